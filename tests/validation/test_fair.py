"""Fair comparisons: equal kernels and equal trials for every policy, and a row of the search is a searched schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpusim.engine.evaluate import Evaluator
from gpusim.errors import RecipeError
from gpusim.formats.hardware import load_hardware
from gpusim.formats.recipe import Case, Recipe
from gpusim.formats.trace import Gpu
from gpusim.gpu import device
from gpusim.gpu.replay import replay as edge
from gpusim.io.file_limits import MAX_STREAMS
from gpusim.io.files import read_document, write_document
from gpusim.plan.graph import OpGraph
from gpusim.plan.ranking import ranked_variants
from gpusim.plan.schedule import Schedule
from gpusim.plan.sync import StepSync
from gpusim.policies.registry import POLICIES, stream_counts
from gpusim.search import events
from gpusim.trace.store import read_trace
from gpusim.validation import fair, stages
from gpusim.validation import predictions as predictions_module
from gpusim.validation.fair import best_of, counts_of, fair_schedules, fastest_of_each, kernels_of
from gpusim.validation.recipe import FASTEST_KERNELS, read_recipe
from gpusim.validation.run import run_recipe
from gpusim.validation.stages import measure_stage, predict_stage, predicted_path
from gpusim.validation.trials import SCHEMA as TRIALS
from gpusim.validation.trials import Trials
from tests.validation.test_recipes import replay

TRACE = "validate/traces/search_inference/squeezenet1_1-infer-b1.json.gz"
GOOGLENET = "validate/traces/search_inference/googlenet-infer-b1.json.gz"
GPU = Gpu(name="NVIDIA H200", driver="1", cuda="13", torch="2", cudnn="9", sm_clock_mhz=1, mem_clock_mhz=1)
POLICIES_ASKED_FOR = ("nimble", "opara", FASTEST_KERNELS, "search")


def recipe(folder: Path) -> Recipe:
    return Recipe(
        name="fair",
        case=(Case(trace=TRACE),),
        policies=POLICIES_ASKED_FOR,
        trials=2,
        streams=6,
        budget_s=0.3,
        traces=str(folder / "predicted"),
    )


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return OpGraph.build(read_trace(Path(TRACE)), load_hardware("h200"))


@pytest.fixture(scope="module")
def planned(graph: OpGraph) -> list[tuple[str, Schedule]]:
    return list(fair_schedules(graph, recipe(Path())))


def schedule(policy: str, *variants: int) -> Schedule:
    return Schedule((0, 1), (0, 1), variants).made(policy, "test")


def test_fastest_of_each_policy_is_kept_on_each_choice_of_kernels_with_the_times_of_its_own_trials() -> None:
    tried = [schedule("a"), schedule("a"), schedule("b"), schedule("a", 0, 1), schedule("a", 1, 1)]
    assert fastest_of_each(tried, [9, 7, 8, 5, 6]) == {1: (9, 7), 2: (8,), 3: (5, 6)}


def test_every_policy_has_as_many_trials_as_asked_for_and_all_run_the_same_chosen_kernels(
    graph: OpGraph, planned: list[tuple[str, Schedule]]
) -> None:
    rows = [(policy, kernels_of(each)) for policy, each in planned]
    assert all(rows.count(row) <= 2 for row in rows)
    assert {row for row in rows if row[0] != FASTEST_KERNELS} == {
        (policy, kernels) for policy in ("nimble", "opara", "search") for kernels in ("captured", "chosen")
    }
    assert {each.variants for _, each in planned if each.has_variants} == {ranked_variants(graph, 0.0)}


def test_every_policy_is_planned_by_one_rule_on_as_many_streams_as_it_uses() -> None:
    """A policy that takes seconds a call, too."""
    wanted = (2, 3, 4, 6, 8, 16, MAX_STREAMS)
    of_policies = {name: counts_of(name, 16) for name in POLICIES}
    assert of_policies.pop("sequential") == (1,)
    assert of_policies.pop("ooo_backprop") == (2,)
    assert of_policies.pop("ios") == (2, 3, 4, 6, 8)
    assert set(of_policies.values()) == {wanted}


def test_ios_is_tried_on_other_numbers_of_streams_than_four_and_eight() -> None:
    """GoogLeNet's modules have four branches: 6 and 8 streams give what 4 do. On captured kernels, by a policy that
    takes seconds.
    """
    googlenet = replace(OpGraph.build(read_trace(Path(GOOGLENET)), load_hardware("h200")), variants=())
    plan = msgspec.structs.replace(recipe(Path()), policies=("ios",), trials=4, streams=16)
    tried = [each for _, each in fair_schedules(googlenet, plan)]
    assert sorted(each.stream_count for each in tried) == [2, 3, 4]


def test_kernels_are_not_chosen_where_the_captured_ones_are_fastest(
    graph: OpGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each schedule would be tried twice, and be two of its policy's trials."""
    monkeypatch.setattr(fair, "ranked_variants", lambda graph, area_weight: (0,) * len(graph))
    plan = msgspec.structs.replace(recipe(Path()), policies=("nimble", FASTEST_KERNELS), trials=4)
    tried = list(fair_schedules(graph, plan))
    assert {policy for policy, _ in tried} == {"nimble"}
    assert len({each for _, each in tried}) == len(tried) <= 4


def test_fastest_kernels_are_one_row_on_one_stream(planned: list[tuple[str, Schedule]]) -> None:
    (alone,) = [each for policy, each in planned if policy == FASTEST_KERNELS]
    assert (alone.stream_count, alone.has_variants) == (1, True)


def test_trials_are_of_the_schedules_compared_best(graph: OpGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an event counts for more than any predicted time, a policy's only trial has its fewest events."""
    monkeypatch.setattr(events, "EVENT_NS", 10**9)
    plan = msgspec.structs.replace(recipe(Path()), policies=("opara",), trials=1)
    (tried,) = [each for _, each in fair_schedules(graph, plan) if not each.has_variants]
    made = [POLICIES["opara"](graph, count) for count in stream_counts(plan.streams)]
    step = StepSync.of(graph.trace, graph.preds, {})
    counts = [events.events_of(graph, each, step) for each in made]
    fastest = min(made, key=Evaluator(graph).makespan_ns)
    assert events.events_of(graph, tried, step) == min(counts) < counts[made.index(fastest)]


def test_trials_are_on_other_numbers_of_streams_first(graph: OpGraph) -> None:
    """Schedules of a search differ by nanoseconds; on another number of streams in what a prediction leaves out."""
    evaluator, step = Evaluator(graph), StepSync.of(graph.trace, graph.preds, {})
    made = [*(POLICIES[name](graph, 2) for name in ("nimble", "wavefront", "opara")), POLICIES["opara"](graph, 6)]
    times_ns = [evaluator.makespan_ns(each) for each in made]
    assert [each.stream_count for each in made] == [2, 2, 2, 6]
    assert len(set(times_ns)) == 4
    tried = best_of(evaluator, step, made, 3)
    assert tried[0] == made[times_ns.index(min(times_ns))]
    assert [each.stream_count for each in tried[:2]] in ([2, 6], [6, 2])
    assert tried[2].stream_count == 2


def test_a_row_of_the_search_is_no_schedule_of_a_policy(graph: OpGraph, planned: list[tuple[str, Schedule]]) -> None:
    made = {policy(graph, n) for policy in POLICIES.values() if not policy.slow for n in stream_counts(6)}
    searched = [each for policy, each in planned if policy == "search" and not each.has_variants]
    assert searched
    assert not made.intersection(searched)


class Trying:
    """A GPU's edge where later schedules are faster; it breaks off before the contender `broken_at`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tried: list[list[Schedule]] = []
        self.broken_at = -1
        monkeypatch.setattr(stages, "alone", lambda work, *arguments: work(*arguments))
        monkeypatch.setattr(stages, "replay_chosen", replay)
        monkeypatch.setattr(device, "require_gpu", lambda: None)
        monkeypatch.setattr(device, "gpu_facts", lambda: GPU)
        monkeypatch.setattr(edge, "try_groups", self.try_groups)

    def try_groups(
        self, graph: OpGraph, groups: Sequence[Sequence[Schedule]], *, done: Callable[[int, list[int]], None], **_: Any
    ) -> None:
        for number, group in enumerate(groups):
            if len(self.tried) == self.broken_at:
                raise KeyboardInterrupt
            self.tried.append(list(group))
            done(number, [1000 - place for place in range(len(group))])


def test_measuring_tries_all_predicted_schedules_and_replays_the_fastest_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an interrupted run has tried is not tried again, nor on another GPU; nothing took no time at all."""
    trying, plan, folder = Trying(monkeypatch), recipe(tmp_path), tmp_path / "results"
    (predictions,) = predict_stage(plan, plan.case, lambda _: None)
    assert predictions == predicted_path(plan.case[0], plan)
    trying.broken_at = 3
    with pytest.raises(KeyboardInterrupt):
        measure_stage(plan, plan.case, folder, "c", lambda _: None)
    (kept,) = folder.iterdir()
    with monkeypatch.context() as other:
        other.setattr(device, "gpu_facts", lambda: msgspec.structs.replace(GPU, name="another"))
        with pytest.raises(RecipeError, match=rf"{kept.name}: \$.gpu: trials on {GPU.name}, this is another"):
            measure_stage(plan, plan.case, folder, "c", lambda _: None)
    written = read_document(kept, Trials, TRIALS, RecipeError)
    at_once = msgspec.structs.replace(written.tried[0], times_ns=(0,) * len(written.tried[0].times_ns))
    write_document(kept, msgspec.structs.replace(written, tried=(at_once, *written.tried[1:])))
    with pytest.raises(RecipeError, match=r"\$\.tried\[0\]\.times_ns\[0\]: Expected `int` >= 1"):
        measure_stage(plan, plan.case, folder, "c", lambda _: None)
    write_document(kept, written)
    trying.broken_at = -1
    results = measure_stage(plan, plan.case, folder, "c", lambda _: None)
    rows = {(case.policy, case.kernels): case for case in results.cases}
    assert len(rows) == len(results.cases) == len(trying.tried) == 7
    assert sum(len(case.tried_ns) for case in results.cases) == sum(map(len, trying.tried))
    assert all(list(case.tried_ns) == sorted(case.tried_ns, reverse=True) for case in results.cases)
    assert not kept.exists()


def test_trials_of_other_predictions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trying, plan, folder = Trying(monkeypatch), recipe(tmp_path), tmp_path / "results"
    (predictions,) = predict_stage(plan, plan.case, lambda _: None)
    trying.broken_at = 1
    with pytest.raises(KeyboardInterrupt):
        measure_stage(plan, plan.case, folder, "c", lambda _: None)
    predictions.unlink()
    monkeypatch.setattr(predictions_module, "code_version", lambda: "another")
    predict_stage(plan, plan.case, lambda _: None)
    with pytest.raises(RecipeError, match="trials of other predictions; remove the file"):
        measure_stage(plan, plan.case, folder, "c", lambda _: None)


def test_trials_outside_of_stages_and_of_what_is_no_policy_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"fair: \$\.trials: trials need stages"):
        run_recipe(recipe(tmp_path), tmp_path / "results", "c", lambda _: None)
    file = tmp_path / "r.toml"
    file.write_text(f'name = "r"\ntrials = 2\npolicies = ["nimble", "recommended"]\n[[case]]\ntrace = "{TRACE}"\n')
    with pytest.raises(RecipeError, match=r"r.toml: \$\.policies\[1\]: trials compare policies, not 'recommended'"):
        read_recipe(file)
