"""A recipe in stages: each resumes, predictions precede measurements, days are joined."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpusim.errors import CaptureError, RecipeError, ScheduleError
from gpusim.formats.measurement import Measurement
from gpusim.formats.recipe import Case, Recipe
from gpusim.formats.results import ResultCase, newest_results, read_results
from gpusim.io.files import write_document
from gpusim.trace.store import read_trace, write_trace
from gpusim.validation import stages
from gpusim.validation.chosen import Chosen
from gpusim.validation.predictions import predictions_path, read_predictions
from gpusim.validation.recipe import read_recipe
from gpusim.validation.replayed import SUFFIX, read_replayed
from gpusim.validation.stages import capture_stage, measure_stage, predict_stage, selected
from gpusim.version import code_version
from tests.validation.test_recipes import capture
from tests.validation.test_recipes import replay as replayed

CALLS: list[str] = []
VALIDATE = Path(__file__).parents[2] / "validate"


def slower_each_time(
    path: Path, chosen: Chosen, recipe: Recipe, command: str, trust_code: bool
) -> tuple[Chosen, list[Measurement]]:
    """Return measurements as if replayed; a second process takes 10 ns more, and predicts something else."""
    CALLS.append(path.name)
    chosen, measured = replayed(path, chosen, recipe, command, trust_code)
    again = 10 * (CALLS.count(path.name) - 1)

    def later(timing: Any) -> Any:
        return msgspec.structs.replace(timing, median_ns=timing.median_ns + again)

    return chosen, [
        msgspec.structs.replace(each, schedule=later(each.schedule), sequential=later(each.sequential), predicted_ns=1)
        for each in measured
    ]


@pytest.fixture(autouse=True)
def edge(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process of its own and no GPU."""

    def here(work: Callable[..., Any], *args: object) -> Any:
        return work(*args)

    CALLS.clear()
    monkeypatch.setattr(stages, "alone", here)
    monkeypatch.setattr(stages, "capture_case", captured)
    monkeypatch.setattr(stages, "replay_chosen", slower_each_time)


def captured(case: Case, folder: Path, seed: int, command: str) -> Path:
    """Return a trace under the name that a capture gives it."""
    made = read_trace(capture(case, folder, seed, command))
    (folder / f"{made.model.network}.json").unlink()
    path = folder / f"{made.name}.json.gz"
    write_trace(made, path)
    return path


def recipe(tmp_path: Path, *networks: str, **fields: Any) -> Recipe:
    cases = tuple(Case(spec=f"m.py:{name}", mode="infer", batch=1) for name in networks)
    given = {"name": "kinds", "case": cases, "streams": 4, "budget_s": 0.05, "policies": ("wavefront",)}
    return Recipe(**(given | {"traces": str(tmp_path / "traces"), "processes": 2} | fields))


def run(tmp_path: Path, plan: Recipe, *numbers: int) -> Any:
    cases = selected(plan, numbers)
    capture_stage(plan, cases, "c", lambda _: None)
    predict_stage(plan, cases, lambda _: None)
    return measure_stage(plan, cases, tmp_path / "results", "c", lambda _: None)


def test_predictions_stand_before_measurements_and_measuring_makes_no_new_ones(tmp_path: Path) -> None:
    plan = recipe(tmp_path, "a")
    results = run(tmp_path, plan)
    (path,) = (tmp_path / "traces").glob("*.predicted.json.gz")
    predictions = read_predictions(path, tmp_path / "traces" / "a-infer-b1.json.gz")
    assert predictions.code == code_version()
    assert [case.predicted_ns for case in results.cases] == [each.predicted_ns for each in predictions.schedules]
    assert results.cases[0].commit == predictions.code
    assert results.cases[0].predicted_interval_ns == predictions.intervals_ns[0]


def test_interval_is_what_medians_of_processes_span(tmp_path: Path) -> None:
    (case,) = run(tmp_path, recipe(tmp_path, "a")).cases
    assert CALLS == ["a-infer-b1.json.gz"] * 2
    low, high = case.interval_ns
    assert high - low == 10
    assert case.measured_ns == low + 5


def test_outputs_that_differ_in_one_process_are_reported_as_different(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = recipe(tmp_path, "a", processes=1)
    assert all(case.outputs_equal for case in run(tmp_path, plan).cases)

    def differ(*arguments: Any) -> tuple[Chosen, list[Measurement]]:
        chosen, measured = slower_each_time(*arguments)
        bad = [msgspec.structs.replace(each.outputs, equal=False, worst_error=0.5) for each in measured]
        return chosen, [msgspec.structs.replace(each, outputs=o) for each, o in zip(measured, bad, strict=True)]

    monkeypatch.setattr(stages, "replay_chosen", differ)
    again = msgspec.structs.replace(plan, processes=2)
    assert all(not case.outputs_equal and case.worst_error == 0.5 for case in run(tmp_path, again).cases)
    monkeypatch.setattr(stages, "replay_chosen", slower_each_time)
    later = msgspec.structs.replace(plan, processes=3)
    assert all(not case.outputs_equal for case in run(tmp_path, later).cases)


def test_a_later_process_replays_the_same_schedules_and_joins_their_rows(tmp_path: Path) -> None:
    """Of three processes on three days, and predictions stay those of before the first."""
    plan = recipe(tmp_path, "a", "b", processes=1, policies=("wavefront", "round_robin"))
    first = run(tmp_path, plan)
    for processes in (2, 3, 3):
        results = run(tmp_path, msgspec.structs.replace(plan, processes=processes))
    assert CALLS.count("a-infer-b1.json.gz") == CALLS.count("b-infer-b1.json.gz") == 3
    assert results == read_results(next((tmp_path / "results").glob("*.json")))
    for before, after in zip(first.cases, results.cases, strict=True):
        ns = before.measured_ns
        assert [each.measured_ns for each in after.processes] == [ns, ns + 10, ns + 20]
        assert (after.measured_ns, after.interval_ns) == (ns + 10, (ns, ns + 20))
        assert after.sequential_ns == before.sequential_ns + 10
        assert (after.predicted_ns, after.commit) == (before.predicted_ns, before.commit)
    replayed = read_replayed(next((tmp_path / "results").glob("*.schedules.json.gz")))
    assert [each.measured_ns for each in replayed] == [case.measured_ns for case in results.cases]


def test_rows_that_do_not_name_their_processes_are_not_measured_again(tmp_path: Path) -> None:
    plan = recipe(tmp_path, "a", processes=1)
    run(tmp_path, plan)
    path = next((tmp_path / "results").glob("*.json"))
    results = read_results(path)
    cases = tuple(msgspec.structs.replace(case, processes=()) for case in results.cases)
    write_document(path, msgspec.structs.replace(results, cases=cases))
    CALLS.clear()
    run(tmp_path, msgspec.structs.replace(plan, processes=2))
    assert CALLS == []


@pytest.mark.parametrize("name", ["fair", "neighbours", "neighbours_few", "neighbours_more"])
def test_further_processes_of_a_stored_comparison_are_measured_by_the_same_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its second case, or its only one, cut to the first process; all stored rows say what their processes took."""
    plan = read_recipe(VALIDATE / f"{name}.toml")
    cases = plan.case[1:2] or plan.case
    stored = newest_results(VALIDATE / "results", name)
    results = read_results(stored)
    assert plan.processes == (3 if name == "fair" else 2)
    assert all(1 <= len(row.processes) <= plan.processes for row in results.cases)
    trace = read_trace(stages.trace_path(cases[0], plan))
    rows = tuple(_of_first_process(row) if row.trace == trace.name else row for row in results.cases)
    (folder := tmp_path / "results").mkdir()
    write_document(folder / stored.name, msgspec.structs.replace(results, cases=rows))
    shutil.copy(stored.with_name(stored.stem + SUFFIX), folder)

    def same_software(*arguments: Any) -> tuple[Chosen, list[Measurement]]:
        chosen, measured = slower_each_time(*arguments)
        gpu = msgspec.structs.replace(
            measured[0].gpu, torch=rows[0].versions["torch"], driver=rows[0].versions["driver"]
        )
        return chosen, [msgspec.structs.replace(each, gpu=gpu) for each in measured]

    monkeypatch.setattr(stages, "replay_chosen", same_software)
    for _ in range(2):
        joined = measure_stage(plan, cases, folder, "c", lambda _: None).cases
    assert [f"{trace.name}.json.gz"] * (plan.processes - 1) == CALLS
    assert all(len(row.processes) == plan.processes for row in joined if row.trace == trace.name)
    assert [row for row in joined if row.trace != trace.name] == [row for row in rows if row.trace != trace.name]


def _of_first_process(row: ResultCase) -> ResultCase:
    first = row.processes[0]
    times = {"measured_ns": first.measured_ns, "sequential_ns": first.sequential_ns}
    return msgspec.structs.replace(row, processes=(first,), **times)


def test_a_later_process_under_another_torch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = recipe(tmp_path, "a", processes=1)
    before = run(tmp_path, plan)

    def newer(*arguments: Any) -> tuple[Chosen, list[Measurement]]:
        chosen, measured = slower_each_time(*arguments)
        gpu = msgspec.structs.replace(measured[0].gpu, torch="99.0")
        return chosen, [msgspec.structs.replace(each, gpu=gpu) for each in measured]

    monkeypatch.setattr(stages, "replay_chosen", newer)
    with pytest.raises(RecipeError, match=r"a-infer-b1 was measured with torch .*, this is torch 99\.0,"):
        run(tmp_path, msgspec.structs.replace(plan, processes=2))
    assert read_results(next((tmp_path / "results").glob("*.json"))) == before


def test_cases_of_several_runs_join_in_one_file_and_none_is_measured_twice(tmp_path: Path) -> None:
    plan = recipe(tmp_path, "a", "b")
    run(tmp_path, plan, 2)
    run(tmp_path, plan, 1)
    results = run(tmp_path, plan)
    (path,) = (tmp_path / "results").glob("*.json")
    assert [case.network for case in read_results(path).cases] == ["b", "a"]
    assert results == read_results(path)
    assert len(CALLS) == 4
    assert all(case.date and case.versions["torch"] for case in results.cases)


def test_another_gpu_is_refused_after_one_process_and_the_cases_before_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = recipe(tmp_path, "a", "b")
    run(tmp_path, plan, 1)

    def elsewhere(*arguments: Any) -> tuple[Chosen, list[Measurement]]:
        chosen, measured = slower_each_time(*arguments)
        gpu = msgspec.structs.replace(measured[0].gpu, name="Other GPU")
        return chosen, [msgspec.structs.replace(each, gpu=gpu) for each in measured]

    monkeypatch.setattr(stages, "replay_chosen", elsewhere)
    with pytest.raises(RecipeError, match=r"kinds: results in '.*' are of .*, this is Other GPU; give another folder"):
        run(tmp_path, plan, 2)
    assert CALLS.count("b-infer-b1.json.gz") == 1
    results = run(tmp_path, plan)
    assert [case.network for case in results.cases] == ["a"]


def test_step_captured_anew_with_other_ops_is_measured_anew(tmp_path: Path) -> None:
    plan = recipe(tmp_path, "a", "b")
    run(tmp_path, plan)
    path = tmp_path / "traces" / "a-infer-b1.json.gz"
    trace = read_trace(path)
    renamed = msgspec.structs.replace(trace.ops[0], name=f"{trace.ops[0].name}_again")
    write_trace(msgspec.structs.replace(trace, ops=(renamed, *trace.ops[1:])), path)
    predictions_path(path).unlink()
    CALLS.clear()
    results = run(tmp_path, plan)
    assert CALLS == ["a-infer-b1.json.gz"] * 2
    assert sorted(case.network for case in results.cases) == ["a", "b"]


def test_schedule_that_is_not_legal_is_an_error_of_the_predictions_file(tmp_path: Path) -> None:
    plan = recipe(tmp_path, "a")
    path = capture_stage(plan, plan.case, "c", lambda _: None)[0]
    (target,) = predict_stage(plan, plan.case, lambda _: None)
    predictions = read_predictions(target, path)
    (schedule,) = predictions.schedules
    broken = msgspec.structs.replace(schedule, placements=())
    write_document(target, msgspec.structs.replace(predictions, schedules=(broken,)))
    with pytest.raises(ScheduleError, match=rf"^{re.escape(str(target))}: \$\.schedules\[0\]: "):
        measure_stage(plan, plan.case, tmp_path / "results", "c", lambda _: None)


def test_predictions_are_never_made_anew_and_hold_for_their_own_capture_only(tmp_path: Path) -> None:
    plan = recipe(tmp_path, "a")
    path = capture_stage(plan, plan.case, "c", lambda _: None)[0]
    (first,) = predict_stage(plan, plan.case, lambda _: None)
    before = first.read_bytes()
    predict_stage(plan, plan.case, lambda _: None)
    assert first.read_bytes() == before
    trace = read_trace(path)
    slower = msgspec.structs.replace(trace.ops[0], host_ns=trace.ops[0].host_ns + 1)
    write_trace(msgspec.structs.replace(trace, ops=(slower, *trace.ops[1:])), path)
    with pytest.raises(RecipeError, match=r"predicted.json.gz: \$\.trace_sha256: predictions of another capture"):
        predict_stage(plan, plan.case, lambda _: None)


def test_predictions_hold_for_a_trace_that_another_release_would_write_in_another_way(tmp_path: Path) -> None:
    plan = recipe(tmp_path, "a")
    path = capture_stage(plan, plan.case, "c", lambda _: None)[0]
    text = json.dumps(json.loads(gzip.decompress(path.read_bytes())), indent=1)
    path.write_bytes(gzip.compress(text.encode()))
    (target,) = predict_stage(plan, plan.case, lambda _: None)
    assert read_predictions(target, path).trace_sha256 == hashlib.sha256(text.encode()).hexdigest()


def test_capture_that_fails_leaves_the_others_and_is_tried_again_next_time(tmp_path: Path) -> None:
    plan = recipe(tmp_path, "fails to capture", "b")
    said: list[str] = []
    for _ in range(2):
        paths = capture_stage(plan, plan.case, "c", said.append)
        assert [path.name for path in paths] == ["b-infer-b1.json.gz"]
    assert [line for line in said if "failed" in line] == [
        "failed: m.py:fails to capture: cannot capture m.py:fails to capture"
    ] * 2
    with pytest.raises(CaptureError):
        capture_stage(plan, plan.case[:1], "c", said.append)


@pytest.mark.parametrize("number", [0, 3, -1])
def test_case_that_the_recipe_does_not_have_is_refused(number: int, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=rf"kinds: no case {number}: cases are numbered 1 to 2"):
        selected(recipe(tmp_path, "a", "b"), (number,))


def test_measuring_before_predicting_and_predicting_before_capturing_are_refused(tmp_path: Path) -> None:
    plan = recipe(tmp_path, "a")
    said: list[str] = []
    assert plan.traces is not None
    folder = re.escape(os.path.abspath(plan.traces))
    with pytest.raises(RecipeError, match=f"no case is captured yet in {folder}: run the stage 'capture' first"):
        predict_stage(plan, plan.case, said.append)
    assert said == [f"not captured yet: {stages.trace_path(plan.case[0], plan)}"]
    with pytest.raises(RecipeError, match="not captured yet"):
        measure_stage(plan, plan.case, tmp_path / "results", "c", lambda _: None)


def test_stages_need_a_folder_of_traces_and_no_trials(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"\$\.traces: stages need a folder"):
        capture_stage(recipe(tmp_path, "a", traces=None), recipe(tmp_path, "a").case, "c", lambda _: None)
    with pytest.raises(RecipeError, match=r"\$\.measure: trials choose"):
        predict_stage(recipe(tmp_path, "a", measure=4), recipe(tmp_path, "a").case, lambda _: None)
