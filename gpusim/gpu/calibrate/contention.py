"""Fit of the contention constants: schedules of the calibration steps, replayed and simulated."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from gpusim.engine.fast import FastEngine
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.trace import Trace
from gpusim.gpu.calibrate import network as calibration_net
from gpusim.gpu.capture.options import CaptureOptions
from gpusim.gpu.isolate import alone
from gpusim.plan.anchor import anchor
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule
from gpusim.plan.tasks import Plan
from gpusim.policies.random_schedules import random_schedule
from gpusim.policies.registry import POLICIES
from gpusim.quantiles import quantile

CALIBRATION_NET = f"{Path(calibration_net.__file__)}:{calibration_net.branching.__name__}"
#: Calibration steps: three of a network made for this, and four of real networks, which run more short kernels and
#: batch norms concurrently. These networks count as fitted from then on.
STEPS: tuple[CaptureOptions, ...] = (
    CaptureOptions(spec=CALIBRATION_NET, mode="infer", batch=1),
    CaptureOptions(spec=CALIBRATION_NET, mode="train", batch=4),
    CaptureOptions(spec=CALIBRATION_NET, mode="train", batch=24, dtype="bf16", memory_format="channels_last"),
    CaptureOptions(spec="torchvision:googlenet", mode="infer", batch=1),
    CaptureOptions(spec="torchvision:googlenet", mode="train", batch=8),
    CaptureOptions(spec="torchvision:densenet121", mode="infer", batch=1),
    CaptureOptions(spec="torchvision:densenet121", mode="train", batch=8),
)
#: Schedules replayed per step: policy and number of streams, and random ones.
SCHEDULES = tuple((policy, n) for policy in ("wavefront", "round_robin", "critical_path") for n in (2, 4, 8))
RANDOM_SCHEDULES = 8
RECORDINGS = 2
#: Least exponent; 0 has a special meaning.
LEAST = 1e-6
Constants = tuple[float, ...]
"""Values of the constants that are fitted together."""
Build = Callable[[HardwareModel, Constants], HardwareModel]
"""Function that sets these constants in a model."""
#: Errors beyond this count linearly, not by their square: recordings of one step (GoogLeNet, inference) differ by
#: several percent through the addresses of tensors, and one step must not outweigh all others.
OUTLIER = 0.02
#: Grid for the first search of the least loss, then the spacing of points.
BY_BLOCK_GRID = (tuple(number / 10 for number in range(1, 8)), tuple(number / 10 for number in range(1, 10)))
BY_BLOCK_SPACING, BY_BLOCK_MOST = (0.05, 0.05), (1.0, 1.0)
POOLED_GRID, POOLED_SPACING = ((0.0, 0.4, 0.8, 1.2, 1.6),), (0.1,)
POOLED_MOST = (math.inf,)
#: Points along each constant, and rounds of refinement around the lowest point.
AROUND, ROUNDS = 5, 3
#: Limit on a surface's minimum, in multiples of the loss at its centre.
MUCH_MORE = 1.25


@dataclass(frozen=True)
class Point:
    """One replayed schedule: the plan, the hardware model anchored to its trace, the measured time."""

    plan: Plan
    hardware: HardwareModel
    measured_ns: int
    weight: float = 1.0
    """1 / number of schedules of the step, so that each step has the same weight."""


@dataclass(frozen=True)
class Fit:
    """Fitted constants and their residuals."""

    sharing_exponent: float
    matrix_exponent: float
    younger_slowdown: float
    """Fitted after the others, for the pooled model of the SMs."""
    chain_ns: float
    """Median gap of the anchored traces, in ns."""
    residuals: tuple[float, ...]
    """|log(predicted / measured)| of each schedule, with block-level SMs."""
    pooled_residuals: tuple[float, ...]
    """|log(predicted / measured)| of each schedule, with pooled SMs."""

    @property
    def median(self) -> float:
        return statistics.median(self.residuals)

    @property
    def p90(self) -> float:
        return quantile(sorted(self.residuals), 0.9)


@dataclass(frozen=True)
class Measured:
    """Replays of the calibration steps."""

    points: tuple[Point, ...]
    gaps_ns: tuple[float, ...]
    """Anchored gap of each trace, in ns."""
    branches_ns: tuple[float, ...]
    """Extra gap of each step in a graph with branches, in ns."""

    @property
    def branch_ns(self) -> float:
        """Median branch cost over the steps, in ns; at least 0, since a recording may get better addresses by
        chance.
        """
        return max(0.0, statistics.median(self.branches_ns))


def measure_points(model: HardwareModel, say: Callable[[str], None]) -> Measured:
    """Capture and replay the calibration steps; the points include the measured branch cost."""
    replayed = []
    for options in STEPS:
        trace = alone(_capture, options)
        say(f"replaying {trace.name}")
        graph = OpGraph.build(trace, model)
        schedules = (
            *(POLICIES[policy](graph, streams) for policy, streams in SCHEDULES),
            *(random_schedule(graph, number, seed=0) for number in range(RANDOM_SCHEDULES)),
        )
        replayed.append((trace, schedules, *alone(_replay, trace, schedules, model)))
    measured = Measured(
        points=(),
        gaps_ns=tuple(anchor(trace, model).chain_ns for trace, *_ in replayed),
        branches_ns=tuple(branch_ns for *_, branch_ns in replayed),
    )
    model = with_branch_cost(model, measured.branch_ns)
    points: list[Point] = []
    for trace, schedules, sequential_ns, times, _ in replayed:
        points += points_of(trace, model, sequential_ns, schedules, times)
    return dataclasses.replace(measured, points=tuple(points))


def points_of(
    trace: Trace,
    model: HardwareModel,
    sequential_ns: int,
    schedules: Sequence[Schedule],
    measured_ns: Sequence[int],
) -> list[Point]:
    """Return the points of one step: schedules with their measured times.

    The trace is anchored to the sequential graph timed in the same process (`sequential_ns`), which differs from the
    capture's as much as two recordings do.
    """
    truth = trace.ground_truth
    assert truth is not None
    graph_time = msgspec.structs.replace(truth.graph, median_ns=sequential_ns)
    truth = msgspec.structs.replace(truth, graph=graph_time)
    here = OpGraph.build(msgspec.structs.replace(trace, ground_truth=truth), model)
    return [
        Point(lower(here, schedule), here.hardware, took_ns, 1 / len(schedules))
        for schedule, took_ns in zip(schedules, measured_ns, strict=True)
    ]


def fit(points: Sequence[Point], gaps: Sequence[float]) -> Fit:
    """Minimize the loss of log(predicted / measured) over both exponents, then over the slow-down."""
    constants = _least(points, by_block, BY_BLOCK_GRID, BY_BLOCK_SPACING, BY_BLOCK_MOST)
    exponent, matrix_exponent = constants

    def pooled(model: HardwareModel, constants: Constants) -> HardwareModel:
        return with_contention(model, 0.0, 0.0, constants[0])

    (slowdown,) = _least(points, pooled, POOLED_GRID, POOLED_SPACING, POOLED_MOST)
    return Fit(
        sharing_exponent=exponent,
        matrix_exponent=matrix_exponent,
        younger_slowdown=slowdown,
        chain_ns=statistics.median(gaps),
        residuals=tuple(abs(error) for error in errors(points, by_block, constants)),
        pooled_residuals=tuple(abs(error) for error in errors(points, pooled, (slowdown,))),
    )


def by_block(model: HardwareModel, constants: Constants) -> HardwareModel:
    """Return the model with these exponents and block-level SMs."""
    exponent, matrix_exponent = constants
    # 0 would select the pooled model, or the exponent of other kernels
    least = max(exponent, LEAST), max(matrix_exponent, LEAST)
    return with_contention(model, *least, model.contention.younger_slowdown)


def with_contention(model: HardwareModel, exponent: float, matrix_exponent: float, slowdown: float) -> HardwareModel:
    """Return the model with other contention constants."""
    return msgspec.structs.replace(
        model,
        contention=msgspec.structs.replace(
            model.contention, younger_slowdown=slowdown, sharing_exponent=exponent, matrix_exponent=matrix_exponent
        ),
    )


def with_branch_cost(model: HardwareModel, branch_ns: float) -> HardwareModel:
    """Return the model with another branch overhead."""
    return msgspec.structs.replace(model, graph=msgspec.structs.replace(model.graph, branch_ns=branch_ns))


def _least(
    points: Sequence[Point], build: Build, grid: Sequence[Sequence[float]], spacing: Constants, most: Constants
) -> Constants:
    """Return the constants with the least loss, found on a smooth surface fitted to it.

    Times jump where blocks move to other SMs, so single points beat their neighbours by chance; and two constants
    compensate each other, so the minimum lies in an oblique valley. A search from point to point gets stuck in either.
    Hence the lowest point of a quadratic surface, refitted several times around the last one.
    """

    def loss(constants: Constants) -> float:
        return _loss(points, build, constants)

    best = min(itertools.product(*grid), key=loss)
    for _ in range(ROUNDS):
        axes = [
            [min(max(0.0, value + step * (place - AROUND // 2)), limit) for place in range(AROUND)]
            for value, step, limit in zip(best, spacing, most, strict=True)
        ]
        around = {at: loss(at) for at in itertools.product(*axes)}
        lowest = _lowest(around, best, spacing)
        # Stay within the known points: beyond them the surface is extrapolated. It is also unreliable where it leads to
        # a much larger loss than that at its centre.
        lowest = tuple(min(max(value, axis[0]), axis[-1]) for value, axis in zip(lowest, axes, strict=True))
        best = lowest if loss(lowest) <= MUCH_MORE * loss(best) else best
    return best


def _lowest(losses: Mapping[Constants, float], centre: Constants, spacing: Constants) -> Constants:
    """Return the lowest point of a quadratic surface fitted to the losses, with more weight on low ones."""
    values = np.array(list(losses.values()))
    places = (np.array(list(losses)) - centre) / spacing
    count = len(centre)
    pairs = list(itertools.combinations_with_replacement(range(count), 2))
    terms = np.column_stack([np.ones(len(places)), places, *(places[:, i] * places[:, j] for i, j in pairs)])
    weights = (values.min() / np.maximum(values, 1e-12)) ** 2 + 1e-3
    coefficients = np.linalg.lstsq(terms * weights[:, None], values * weights, rcond=None)[0]
    bend = np.zeros((count, count))
    for (i, j), value in zip(pairs, coefficients[1 + count :], strict=True):
        bend[i, j] += value
        bend[j, i] += value
    bent, axes = np.linalg.eigh(bend)
    # Along an axis without upward curvature, go to the end of the known range.
    slope = axes.T @ coefficients[1 : 1 + count]
    steps = np.where(bent > 1e-9, -slope / np.maximum(bent, 1e-9), -np.sign(slope) * AROUND)
    return tuple(float(value) for value in centre + axes @ steps * spacing)


def _loss(points: Sequence[Point], build: Build, constants: Constants) -> float:
    residuals = errors(points, build, constants)
    return sum(point.weight * huber(error) for point, error in zip(points, residuals, strict=True))


def huber(error: float) -> float:
    """Return the square of an error, continued linearly beyond `OUTLIER` (Huber, 1964)."""
    size = abs(error)
    return size**2 if size < OUTLIER else OUTLIER * (2.0 * size - OUTLIER)


def errors(points: Sequence[Point], build: Build, constants: Constants) -> list[float]:
    """Return log(predicted / measured) of each point with these constants."""
    engine = FastEngine()
    return [
        math.log(engine.run(point.plan, build(point.hardware, constants)).makespan_ns / point.measured_ns)
        for point in points
    ]


def _capture(options: CaptureOptions) -> Trace:
    from gpusim.gpu.capture.capture import capture

    return capture(dataclasses.replace(options, command="gpusim calibrate")).trace


def _replay(trace: Trace, schedules: tuple[Schedule, ...], model: HardwareModel) -> tuple[int, list[int], float]:
    """Return the measured times of the sequential graph and of each schedule, and the branch cost per gap, in ns."""
    from gpusim.gpu.calibrate.linear_graph import branch_cost_ns
    from gpusim.gpu.replay.replay import replay, require_equal

    measured = replay(OpGraph.build(trace, model), schedules, recordings=RECORDINGS)
    for measurement in measured:
        require_equal(measurement)
    times_ns = [measurement.schedule.median_ns for measurement in measured]
    return measured[0].sequential.median_ns, times_ns, branch_cost_ns(trace, model)
