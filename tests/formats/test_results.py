"""The results document of a recipe: ratios, names, tables, and broken files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpusim.errors import MeasurementError
from gpusim.formats.results import newest_results, read_results, results_name
from gpusim.validation.tables import case_table, results_markdown, summary_lines


@pytest.fixture
def results(tmp_path: Path) -> Any:
    """Return results of two cases without a run."""
    path = tmp_path / "r.json"
    case = {
        "trace": "a-infer-b1", "network": "a", "mode": "infer", "batch": 1, "dtype": "tf32",
        "memory_format": "contiguous", "frontend": "aten", "policy": "search", "streams": 4, "predicted_ns": 90,
        "measured_ns": 100, "interval_ns": [99, 101], "sequential_ns": 150, "sequential_interval_ns": [149, 151],
        "predicted_sequential_ns": 153, "eager_ns": 400, "outputs_equal": True, "bit_equal": True, "worst_error": 0.0,
        "sequential_error": 0.0, "fitted": False, "worth_it": True, "bounds_ns": {"area": 50},
        "predicted_peak_bytes": 1, "measured_peak_bytes": 1, "sequential_peak_bytes": 1, "events": 2,
        "sm_clock_mhz": 1980, "baselines": {},
    }  # fmt: skip
    other = case | {"policy": "wavefront", "predicted_ns": 104, "bit_equal": False, "outputs_equal": False}
    other |= {"sm_clock_mhz": 1965}
    document = {
        "schema": "gpusim-results/1", "recipe": "r", "gpu": "NVIDIA A100 80GB", "date": "2025-03-04", "command": "c",
        "hardware": "h200", "versions": {"torch": "2"}, "cases": [case, other],
    }  # fmt: skip
    path.write_text(json.dumps(document))
    return read_results(path)


def test_ratios_of_a_case(results: Any) -> None:
    case = results.cases[0]
    assert (case.speedup, case.predicted_speedup) == (1.5, 1.7)
    assert (case.error, case.sequential_prediction_error) == pytest.approx((-0.1, 0.02))


def test_name_of_a_results_file(results: Any) -> None:
    assert results_name(results) == "r_a100-80gb_20250304"


@pytest.mark.parametrize(
    ("field", "value"),
    [("recipe", "../r"), ("recipe", "r\n"), ("date", "/../../2025"), ("date", "2025-03-04\n"), ("date", "")],
)
def test_results_that_would_be_written_into_another_folder_are_refused(
    field: str, value: str, results: Any, tmp_path: Path
) -> None:
    """A run in stages adds its cases to a file that is there, under the name made of the file's recipe and date."""
    path = tmp_path / "other.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(results, **{field: value})))
    with pytest.raises(MeasurementError, match=rf"other\.json: \$\.{field}: Expected `str` matching regex"):
        read_results(path)


def test_the_gpu_of_a_results_file_stays_one_part_of_its_name(results: Any) -> None:
    moved = msgspec.structs.replace(results, gpu="NVIDIA ../A 1/..\\")
    assert results_name(moved) == "r_..-a-1-..-_20250304"


def test_table_says_when_outputs_differ(results: Any) -> None:
    rows = case_table(results.cases)[2:]
    assert [row.rsplit("|", 2)[1].strip() for row in rows] == ["bit-equal", "DIFFERENT"]
    assert "1965-1980 MHz" in results_markdown(results, "r.json")


def test_summary_counts_each_sequential_graph_once(results: Any) -> None:
    first, second = summary_lines([msgspec.structs.replace(case, outputs_equal=True) for case in results.cases])
    assert first.startswith("- 2 multi-stream schedules on networks that no constant was fitted on: ")
    assert "prediction error median 7.0%, " in first
    assert second.startswith("- 1 sequential graph, anchored and so no evidence: measured again within 2.0% ")


def test_summary_leaves_out_schedules_whose_outputs_differ(results: Any) -> None:
    """Their time is none of the step's: here the second, whose error is the smaller one."""
    assert [case.outputs_equal for case in results.cases] == [True, False]
    (first, *_) = summary_lines(results.cases)
    assert first.startswith("- 1 multi-stream schedule on networks that no constant was fitted on: ")
    assert "prediction error median 10.0%, " in first


def test_summary_calls_no_anchored_time_a_prediction(results: Any) -> None:
    alone = [msgspec.structs.replace(case, streams=1) for case in results.cases]
    (line,) = summary_lines(alone)
    assert "prediction" not in line
    assert "sequential error" not in case_table(alone)[0]


def test_summary_has_schedules_of_fitted_networks_apart(results: Any) -> None:
    one, other = results.cases
    first, second, _ = summary_lines([one, msgspec.structs.replace(other, outputs_equal=True, fitted=True)])
    assert first.startswith("- 1 multi-stream schedule on networks that no constant was fitted on: ")
    assert second.startswith("- 1 multi-stream schedule on fitted networks: ")


@pytest.mark.parametrize("text", ["", "{}", '{"schema": "gpusim-results/2"}', '{"schema": "gpusim-results/1"}'])
def test_broken_results_file_is_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(MeasurementError) as caught:
        read_results(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


PROCESS = {"measured_ns": 100, "sequential_ns": 150, "date": "2026-11-29"}


@pytest.mark.parametrize(
    ("processes", "problem"),
    [
        ([PROCESS, PROCESS | {"measured_ns": 104}], r"cases\[0\]\.processes: the median .* is not measured_ns, 100"),
        ([PROCESS] * 101, r"cases\[0\]\.processes: Expected `array` of length <= 100"),
        ([PROCESS | {"date": "tomorrow"}], r"cases\[0\]\.processes\[0\]\.date: Expected `str` matching regex"),
        ([PROCESS | {"measured_ns": 0}], r"cases\[0\]\.processes\[0\]\.measured_ns: Expected `int` >= 1"),
    ],
)
def test_processes_that_cannot_be_are_refused(processes: list[Any], problem: str, results: Any, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    document = json.loads(path.read_text())
    document["cases"][0]["processes"] = processes
    path.write_text(json.dumps(document))
    with pytest.raises(MeasurementError, match=problem):
        read_results(path)


def test_a_time_is_the_median_of_its_processes_and_both_states_of_the_graph_are_kept(
    results: Any, tmp_path: Path
) -> None:
    path = tmp_path / "r.json"
    document = json.loads(path.read_text())
    other = PROCESS | {"measured_ns": 100, "sequential_ns": 170}
    document["cases"][0]["processes"] = [PROCESS, other]
    path.write_text(json.dumps(document))
    with_processes, without = read_results(path).cases
    assert with_processes.sequential_times_ns == (150, 170)
    assert without.sequential_times_ns == (150,)


def test_the_newest_results_are_those_of_the_latest_date_and_of_this_recipe_alone(tmp_path: Path) -> None:
    """Names of recipes begin alike, and a file of schedules lies beside each."""
    names = ("a_h200_20251231", "a_h200_20260101", "a_b_h200_20270101", "a_a100_20270101", "a_h200_20260102.pairs")
    for name in names:
        (tmp_path / f"{name}.json").touch()
    assert newest_results(tmp_path, "a").name == "a_h200_20260101.json"
    assert newest_results(tmp_path, "a", "a100").name == "a_a100_20270101.json"
    with pytest.raises(MeasurementError, match="no results of the recipe 'b'"):
        newest_results(tmp_path, "b")
