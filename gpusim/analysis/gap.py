"""The gap between the largest lower bound and a schedule, divided into parts by what-if simulations of that schedule.

Unlike `gpusim.analysis.limits`, which searches the best schedule under each set of limits, this module keeps the
schedule and switches limits on one by one, starting with those included in the bound. A bound from chains of kernels
includes dependencies and gaps; a bound from SM area includes neither. So there are two orders:

1. Chains: streams and order, front end, SM resources, contention, DRAM bandwidth.
2. Area: imbalance (all kernels at once, in launch order, on SMs with contention and DRAM), dependencies, gaps and
   joins, front end, streams and order.

Each part is the time that its limit adds. The largest bound may exceed the simple bound at which its order starts (a
window has chains at both ends and area between): the excess is subtracted from the related parts. With a measurement,
the last part is the time beyond the model. Losses to L2 cache misses belong to DRAM bandwidth in the first order, and
to streams and order in the second. A negative part is a scheduling anomaly or a prediction that was too long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from gpusim.analysis.relaxed import CONTENTION, DEPENDENCIES, DRAM, FRONT_END, GAPS, SMS, relaxed, without_cache_misses
from gpusim.bounds.bounds import Bounds
from gpusim.bounds.energetic import Kernels, crowded_area_ns
from gpusim.engine.base import Engine
from gpusim.engine.evaluate import Evaluator
from gpusim.notebook import ShortRepr
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule

ORDER: Final = "streams and order"
IMBALANCE: Final = "imbalance"
MODEL: Final = "beyond the model"
PARTS: Final = (DEPENDENCIES, GAPS, ORDER, FRONT_END, IMBALANCE, SMS, CONTENTION, DRAM, MODEL)
"""All parts, in the order of reports."""


@dataclass(frozen=True, slots=True, repr=False)
class Gap(ShortRepr):
    """The gap between the largest bound and a schedule's time; its parts add up exactly."""

    bound: str
    bound_ns: int
    time_ns: int
    """Time of the schedule, measured if there is a measurement, else predicted."""
    parts: tuple[tuple[str, int], ...]
    """Parts of the gap by name of the limit, in ns."""

    @property
    def ratio(self) -> float:
        """Time of the schedule over the bound."""
        return self.time_ns / self.bound_ns if self.bound_ns else 1.0

    @property
    def largest(self) -> str:
        """Name of the largest part; empty if there is no gap."""
        name, time_ns = max(self.parts, key=lambda part: part[1], default=("", 0))
        return name if time_ns > 0 else ""

    def part_ns(self, name: str) -> int:
        """Return the part of a name in ns, 0 if there is none."""
        return dict(self.parts).get(name, 0)


def gap_to_bound(
    graph: OpGraph, schedule: Schedule, bound: Bounds, engine: Engine, measured_ns: int | None = None
) -> Gap:
    """Return the gap between the largest of `bound` and a schedule of the graph, on one GPU, in graph mode."""
    bound_ns, name = bound.largest
    area_ns = int(crowded_area_ns(Kernels.of(graph)))
    known: tuple[str, ...]
    if bound.critical_path_ns >= area_ns:
        base_ns, times = bound.critical_path_ns, _from_chains(graph, schedule, engine)
        known = (SMS, CONTENTION, FRONT_END, DRAM)
    else:
        base_ns, times = area_ns, _from_area(graph, schedule, engine)
        known = (DEPENDENCIES, GAPS, IMBALANCE)
    parts: dict[str, int] = {}
    before_ns = base_ns
    for limit, time_ns in times:
        parts[limit] = time_ns - before_ns
        before_ns = time_ns
    _take_off(parts, known, bound_ns - base_ns)
    if measured_ns is not None:
        parts[MODEL] = measured_ns - before_ns
        before_ns = measured_ns
    return Gap(name, bound_ns, before_ns, tuple((part, parts[part]) for part in PARTS if part in parts))


def _from_chains(graph: OpGraph, schedule: Schedule, engine: Engine) -> list[tuple[str, int]]:
    """Return makespans of the schedule with more and more limits, starting from chains; the last is its own."""
    times, limits_on = [], [DEPENDENCIES, GAPS]
    for limit, new in (
        (ORDER, ()),
        (FRONT_END, (FRONT_END,)),
        (SMS, (SMS,)),
        (CONTENTION, (CONTENTION,)),
        (DRAM, (DRAM,)),
    ):
        limits_on += new
        times.append((limit, _makespan_ns(relaxed(graph, limits_on), schedule, engine)))
    return times


def _from_area(graph: OpGraph, schedule: Schedule, engine: Engine) -> list[tuple[str, int]]:
    """Return makespans starting from SM area; all but the last have every op on its own stream."""
    limits_on = [SMS, CONTENTION, DRAM]
    apart = replace(schedule, streams=tuple(range(len(graph))))
    cached = graph.with_tasks(without_cache_misses(graph.hardware), graph.tasks)
    alone = relaxed(cached.without_dependencies(), limits_on)
    times = [(IMBALANCE, _makespan_ns(alone, apart, engine))]
    for limit in (DEPENDENCIES, GAPS, FRONT_END):
        limits_on.append(limit)
        times.append((limit, _makespan_ns(relaxed(cached, limits_on), apart, engine)))
    return [*times, (ORDER, _makespan_ns(graph, schedule, engine))]


def _makespan_ns(graph: OpGraph, schedule: Schedule, engine: Engine) -> int:
    return Evaluator(graph, engine).makespan_ns(schedule)


def _take_off(parts: dict[str, int], names: Sequence[str], time_ns: int) -> None:
    """Subtract `time_ns` from the named parts in order, none below 0; a remainder goes to the first."""
    for name in names:
        taken_ns = min(time_ns, max(0, parts.get(name, 0)))
        if taken_ns > 0:
            parts[name] -= taken_ns
            time_ns -= taken_ns
    if time_ns:
        parts[names[0]] = parts.get(names[0], 0) - time_ns
