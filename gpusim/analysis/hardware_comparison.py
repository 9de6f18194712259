"""Two calibrations of one GPU, number by number: which agree, and what a prediction makes of those that do not."""

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
"""Sections that a calibration measures; the others are data sheets, limits, and what validation found."""
TOLERANCE: Final = 0.05
#: Schedules that a number's effect is judged by: few streams, many, one.
SCHEDULES: Final = (("critical_path", 4), ("wavefront", 8), ("sequential", 1))


@dataclass(frozen=True, slots=True)
class Difference:
    """One number of both models."""

    parameter: str
    """`section.field`."""
    first: float
    second: float
    effect: float | None
    """Largest change of a predicted time, as a share of it, where the first model has the second's number; None where
    no trace was given, or the numbers are the same."""

    @property
    def relative(self) -> float:
        """Second over first less 1; infinite where the first is 0 and the second is not."""
        if self.first == self.second:
            return 0.0
        return self.second / self.first - 1.0 if self.first else math.inf

    def agrees(self, tolerance: float = TOLERANCE) -> bool:
        """Whether they differ by no more than `tolerance` of the larger."""
        return abs(self.first - self.second) <= tolerance * max(abs(self.first), abs(self.second))


def compare(first: HardwareModel, second: HardwareModel, traces: Iterable[Trace] = ()) -> list[Difference]:
    """Every measured number of two models of one GPU. Raises `HardwareError` where they are of different GPUs."""
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
    """A trace, and schedules of it that stay the same whatever the model."""

    trace: Trace
    schedules: tuple[Schedule, ...]

    @classmethod
    def of(cls, trace: Trace, hardware: HardwareModel) -> _Step:
        graph = OpGraph.build(trace, hardware)
        return cls(trace, tuple(POLICIES[policy](graph, streams) for policy, streams in SCHEDULES))

    def predictions(self, hardware: HardwareModel) -> list[int]:
        """Times in ns: each schedule as a CUDA graph and launched from the host, and the eager step."""
        graph = OpGraph.build(self.trace, hardware)
        engine = FastEngine()
        plans = [lower(graph, schedule, mode) for schedule in self.schedules for mode in get_args(LaunchMode)]
        eager_ns = predict_eager(graph, engine)
        return [engine.run(plan, graph.hardware).makespan_ns for plan in plans] + ([eager_ns] if eager_ns else [])
