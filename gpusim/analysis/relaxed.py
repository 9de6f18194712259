"""Op graphs on a GPU that has only some of its limits: what the limits report and the gap to the bounds are made of."""

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
"""In the order in which they are switched on."""

_FRONT_END_COSTS: Final = ("front_end_ns",)
#: For each number of the launch costs and of contention the limit that it belongs to: switched off, it has no effect. A
#: new cost of launches belongs to `GAPS`.
SWITCHES: Final[dict[str, str]] = {
    **{f"graph.{name}": FRONT_END if name in _FRONT_END_COSTS else GAPS for name in measure_of(GraphCosts)},
    **{f"contention.{name}": CONTENTION for name in measure_of(Contention)},
}

#: Far above any bandwidth: the limit is switched off.
_NO_BANDWIDTH_LIMIT_BYTES_PER_NS = 1e12
#: A sharing exponent that slows nothing down, and yet is not 0: blocks still go to SMs one by one.
_NO_SLOWDOWN = 1e-12


def relaxed(graph: OpGraph, limits_on: Iterable[str]) -> OpGraph:
    """The op graph on a GPU that has only the limits named; dependencies and streams are the caller's to keep."""
    limits_on = frozenset(limits_on)
    changes: list[Callable[[Task], Task]] = []
    hardware = graph.hardware
    if GAPS not in limits_on:
        hardware = _without_costs(hardware, GAPS)
        changes.append(lambda task: msgspec.structs.replace(task, extra_ns=0.0))
    if FRONT_END not in limits_on:
        hardware = _without_costs(hardware, FRONT_END)
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
    """The same GPU with kernels that run together slowing each other only by what SMs and bandwidth they take."""
    exponent = min(hardware.contention.sharing_exponent, _NO_SLOWDOWN)
    contention = msgspec.structs.replace(
        hardware.contention, younger_slowdown=0.0, sharing_exponent=exponent, matrix_exponent=0.0
    )
    return msgspec.structs.replace(hardware, contention=contention)


def without_bandwidth_limit(hardware: HardwareModel) -> HardwareModel:
    """The same GPU with as much DRAM bandwidth as anybody asks for."""
    memory = msgspec.structs.replace(hardware.memory, dram_bytes_per_ns=_NO_BANDWIDTH_LIMIT_BYTES_PER_NS)
    return msgspec.structs.replace(hardware, memory=memory)


def _without_costs(hardware: HardwareModel, limit: str) -> HardwareModel:
    """The same GPU without the launch costs of a limit; counts may stay where what they count costs nothing."""
    times = [name for name, measure in measure_of(GraphCosts).items() if measure == "time"]
    free = {name: 0.0 for name in times if SWITCHES[f"graph.{name}"] == limit}
    return msgspec.structs.replace(hardware, graph=msgspec.structs.replace(hardware.graph, **free))
