"""Limits of a simulation, shared by all engines: simulated time, placed blocks and number of events.

Every event starts or ends work, so a simulation always terminates. The event budget checks that at run time: no plan
can need as many events, and a simulation that exceeds the budget stops with an error.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from gpusim.errors import PlanError
from gpusim.formats.hardware import GraphCosts, HardwareModel, StreamCosts, measure_of
from gpusim.plan.tasks import MAX_TIME_NS, Plan, Task
from gpusim.rules.dispatch import MOST_BLOCKS, placed_blocks
from gpusim.rules.occupancy import NO_FOOTPRINT

#: Limits on resident blocks per SM and per GPU; the largest GPUs have 32 and 5,000.
MOST_BLOCKS_PER_SM: Final = 4096
MOST_RESIDENT_BLOCKS: Final = 1 << 30
#: Event budget per task and per placed block. A task becomes ready, starts and ends, with a check of the front end each
#: time, and each event that ends blocks ends at least one.
EVENTS: Final = 16


@cache
def _costs() -> dict[str, tuple[str, ...]]:
    """Return the fields that hold delays, by section of the hardware model."""
    sections = {"graph": measure_of(GraphCosts), "stream": measure_of(StreamCosts)}
    times = {section: tuple(name for name in units if units[name] == "time") for section, units in sections.items()}
    return {**times, "copies": ("latency_ns", "switch_ns", "memset_d2h_ns", "memset_h2d_ns")}


def blocks_to_place(task: Task, sms: int) -> int:
    """Return the number of blocks placed for a kernel on `sms` SMs, each as long as a block of a full wave."""
    return placed_blocks(min(task.blocks, MOST_BLOCKS), sms * task.blocks_per_sm)


def work_of(plan: Plan, hardware: HardwareModel) -> int:
    """Return the number of tasks and placed blocks of a plan; the budget is `EVENTS` times that."""
    by_block = hardware.contention.sharing_exponent > 0
    blocks = 0
    for task in plan.tasks:
        if by_block and task.blocks and task.footprint != NO_FOOTPRINT:
            blocks += blocks_to_place(task, task.partition_sms or hardware.limits.sms)
    return len(plan) + 1 + blocks


def check_costs(hardware: HardwareModel) -> None:
    """Raise `PlanError` for costs or sizes of a GPU beyond what engines count exactly."""
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
    """Return the error for an exceeded event budget; `task` and `time_ns` belong to the last event, if known."""
    where = "" if task is None else f"; task {task}, time {time_ns:.0f} ns"
    return PlanError(f"the simulation passed {events} events without an end{where}")


def too_long(time_ns: float) -> PlanError:
    """Return the error for a simulated time at which the clock would skip nanoseconds."""
    return PlanError(f"the simulation takes {time_ns:.6g} ns; at most {MAX_TIME_NS} ns (104 days) can be simulated")
