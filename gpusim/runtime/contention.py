"""Fitting the contention constants: schedules of the calibration network, replayed and simulated."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpusim.engine.reference import ReferenceEngine
from gpusim.hardware.model import Contention, HardwareModel
from gpusim.plan.anchor import anchor
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule, check_schedule, make_schedule
from gpusim.plan.tasks import Plan
from gpusim.policies.registry import POLICIES
from gpusim.runtime import calibration_net
from gpusim.runtime.isolate import alone
from gpusim.trace.schema import Mode, Trace

#: Steps of the calibration network that are captured and replayed.
STEPS: tuple[tuple[Mode, int], ...] = (("infer", 1), ("train", 4), ("train", 24))
#: Schedules replayed of each: policy and streams.
SCHEDULES = (
    *((policy, streams) for policy in ("wavefront", "round_robin") for streams in (2, 4, 8)),
    *(("critical_path", streams) for streams in (2, 3, 4, 8)),
)
RECORDINGS = 4
#: First grid of the fit; the second has a quarter of its steps around the best.
SLOWDOWNS = [step / 5 for step in range(11)]
JOINS_NS = [0.0, 150.0, 300.0, 450.0]


@dataclass(frozen=True)
class Point:
    """One replayed schedule: the plan, the hardware model anchored to its trace, the measured time."""

    plan: Plan
    hardware: HardwareModel
    measured_ns: int


@dataclass(frozen=True)
class Fit:
    """Fitted constants and what is left."""

    younger_slowdown: float
    join_ns: float
    chain_ns: float
    """Median gap that the traces are anchored to."""
    residuals: tuple[float, ...]
    """|log(predicted / measured)| of each schedule."""

    @property
    def median(self) -> float:
        return statistics.median(self.residuals)

    @property
    def p90(self) -> float:
        return sorted(self.residuals)[round(0.9 * (len(self.residuals) - 1))]


def measure_points(model: HardwareModel, say: Callable[[str], None]) -> tuple[list[Point], list[float]]:
    """Capture and replay the calibration network. Returns the points and the gap of each trace."""
    points, gaps = [], []
    for mode, batch in STEPS:
        say(f"calibration network, {mode} {batch}")
        trace = alone(_capture, mode, batch)
        graph = OpGraph.build(trace, model)
        gaps.append(anchor(trace, model).chain_ns)
        schedules = []
        for policy, streams in SCHEDULES:
            made = POLICIES[policy](graph, streams)
            schedules.append(make_schedule(trace, made.order, made.streams, policy=policy, made_by="calibrate"))
        sequential_ns, times = alone(_replay, trace, tuple(schedules), model)
        # The gap of this very process's recordings: they differ from the capture's by what two recordings differ.
        truth = trace.ground_truth
        assert truth is not None
        graph_time = msgspec.structs.replace(truth.graph, median_ns=sequential_ns)
        truth = msgspec.structs.replace(truth, graph=graph_time)
        here = OpGraph.build(msgspec.structs.replace(trace, ground_truth=truth), model)
        for schedule, measured_ns in zip(schedules, times, strict=True):
            order, streams_of = check_schedule(schedule, trace, here.preds)
            points.append(Point(lower(here, order, streams_of), here.hardware, measured_ns))
    return points, gaps


def fit(points: Sequence[Point], gaps: Sequence[float]) -> Fit:
    """Least squares of log(predicted / measured) over slow-down and join cost, on a grid and then a finer one."""
    best = _best(points, itertools.product(SLOWDOWNS, JOINS_NS))
    step_a, step_j = (SLOWDOWNS[1] - SLOWDOWNS[0]) / 4, (JOINS_NS[1] - JOINS_NS[0]) / 3
    fine = itertools.product(
        (max(0.0, best[0] + step_a * k) for k in range(-3, 4)), [max(0.0, best[1] + step_j * k) for k in (-1, 0, 1)]
    )
    best = _best(points, fine)
    residuals = tuple(abs(error) for error in errors(points, *best))
    return Fit(best[0], best[1], statistics.median(gaps), residuals)


def _best(points: Sequence[Point], grid: Iterable[tuple[float, float]]) -> tuple[float, float]:
    return min(grid, key=lambda pair: sum(error**2 for error in errors(points, *pair)))


def errors(points: Sequence[Point], slowdown: float, join_ns: float) -> list[float]:
    """log(predicted / measured) of each point with these constants."""
    engine = ReferenceEngine()
    found = []
    for point in points:
        hardware = with_contention(point.hardware, slowdown, join_ns)
        found.append(math.log(engine.run(point.plan, hardware, record=False).makespan_ns / point.measured_ns))
    return found


def with_contention(model: HardwareModel, slowdown: float, join_ns: float) -> HardwareModel:
    """The model with other contention constants."""
    return msgspec.structs.replace(
        model,
        contention=Contention(younger_slowdown=slowdown),
        graph=msgspec.structs.replace(model.graph, join_ns=join_ns),
    )


def _capture(mode: Mode, batch: int) -> Trace:
    from gpusim.runtime.capture import CaptureOptions, capture

    spec = f"{Path(calibration_net.__file__)}:{calibration_net.branching.__name__}"
    return capture(CaptureOptions(spec=spec, mode=mode, batch=batch, command="gpusim calibrate")).trace


def _replay(trace: Trace, schedules: tuple[Schedule, ...], model: HardwareModel) -> tuple[int, list[int]]:
    """Measured time of the sequential graph and of each schedule."""
    from gpusim.runtime.replay import replay, require_equal

    measured = replay(trace, schedules, model, recordings=RECORDINGS)
    for measurement in measured:
        require_equal(measurement)
    return measured[0].sequential.median_ns, [m.schedule.median_ns for m in measured]
