"""Memory plans of a results file, predicted again, and replayed plans compared with their measurements."""

from __future__ import annotations

import functools
import json
import math
import shutil
import statistics
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from gpusim.cli import cli
from gpusim.errors import MeasurementError
from gpusim.formats.recipe import Case, Recipe
from gpusim.formats.results import read_results
from gpusim.io.files import read_file
from gpusim.memplan.evaluate import MemoryEvaluator
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.policies.least_time import LeastTime
from gpusim.plan.graph import OpGraph
from gpusim.trace.store import read_trace
from gpusim.validation.again import predict_again, trace_files
from gpusim.validation.chosen import hardware_of
from gpusim.validation.memory_again import plans_path, read_replayed_plans, write_replayed_plans
from gpusim.validation.memory_stages import predict_memory, read_memory_predictions
from gpusim.validation.memory_tables import peak_error

RESULTS = Path(__file__).parents[2] / "validate" / "results"
FILES = sorted(RESULTS.glob("memory_*.json"))
#: Plans replayed before the costs of copies next to kernels were measured.
FIRST = RESULTS / "memory_h200_20261123.json"
#: Permitted growth of an error by a change of a rule, as a fraction of the measured value.
MAY_GROW = 0.005
#: Largest error of a step: SuperNeurons' plan of DenseNet-121 (research/2026-11-26-copies-out.md).
MOST = 0.09
#: Largest error of a peak: that of a plan with the smallest budget (research/2026-11-24-plan-timelines.md).
PEAK_ERROR = 0.012


again = functools.cache(predict_again)


def test_there_are_replayed_plans() -> None:
    assert FIRST in FILES


@pytest.mark.parametrize("results", FILES, ids=lambda path: path.stem)
def test_predictions_of_replayed_plans_have_not_become_worse(results: Path) -> None:
    """A change of a rule, of the planner's instructions or of the allocator shows here."""
    then, now = again(results)
    moved = [c.error for c in now.cases if c.predicted_ns != c.predicted_sequential_ns]
    before = [c.error for c in then.cases if c.predicted_ns != c.predicted_sequential_ns]
    assert len(moved) >= 8
    assert max(map(abs, moved)) <= max(MOST, max(map(abs, before)) + MAY_GROW)
    assert sum(map(abs, moved)) <= sum(map(abs, before)) + MAY_GROW * len(before)
    assert max(abs(peak_error(case)) for case in now.cases) <= PEAK_ERROR


def test_changelog_says_how_far_off_plans_that_copy_are_by_the_rule_of_today() -> None:
    cases = [case for results in FILES for case in again(results)[1].cases]
    errors = [abs(case.error) for case in cases if case.streams > 1]
    median, most = 100 * statistics.median(errors), math.ceil(1000 * max(errors)) / 10
    text = " ".join((RESULTS.parents[1] / "CHANGELOG.md").read_text(encoding="utf-8").split())
    assert f"All {len(errors)} that copy are predicted again within {most} %" in text
    assert f"within {most} %, {median:.1f} % in the median" in text


@pytest.mark.parametrize("step", ["densenet121-train-b16", "encoder_12-train-b32"])
def test_where_torchs_budget_was_faster_our_plan_of_today_is(step: str) -> None:
    """Without copies where they were measured to cost most."""
    file = next(f for f in FILES for c in again(f)[1].cases if (c.trace, c.policy) == (step, "torch_budget"))
    torchs = next(c for c in again(file)[1].cases if (c.trace, c.policy) == (step, "torch_budget"))
    trace = read_trace(trace_files(file)[step])
    evaluator = MemoryEvaluator(OpGraph.build(trace, hardware_of(trace)))
    planner = LeastTime(Setting(evaluator.graph, evaluator.storages), evaluator)
    ours = evaluator.evaluate(planner.best(torchs.predicted_peak_bytes))
    assert ours.step_ns < 0.996 * torchs.predicted_ns
    assert step == "densenet121-train-b16" or not ours.plan.offloads


def test_first_plans_run_the_instructions_of_their_day() -> None:
    """Without later costs, the predictions of that day are reproduced to the nanosecond."""
    then = read_results(FIRST)
    files = trace_files(FIRST)
    evaluators = {}
    for name in {case.trace for case in then.cases}:
        trace = read_trace(files[name])
        hardware = hardware_of(trace)
        today = ("switch_ns", "copy_slowdown", "kernel_slowdown", "memset_d2h_ns", "memset_h2d_ns")
        copies = msgspec.structs.replace(hardware.copies, **dict.fromkeys(today, 0.0))
        costs = msgspec.structs.replace(hardware.graph, join_ns=0.0)
        of_then = msgspec.structs.replace(hardware, copies=copies, graph=costs)
        evaluators[name] = MemoryEvaluator(OpGraph.build(trace, of_then))
    first = [
        (case, replayed)
        for case, replayed in zip(then.cases, read_replayed_plans(plans_path(FIRST)), strict=True)
        if not replayed.barriers_first  # later rows join the same file
    ]
    assert len(first) == 14
    for case, replayed in first:
        evaluator = evaluators[case.trace]
        plan = MemoryPlan.from_document(replayed.plan, evaluator.graph.trace)
        outcome = evaluator.evaluate(plan, barriers_first=replayed.barriers_first)
        assert (outcome.step_ns, outcome.peak_bytes) == (case.predicted_ns, case.predicted_peak_bytes)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Copy the first results, with plans and traces next to them as in the tree."""
    folder = tmp_path / "validate" / "results"
    folder.mkdir(parents=True)
    for path in (FIRST, plans_path(FIRST)):
        shutil.copy(path, folder / path.name)
    traces = tmp_path / "validate" / "traces"
    traces.mkdir()
    captured = RESULTS.parent / "traces" / "memory"
    shutil.copy(captured.with_suffix(".zip"), traces / "memory.zip")
    if captured.is_dir():
        shutil.copytree(captured, traces / "memory")
    return folder / FIRST.name


def test_command_says_times_and_peaks(copied: Path) -> None:
    ran = CliRunner().invoke(cli, ["validate", str(copied), "--again", "--json"], catch_exceptions=False)
    cases = json.loads(ran.stdout)["cases"]
    assert len(cases) == len(read_results(copied).cases)
    for case in cases:
        assert abs(case["predicted_peak_bytes"] / case["measured_peak_bytes"] - 1) <= 0.01
        assert case["then_peak_bytes"] > 0
    table = CliRunner().invoke(cli, ["validate", str(copied), "--again"], catch_exceptions=False).output
    assert "memory plans, peaks: error median" in " ".join(table.split())


def test_plans_of_other_cases_are_refused(copied: Path) -> None:
    plans = read_replayed_plans(plans_path(copied))
    write_replayed_plans(plans[1:], copied)
    with pytest.raises(MeasurementError, match=f"{len(plans)} cases, and {len(plans) - 1} memory plans next to it"):
        predict_again(copied)
    write_replayed_plans((plans[1], plans[0], *plans[2:]), copied)
    with pytest.raises(MeasurementError, match="does not match its memory plan"):
        predict_again(copied)


def test_plan_that_cannot_run_is_named_by_file_and_place(copied: Path) -> None:
    plans = list(read_replayed_plans(plans_path(copied)))
    plan = msgspec.structs.replace(plans[0].plan, op_streams=(1,))
    write_replayed_plans((msgspec.structs.replace(plans[0], plan=plan), *plans[1:]), copied)
    with pytest.raises(MeasurementError, match=r"plans\.json\.gz: \$\.plans\[0\]\.plan: .* streams for 1 ops"):
        predict_again(copied)


def test_missing_trace_is_named(copied: Path) -> None:
    (copied.parent.parent / "traces" / "memory.zip").unlink()
    shutil.rmtree(copied.parent.parent / "traces" / "memory", ignore_errors=True)
    with pytest.raises(MeasurementError, match="there is no trace 'resnet50-train-b16'"):
        predict_again(copied)


def test_another_step_is_refused(copied: Path) -> None:
    with pytest.raises(MeasurementError, match="is not the step of"):
        predict_again(copied, {"resnet50-train-b16": trace_files(FIRST)["vgg16-train-b16"]})


def test_our_policy_is_planned_for_the_peak_of_each_other(tmp_path: Path) -> None:
    """With `memory_matched`: at the memory of a published plan, and predicted to take no longer."""
    path = tmp_path / "vgg16-train-b16.json.gz"
    path.write_bytes(read_file(trace_files(FIRST)["vgg16-train-b16"], MeasurementError))
    recipe = Recipe(
        name="made", case=(Case(trace=str(path)),), memory_policies=("vdnn_conv", "checkpoint"), memory_matched=True
    )
    plans = read_memory_predictions(predict_memory(path, recipe), path).plans
    others, ours = plans[:2], plans[2:]
    assert [each.plan.policy for each in plans] == ["vdnn_conv", "checkpoint", "least_time", "least_time"]
    for other, mine in zip(others, ours, strict=True):
        assert mine.budget_bytes == other.plan.predicted_peak_bytes
        assert mine.plan.predicted_peak_bytes <= other.plan.predicted_peak_bytes
        assert mine.plan.predicted_ns <= other.plan.predicted_ns
