"""`scripts/join_results.py`: the steps of a newer run replace those of a results file, with their schedules."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gpusim.formats.results import ResultCase, Results, read_results
from gpusim.io.files import write_document
from gpusim.validation.replayed import ReplayedSchedule, read_replayed, write_replayed
from tests.repo.test_readme import script
from tests.support.made_results import case, make_results


def of_run(*rows: ResultCase, date: str = "2025-04-05", recipe: str = "r") -> Results:
    return msgspec.structs.replace(make_results(rows, recipe), date=date, versions={"torch": "3"})


def write(path: Path, results: Results, schedules: bool = True) -> Path:
    """Write results, and for each row a schedule of one op with the row's time."""
    write_document(path, results)
    if schedules:
        made = [
            ReplayedSchedule(
                trace=row.trace,
                trace_hash="h",
                policy=row.policy,
                order=(0,),
                stream_of=(0,),
                measured_ns=row.measured_ns,
                sequential_ns=row.sequential_ns,
            )
            for row in results.cases
        ]
        write_replayed(made, path)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Results of two steps, a with two rows and b with one."""
    rows = [case(1, 10, trace="a"), case(1, 11, trace="a"), case(1, 12, trace="b")]
    return write(tmp_path / "r_h200_20250304.json", make_results(rows))


def rows_of(file: Path) -> list[tuple[str, int, str]]:
    return [(row.trace, row.measured_ns, row.date) for row in read_results(file).cases]


def test_rows_of_a_step_are_replaced_in_their_place_and_new_steps_come_last(file: Path, tmp_path: Path) -> None:
    rows = [case(1, 30, trace="c"), case(1, 20, trace="a"), case(1, 21, trace="a"), case(1, 22, trace="a")]
    run = write(tmp_path / "run.json", of_run(*rows))
    assert script("join_results").main([str(file), str(run)]) == 0
    new = "2025-04-05"
    assert rows_of(file) == [("a", 20, new), ("a", 21, new), ("a", 22, new), ("b", 12, ""), ("c", 30, new)]
    assert read_results(file).cases[0].versions == {"torch": "3"}
    assert read_results(file).date == "2025-03-04"
    schedules = read_replayed(file.with_name("r_h200_20250304.schedules.json.gz"))
    assert [each.measured_ns for each in schedules] == [20, 21, 22, 12, 30]


def test_only_the_named_steps_are_taken(file: Path, tmp_path: Path) -> None:
    run = write(tmp_path / "run.json", of_run(case(1, 20, trace="a"), case(1, 30, trace="b")))
    assert script("join_results").main([str(file), str(run), "--step", "b"]) == 0
    assert [ns for _, ns, _ in rows_of(file)] == [10, 11, 30]


@pytest.mark.parametrize(
    ("run", "schedules", "step", "problem"),
    [
        (of_run(case(1, 20, trace="a"), recipe="other"), True, "a", "recipe 'other' cannot be joined to 'r'"),
        (of_run(case(1, 20, trace="a")), True, "z", "step 'z' is not in the run"),
        (of_run(case(1, 20, trace="c")), False, "c", "run.json: no replayed schedules are beside it"),
    ],
)
def test_what_does_not_fit_is_one_line_and_nothing_is_written(
    file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    run: Results,
    schedules: bool,
    step: str,
    problem: str,
) -> None:
    before = file.read_bytes()
    made = write(tmp_path / "run.json", run, schedules)
    assert script("join_results").main([str(file), str(made), "--step", step]) == 2
    assert problem in capsys.readouterr().err
    assert file.read_bytes() == before


def test_a_file_that_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script("join_results").main([str(tmp_path / "no.json"), str(tmp_path / "no.json")]) == 2
    assert "no.json: cannot be read" in capsys.readouterr().err
