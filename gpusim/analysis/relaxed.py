"""Op graphs on a GPU with some limits switched off, for the limits report and the gap to the bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from gpusim.formats.hardware import Contention, GraphCosts, HardwareModel, measure_of
from gpusim.plan.graph import OpGraph
from gpusim.plan.tasks import Task
from gpusim.rules.occupancy import NO_DEMAND, NO_FOOTPRINT

DEPENDENCIES: Final = "dependencies"
GAPS: Final = "gaps and joins"
FRONT_END: Final = "front end"
SMS: Final = "SM resources"
CONTENTION: Final = "contention"
DRAM: Final = "DRAM bandwidth"
STREAMS: Final = "streams"
LIMITS: Final = (DEPENDENCIES, GAPS, FRONT_END, SMS, CONTENTION, DRAM, STREAMS)
"""Limits in the order in which they are switched on."""

#: Limits of launch costs that do not belong to `GAPS`, as a new one does.
_OTHER_COSTS: Final = {"front_end_ns": FRONT_END, "turnover_ns": FRONT_END, "product_frac": CONTENTION}
#: Limit of each number of the launch costs and of contention, which has no effect while the limit is off.
SWITCHES: Final[dict[str, str]] = {
    **{f"graph.{name}": _OTHER_COSTS.get(name, GAPS) for name in measure_of(GraphCosts)},
    **{f"contention.{name}": CONTENTION for name in measure_of(Contention)},
}

#: Far above any bandwidth, so the limit is off.
_NO_BANDWIDTH_LIMIT_BYTES_PER_NS = 1e12
#: A sharing exponent without effect but not 0, so that blocks are still placed SM by SM.
_NO_SLOWDOWN = 1e-12


def relaxed(graph: OpGraph, limits_on: Iterable[str]) -> OpGraph:
    """Return the op graph on a GPU with only the named limits; dependencies and streams are up to the caller."""
    limits_on = frozenset(limits_on)
    changes: list[Callable[[Task], Task]] = []
    hardware = graph.hardware
    if GAPS not in limits_on:
        hardware = _without_costs(hardware, GAPS)
        changes.append(lambda task: msgspec.structs.replace(task, extra_ns=0.0))
    if FRONT_END not in limits_on:
        hardware = _without_costs(hardware, FRONT_END)
        changes.append(lambda task: msgspec.structs.replace(task, idle_ns=0.0))
    if SMS not in limits_on:
        kernels = max(1, sum(len(tasks) for tasks in graph.tasks))
        limits = msgspec.structs.replace(hardware.limits, resident_grids=kernels)
        hardware = msgspec.structs.replace(hardware, limits=limits)
        changes.append(lambda task: msgspec.structs.replace(task, demand=NO_DEMAND, footprint=NO_FOOTPRINT))
    if CONTENTION not in limits_on:
        hardware = without_contention(hardware)
    if DRAM not in limits_on:
        hardware = without_bandwidth_limit(hardware)
    tasks = graph.tasks
    for change in changes:
        tasks = tuple(tuple(map(change, of_op)) for of_op in tasks)
    return graph.with_tasks(hardware, tasks)


def without_contention(hardware: HardwareModel) -> HardwareModel:
    """Return the same GPU without contention: concurrent kernels only compete for SMs and bandwidth."""
    exponent = min(hardware.contention.sharing_exponent, _NO_SLOWDOWN)
    contention = msgspec.structs.replace(
        hardware.contention, younger_slowdown=0.0, sharing_exponent=exponent, matrix_exponent=0.0
    )
    return _without_costs(msgspec.structs.replace(hardware, contention=contention), CONTENTION)


def without_bandwidth_limit(hardware: HardwareModel) -> HardwareModel:
    """Return the same GPU with unlimited DRAM bandwidth, and without losses to L2 cache misses."""
    memory = msgspec.structs.replace(hardware.memory, dram_bytes_per_ns=_NO_BANDWIDTH_LIMIT_BYTES_PER_NS)
    return without_cache_misses(msgspec.structs.replace(hardware, memory=memory))


def without_cache_misses(hardware: HardwareModel) -> HardwareModel:
    """Return the same GPU without losses to L2 cache misses (`gpusim.plan.cache_misses`).

    A what-if with each op on its own stream needs this: no memory is reused there, and nearly all accesses would miss.
    """
    return msgspec.structs.replace(hardware, memory=msgspec.structs.replace(hardware.memory, l2_bytes_per_ns=0.0))


def _without_costs(hardware: HardwareModel, limit: str) -> HardwareModel:
    """Return the same GPU without the launch costs of a limit; counts may stay, since what they count is free."""
    costs = [name for name, measure in measure_of(GraphCosts).items() if measure != "count"]
    free = {name: 0.0 for name in costs if SWITCHES[f"graph.{name}"] == limit}
    return msgspec.structs.replace(hardware, graph=msgspec.structs.replace(hardware.graph, **free))
