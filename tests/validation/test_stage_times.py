"""IOS by measured stage latencies: what is measured, what is chosen by it, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from gpusim.errors import RecipeError
from gpusim.formats.hardware import load_hardware
from gpusim.formats.recipe import Case, Recipe
from gpusim.plan.graph import OpGraph
from gpusim.trace.store import read_trace
from gpusim.validation import stage_times, stages
from gpusim.validation.predictions import read_predictions
from gpusim.validation.recipe import MEASURED_IOS, read_recipe
from gpusim.validation.stage_times import (
    MergeTime,
    Stage,
    StageTime,
    StageTimes,
    measure_stages_of,
    measured_ios,
    mergeable,
    read_stage_times,
    saved_by_merging_ns,
    stage_times_path,
    stages_to_measure,
)
from tests.support.helpers import build_graph, make_hardware, wide_trace

TRACE = Path("validate/traces/search_inference/squeezenet1_1-infer-b1.json.gz")
#: Stem 0, two chains of one op each, 1 and 2, and their join 3.
FORK = build_graph(wide_trace(width=2, depth=1), make_hardware())


def recipe(folder: Path, trace: str = str(TRACE)) -> Recipe:
    return Recipe(
        name="ios",
        case=(Case(trace=trace),),
        policies=(MEASURED_IOS, "ios"),
        trials=2,
        streams=4,
        traces=str(folder),
    )


def fake(times_ns: int) -> object:
    """Return a measurement in place of the GPU's: every stage takes the same."""

    def alone(
        _: object, path: Path, found: Sequence[Stage], merges: Sequence[tuple[int, ...]]
    ) -> tuple[str, list[int], list[tuple[int, int, int]]]:
        assert path == TRACE
        return "NVIDIA H200", [times_ns] * len(found), [(3000, 5000, 4000)] * len(merges)

    return alone


def document(times_ns: dict[Stage, int], merges: tuple[MergeTime, ...] = ()) -> StageTimes:
    return StageTimes(
        schema="gpusim-stages/1",
        trace="fork",
        trace_sha256="",
        gpu="",
        date="",
        command="",
        gpusim="",
        stages=tuple(StageTime(groups=stage, time_ns=time_ns) for stage, time_ns in times_ns.items()),
        merges=merges,
    )


def test_convolutions_of_one_input_can_be_merged_if_their_centres_agree() -> None:
    """SqueezeNet: after each of eight squeezing convolutions, one of 1 x 1 and one of 3 x 3 with padding."""
    trace = read_trace(TRACE)
    found = mergeable(trace)
    assert len(found) == 8
    for one, other in found:
        assert trace.ops[one].args[0] == trace.ops[other].args[0]
        assert [trace.ops[op].args[4] for op in (one, other)] == [[0, 0], [1, 1]]


def test_merging_saves_what_it_is_faster_by_than_both_other_ways_each_convolution_once() -> None:
    def merge(*ops: int, merged_ns: int) -> MergeTime:
        return MergeTime(ops=ops, merged_ns=merged_ns, together_ns=1000, in_turn_ns=900)

    merges = (merge(0, 1, 2, merged_ns=500), merge(0, 1, merged_ns=600), merge(3, 4, merged_ns=950))
    assert saved_by_merging_ns(document({}, merges)) == 400
    assert saved_by_merging_ns(document({})) == 0


def test_stages_of_a_fork_are_its_ops_alone_in_chains_and_next_to_each_other() -> None:
    found = stages_to_measure(FORK, (2,))
    assert ((1,), (2,)) in found
    assert ((0,),) in found
    assert ((3,),) in found
    assert len(found) == len(set(found))
    assert all(1 <= len(groups) <= 2 for groups in found)


@pytest.mark.parametrize(("together_ns", "streams"), [(100, 2), (10_000, 1)])
def test_branches_share_a_stage_only_where_it_is_measured_to_be_faster(together_ns: int, streams: int) -> None:
    times_ns = {stage: 1000 * sum(map(len, stage)) for stage in stages_to_measure(FORK, (2,))}
    measured = {stage: together_ns if len(stage) > 1 else ns for stage, ns in times_ns.items()}
    assert measured_ios(FORK, 2, document(measured)).stream_count == streams


def test_a_stage_that_was_not_measured_is_refused() -> None:
    with pytest.raises(RecipeError, match="was not measured"):
        measured_ios(FORK, 2, document({}))


def test_latencies_come_back_and_those_of_another_trace_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_times, "alone", fake(5000))
    graph = OpGraph.build(read_trace(TRACE), load_hardware("h200"))
    file = measure_stages_of(TRACE, graph, recipe(tmp_path), (4,), "test")
    assert file == stage_times_path(TRACE, recipe(tmp_path))
    times = read_stage_times(TRACE, recipe(tmp_path))
    assert [each.groups for each in times.stages] == stages_to_measure(graph, (4,))
    assert {each.time_ns for each in times.stages} == {5000}
    assert [each.ops for each in times.merges] == mergeable(graph.trace)
    other = TRACE.with_name("resnet50-infer-b1.json.gz")
    file.rename(stage_times_path(other, recipe(tmp_path)))
    with pytest.raises(RecipeError, match="another capture of 'resnet50-infer-b1'"):
        read_stage_times(other, recipe(tmp_path))


def test_stages_are_measured_once_and_predictions_use_them_on_captured_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_times, "alone", fake(5000))
    wanted = recipe(tmp_path)
    said: list[str] = []
    for _ in range(2):
        stages.capture_stage(wanted, wanted.case, "test", said.append)
    assert said == [f"measured the stages of {TRACE.name}; merging convolutions saves 8 us in all"]
    (predicted,) = stages.predict_stage(wanted, wanted.case, said.append)
    graph = OpGraph.build(read_trace(TRACE), load_hardware("h200"))
    chosen = read_predictions(predicted, TRACE).chosen(graph, "test")
    by_measured = [each for each in chosen.schedules if each.policy == MEASURED_IOS]
    assert by_measured
    assert not any(each.has_variants for each in by_measured)


def test_a_recipe_with_measured_stages_needs_trials(tmp_path: Path) -> None:
    file = tmp_path / "ios.toml"
    file.write_text(f'name = "ios"\npolicies = ["{MEASURED_IOS}"]\n[[case]]\ntrace = "{TRACE}"\n', encoding="utf-8")
    with pytest.raises(RecipeError, match=r"\$\.policies\[0\]: 'ios, measured stages' goes with trials"):
        read_recipe(file)
