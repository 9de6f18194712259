"""Each command builds the step once, and passes it on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpusim.analysis.limits import limits
from gpusim.cli import cli
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.recipe import Case, Recipe
from gpusim.formats.trace import Trace
from gpusim.plan.graph import OpGraph
from gpusim.search.explore import explore
from gpusim.trace.store import write_trace
from gpusim.validation.chosen import choose_schedules
from tests.support.helpers import build_graph, wide_trace


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the trace name of each step that is built."""
    names: list[str] = []
    build = OpGraph.build

    def counted(_: Any, trace: Trace, hardware: HardwareModel) -> OpGraph:
        names.append(trace.name)
        return build(trace, hardware)

    monkeypatch.setattr(OpGraph, "build", classmethod(counted))
    return names


@pytest.mark.parametrize(
    "words",
    [
        ["explore", "--evaluations", "8"],
        ["limits"],
        ["simulate"],
        ["simulate", "--policy", "recommended"],
        ["explain"],
        ["whatif", "--sms", "66"],
        ["figure", "gain"],
        ["figure", "memory"],
    ],
    ids=" ".join,
)
def test_each_command_builds_the_step_once(words: list[str], built: list[str], tmp_path: Path) -> None:
    trace = wide_trace(3)
    path = tmp_path / "t.json"
    write_trace(trace, path)
    command, *options = words
    given = [command, *options[:1], str(path), *options[1:]] if command == "figure" else [command, str(path), *options]
    if command == "figure":
        given += ["--html", str(tmp_path / "f.html")]
    done = CliRunner().invoke(cli, given)
    assert done.exit_code == 0, done.output
    assert built == [trace.name]


def test_recipe_builds_each_step_once(built: list[str], tmp_path: Path) -> None:
    trace = wide_trace(3)
    write_trace(trace, tmp_path / "t.json")
    case = Case(trace=str(tmp_path / "t.json"))
    recipe = Recipe(name="r", case=(case,), policies=("wavefront", "search"), counts=(2,), budget_s=0.05, streams=2)
    choose_schedules(tmp_path / "t.json", recipe)
    assert built == [trace.name]


def test_explore_limits_and_another_best_take_the_step_as_it_was_built(built: list[str]) -> None:
    graph = build_graph(wide_trace(3))
    explored = explore(graph, streams=2, budget_s=60.0, evaluations=8)
    again = explored.with_best(explored.best_of("sequential"))
    assert explored.graph is again.graph is graph
    assert explored.timeline.makespan_ns == explored.best.makespan_ns
    limits(graph, streams=2)
    assert built == [graph.trace.name]
