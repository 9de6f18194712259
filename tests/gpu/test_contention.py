"""Fit of the contention constants: it recovers the constants behind the measurements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")

from gpusim.engine.reference import ReferenceEngine
from gpusim.formats.trace import Trace
from gpusim.gpu.calibrate import contention
from gpusim.gpu.calibrate.contention import Constants, Point, by_block, errors, fit, huber, measure_points
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule
from gpusim.policies.random_schedules import random_schedule
from gpusim.policies.registry import POLICIES
from gpusim.trace.store import load_trace
from gpusim.validation.recipe import read_recipe
from tests.support.helpers import HALF, chain_trace, make_hardware, wide_trace

ROOT = Path(__file__).parents[2]


def points(*constants: float, busy_ns: float = 300.0) -> list[Point]:
    """Return schedules of wide steps 'measured' by the reference engine with known exponents and busy cost.

    Every other op multiplies matrices.
    """
    found = []
    for dur_ns in (9000, 900):  # long kernels show contention, short ones the gaps
        hardware = make_hardware(chain_ns=300, front_end_ns=200, busy_ns=busy_ns, busy_starts=2)
        graph = OpGraph.build(wide_trace(6, dur_ns, 3, blocks=HALF), hardware)
        tasks = (
            tuple(msgspec.structs.replace(task, matrix=op % 2 == 0) for task in of_op)
            for op, of_op in enumerate(graph.tasks)
        )
        graph = replace(graph, tasks=tuple(tasks))
        truth = by_block(graph.hardware, constants)
        made = [
            POLICIES[policy](graph, n) for policy in ("wavefront", "round_robin", "critical_path") for n in (2, 4, 8)
        ]
        made += [random_schedule(graph, number, seed=0) for number in range(6)]
        for schedule in made:
            plan = lower(graph, schedule)
            found.append(Point(plan, graph.hardware, ReferenceEngine().run(plan, truth).makespan_ns))
    return found


@pytest.mark.parametrize(
    ("constants", "busy_ns"),
    [((0.0, 0.0), 0.0), ((0.6, 0.6), 150.0), ((0.25, 0.6), 700.0), ((0.6, 0.3), 433.0), ((0.45, 0.85), 50.0)],
)
def test_fit_finds_the_constants_that_made_the_measurements(constants: Constants, busy_ns: float) -> None:
    """Both within one and a half times the spacing of the points: times jump, so the surface is not quadratic. Their
    predictions are within 1.2 %.
    """
    found = fit(points(*constants, busy_ns=busy_ns), [300.0])
    fitted = (found.sharing_exponent, found.matrix_exponent)
    for value, wanted, step in zip(fitted, constants, contention.BY_BLOCK_SPACING, strict=True):
        assert value == pytest.approx(wanted, abs=1.5 * step)
    assert found.p90 < 0.012


def test_no_constant_is_fitted_below_zero() -> None:
    """Schedules faster than any cost explains: no cost at all is closest."""
    faster = [replace(point, measured_ns=round(point.measured_ns * 0.9)) for point in points(0.0, 0.0)]
    found = fit(faster, [300.0])
    assert (found.sharing_exponent, found.matrix_exponent) == pytest.approx((0.0, 0.0))


def test_every_step_counts_alike_however_many_schedules_it_has() -> None:
    """The loss is the same with three times the schedules at a third of the weight, and larger at full weight."""
    few, many = points(0.2, 0.2)[::3], points(1.0, 1.0)[::3]
    thrice = [replace(point, weight=1 / 3) for point in many * 3]
    for constants in ((0.2, 0.2), (0.5, 0.9)):
        alike = contention._loss([*few, *many], by_block, constants)
        assert contention._loss([*few, *thrice], by_block, constants) == pytest.approx(alike)
        assert contention._loss([*few, *many * 3], by_block, constants) > alike


@pytest.mark.parametrize(("error", "loss"), [(0.01, 0.0001), (-0.02, 0.0004), (0.03, 0.0008), (-0.12, 0.0044)])
def test_large_errors_count_in_proportion(error: float, loss: float) -> None:
    """By hand: 0.02 x (2 x 0.03 - 0.02)."""
    assert huber(error) == pytest.approx(loss)


def test_gap_is_the_median_of_the_traces() -> None:
    assert fit(points(0.5, 0.5), [100.0, 400.0, 200.0]).chain_ns == 200.0


def test_errors_are_logs_of_predicted_over_measured() -> None:
    measured = points(0.5, 0.5)
    assert errors(measured, by_block, (0.5, 0.5)) == pytest.approx([0.0] * len(measured), abs=1e-9)
    doubled = [replace(point, measured_ns=point.measured_ns * 2) for point in measured]
    assert errors(doubled, by_block, (0.5, 0.5)) == pytest.approx([-0.6931] * len(measured), abs=1e-3)


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Schedule, ...]]:
    """Replace the GPU: captures of a chain of five kernels of 1000 ns, and replays that take 7000 ns."""
    asked: list[tuple[Schedule, ...]] = []

    def capture(*_: object) -> Trace:
        return chain_trace(5, 1000, graph_ns=6600)

    def replay(trace: Trace, schedules: tuple[Schedule, ...], model: object) -> tuple[int, list[int], float]:
        asked.append(schedules)
        return 7000, [7000 + number for number in range(len(schedules))], 10.0 * len(asked)

    def here(work: Callable[..., Any], *arguments: object) -> Any:
        return work(*arguments)

    monkeypatch.setattr(contention, "alone", here)
    monkeypatch.setattr(contention, "_capture", capture)
    monkeypatch.setattr(contention, "_replay", replay)
    return asked


def test_every_step_is_replayed_with_policies_and_schedules_by_lot(replayed: list[tuple[Schedule, ...]]) -> None:
    found = measure_points(make_hardware(), lambda _: None)
    assert len(replayed) == len(found.gaps_ns) == len(contention.STEPS)
    for schedules in replayed:
        policies = [schedule.policy for schedule in schedules]
        assert policies.count("random") == contention.RANDOM_SCHEDULES
        assert len(policies) == contention.RANDOM_SCHEDULES + len(contention.SCHEDULES)
    each = [7000 + number for number in range(len(replayed[0]))]
    assert [point.measured_ns for point in found.points] == each * len(contention.STEPS)
    assert sum(point.weight for point in found.points) == pytest.approx(len(contention.STEPS))


def test_points_are_anchored_to_the_sequential_run_of_their_own_replay(replayed: list[tuple[Schedule, ...]]) -> None:
    """Recordings of two processes differ; that difference must not enter the constants."""
    found = measure_points(make_hardware(), lambda _: None)
    assert set(found.gaps_ns) == {400.0}  # (6600 - 5 x 1000) / 4, of the capture
    assert {point.hardware.graph.chain_ns for point in found.points} == {500.0}  # (7000 - 5 x 1000) / 4


def test_points_have_the_median_branch_cost_of_all_steps(replayed: list[tuple[Schedule, ...]]) -> None:
    """A measured constant is not fitted: the fit starts from points that have it."""
    found = measure_points(make_hardware(branch_ns=999.0), lambda _: None)
    assert found.branches_ns == (10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0)
    assert {point.hardware.graph.branch_ns for point in found.points} == {found.branch_ns} == {40.0}
    assert replace(found, branches_ns=(-3.0, -1.0, 5.0)).branch_ns == 0.0


@pytest.mark.parametrize("path", sorted((ROOT / "validate").glob("*.toml")), ids=lambda path: path.stem)
def test_recipes_mark_the_networks_that_constants_are_fitted_on(path: Path) -> None:
    """Only these networks are marked: predictions of a marked network are no evidence."""
    fitted = {options.spec.rpartition(":")[2] for options in contention.STEPS}
    for case in read_recipe(path).case:
        network = load_trace(case.trace).model.network if case.trace else (case.spec or "").rpartition(":")[2]
        assert case.fitted is (network in fitted), network
