"""`gpusim sweep`: its output, its options, its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pandas as pd
import pytest

from gpusim.defaults import DEFAULT_ENGINE
from gpusim.formats.hardware import load_hardware
from gpusim.formats.sweep import Sweep
from gpusim.io.files import write_document
from gpusim.sweep.spec import policy_names
from gpusim.sweep.store import APPLICATION_ID, COLUMNS
from gpusim.trace.store import write_trace
from tests.cli.test_cli import Run, document, refused, run
from tests.support.sweeping import (
    ENGINE,
    ROOT,
    STEPS,
    arguments,
    grid,
    numbers,
    over_the_limit,
    rows_of,
    write,
    write_traces,
)

__all__ = ["grid", "run"]  # fixtures


# --- The command ---


def test_command_prints_one_json_document(tmp_path: Path, run: Run) -> None:
    words = (*arguments(tmp_path), "--json", "--export", tmp_path / "t.csv")
    found = document(run(*words))
    assert (found["points"], found["computed"], found["failed"], found["before"]) == (20, 20, 0, 0)
    assert (found["engine"], found["seed"], found["store"]) == (ENGINE, 0, str(tmp_path / "s.sqlite"))
    wanted = {"trace", "hardware", "policy", "streams", "makespan_ns", "speedup"}
    assert all(wanted <= set(best) for best in found["best"])
    assert len(found["best"]) == 2
    assert found["failures"] == []
    assert len(pd.read_csv(tmp_path / "t.csv")) == 20
    assert document(run(*words))["before"] == 20


def test_command_without_lists_takes_every_quick_policy_and_the_default_engine(tmp_path: Path, run: Run) -> None:
    (trace, _) = write_traces(tmp_path)
    found = document(run("sweep", "--trace", trace, "--workers", "1", "-o", tmp_path / "s.sqlite", "--json"))
    assert (found["engine"], found["seed"], found["failed"]) == (DEFAULT_ENGINE, 0, 0)
    rows = rows_of(tmp_path / "s.sqlite")
    assert {row.policy for row in rows} == set(policy_names(["all"]))
    assert {row.streams for row in rows if row.policy == "wavefront"} == {2, 4, 8}


def test_command_sums_up_for_people_and_marks_uncalibrated_hardware(tmp_path: Path, run: Run) -> None:
    write_trace(over_the_limit(), tmp_path / "big.json")
    done = run(*arguments(tmp_path), "--trace", tmp_path / "big.json", "--hw", "p100", "--hw", "h200", "--workers", "1")
    assert (done.code, done.err) == (0, "")
    assert "60 points: 60 computed" in done.out
    assert "10 points of tiny-infer-b1 on p100 (uncalibrated) failed: " in done.out
    assert done.out.count("p100 (uncalibrated)") == 3
    alone = run("sweep", "-o", tmp_path / "s.sqlite")
    assert alone.out.splitlines()[:-1] == done.out.splitlines()[1:-1]
    found = document(run("sweep", "-o", tmp_path / "s.sqlite", "--json"))
    assert found["points"] == 60
    assert [failure["points"] for failure in found["failures"]] == [10, 10]


def test_sweep_file_and_options_say_the_same(tmp_path: Path, run: Run) -> None:
    first, second = write_traces(tmp_path)
    lists = {"traces": [str(first), str(second)], "policies": ["sequential", *STEPS], "streams": [2, 3, 4]}
    fields = lists | {"engine": ENGINE}
    text = "\n".join(f"{name} = {json.dumps(value)}" for name, value in fields.items())
    document(run("sweep", write(tmp_path, text), "--workers", "1", "-o", tmp_path / "f.sqlite", "--json"))
    document(run(*arguments(tmp_path), "--json"))
    assert numbers(rows_of(tmp_path / "f.sqlite")) == numbers(rows_of(tmp_path / "s.sqlite"))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--trace", "all", "--streams", "0"), "--streams 0: the number of streams lies between 1 and 128"),
        (("--trace", "all", "--streams", "2,,4"), "--streams 2,,4: not a list of numbers such as 2,4,8"),
        (("--trace", "googlenett"), "unknown trace 'googlenett'; did you mean 'googlenet-"),
        (("--trace", "all", "--policy", "wavefrnt"), "unknown policy 'wavefrnt'; did you mean 'wavefront'?"),
        (("--trace", "all", "--hw", "h20"), "unknown hardware 'h20'; did you mean 'h200'?"),
        (("--trace", "all", "--engine", "refrence"), "unknown engine 'refrence'; did you mean 'reference'?"),
        (("missing.toml",), "missing.toml: cannot be read: No such file"),
        (("missing.toml", "--trace", "all"), "a sweep file goes without --trace"),
        (("missing.toml", "--streams", "2"), "a sweep file goes without --trace"),
        (("--policy", "all"), "give a sweep file or --trace"),
        (("--trace", "all", "--workers", "2", "--scheduler", "tcp://h:1"), "--workers goes without --scheduler"),
        ((), "there is no such store"),
    ],
)
def test_refusals_are_one_line_and_leave_no_store(
    words: tuple[str, ...], complaint: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert complaint in refused(run("sweep", *words, "-o", "s.sqlite"))
    assert not list(tmp_path.iterdir())


def test_hardware_file_is_taken_by_its_content(tmp_path: Path, run: Run) -> None:
    model = load_hardware("h200")
    write_document(tmp_path / "mine.json", msgspec.structs.replace(model, name="mine"))
    (trace, _) = write_traces(tmp_path)
    given = (
        "sweep",
        "--engine",
        ENGINE,
        "--trace",
        trace,
        "--policy",
        "wavefront",
        "--workers",
        "1",
        "-o",
        tmp_path / "s.sqlite",
        "--json",
    )
    found = document(run(*given, "--hw", "h200", "--hw", tmp_path / "mine.json"))
    assert [best["hardware"] for best in found["best"]] == ["h200", "mine"]
    assert len({best["makespan_ns"] for best in found["best"]}) == 1


def test_page_describes_every_column_and_field() -> None:
    page = (ROOT / "docs" / "commands" / "sweep.md").read_text(encoding="utf-8")
    assert [name for name in (*COLUMNS, *Sweep.__struct_fields__) if f"`{name}`" not in page] == []
    assert f"`{APPLICATION_ID:#x}`" in page
