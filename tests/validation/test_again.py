"""`gpusim validate RESULTS.json --again`: new predictions of a results file's schedules by the current model."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from gpusim.cli import cli
from gpusim.errors import MeasurementError, OptionError, ScheduleError
from gpusim.formats.results import read_results
from gpusim.trace.store import bundled_traces, read_trace, write_trace
from gpusim.validation.again import anchored_again, trace_files, traces_in
from gpusim.validation.replayed import SUFFIX, read_replayed, write_replayed
from gpusim.validation.tables import summary_lines
from tests.validation.test_golden import make_golden


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    schedules = make_golden(folder)
    return schedules.with_name(schedules.name.replace(".schedules.json.gz", ".json"))


def test_document_has_each_case_with_both_predictions(results: Path) -> None:
    ran = CliRunner().invoke(cli, ["validate", str(results), "--again", "--json"], catch_exceptions=False)
    cases = json.loads(ran.stdout)["cases"]
    assert len(cases) == len(read_results(results).cases)
    for case in cases:
        assert set(case) == {
            "trace", "network", "mode", "batch", "policy", "streams",
            "measured_ns", "predicted_ns", "then_ns", "fitted",
        }  # fmt: skip
        assert case["predicted_ns"] == case["then_ns"]


def beside(results: Path, share: float) -> None:
    """Change the sequential graph of all cases to a share of its time at capture."""
    document = json.loads(results.read_text())
    truth = read_trace(bundled_traces()[document["cases"][0]["trace"]]).ground_truth
    assert truth is not None
    for case in document["cases"]:
        case |= {
            "predicted_sequential_ns": truth.graph.median_ns,
            "sequential_ns": round(share * truth.graph.median_ns),
        }
    results.write_text(json.dumps(document))


def test_results_without_a_predicted_sequential_graph_are_predicted_again(results: Path) -> None:
    """0 is allowed in a results file: nothing is known that could differ."""
    document = json.loads(results.read_text())
    for case in document["cases"]:
        case["predicted_sequential_ns"] = 0
    results.write_text(json.dumps(document))
    assert anchored_again(results) == {}
    assert not any("from its capture" in line for line in summary_lines(read_results(results).cases))


def test_a_trace_without_times_of_a_capture_is_not_anchored_anew(results: Path, tmp_path: Path) -> None:
    """`--traces` may name an estimate of the same step."""
    beside(results, 0.94)
    name = read_results(results).cases[0].trace
    estimate = msgspec.structs.replace(read_trace(bundled_traces()[name]), ground_truth=None)
    write_trace(estimate, tmp_path / f"{name}.json.gz")
    assert anchored_again(results, traces_in(tmp_path)) == {}


@pytest.mark.parametrize(("share", "differs"), [(0.98, False), (1.02, False), (0.94, True), (1.05, True)])
def test_a_step_in_another_state_than_at_capture_is_anchored_anew(share: float, differs: bool, results: Path) -> None:
    beside(results, share)
    anew = anchored_again(results)
    cases = read_results(results).cases
    assert len(anew) == (len(cases) if differs else 0)
    for number, case in anew.items():
        change = case.predicted_ns / cases[number].predicted_ns - 1
        assert 0 < change / (share - 1) <= 1, "in the same direction, by at most the same share"
    ran = CliRunner().invoke(cli, ["validate", str(results), "--again", "--json"], catch_exceptions=False)
    document = json.loads(ran.stdout)["cases"]
    assert [case.get("anchored_ns") for case in document] == [
        anew[number].predicted_ns if number in anew else None for number in range(len(cases))
    ]
    ran = CliRunner().invoke(cli, ["validate", str(results), "--again"], catch_exceptions=False)
    assert ("anew" in ran.output) == differs
    said = " ".join(ran.output.split())
    assert (f"anew: {len(cases)} schedules beside a sequential graph that is more than 3%" in said) == differs
    others = "schedules beside a sequential graph that is more than 3% from its capture"
    assert any(others in line for line in summary_lines(cases)) == differs


def test_traces_beside_the_results_are_found_from_their_own_folder(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cd results; gpusim validate NAME.json --again`: its traces are in ../traces."""
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "of-its-own.json.gz").write_bytes(b"")
    monkeypatch.chdir(results.parent)
    assert "of-its-own" in trace_files(Path(results.name))


def test_traces_of_a_given_folder_come_first(results: Path, tmp_path: Path) -> None:
    """A trace of the same name but another step there is refused; the same step is taken."""
    folder = tmp_path / "mine"
    folder.mkdir()
    name = read_results(results).cases[0].trace
    shutil.copy(bundled_traces()[name], folder / f"{name}.json.gz")
    assert list(traces_in(folder)) == [name]
    command = ["validate", str(results), "--again", "--traces", str(folder)]
    assert CliRunner().invoke(cli, command, catch_exceptions=False).exit_code == 0
    shutil.copy(bundled_traces()["googlenet-infer-b1"], folder / f"{name}.json.gz")
    with pytest.raises(MeasurementError, match="is not the step of"):
        CliRunner().invoke(cli, command, catch_exceptions=False)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"trace_hash": "0" * 32}, "is another step"),
        ({"variants": 9}, "is without the kernels that its schedules choose"),
    ],
)
def test_bundled_trace_taken_for_a_missing_one_is_named(results: Path, change: dict[str, Any], why: str) -> None:
    """A results file that was copied away from its traces has the bundled ones of the same names."""
    schedules = list(read_replayed(results.with_name(results.stem + SUFFIX)))
    if "variants" in change:
        change = {"variants": (change["variants"],) * len(schedules[-1].order)}
    schedules[-1] = msgspec.structs.replace(schedules[-1], **change)
    write_replayed(schedules, results)
    name = schedules[-1].trace
    with pytest.raises(MeasurementError) as caught:
        CliRunner().invoke(cli, ["validate", str(results), "--again"], catch_exceptions=False)
    wanted = f"its own trace '{name}' is missing: the bundled one taken in its place, {bundled_traces()[name]}, {why};"
    assert str(caught.value).startswith(f"{results}: {wanted}")
    assert "\n" not in str(caught.value)


def test_table_has_a_row_for_each_step(results: Path) -> None:
    ran = CliRunner().invoke(cli, ["validate", str(results), "--again"], catch_exceptions=False)
    assert read_results(results).cases[0].trace in ran.output


def test_folder_of_traces_must_exist_and_goes_with_again_only(results: Path, tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match="no such folder of traces"):
        traces_in(tmp_path / "none")
    with pytest.raises(OptionError, match="--traces goes with --again"):
        CliRunner().invoke(cli, ["validate", str(results), "--traces", str(tmp_path)], catch_exceptions=False)


def test_results_without_schedules_say_so(results: Path) -> None:
    results.with_name(results.stem + SUFFIX).unlink()
    with pytest.raises(MeasurementError, match="so no schedules to predict again"):
        CliRunner().invoke(cli, ["validate", str(results), "--again"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"order": [10**6]}, "does not have each of the"),
        ({"stream_of": [10**9]}, "needs a stream"),
        ({"variants": [7]}, "needs a stream, and a variant"),
        ({"order": "reversed"}, "needs the result|comes before|before"),
        ({"partitions": [{"streams": [0], "sms": 10**6}]}, "SMs"),
    ],
)
def test_schedule_that_is_not_legal_for_its_trace_names_the_file(
    results: Path, change: dict[str, Any], problem: str
) -> None:
    beside = results.with_name(results.stem + SUFFIX)
    document = json.loads(gzip.decompress(beside.read_bytes()))
    first = document["schedules"][1]
    first |= {key: first["order"][::-1] if value == "reversed" else value for key, value in change.items()}
    beside.write_bytes(gzip.compress(json.dumps(document).encode()))
    with pytest.raises(ScheduleError, match=problem) as error:
        CliRunner().invoke(cli, ["validate", str(results), "--again"], catch_exceptions=False)
    assert f"{beside.name}: $.schedules[1]: " in str(error.value)


def test_recipe_of_a_name_that_no_file_has_is_none(results: Path) -> None:
    """The recipe's name is text in the results file; `tests/formats/test_results.py` has those that are refused."""
    document = json.loads(results.read_text())
    for name in ("x" * 300, "there-is-no-such-recipe"):
        results.write_text(json.dumps(document | {"recipe": name}))
        assert CliRunner().invoke(cli, ["validate", str(results), "--again"], catch_exceptions=False).exit_code == 0
