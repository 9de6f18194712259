"""Compilation at a first start: on two cores, what a search needs, and counted against the search's budget."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numba
import pytest

from gpusim.engine.batch import BatchEngine
from gpusim.engine.compiled import jit, warm
from gpusim.engine.compiled.simulate import simulate
from gpusim.formats.hardware import HardwareModel
from gpusim.plan.graph import OpGraph
from gpusim.policies.shared.list_scheduling import FastLists
from gpusim.search import explore as exploring
from gpusim.search.neighbourhood import refine
from tests.support.helpers import build_graph, make_hardware, wide_trace


@pytest.mark.parametrize("hardware", [make_hardware(sharing=0.5), make_hardware()], ids=["by block", "one pool"])
def test_what_is_compiled_ahead_has_the_types_of_what_a_search_runs(hardware: HardwareModel) -> None:
    compiled = (simulate, *warm.OTHERS)
    graph = OpGraph.build(wide_trace(2, 1000, 3), hardware)
    in_order = list(range(len(graph)))
    BatchEngine(graph).evaluate([in_order], [[0] * len(graph)], peak=True)
    FastLists(graph).makespans([graph.bottom_ns], 2)
    refine(graph, [exploring.POLICIES["sequential"](graph, 1)], 2, budget_s=0.0, seed=0)
    before = [set(each.dispatcher().signatures) for each in compiled]  # type: ignore[attr-defined]
    warm.compile_simulate(hardware)
    warm.compile_others()
    assert [set(each.dispatcher().signatures) for each in compiled] == before  # type: ignore[attr-defined]
    assert all(before)


class _Helper:
    """Stand-in for a compiling process."""

    def __init__(self, command: list[str], **_: Any) -> None:
        self.command = command
        self.ended = self.terminated = False
        HELPERS.append(self)

    def poll(self) -> int | None:
        return 0 if self.ended else None

    def wait(self) -> int:
        self.ended = True
        return 0

    def terminate(self) -> None:
        self.terminated = True


HELPERS: list[_Helper] = []


@pytest.fixture
def helpers(monkeypatch: pytest.MonkeyPatch) -> list[_Helper]:
    """Record the helpers of a start on two cores with an empty cache; nothing is compiled."""
    HELPERS.clear()
    monkeypatch.setattr(warm.subprocess, "Popen", _Helper)
    monkeypatch.setattr(warm, "cores", lambda: 2)
    monkeypatch.setattr(warm, "is_kept", lambda function: False)
    monkeypatch.setattr(warm, "compile_simulate", lambda hardware: None)
    monkeypatch.setattr(warm, "compile_others", lambda: None)
    return HELPERS


@pytest.mark.parametrize(("sharing", "rule"), [(0.5, warm.BY_BLOCK), (0.0, warm.ONE_POOL)])
def test_a_first_start_takes_two_helpers_and_waits_for_them(helpers: list[_Helper], sharing: float, rule: str) -> None:
    warm.warm_up(make_hardware(sharing=sharing))
    assert [helper.command for helper in helpers] == [warm.helper_command(rule), warm.helper_command(warm.ALL_OTHERS)]
    assert all(helper.ended and not helper.terminated for helper in helpers)


def test_helpers_compile_while_a_block_runs_and_none_outlives_it(helpers: list[_Helper]) -> None:
    with warm.compiling_ahead(make_hardware()) as wait:
        assert [helper.ended for helper in helpers] == [False, False]
        wait()
        assert all(helper.ended and not helper.terminated for helper in helpers)
    with pytest.raises(ZeroDivisionError), warm.compiling_ahead(make_hardware()):
        raise ZeroDivisionError
    assert [helper.terminated for helper in helpers] == [False, False, True, True]


def test_no_helper_outlives_an_interrupt(helpers: list[_Helper], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(helper: _Helper) -> int:
        if not helper.terminated:
            raise KeyboardInterrupt
        helper.ended = True
        return 0

    monkeypatch.setattr(_Helper, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        warm.warm_up(make_hardware())
    assert len(helpers) == 2
    assert all(helper.terminated and helper.ended for helper in helpers)


@pytest.mark.parametrize(("cores", "kept"), [(1, False), (2, True), (2, None)])
def test_no_helper_where_all_is_kept_or_nothing_can_be_or_for_one_core(
    helpers: list[_Helper], monkeypatch: pytest.MonkeyPatch, cores: int, kept: bool | None
) -> None:
    done = []
    monkeypatch.setattr(warm, "cores", lambda: cores)
    monkeypatch.setattr(warm, "is_kept", lambda function: kept)
    monkeypatch.setattr(warm, "compile_simulate", lambda hardware: done.append("simulate"))
    monkeypatch.setattr(warm, "compile_others", lambda: done.append("others"))
    warm.warm_up(make_hardware())
    assert not helpers
    assert done == ["simulate", "others"]


def test_without_a_helper_all_is_compiled_here(helpers: list[_Helper], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(command: list[str], **_: Any) -> None:
        raise OSError("no more processes")

    done = []
    monkeypatch.setattr(warm.subprocess, "Popen", refuse)
    monkeypatch.setattr(warm, "compile_others", lambda: done.append("others"))
    warm.warm_up(make_hardware())
    assert done == ["others"]


@pytest.mark.parametrize("what", [warm.BY_BLOCK, warm.ONE_POOL, warm.ALL_OTHERS])
def test_what_a_helper_runs_runs(what: str) -> None:
    """The helper loads or compiles the code, without output."""
    done = subprocess.run(warm.helper_command(what), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_entry_is_kept_once_it_was_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    @jit.entry
    def add_two(number: int) -> int:
        return number + 2

    assert jit.is_kept(add_two) is False
    assert add_two(40) == 42
    assert jit.is_kept(add_two) is True


def test_where_nothing_can_be_kept_it_is_not_known_as_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(dispatcher: Any) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(type(numba.njit(lambda: None)), "enable_caching", refuse)

    @jit.entry
    def add_three(number: int) -> int:
        return number + 3

    assert jit.is_kept(add_three) is None


@pytest.mark.parametrize(
    ("compiling_s", "evaluations", "left_s"),
    [(0.0, None, 9.0), (3.0, None, 6.0), (8.0, None, 1.5), (60.0, None, 1.5), (60.0, 70, 9.0)],
)
def test_compiling_counts_as_search_up_to_a_share_of_the_budget(
    monkeypatch: pytest.MonkeyPatch, compiling_s: float, evaluations: int | None, left_s: float
) -> None:
    """With a number of evaluations it does not count: such a search does not depend on the clock."""
    budgets = []

    def stop(graph: OpGraph, made: Any, streams: int, budget_s: float, *others: Any) -> None:
        budgets.append(budget_s)
        raise KeyboardInterrupt

    monkeypatch.setattr(exploring, "warm_up", lambda hardware: compiling_s)
    monkeypatch.setattr(exploring, "search_all", stop)
    with pytest.raises(KeyboardInterrupt):
        exploring.explore(build_graph(wide_trace(2, 9000, 2), make_hardware()), budget_s=9.0, evaluations=evaluations)
    assert budgets == [pytest.approx(left_s)]
