"""What bounds a simulation, in every engine: the times it may reach, the blocks it places, and the events it takes.

Every event starts or ends work, so a simulation ends by itself. The budget of events is the proof of that at run time:
no plan can need as many, and one that does stops with a line.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from gpusim.errors import PlanError
from gpusim.formats.hardware import GraphCosts, HardwareModel, StreamCosts, measure_of
from gpusim.plan.tasks import MAX_TIME_NS, Plan, Task
from gpusim.rules.dispatch import MOST_BLOCKS, placed_blocks
from gpusim.rules.occupancy import NO_FOOTPRINT

#: Blocks of one SM and of one GPU that engines have room for; the largest GPUs have 32 and 5,000.
MOST_BLOCKS_PER_SM: Final = 4096
MOST_RESIDENT_BLOCKS: Final = 1 << 30
#: Events for each task, and for each block that is placed. A task becomes ready, starts and ends, with a look at the
#: front end each time, and each end of blocks ends one block at least.
EVENTS: Final = 16


@cache
def _costs() -> dict[str, tuple[str, ...]]:
    """The times of each section of the hardware model that delay something."""
    sections = {"graph": measure_of(GraphCosts), "stream": measure_of(StreamCosts)}
    times = {section: tuple(name for name in units if units[name] == "time") for section, units in sections.items()}
    return {**times, "copies": ("latency_ns", "switch_ns")}


def blocks_to_place(task: Task, sms: int) -> int:
    """Blocks that engines place for a kernel on so many SMs; each takes the time of a block of a full wave."""
    return placed_blocks(min(task.blocks, MOST_BLOCKS), sms * task.blocks_per_sm)


def work_of(plan: Plan, hardware: HardwareModel) -> int:
    """What a plan has to do, in tasks and blocks: `EVENTS` for each of them are the budget."""
    by_block = hardware.contention.sharing_exponent > 0
    blocks = 0
    for task in plan.tasks:
        if by_block and task.blocks and task.footprint != NO_FOOTPRINT:
            blocks += blocks_to_place(task, task.partition_sms or hardware.limits.sms)
    return len(plan) + 1 + blocks


def check_costs(hardware: HardwareModel) -> None:
    """Raise `PlanError` for a GPU whose costs or sizes are beyond what engines count exactly."""
    for section, names in _costs().items():
        for name in names:
            time_ns = getattr(getattr(hardware, section), name)
            if not 0 <= time_ns <= MAX_TIME_NS:
                limit = f"at most {MAX_TIME_NS} ns (104 days) can be simulated"
                raise PlanError(f"hardware '{hardware.name}': {section}.{name} is {time_ns:.6g} ns; {limit}")
    held, sms = hardware.limits.blocks_per_sm, hardware.limits.sms
    if held > MOST_BLOCKS_PER_SM or held * sms > MOST_RESIDENT_BLOCKS:
        limit = f"{MOST_BLOCKS_PER_SM} an SM and {MOST_RESIDENT_BLOCKS} in all can be simulated"
        raise PlanError(f"hardware '{hardware.name}': limits.blocks_per_sm is {held:.6g} of {sms:.6g} SMs; {limit}")


def too_many_events(events: int, task: int | None, time_ns: float | None) -> PlanError:
    """The error of a simulation that has used its budget; `task` and `time_ns` of the last event, where known."""
    where = "" if task is None else f"; task {task}, time {time_ns:.0f} ns"
    return PlanError(f"the simulation passed {events} events without an end{where}")


def too_long(time_ns: float) -> PlanError:
    """The error of a simulation whose clock would skip nanoseconds."""
    return PlanError(f"the simulation takes {time_ns:.6g} ns; at most {MAX_TIME_NS} ns (104 days) can be simulated")
