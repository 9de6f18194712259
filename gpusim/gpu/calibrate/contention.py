"""Fitting the contention constants: schedules of the calibration steps, replayed and simulated."""

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
#: Least exponent that stands for itself.
LEAST = 1e-6
Constants = tuple[float, ...]
"""Values of the constants that are fitted together."""
Build = Callable[[HardwareModel, Constants], HardwareModel]
"""The model with these values."""
#: An error as large as this counts in proportion, no longer by its square: the recordings of one step (GoogLeNet,
#: inference) differ by several percent, by where its tensors lie, and it must not decide for all others.
OUTLIER = 0.02
#: Where the least loss is looked for: a grid, and then points so far apart.
BY_BLOCK_GRID = (tuple(number / 10 for number in range(1, 8)), tuple(number / 10 for number in range(1, 10)))
BY_BLOCK_SPACING, BY_BLOCK_MOST = (0.05, 0.05), (1.0, 1.0)
POOLED_GRID, POOLED_SPACING = ((0.0, 0.4, 0.8, 1.2, 1.6),), (0.1,)
POOLED_MOST = (math.inf,)
#: Points along each constant; how often they are laid around the lowest point found.
AROUND, ROUNDS = 5, 3
#: Times the loss where a surface was laid; to more than that it does not lead.
MUCH_MORE = 1.25


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
    matrix_exponent: float
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


@dataclass(frozen=True)
class Measured:
    """The calibration steps, replayed."""

    points: tuple[Point, ...]
    gaps_ns: tuple[float, ...]
    """Gap that each trace is anchored to."""
    branches_ns: tuple[float, ...]
    """What each step's gaps take more in a graph that is no straight line."""

    @property
    def branch_ns(self) -> float:
        """Median over the steps. Never below 0: a recording of either graph may lie better in memory."""
        return max(0.0, statistics.median(self.branches_ns))


def measure_points(model: HardwareModel, say: Callable[[str], None]) -> Measured:
    """Capture and replay the calibration steps; the points have the branch cost that was found."""
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
    """The points of one step: schedules and what they took.

    The trace is anchored to the sequential graph that was timed in the same process, `sequential_ns`: it differs from
    the capture's by what two recordings differ.
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
    """Least loss of log(predicted / measured) over both exponents, then over the slow-down."""
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
    """The model with these exponents, its SMs one by one."""
    exponent, matrix_exponent = constants
    # 0 would stand for the pool, and for the same as other kernels
    least = max(exponent, LEAST), max(matrix_exponent, LEAST)
    return with_contention(model, *least, model.contention.younger_slowdown)


def with_contention(model: HardwareModel, exponent: float, matrix_exponent: float, slowdown: float) -> HardwareModel:
    """The model with other constants of what kernels do to each other."""
    return msgspec.structs.replace(
        model,
        contention=msgspec.structs.replace(
            model.contention, younger_slowdown=slowdown, sharing_exponent=exponent, matrix_exponent=matrix_exponent
        ),
    )


def with_branch_cost(model: HardwareModel, branch_ns: float) -> HardwareModel:
    """The model with another cost of graphs that are no straight line."""
    return msgspec.structs.replace(model, graph=msgspec.structs.replace(model.graph, branch_ns=branch_ns))


def _least(
    points: Sequence[Point], build: Build, grid: Sequence[Sequence[float]], spacing: Constants, most: Constants
) -> Constants:
    """The constants with the least loss, by the smooth surface that lies nearest to it.

    Times jump where blocks go elsewhere, so that single constants are better than their neighbours by chance; and two
    constants make up for each other, so the least lies in a valley along none of them. A search that goes from point
    to point ends in either. Hence the lowest point of a quadratic surface, again and again around the last one.
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
        # No further than the points that are known: beyond, the surface is a guess. And a bad one where it leads to
        # much more loss than there is where it was laid.
        lowest = tuple(min(max(value, axis[0]), axis[-1]) for value, axis in zip(lowest, axes, strict=True))
        best = lowest if loss(lowest) <= MUCH_MORE * loss(best) else best
    return best


def _lowest(losses: Mapping[Constants, float], centre: Constants, spacing: Constants) -> Constants:
    """The lowest point of the quadratic surface through the losses, the low ones most."""
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
    # Along an axis in which it does not bend upwards: to the end of what is known.
    slope = axes.T @ coefficients[1 : 1 + count]
    steps = np.where(bent > 1e-9, -slope / np.maximum(bent, 1e-9), -np.sign(slope) * AROUND)
    return tuple(float(value) for value in centre + axes @ steps * spacing)


def _loss(points: Sequence[Point], build: Build, constants: Constants) -> float:
    residuals = errors(points, build, constants)
    return sum(point.weight * huber(error) for point, error in zip(points, residuals, strict=True))


def huber(error: float) -> float:
    """The square of an error, and beyond `OUTLIER` what grows in proportion (Huber, 1964)."""
    size = abs(error)
    return size**2 if size < OUTLIER else OUTLIER * (2.0 * size - OUTLIER)


def errors(points: Sequence[Point], build: Build, constants: Constants) -> list[float]:
    """log(predicted / measured) of each point with these constants."""
    engine = FastEngine()
    return [
        math.log(engine.run(point.plan, build(point.hardware, constants)).makespan_ns / point.measured_ns)
        for point in points
    ]


def _capture(options: CaptureOptions) -> Trace:
    from gpusim.gpu.capture.capture import capture

    return capture(dataclasses.replace(options, command="gpusim calibrate")).trace


def _replay(trace: Trace, schedules: tuple[Schedule, ...], model: HardwareModel) -> tuple[int, list[int], float]:
    """Measured time of the sequential graph and of each schedule, and what a branch costs each gap."""
    from gpusim.gpu.calibrate.linear_graph import branch_cost_ns
    from gpusim.gpu.replay.replay import replay, require_equal

    measured = replay(OpGraph.build(trace, model), schedules, recordings=RECORDINGS)
    for measurement in measured:
        require_equal(measurement)
    times_ns = [measurement.schedule.median_ns for measurement in measured]
    return measured[0].sequential.median_ns, times_ns, branch_cost_ns(trace, model)
