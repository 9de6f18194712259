"""What compiled functions work on: hardware, tasks, and the nodes of plans, as arrays of records.

The records of hardware and tasks take their fields from the classes themselves: a number added to a section of the
hardware model or to `Demand` is a field here without further work.
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

#: Sections of the hardware model whose numbers engines read: the functions of `gpusim.rules` take them as records, too.
SECTIONS: dict[str, Any] = {
    "memory": Memory,
    "copies": Copies,
    "graph": GraphCosts,
    "stream": StreamCosts,
    "contention": Contention,
}
LIMITS = ("sms", "resident_grids", "threads_per_sm", "blocks_per_sm", "regs_per_sm")

#: Values of `kind`: the direction of a copy between host and device, or anything else.
ON_DEVICE, H2D, D2H = -1, 0, 1
KINDS = {"h2d": H2D, "d2h": D2H}

NUMBERS = ("dur_ns", "extra_ns", "dram_bytes", "copy_bytes", "matrix")
PLACES = ("partition", "partition_sms", "blocks", "blocks_per_sm")
#: A task as far as it does not depend on the schedule.
TASK = np.dtype(
    [
        *((name, "f8") for name in (*NUMBERS, *PLACES, *(field.name for field in fields(Demand)))),
        *((f"footprint_{field.name}", "f8") for field in fields(Footprint)),
        ("kind", "i8"),
    ]
)

#: A task of one plan, and what becomes of it. -1 stands for none.
NODE = np.dtype(
    [
        ("row", "i4"),  # its record of `TASK`
        ("device", "i4"),
        ("previous", "i4"),  # the one before it in its stream
        ("first_dep", "i4"),  # in `deps`, which has neither `previous` nor anything twice
        ("n_deps", "i4"),
        ("first_succ", "i4"),  # in `succs`, which has the next one of its stream, too
        ("n_succs", "i4"),
        ("next_copy", "i4"),  # the one after it in its copy engine's line
        ("waiting", "i4"),  # how many predecessors have not ended
        ("started", "i4"),  # how many had started on its GPU when it had, itself among them
        ("priority", "i8"),
        ("gap_ns", "f8"),  # from the end of its last predecessor until it is ready (graph mode)
        ("ready_ns", "f8"),
        ("start_ns", "f8"),
        ("end_ns", "f8"),
    ],
    align=True,
)

#: What stream mode needs to know of a task besides.
LAUNCH = np.dtype(
    [
        ("queue", "i4"),  # hardware queue
        ("behind", "i4"),  # the one after it in that queue
        ("events", "i4"),  # how many waits for events the host issues before it
        ("first_waiter", "i4"),  # those that wait for it: a list in `waiters`
        ("last_waiter", "i4"),
        ("host_ns", "f8"),
        ("launched_ns", "f8"),
    ],
    align=True,
)
WAITER = np.dtype([("node", "i4"), ("next", "i4")], align=True)
QUEUE = np.dtype([("head", "i4"), ("tail", "i4"), ("busy", "i4")], align=True)

#: Groups of SMs at a time: one of memory operations, those that may be split, and one of each partition in any case;
#: in whole rows.
GROUPS = -(-(1 + MOST_GROUPS + MAX_PARTITIONS) // ROW) * ROW

#: A GPU: its front end, its next end, and how much of `running`, `ready` and the copy engines is in use.
DEVICE = np.dtype(
    [
        ("front_end_free", "f8"),
        ("updated", "f8"),
        ("end_at", "f8"),
        ("end_seq", "i8"),
        ("end_index", "i8"),
        ("serve_at", "f8"),
        ("running", "i8"),
        ("starts", "i8"),  # so far
        ("first_running", "i8"),
        ("groups", "i8"),
        ("known", "i8"),  # a bit for each partition that has groups
        ("unplaced", "i8"),  # kernels with blocks to be placed
        ("waiting", "i8"),  # of the running ones, all before that number are placed
        ("empty", "i8"),  # groups that hold nothing
        ("touched", "i8"),  # groups that have changed
        ("placed", "i8"),  # cohorts so far
        ("clock_ns", "f8"),
        ("slow", "f8"),
        ("wanted", "f8"),  # the traffic of all groups, nearly
        ("end_ns", "f8"),  # when blocks end next, of which kernel, and in which group
        ("end_place", "i8"),
        ("end_number", "i8"),
        ("settled", "i8"),  # whether the next three are up to date
        ("alone", "i8"),  # whether no other group ends then
        ("events_left", "i8"),  # until the event loop is to count them
        ("all_of_it", "i8"),  # whether that was the end of the kernel, which is off the SMs already
        ("ends", "f8", (GROUPS,)),  # of groups, by number
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
        ("sm_rate", "f8"),  # of kernels beside the copies that are under way
    ],
    align=True,
)


@cache
def hardware_dtype() -> np.dtype[np.void]:
    """The record of a hardware model: a record for each section, as in the document."""
    names = {section: kind.__struct_fields__ for section, kind in SECTIONS.items()} | {"limits": LIMITS}
    sections = [(section, np.dtype([(name, "f8") for name in fields])) for section, fields in names.items()]
    return np.dtype([*sections, ("partitions", "f8")])


def encode_hardware(hardware: HardwareModel, partitions: int = 1) -> Records:
    """The hardware model, and into how many partitions its SMs are split, as an array of one record."""
    record = np.zeros(1, hardware_dtype())
    record["partitions"] = partitions
    for section, kind in SECTIONS.items():
        for name in kind.__struct_fields__:
            record[section][name] = getattr(getattr(hardware, section), name)
    for name in LIMITS:
        record["limits"][name] = getattr(hardware.limits, name)
    return record


def encode_tasks(tasks: Sequence[Task]) -> Records:
    """What tasks are, whatever the schedule: one record of `TASK` each."""
    if len(set(map(id, tasks))) < len(tasks):  # steps in a row have the same tasks
        once, which = _distinct(tasks)
        return encode_tasks(once)[which]
    rows = np.empty(len(tasks), TASK)
    for name in (*NUMBERS, *PLACES):
        rows[name] = np.fromiter(map(attrgetter(name), tasks), np.float64, len(tasks))
    # Tasks share these: each is looked at once.
    for kind, name, prefix in ((Demand, "demand", ""), (Footprint, "footprint", "footprint_")):
        distinct, which = _distinct(list(map(attrgetter(name), tasks)))
        for field in fields(kind):
            values = np.fromiter(map(attrgetter(field.name), distinct), np.float64, len(distinct))
            rows[f"{prefix}{field.name}"] = values[which]
    kinds = map(KINDS.get, map(attrgetter("kind"), tasks), repeat(ON_DEVICE))
    rows["kind"] = np.fromiter(kinds, np.int64, len(tasks))
    return rows


def _distinct(objects: Sequence[Any]) -> tuple[list[Any], npt.NDArray[np.int64]]:
    """Different objects, and which of them each one is."""
    numbers = list(map(id, objects))
    once = dict(zip(numbers, objects, strict=True))
    place = dict(zip(once, range(len(once)), strict=True))
    return list(once.values()), np.fromiter(map(place.__getitem__, numbers), np.int64, len(objects))


class Plans(NamedTuple):
    """Plans, one in each row, and what became of them.

    `tasks` is how many of its nodes a plan uses, the first ones. `launches` has no columns in graph mode, `succs` none
    in stream mode. `log` gets each start (the task's index) and each end (its complement) in the order in which they
    happen. `ended` counts the tasks that ended; it is the complement of a task, and `makespan_ns` the time, where the
    budget of events was used up.
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
        """Room for `plans` plans of `tasks` tasks with at most `deps` dependencies in all."""
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
    """What is on the SMs block by block, one row for each device: see `gpusim.engine.compiled.sm_groups`."""

    kernels: Records
    line: npt.NDArray[np.uint32]
    groups: Records
    cohorts: Records

    @classmethod
    def of_size(cls, devices: int, grids: int, blocks_per_sm: int) -> Blocks:
        """Room for `grids` kernels at a time on each device."""
        cohorts = max(grids, blocks_per_sm) | 1  # a cohort has a block on an SM at least, or is a memory operation
        groups = np.zeros((devices, GROUPS), SM_GROUP)
        groups["first"] = np.arange(GROUPS) * cohorts
        return cls(
            kernels=np.zeros((devices, grids), PLACED),
            line=np.tile(np.arange(grids, dtype=np.uint32), (devices, 1)),
            groups=groups,
            cohorts=np.zeros((devices, GROUPS * cohorts), COHORT),
        )


class More(NamedTuple):
    """What a plan needs that has copies, is on several devices or in stream mode."""

    engines: Records
    queues: Records
    waiters: Records
    grids: int
    """Kernels that a device may run at a time."""


class Room(NamedTuple):
    """Where one simulation at a time keeps its state: one for each thread.

    `heaps` has one of ready tasks for each device, and behind them the line of what happens at a known time besides
    ends and starts.
    """

    devices: Records
    running: Records | None
    blocks: Blocks | None
    more: More
    heaps: Records

    @classmethod
    def for_plans(cls, plans: Plans, devices: int, queues: int, hardware: HardwareModel) -> Room:
        """Room to simulate any of `plans`. What runs is in `running`, or block by block in `blocks`.

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
            # In the line, each task is ready once; in stream mode it is launched, resumed and its end is known, too. On
            # several devices each arrival, start and end may schedule a look at a front end.
            heaps=np.zeros((2 + (3 if stream_mode else 0) + (3 if devices > 1 else 0)) * tasks + 1, ENTRY),
        )
