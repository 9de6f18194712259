"""Schedules that a recipe replays for a step: stream counts, policies, the search, random schedules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpusim.bounds.bounds import bounds
from gpusim.engine.reference import ReferenceEngine
from gpusim.formats.hardware import load_hardware
from gpusim.formats.recipe import Case, Recipe
from gpusim.formats.trace import Trace
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.policies.random_schedules import random_schedule
from gpusim.policies.registry import POLICIES
from gpusim.search.explore import explore
from gpusim.search.explored import Explored
from gpusim.trace.store import write_trace
from gpusim.validation import chosen as chosen_module
from gpusim.validation.chosen import choose_schedules, hardware_of
from tests.support.helpers import build_graph, chain_trace, wide_trace


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_trace(WIDE, tmp_path / "t.json")
    return tmp_path / "t.json"


WIDE = wide_trace(eager_ns=400_000, graph_ns=130_000)


def recipe(**fields: Any) -> Recipe:
    return Recipe(**({"name": "r", "case": (Case(trace="t"),), "streams": 4, "budget_s": 0.05} | fields))


def test_each_policy_is_replayed_at_each_count_and_then_come_those_by_lot(path: Path) -> None:
    found = choose_schedules(path, recipe(policies=("wavefront", "critical_path"), counts=(2, 4), random=2))
    assert [schedule.policy for schedule in found.schedules] == [
        *("wavefront", "wavefront", "critical_path", "critical_path"),
        *("random", "random"),
    ]
    assert [schedule.stream_count for schedule in found.schedules[:4]] == [2, 4, 2, 4]


def test_policy_that_cannot_use_more_streams_is_replayed_once(path: Path) -> None:
    found = choose_schedules(path, recipe(policies=("sequential", "ooo_backprop"), counts=(3, 8)))
    assert [schedule.policy for schedule in found.schedules] == ["sequential", "ooo_backprop"]


def test_without_counts_each_policy_is_replayed_at_the_count_predicted_best(path: Path) -> None:
    found = choose_schedules(path, recipe(policies=("wavefront", "round_robin")))
    rows = explore(build_graph(WIDE, hardware_of(WIDE)), streams=4, budget_s=0.05)
    assert [schedule.policy for schedule in found.schedules] == ["wavefront", "round_robin"]
    for schedule in found.schedules:
        assert schedule.predicted_ns == rows.best_of(schedule.policy).makespan_ns


def test_search_is_what_explore_recommends_with_and_without_counts(path: Path) -> None:
    for counts in ((), (2, 3)):
        found = choose_schedules(path, recipe(policies=("search", "wavefront"), counts=counts))
        assert [schedule.policy for schedule in found.schedules] == ["search"] + ["wavefront"] * max(1, len(counts))
        assert found.schedules[0].predicted_ns == min(schedule.predicted_ns for schedule in found.schedules)


def test_nothing_is_explored_where_counts_say_it_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exploration of every case would take its whole budget."""
    monkeypatch.delattr(chosen_module, "explore")
    found = choose_schedules(path, recipe(policies=("wavefront",), counts=(2,), random=1))
    assert len(found.schedules) == 2


def test_slow_policy_is_explored_only_where_the_recipe_names_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    ios = POLICIES["ios"]

    def make(graph: OpGraph, streams: int) -> Any:
        asked.append(True)
        return POLICIES["wavefront"](graph, streams)

    monkeypatch.setitem(POLICIES, "ios", replace(ios, make=make))
    choose_schedules(path, recipe(policies=("wavefront",)))
    assert not asked
    found = choose_schedules(path, recipe(policies=("ios",)))
    assert asked
    assert [schedule.policy for schedule in found.schedules] == ["ios"]


def test_schedules_by_lot_are_those_of_the_recipes_seed(path: Path) -> None:
    first, again = (choose_schedules(path, recipe(policies=(), counts=(2,), random=4, seed=5)) for _ in range(2))
    other = choose_schedules(path, recipe(policies=(), counts=(2,), random=4, seed=6))
    assert first == again
    assert first.schedules != other.schedules
    graph = OpGraph.build(WIDE, hardware_of(WIDE))
    for number, schedule in enumerate(first.schedules):
        assert schedule.check(graph) == random_schedule(graph, number, seed=5)


def test_every_schedule_comes_with_its_own_prediction_and_peak_in_the_same_order(path: Path) -> None:
    """Schedules, peaks and measurements are matched by position."""
    found = choose_schedules(path, recipe(policies=("search", "wavefront", "sequential"), counts=(2, 4), random=3))
    assert len(found.schedules) == len(found.peaks) == 1 + 2 + 1 + 3
    graph = OpGraph.build(WIDE, hardware_of(WIDE))
    for schedule, peak in zip(found.schedules, found.peaks, strict=True):
        timeline = ReferenceEngine().run(lower(graph, schedule.check(graph)), graph.hardware)
        assert (timeline.makespan_ns, timeline.peak_bytes) == (schedule.predicted_ns, peak)
        assert schedule.made_by == "gpusim validate, h200, seed 0"


def test_bounds_are_those_of_the_step(path: Path) -> None:
    found = choose_schedules(path, recipe(policies=("wavefront",), counts=(2,)))
    wanted = bounds(OpGraph.build(WIDE, hardware_of(WIDE)))
    assert found.bounds_ns == {
        "critical_path": wanted.critical_path_ns,
        "area": wanted.area_ns,
        "bandwidth": wanted.bandwidth_ns,
        "front_end": wanted.front_end_ns,
        "contention": wanted.contention_ns,
    }


def of_gpu(trace: Trace, gpu: str) -> Trace:
    provenance = msgspec.structs.replace(trace.provenance, gpu=msgspec.structs.replace(trace.provenance.gpu, name=gpu))
    return msgspec.structs.replace(trace, provenance=provenance)


def test_only_a_gain_beyond_the_uncertainty_is_worth_it(tmp_path: Path) -> None:
    """A wide step gains; in a chain no schedule gains anything."""
    verdicts = []
    for trace in (WIDE, chain_trace(5, 1000, graph_ns=6600)):
        write_trace(trace, tmp_path / "t.json")
        verdicts.append(choose_schedules(tmp_path / "t.json", recipe(policies=("wavefront",), counts=(4,))).worth_it)
    assert verdicts == [True, False]


def test_hardware_is_that_of_the_traces_gpu_and_the_default_where_that_is_unknown() -> None:
    assert hardware_of(WIDE).name == "h200"
    assert hardware_of(of_gpu(WIDE, load_hardware("v100").gpu)).name == "v100"
    assert hardware_of(of_gpu(WIDE, "a GPU nobody has heard of")).name == "h200"


# --- Trying the searched schedule on the GPU ---


@pytest.fixture
def explored(monkeypatch: pytest.MonkeyPatch) -> Explored:
    """Share one exploration among all calls: a timed search differs from run to run."""
    found = explore(build_graph(WIDE, hardware_of(WIDE)), streams=4, budget_s=10.0, evaluations=40)
    monkeypatch.setattr(chosen_module, "explore", lambda *_, **__: found)
    return found


def test_contenders_are_the_best_of_search_and_policies_best_first(path: Path, explored: Explored) -> None:
    found = choose_schedules(path, recipe(policies=("search",), measure=100))
    predicted = [schedule.predicted_ns for schedule in found.contenders]
    least = {ns: min(row.compared_ns for row in explored.rows if row.makespan_ns == ns) for ns in predicted}
    compared = [least[ns] for ns in predicted]
    assert len(set(predicted)) == len(predicted), "none twice"
    assert compared == sorted(compared), "best first, as schedules are compared"
    assert compared[0] == min(row.compared_ns for row in explored.rows)
    assert max(predicted) == explored.sequential_ns
    policies = {row.policy for row in explored.rows} - {"search"}
    assert {explored.best_of(policy).makespan_ns for policy in policies} <= set(predicted)
    assert {schedule.policy for schedule in found.contenders} == {"search"}
    assert len(found.contender_peaks) == len(found.contenders)


def test_as_many_contenders_are_tried_as_the_recipe_says(path: Path, explored: Explored) -> None:
    assert choose_schedules(path, recipe(policies=("search",))).contenders == ()
    assert len(choose_schedules(path, recipe(policies=("search",), measure=2)).contenders) == 2


def test_another_searched_schedule_comes_with_its_own_prediction_and_peak(path: Path, explored: Explored) -> None:
    found = choose_schedules(path, recipe(policies=("wavefront", "search"), measure=100))
    last = len(found.contenders) - 1
    changed = found.with_searched([100] * last + [99])
    assert changed.schedules == (found.schedules[0], found.contenders[last])
    assert changed.peaks == (found.peaks[0], found.contender_peaks[last])
    graph = OpGraph.build(WIDE, hardware_of(WIDE))
    for schedule, peak in zip(changed.schedules, changed.peaks, strict=True):
        timeline = ReferenceEngine().run(lower(graph, schedule.check(graph)), graph.hardware)
        assert (timeline.makespan_ns, timeline.peak_bytes) == (schedule.predicted_ns, peak)


def test_row_without_variants_is_the_fastest_contender_that_has_none(path: Path, explored: Explored) -> None:
    found = choose_schedules(path, recipe(policies=("search", "without variants"), measure=100))
    first, *rest = found.contenders
    first = replace(first, variants=(*[0] * (len(first.order) - 1), 1))
    found = replace(found, contenders=(first, *rest))
    changed = found.with_searched([1, *range(len(rest) + 1, 1, -1)])
    assert changed.schedules == (first, rest[-1])
    assert [schedule.policy for schedule in changed.schedules] == ["search", "without variants"]
    assert changed.peaks == (found.contender_peaks[0], found.contender_peaks[-1])
