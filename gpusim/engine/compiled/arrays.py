"""Data of compiled functions: hardware, tasks and nodes of plans, as arrays of records.

The records of hardware and tasks take their fields from the classes: a number added to a section of the hardware model
or to `Demand` becomes a field here automatically.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from itertools import repeat
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpusim.engine.budget import check_costs
from gpusim.engine.compiled.copies import COPY_ENGINE
from gpusim.engine.compiled.ends import ROW
from gpusim.engine.compiled.heap import ENTRY
from gpusim.engine.compiled.pool import RUNNING
from gpusim.engine.compiled.rates import LOADS
from gpusim.engine.compiled.sm_groups import COHORT, PLACED, SM_GROUP
from gpusim.engine.placement import MOST_GROUPS
from gpusim.formats.hardware import Contention, Copies, GraphCosts, HardwareModel, Memory, StreamCosts
from gpusim.plan.tasks import MAX_PARTITIONS, Task
from gpusim.rules.occupancy import Demand, Footprint

Records = npt.NDArray[Any]
Indices = npt.NDArray[np.int32]

#: Sections of the hardware model that engines read; functions of `gpusim.rules` also accept them as records.
SECTIONS: dict[str, Any] = {
    "memory": Memory,
    "copies": Copies,
    "graph": GraphCosts,
    "stream": StreamCosts,
    "contention": Contention,
}
LIMITS = ("sms", "resident_grids", "threads_per_sm", "blocks_per_sm", "regs_per_sm")

#: Values of `kind`: the direction of a copy between host and device, or other work.
ON_DEVICE, H2D, D2H = -1, 0, 1
KINDS = {"h2d": H2D, "d2h": D2H}

NUMBERS = (
    "dur_ns",
    "missed_ns",
    "extra_ns",
    "idle_ns",
    "dram_bytes",
    "copy_bytes",
    "on_copy_engine",
    "matrix",
    "product",
)
PLACES = ("partition", "partition_sms", "blocks", "blocks_per_sm")
#: Data of a task that do not depend on the schedule.
TASK = np.dtype(
    [
        *((name, "f8") for name in (*NUMBERS, *PLACES, *(field.name for field in fields(Demand)))),
        *((f"footprint_{field.name}", "f8") for field in fields(Footprint)),
        ("kind", "i8"),
    ]
)

#: A task of one plan and its simulated times; -1 stands for none.
NODE = np.dtype(
    [
        ("row", "i4"),  # its record of `TASK`
        ("device", "i4"),
        ("previous", "i4"),  # predecessor in its stream
        ("first_dep", "i4"),  # in `deps`, without `previous` or duplicates
        ("n_deps", "i4"),
        ("first_succ", "i4"),  # in `succs`, next task of its stream included
        ("n_succs", "i4"),
        ("next_copy", "i4"),  # next one in the waiting list of its copy engine
        ("waiting", "i4"),  # number of predecessors that have not ended
        ("started", "i4"),  # number of starts on its GPU up to its own
        ("several_ns", "f8"),  # that of its GPU at its start, then its own time beside others
        ("gap_ns", "f8"),  # end of its last predecessor to ready (graph mode)
        ("ready_ns", "f8"),
        ("start_ns", "f8"),
        ("end_ns", "f8"),
    ],
    align=True,
)

#: Data of a task for stream mode.
LAUNCH = np.dtype(
    [
        ("queue", "i4"),  # hardware queue
        ("behind", "i4"),  # next task in that queue
        ("events", "i4"),  # number of event waits that the host issues before it
        ("first_waiter", "i4"),  # tasks that wait for it: a linked list in `waiters`
        ("last_waiter", "i4"),
        ("host_ns", "f8"),
        ("launched_ns", "f8"),
    ],
    align=True,
)
WAITER = np.dtype([("node", "i4"), ("next", "i4")], align=True)
QUEUE = np.dtype([("head", "i4"), ("tail", "i4"), ("busy", "i4")], align=True)

#: Maximum number of groups of SMs: memory operations, groups from splits, and one per partition; in whole rows.
GROUPS = -(-(1 + MOST_GROUPS + MAX_PARTITIONS) // ROW) * ROW

#: A GPU: front end, next end, groups of SMs, and its parts of `running`, `ready` and the copy engines.
DEVICE = np.dtype(
    [
        ("front_end_free", "f8"),
        ("updated", "f8"),
        ("end_at", "f8"),
        ("end_seq", "i8"),
        ("end_index", "i8"),
        ("serve_at", "f8"),
        ("running", "i8"),
        ("starts", "i8"),  # number of starts so far
        ("unended", "i8"),  # kernels that have started and not ended; `running` counts ahead
        ("several_ns", "f8"),  # time with several of them, up to `several_at`
        ("several_at", "f8"),
        ("first_running", "i8"),
        ("groups", "i8"),
        ("known", "i8"),  # bit mask of partitions with groups
        ("unplaced", "i8"),  # number of kernels with unplaced blocks
        ("waiting", "i8"),  # all running kernels before this index are placed
        ("empty", "i8"),  # number of empty groups
        ("touched", "i8"),  # number of changed groups
        ("placed", "i8"),  # number of cohorts so far
        ("clock_ns", "f8"),
        ("slow", "f8"),
        ("wanted", "f8"),  # traffic of all groups, up to rounding
        ("end_ns", "f8"),  # next end of blocks; the next two: kernel and group
        ("end_place", "i8"),
        ("end_number", "i8"),
        ("settled", "i8"),  # 1 if the next end is up to date
        ("alone", "i8"),  # 1 if no other group ends at about that time
        ("events_left", "i8"),  # remaining event budget of the blocks
        ("all_of_it", "i8"),  # 1 if that end was the kernel's last, already removed
        ("ends", "f8", (GROUPS,)),  # first end of each group, by index
        ("row_ends", "f8", (GROUPS // ROW,)),
        ("row_next", "f8", (GROUPS // ROW,)),
        ("row_at", "u4", (GROUPS // ROW,)),
        ("loads", "f8", (LOADS,)),
        ("load_rates", "f8", (LOADS,)),
        ("load_matrix_rates", "f8", (LOADS,)),
        ("traffic", "f8", (GROUPS,)),
        ("order", "u4", (GROUPS,)),
        ("touched_groups", "u4", (GROUPS,)),
        ("candidates", "u4", (GROUPS,)),
        ("ready", "i8"),
        ("first_ready", "i8"),
        ("copying", "i8"),
        ("sm_rate", "f8"),  # of kernels next to active copies
    ],
    align=True,
)


@cache
def hardware_dtype() -> np.dtype[np.void]:
    """Return the dtype of a hardware model: a record per section, as in the document."""
    names = {section: kind.__struct_fields__ for section, kind in SECTIONS.items()} | {"limits": LIMITS}
    sections = [(section, np.dtype([(name, "f8") for name in fields])) for section, fields in names.items()]
    return np.dtype([*sections, ("partitions", "f8")])


def encode_hardware(hardware: HardwareModel, partitions: int = 1) -> Records:
    """Return the hardware model and the number of SM partitions as an array of one record."""
    record = np.zeros(1, hardware_dtype())
    record["partitions"] = partitions
    for section, kind in SECTIONS.items():
        for name in kind.__struct_fields__:
            record[section][name] = getattr(getattr(hardware, section), name)
    for name in LIMITS:
        record["limits"][name] = getattr(hardware.limits, name)
    return record


def encode_tasks(tasks: Sequence[Task]) -> Records:
    """Return the data of tasks that do not depend on the schedule, as records of `TASK`."""
    if len(set(map(id, tasks))) < len(tasks):  # repeated steps share their tasks
        once, which = _distinct(tasks)
        return encode_tasks(once)[which]
    rows = np.empty(len(tasks), TASK)
    for name in (*NUMBERS, *PLACES):
        rows[name] = np.fromiter(map(attrgetter(name), tasks), np.float64, len(tasks))
    # Tasks share demands and footprints: each is encoded once.
    for kind, name, prefix in ((Demand, "demand", ""), (Footprint, "footprint", "footprint_")):
        distinct, which = _distinct(list(map(attrgetter(name), tasks)))
        for field in fields(kind):
            values = np.fromiter(map(attrgetter(field.name), distinct), np.float64, len(distinct))
            rows[f"{prefix}{field.name}"] = values[which]
    kinds = map(KINDS.get, map(attrgetter("kind"), tasks), repeat(ON_DEVICE))
    rows["kind"] = np.fromiter(kinds, np.int64, len(tasks))
    return rows


def _distinct(objects: Sequence[Any]) -> tuple[list[Any], npt.NDArray[np.int64]]:
    """Return the distinct objects, and the index of each object among them."""
    numbers = list(map(id, objects))
    once = dict(zip(numbers, objects, strict=True))
    place = dict(zip(once, range(len(once)), strict=True))
    return list(once.values()), np.fromiter(map(place.__getitem__, numbers), np.int64, len(objects))


class Plans(NamedTuple):
    """Plans, one per row, and their results.

    A plan uses its first `tasks` nodes. `launches` has no columns in graph mode, `succs` none in stream mode. `log` has
    each start (the task's index) and each end (its complement) in simulated order. `ended` counts the tasks that ended.
    If the event budget was exceeded, `ended` is the complement of a task and `makespan_ns` the time reached.
    """

    nodes: Records
    launches: Records
    deps: Indices
    succs: Indices
    log: Indices
    tasks: npt.NDArray[np.int64]
    ended: npt.NDArray[np.int64]
    makespan_ns: npt.NDArray[np.int64]

    @classmethod
    def of_size(cls, plans: int, tasks: int, deps: int, stream_mode: bool) -> Plans:
        """Return arrays for `plans` plans, each with `tasks` tasks and at most `deps` dependencies."""
        return cls(
            nodes=np.zeros((plans, tasks), NODE),
            launches=np.zeros((plans, tasks if stream_mode else 0), LAUNCH),
            deps=np.zeros((plans, deps), np.int32),
            succs=np.zeros((plans, 0 if stream_mode else deps + tasks), np.int32),
            log=np.zeros((plans, 2 * tasks), np.int32),
            tasks=np.full(plans, tasks, np.int64),
            ended=np.zeros(plans, np.int64),
            makespan_ns=np.zeros(plans, np.int64),
        )


class Blocks(NamedTuple):
    """Blocks on the SMs, one row per device (`gpusim.engine.compiled.sm_groups`)."""

    kernels: Records
    line: npt.NDArray[np.uint32]
    groups: Records
    cohorts: Records

    @classmethod
    def of_size(cls, devices: int, grids: int, blocks_per_sm: int) -> Blocks:
        """Return arrays for `grids` concurrent kernels per device."""
        cohorts = max(grids, blocks_per_sm) | 1  # a cohort has at least a block on an SM, or is a memory operation
        groups = np.zeros((devices, GROUPS), SM_GROUP)
        groups["first"] = np.arange(GROUPS) * cohorts
        return cls(
            kernels=np.zeros((devices, grids), PLACED),
            line=np.tile(np.arange(grids, dtype=np.uint32), (devices, 1)),
            groups=groups,
            cohorts=np.zeros((devices, GROUPS * cohorts), COHORT),
        )


class More(NamedTuple):
    """Further state for plans with copies, several devices or stream mode."""

    engines: Records
    queues: Records
    waiters: Records
    grids: int
    """Maximum number of concurrent kernels per device."""


class Room(NamedTuple):
    """State of one simulation at a time, one per thread.

    `heaps` has a heap of ready tasks per device, followed by the queue of all events other than ends and starts.
    """

    devices: Records
    running: Records | None
    blocks: Blocks | None
    more: More
    heaps: Records

    @classmethod
    def for_plans(cls, plans: Plans, devices: int, queues: int, hardware: HardwareModel) -> Room:
        """Return the state to simulate any of `plans`; kernels run in `running` or, block by block, in `blocks`.

        Raises `PlanError` for a GPU beyond what engines simulate.
        """
        check_costs(hardware)
        limits = hardware.limits
        by_block = hardware.contention.sharing_exponent > 0
        tasks = plans.nodes.shape[1]
        stream_mode = plans.launches.shape[1] > 0
        grids = min(tasks, limits.resident_grids)
        records = np.zeros(devices, DEVICE)
        records["order"] = np.arange(GROUPS)
        return cls(
            devices=records,
            running=None if by_block else np.zeros(devices * grids, RUNNING),
            blocks=Blocks.of_size(devices, grids, limits.blocks_per_sm) if by_block else None,
            more=More(
                engines=np.zeros(2 * devices, COPY_ENGINE),
                queues=np.zeros(queues, QUEUE),
                waiters=np.zeros(plans.deps.shape[1] + tasks if stream_mode else 0, WAITER),
                grids=grids,
            ),
            # In the event queue, each task becomes ready once; in stream mode it is also launched and resumed, and its
            # end is announced. On several devices, each arrival, start and end may schedule a check of a front end.
            heaps=np.zeros((2 + (3 if stream_mode else 0) + (3 if devices > 1 else 0)) * tasks + 1, ENTRY),
        )
