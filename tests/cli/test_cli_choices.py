"""Shared rules of commands: one default of streams, policies by list and name, traces given either way, refusals."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpusim.cli import GROUPS, cli, main
from gpusim.cli.common import progress_bar
from gpusim.defaults import DEFAULT_POLICY, DEFAULT_STREAMS, RECOMMENDED
from gpusim.policies.registry import POLICIES
from gpusim.search import explore as exploring
from gpusim.trace.store import write_trace
from tests.support.helpers import wide_trace

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gpusim", *map(str, arguments)])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as exited:
            code = int(exited.code or 0)
        return code, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten branches that use any number of streams."""
    path = tmp_path_factory.mktemp("traces") / "wide.json"
    write_trace(wide_trace(10, eager_ns=400_000, graph_ns=210_000), path)
    return path


# --- One default of streams ---


def test_commands_without_streams_use_the_default_of_the_library(trace: Path, run: Run) -> None:
    """The default is one constant for all commands."""
    _, out, _ = run("simulate", trace, "--json")
    given = run("simulate", trace, "--streams", str(DEFAULT_STREAMS), "--json")[1]
    assert json.loads(out) == json.loads(given)
    assert json.loads(out)["streams"] == DEFAULT_STREAMS
    _, explained, _ = run("explain", trace, "--json")
    _, asked, _ = run("whatif", trace, "--json")
    times = {json.loads(out)["makespan_ns"], json.loads(explained)["makespan_ns"]}
    assert times == {json.loads(asked)["baseline"]["makespan_ns"]}


@pytest.mark.parametrize("command", ["simulate", "explain", "replay", "explore", "limits", "whatif", "figure"])
def test_help_says_the_same_number_of_streams_for_every_command(command: str, run: Run) -> None:
    (option,) = (each for each in cli.commands[command].params if each.name == "streams")
    text = f"[default: {DEFAULT_STREAMS}]"
    assert option.default == DEFAULT_STREAMS or text in getattr(option, "help", "")
    assert text in " ".join(run(command, "--help")[1].split())


# --- The recommended schedule ---


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the exploration by its number of schedules."""
    whole = exploring.explore

    def short(*arguments: Any, **options: Any) -> exploring.Explored:
        return whole(*arguments, **{**options, "budget_s": 1e6, "evaluations": 64})

    monkeypatch.setattr(exploring, "explore", short)


@pytest.mark.usefixtures("quick")
def test_recommended_is_what_explore_recommends(trace: Path, run: Run) -> None:
    best = json.loads(run("explore", trace, "--evaluations", "64", "--budget", "1000", "--json")[1])["best"]
    found = json.loads(run("simulate", trace, "--policy", RECOMMENDED, "--json")[1])
    assert (found["policy"], found["streams"], found["makespan_ns"]) == (
        best["policy"], best["streams"], best["makespan_ns"],
    )  # fmt: skip
    assert json.loads(run("explain", trace, "--policy", RECOMMENDED, "--json")[1])["makespan_ns"] == best["makespan_ns"]


@pytest.mark.parametrize("command", ["simulate", "explain"])
def test_unknown_policy_is_refused_and_recommended_is_among_the_names(command: str, trace: Path, run: Run) -> None:
    code, out, err = run(command, trace, "--policy", "recomended")
    assert (code, out) == (2, "")
    assert f"did you mean '{RECOMMENDED}'?" in err


# --- Policies ---


def test_policies_lists_every_policy_with_a_sentence_and_marks_the_default(run: Run) -> None:
    found = json.loads(run("policies", "--json")[1])
    assert [policy["name"] for policy in found["policies"]] == list(POLICIES)
    assert all(policy["summary"].endswith(".") for policy in found["policies"])
    assert (found["default"], found["recommended"]) == (DEFAULT_POLICY, RECOMMENDED)
    out = " ".join(run("policies")[1].split())
    assert all(name in out for name in (*POLICIES, RECOMMENDED))


# --- Traces either way ---


@pytest.mark.parametrize("command", ["replay", "bench"])
def test_trace_is_an_argument_and_an_option(command: str, trace: Path, run: Run) -> None:
    extra = ("--policy", "nonsense") if command == "replay" else ("--seconds", "99999")
    by_argument, by_option = run(command, trace, *extra), run(command, "--trace", trace, *extra)
    assert by_argument == by_option
    assert by_argument[0] == 2
    assert "Usage" not in by_argument[2] or command == "bench"


def test_trace_given_twice_or_not_at_all_is_one_line(trace: Path, run: Run) -> None:
    code, _, err = run("replay", trace, "--trace", trace, "--policy", "sequential")
    assert (code, err.count("\n")) == (2, 1)
    assert "give the trace once" in err
    assert "give a TRACE" in run("replay", "--policy", "sequential")[2]


# --- Help ---


def test_help_groups_every_command_and_cuts_no_summary(run: Run) -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(cli.commands)
    out = run("--help")[1]
    for heading, summaries in GROUPS.items():
        assert f"\n{heading}:\n" in out
        for name, summary in summaries.items():
            assert len(summary) <= 54
            assert any(line.split() == [name, *summary.split()] for line in out.splitlines())


# --- Refusals and defaults ---


def test_figure_without_a_file_writes_one_named_after_trace_and_kind(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = run("figure", "breakdown", trace)
    assert code == 0
    assert "figure written to wide-breakdown.html" in out
    assert (tmp_path / "wide-breakdown.html").is_file()


def test_progress_without_a_best_time_claims_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a best time, no `best 0 ns` is shown."""
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar(True) as report:
        report("limits of step", 0.5, 0)
    assert "limits of step" in shown.getvalue()
    assert "best" not in shown.getvalue()
    with progress_bar(True) as report:
        report("search", 0.5, 3_170_000)
    assert "best 3.17 ms" in shown.getvalue()


# --- Endings of outputs ---


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("explore", "missing.json"), "schedule"),
        (("capture", "m.py:f", "--mode", "infer", "--batch", "1"), "trace"),
        (("import", "missing.json"), "trace"),
    ],
)
def test_output_of_another_ending_is_refused_before_the_work(
    arguments: tuple[str, ...], what: str, tmp_path: Path, run: Run
) -> None:
    target = tmp_path / "x.txt"
    code, _, said = run(*arguments, "-o", target)
    assert code == 2
    assert said == f"gpusim: -o {target}: a {what}'s name ends in .json or .json.gz\n"
    assert not list(tmp_path.iterdir())
