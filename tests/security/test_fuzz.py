"""Hostile files and command lines: no traceback, hang, excessive memory or nonsense.

`scripts/fuzz` runs the same generators for longer. The first tests are of the harness itself: it sees what is broken.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz import bases
from tests.fuzz.cases import Answer, Case
from tests.fuzz.classes import (
    ACCEPTED,
    CONTROL,
    CRASH,
    GOOD,
    HANG,
    MARKUP,
    MEMORY,
    NOT_NAMED,
    REFUSED,
    TOO_LONG,
    TRACEBACK,
    WRONG,
    classify,
)
from tests.fuzz.corpus import corpus
from tests.fuzz.families import FAMILIES, make_case, split
from tests.fuzz.mutate import to_json
from tests.fuzz.run import ROOT, Campaign, Failure, Worker, run_cases
from tests.fuzz.sense import active_markup, files_problem
from tests.fuzz.stand_ins import FAULT

SEED, CASES = 20261123, 250
#: Number of hangs that ends the test: each takes 20 s.
MOST_HANGS = 3


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as made:
        yield made


@pytest.fixture(scope="module")
def faulty() -> Iterator[Worker]:
    with Worker("faulty reader") as made:
        yield made


def good_trace(*words: str, outputs: tuple[str, ...] = ()) -> Case:
    argv = words or ("simulate", "trace.json", "--json")
    return Case("power", argv, {"trace.json": to_json(bases.traces()[0])}, ("trace.json",), outputs)


def with_fault(fault: str, *words: str) -> Case:
    case = good_trace(*words)
    return dataclasses.replace(case, files={**case.files, FAULT: fault.encode()})


# --- The harness sees what is broken ---


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("value error", TRACEBACK),
        ("escape", WRONG),  # --json then prints no JSON
        ("escape in a refusal", CONTROL),
        ("markup", MARKUP),
        ("loop", HANG),
        ("allocate", MEMORY),
        ("allocate all", MEMORY),
        ("memory error", MEMORY),
        ("die", CRASH),
        ("long refusal", TOO_LONG),
        ("long value", TOO_LONG),
        ("no name", NOT_NAMED),
        ("file left", WRONG),
        ("exit 1", WRONG),
        ("silent refusal", WRONG),
    ],
)
def test_faulty_reader_is_put_into_its_class(
    fault: str, expected: str, faulty: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faulty, "hang_s", 1.0 if expected == HANG else 20.0)
    case = with_fault(fault)
    name, reason = classify(case, faulty.ask(case))
    assert name == expected, reason
    assert reason


def test_reader_without_a_fault_is_accepted(faulty: Worker) -> None:
    """So the classes above are of the faults."""
    case = with_fault("none")
    assert classify(case, faulty.ask(case)) == (ACCEPTED, "")


@pytest.mark.parametrize("stand_in", ["engines differ", "below the bound", "negative time"])
def test_broken_engine_gives_a_wrong_result(stand_in: str) -> None:
    with Worker(stand_in) as broken:
        name, reason = classify(good_trace(), broken.ask(good_trace()))
    assert name == WRONG, reason
    assert reason


@pytest.mark.parametrize(("fault", "expected"), [("escape", CONTROL), ("markup taken", MARKUP)])
def test_text_that_a_terminal_acts_on_is_seen_in_what_a_command_prints(
    fault: str, expected: str, faulty: Worker
) -> None:
    case = with_fault(fault, "simulate", "trace.json")
    assert classify(case, faulty.ask(case))[0] == expected


def test_worker_goes_on_after_one_that_was_ended(faulty: Worker) -> None:
    assert faulty.ask(with_fault("die")).ended == "crash"
    assert faulty.ask(good_trace("traces")).code == 0


def test_unbroken_cases_are_accepted_and_refused_well(worker: Worker) -> None:
    for words in (("simulate", "trace.json", "--json"), ("explain", "trace.json"), ("limits", "trace.json")):
        assert classify(good_trace(*words), worker.ask(good_trace(*words))) == (ACCEPTED, "")
    broken = Case("power", ("simulate", "trace.json"), {"trace.json": b"{"}, ("trace.json",))
    assert classify(broken, worker.ask(broken))[0] == REFUSED


@pytest.mark.parametrize(
    ("name", "content", "code", "problem"),
    [
        (".out.json.abc", b"", 0, "left over"),
        ("out.json", b'{"a":', 0, "out.json: "),
        ("out.json", b"{}", 2, "refused, but wrote"),
        ("out.html", b"<html>", 0, "does not end as a page does"),
        ("out.csv", b"a,b\n1,", 0, "does not end with a whole line"),
        ("out.json.gz", b"\x1f\x8b\x08", 0, "out.json.gz: "),
        ("out.sqlite", b"SQLite format 3\x00broken", 0, "out.sqlite: "),
    ],
)
def test_half_written_and_left_over_files_are_seen(
    name: str, content: bytes, code: int, problem: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    case = Case("power", ("simulate",), outputs=() if name.startswith(".") else (name,))
    assert problem in files_problem(case, tmp_path, code)


def test_missing_output_is_seen(tmp_path: Path) -> None:
    assert "did not write" in files_problem(Case("power", ("simulate",), outputs=("out.json",)), tmp_path, 0)


@pytest.mark.parametrize(
    ("name", "text", "active"),
    [
        ("out.csv", "a\n=1+1\n", True),
        ("out.csv", "a\n'=1+1\n-1.5\n", False),
        ("out.html", "<p><img src=x onerror=alert(1)></html>", True),
        ("out.html", "<p>\\u003cimg src=x onerror=alert(1)></html>", False),
    ],
)
def test_markup_that_is_active_in_a_file_is_seen(name: str, text: str, active: bool, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert bool(active_markup(Case("power", ("limits",), outputs=(name,)), tmp_path)) == active


def test_answer_that_is_to_be_refused_may_not_be_accepted() -> None:
    assert classify(Case("power", ("simulate",), expected="refused"), Answer())[0] == WRONG
    assert classify(Case("power", ("simulate",), expected="accepted"), Answer(code=2, err="gpusim: x"))[0] == WRONG


def test_same_seed_gives_the_same_cases_and_another_seed_others() -> None:
    for family in FAMILIES:
        assert make_case(family, 1, 3) == make_case(family, 1, 3)
        assert any(make_case(family, 1, index) != make_case(family, 2, index) for index in range(5))


def test_campaign_keeps_its_failures_and_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    families = ("rules", "replayed")
    first = Campaign(tmp_path, 7).run(6, families, lambda line: None)
    lines = (tmp_path / "done.jsonl").read_text().splitlines()
    assert len(lines) == sum(split(6, families).values())
    kept = lines[0].replace(json.loads(lines[0])["class"], HANG)
    (tmp_path / "done.jsonl").write_text("\n".join((kept, *lines[1:3], lines[3][:10])))  # killed in the fourth line
    again = Campaign(tmp_path, 7)
    assert len(again.done) == 3
    table = again.run(6, families, lambda line: None)
    assert sum(row.total() for row in table.counts.values()) == len(lines)
    assert table.bad == first.bad + 1, "what is done is not run again"


# --- gpusim holds ---


def test_known_defects_stay_mended(worker: Worker) -> None:
    _all_good(iter(corpus()), worker)


def test_mutated_files_and_command_lines_are_answered_well(worker: Worker) -> None:
    counts = split(CASES, tuple(FAMILIES))
    assert sum(counts.values()) >= CASES
    _all_good((make_case(family, SEED, index) for family, count in counts.items() for index in range(count)), worker)


def _all_good(cases: Iterator[Case], worker: Worker) -> None:
    failures: list[Failure] = []
    tried = 0
    for case, name, reason in run_cases(cases, worker):
        tried += 1
        if name not in GOOD:
            failures.append(Failure(case, name, reason))
        if sum(failure.name == HANG for failure in failures) >= MOST_HANGS:
            break
    assert tried
    assert not failures, f"{len(failures)} of {tried} cases:\n" + "\n".join(map(str, failures[:40]))


def test_script_ends_with_a_table_and_exit_code_1_where_anything_failed(tmp_path: Path) -> None:
    command = [
        sys.executable,
        ROOT / "scripts" / "fuzz",
        "--cases",
        "4",
        "--families",
        "rules,replayed",
        "--out",
        tmp_path,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout.splitlines()[-1].startswith("| all | 4 |")
    assert (tmp_path / "done.jsonl").exists()
