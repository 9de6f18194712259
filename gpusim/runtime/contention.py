"""Fitting the contention constants: schedules of the calibration steps, replayed and simulated."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpusim.engine.fast import FastEngine
from gpusim.hardware.model import Contention, HardwareModel
from gpusim.plan.anchor import anchor
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule, make_schedule
from gpusim.plan.tasks import Plan
from gpusim.policies.random_schedules import RANDOM, random_assignment
from gpusim.policies.registry import POLICIES
from gpusim.runtime import calibration_net
from gpusim.runtime.capture import CaptureOptions
from gpusim.runtime.isolate import alone
from gpusim.trace.schema import Trace

CALIBRATION_NET = f"{Path(calibration_net.__file__)}:{calibration_net.branching.__name__}"
#: Steps that are captured and replayed: three of a network made for it, and four of real ones, which leave more
#: kernels of a few microseconds and of batch norm beside each other. These networks count as fitted ever after.
STEPS: tuple[CaptureOptions, ...] = (
    CaptureOptions(spec=CALIBRATION_NET, mode="infer", batch=1),
    CaptureOptions(spec=CALIBRATION_NET, mode="train", batch=4),
    CaptureOptions(spec=CALIBRATION_NET, mode="train", batch=24, dtype="bf16", memory_format="channels_last"),
    CaptureOptions(spec="torchvision:googlenet", mode="infer", batch=1),
    CaptureOptions(spec="torchvision:googlenet", mode="train", batch=8),
    CaptureOptions(spec="torchvision:densenet121", mode="infer", batch=1),
    CaptureOptions(spec="torchvision:densenet121", mode="train", batch=8),
)
#: Schedules replayed of each: policy and streams, and random ones.
SCHEDULES = tuple((policy, n) for policy in ("wavefront", "round_robin", "critical_path") for n in (2, 4, 8))
RANDOM_SCHEDULES = 8
RECORDINGS = 2
Constants = tuple[float, ...]
"""Values of the constants that are fitted together."""
Build = Callable[[HardwareModel, Constants], HardwareModel]
"""The model with these values."""
#: The search for the least squares: start, first steps, and the steps at which it ends.
BY_BLOCK_START, BY_BLOCK_STEPS, BY_BLOCK_LAST = (0.5, 100.0), (0.1, 50.0), (0.01, 5.0)
POOLED_START, POOLED_STEPS, POOLED_LAST = (0.8,), (0.2,), (0.01,)


@dataclass(frozen=True)
class Point:
    """One replayed schedule: the plan, the hardware model anchored to its trace, the measured time."""

    plan: Plan
    hardware: HardwareModel
    measured_ns: int
    weight: float = 1.0
    """One over the number of schedules of its step: each step counts alike."""


@dataclass(frozen=True)
class Fit:
    """Fitted constants and what is left."""

    sharing_exponent: float
    join_ns: float
    younger_slowdown: float
    """Fitted after the others, for the SMs as one pool."""
    chain_ns: float
    """Median gap that the traces are anchored to."""
    residuals: tuple[float, ...]
    """|log(predicted / measured)| of each schedule, block by block."""
    pooled_residuals: tuple[float, ...]
    """The same for the SMs as one pool."""

    @property
    def median(self) -> float:
        return statistics.median(self.residuals)

    @property
    def p90(self) -> float:
        return sorted(self.residuals)[round(0.9 * (len(self.residuals) - 1))]


def measure_points(model: HardwareModel, say: Callable[[str], None]) -> tuple[list[Point], list[float]]:
    """Capture and replay the calibration steps. Returns the points and the gap of each trace."""
    points, gaps = [], []
    for options in STEPS:
        trace = alone(_capture, options)
        say(f"replaying {trace.name}")
        graph = OpGraph.build(trace, model)
        gaps.append(anchor(trace, model).chain_ns)
        made = [(policy, POLICIES[policy](graph, streams)) for policy, streams in SCHEDULES]
        made += [(RANDOM, random_assignment(graph, number, seed=0)) for number in range(RANDOM_SCHEDULES)]
        schedules = tuple(
            make_schedule(trace, assignment.order, assignment.streams, policy=policy, made_by="calibrate")
            for policy, assignment in made
        )
        sequential_ns, times = alone(_replay, trace, schedules, model)
        arrangements = [(assignment.order, assignment.streams) for _, assignment in made]
        points += points_of(trace, model, sequential_ns, arrangements, times)
    return points, gaps


def points_of(
    trace: Trace,
    model: HardwareModel,
    sequential_ns: int,
    arrangements: Sequence[tuple[Sequence[int], Sequence[int]]],
    measured_ns: Sequence[int],
) -> list[Point]:
    """The points of one step: launch orders and streams by op, and what they took.

    The trace is anchored to the sequential graph that was timed in the same process, `sequential_ns`: it differs from
    the capture's by what two recordings differ.
    """
    truth = trace.ground_truth
    assert truth is not None
    graph_time = msgspec.structs.replace(truth.graph, median_ns=sequential_ns)
    truth = msgspec.structs.replace(truth, graph=graph_time)
    here = OpGraph.build(msgspec.structs.replace(trace, ground_truth=truth), model)
    return [
        Point(lower(here, order, streams), here.hardware, took_ns, 1 / len(arrangements))
        for (order, streams), took_ns in zip(arrangements, measured_ns, strict=True)
    ]


def fit(points: Sequence[Point], gaps: Sequence[float]) -> Fit:
    """Least squares of log(predicted / measured) over the sharing exponent and the join cost, then the slow-down."""
    exponent, join_ns = _least_squares(points, by_block, BY_BLOCK_START, BY_BLOCK_STEPS, BY_BLOCK_LAST)

    def pooled(model: HardwareModel, constants: Constants) -> HardwareModel:
        return with_contention(model, 0.0, join_ns, constants[0])

    (slowdown,) = _least_squares(points, pooled, POOLED_START, POOLED_STEPS, POOLED_LAST)
    return Fit(
        sharing_exponent=exponent,
        join_ns=join_ns,
        younger_slowdown=slowdown,
        chain_ns=statistics.median(gaps),
        residuals=tuple(abs(error) for error in errors(points, by_block, (exponent, join_ns))),
        pooled_residuals=tuple(abs(error) for error in errors(points, pooled, (slowdown,))),
    )


def by_block(model: HardwareModel, constants: Constants) -> HardwareModel:
    """The model with this sharing exponent and join cost, its SMs one by one."""
    exponent, join_ns = constants
    # 0 would stand for the pool
    return with_contention(model, max(exponent, 1e-6), join_ns, model.contention.younger_slowdown)


def with_contention(model: HardwareModel, exponent: float, join_ns: float, slowdown: float) -> HardwareModel:
    """The model with other constants of what kernels do to each other."""
    return msgspec.structs.replace(
        model,
        contention=Contention(younger_slowdown=slowdown, sharing_exponent=exponent),
        graph=msgspec.structs.replace(model.graph, join_ns=join_ns),
    )


def _least_squares(
    points: Sequence[Point], build: Build, start: Constants, first: Constants, last: Constants
) -> Constants:
    """A pattern search: along each constant in turn, by steps that halve where nothing helps."""
    best, steps = start, first
    least = _squares(points, build, best)
    while any(step > final for step, final in zip(steps, last, strict=True)):
        tried = [_moved(best, axis, sign * steps[axis]) for axis in range(len(best)) for sign in (1, -1)]
        squares, found = min((_squares(points, build, candidate), candidate) for candidate in tried)
        if squares < least:
            least, best = squares, found
        else:
            steps = tuple(step / 2 for step in steps)
    return best


def _moved(constants: Constants, axis: int, by: float) -> Constants:
    return tuple(max(0.0, value + by) if index == axis else value for index, value in enumerate(constants))


def _squares(points: Sequence[Point], build: Build, constants: Constants) -> float:
    found = errors(points, build, constants)
    return sum(point.weight * error**2 for point, error in zip(points, found, strict=True))


def errors(points: Sequence[Point], build: Build, constants: Constants) -> list[float]:
    """log(predicted / measured) of each point with these constants."""
    engine = FastEngine()
    return [
        math.log(engine.run(point.plan, build(point.hardware, constants)).makespan_ns / point.measured_ns)
        for point in points
    ]


def _capture(options: CaptureOptions) -> Trace:
    from gpusim.runtime.capture import capture

    return capture(dataclasses.replace(options, command="gpusim calibrate")).trace


def _replay(trace: Trace, schedules: tuple[Schedule, ...], model: HardwareModel) -> tuple[int, list[int]]:
    """Measured time of the sequential graph and of each schedule."""
    from gpusim.runtime.replay import replay, require_equal

    measured = replay(trace, schedules, model, recordings=RECORDINGS)
    for measurement in measured:
        require_equal(measurement)
    return measured[0].sequential.median_ns, [m.schedule.median_ns for m in measured]
