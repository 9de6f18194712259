"""Comparison of two calibrations of one GPU: differing numbers and their effect on predictions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, get_args

import msgspec

from gpusim.engine.fast import FastEngine
from gpusim.errors import HardwareError
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.trace import Trace
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule
from gpusim.plan.tasks import LaunchMode
from gpusim.policies.registry import POLICIES
from gpusim.search.eager import predict_eager

MEASURED: Final = ("memory", "copies", "graph", "stream", "contention")
"""Sections measured by calibration; the others come from data sheets and validation."""
TOLERANCE: Final = 0.05
#: Schedules for judging the effect of a number: few streams, many, one.
SCHEDULES: Final = (("critical_path", 4), ("wavefront", 8), ("sequential", 1))


@dataclass(frozen=True, slots=True)
class Difference:
    """One number in both models."""

    parameter: str
    """`section.field`."""
    first: float
    second: float
    effect: float | None
    """Largest relative change of a predicted time if the first model takes the second's number; None without traces or
    for equal numbers."""

    @property
    def relative(self) -> float:
        """Second over first, minus 1; infinite if only the first is 0."""
        if self.first == self.second:
            return 0.0
        return self.second / self.first - 1.0 if self.first else math.inf

    def agrees(self, tolerance: float = TOLERANCE) -> bool:
        """Return True if they differ by at most `tolerance` of the larger."""
        return abs(self.first - self.second) <= tolerance * max(abs(self.first), abs(self.second))


def compare(first: HardwareModel, second: HardwareModel, traces: Iterable[Trace] = ()) -> list[Difference]:
    """Compare every measured number of two models of one GPU. Raises `HardwareError` for different GPUs."""
    if first.gpu != second.gpu:
        raise HardwareError(second.name, f"is of '{second.gpu}', '{first.name}' of '{first.gpu}'", place="$.gpu")
    steps = [_Step.of(trace, first) for trace in traces]
    before = [time_ns for step in steps for time_ns in step.predictions(first)]
    differences = []
    for section in MEASURED:
        one, other = getattr(first, section), getattr(second, section)
        for field in one.__struct_fields__:
            a, b = getattr(one, field), getattr(other, field)
            if isinstance(a, bool) or not isinstance(a, int | float):
                continue
            effect = None
            if a != b and steps:
                swapped = msgspec.structs.replace(one, **{field: b})
                model = msgspec.structs.replace(first, **{section: swapped})
                after = [time_ns for step in steps for time_ns in step.predictions(model)]
                effect = max(abs(new / old - 1.0) for new, old in zip(after, before, strict=True))
            differences.append(Difference(f"{section}.{field}", float(a), float(b), effect))
    return differences


@dataclass(frozen=True, slots=True)
class _Step:
    """A trace with schedules that are the same for all models."""

    trace: Trace
    schedules: tuple[Schedule, ...]

    @classmethod
    def of(cls, trace: Trace, hardware: HardwareModel) -> _Step:
        graph = OpGraph.build(trace, hardware)
        return cls(trace, tuple(POLICIES[policy](graph, streams) for policy, streams in SCHEDULES))

    def predictions(self, hardware: HardwareModel) -> list[int]:
        """Return predicted times in ns: each schedule in a CUDA graph and launched by the host, and the eager step."""
        graph = OpGraph.build(self.trace, hardware)
        engine = FastEngine()
        plans = [lower(graph, schedule, mode) for schedule in self.schedules for mode in get_args(LaunchMode)]
        eager_ns = predict_eager(graph, engine)
        return [engine.run(plan, graph.hardware).makespan_ns for plan in plans] + ([eager_ns] if eager_ns else [])
