"""IOS by measured stage latencies: what is measured, what is chosen by it, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest

from gpusim.errors import RecipeError
from gpusim.formats.hardware import load_hardware
from gpusim.formats.recipe import Case, Recipe
from gpusim.formats.trace import Trace, Variant, VariantSettings
from gpusim.plan.graph import OpGraph
from gpusim.trace.fusion import covered_by
from gpusim.trace.merging import CONVOLUTION, is_merge, merge_in, mergeable
from gpusim.trace.store import read_trace
from gpusim.validation import stage_times, stages
from gpusim.validation.predictions import read_predictions
from gpusim.validation.recipe import MEASURED_IOS, read_recipe
from gpusim.validation.stage_times import (
    Stage,
    StageTime,
    StageTimes,
    measure_stages_of,
    measured_ios,
    merge_of,
    read_stage_times,
    stage_times_path,
    stages_to_measure,
)
from tests.support.helpers import build_graph, kernel, make_hardware, wide_trace

MERGED = VariantSettings(composition="merged")
#: SqueezeNet's convolutions of 1 x 1 and of 3 x 3 on one input.
PAIRS = ((5, 7), (12, 14), (20, 22), (27, 29), (35, 37), (42, 44), (49, 51), (56, 58))
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
    """Return a measurement in place of the GPU's: a time for each op of a stage, merged a third of one."""

    def alone(
        _: object, path: Path, found: Sequence[Stage], merges: Mapping[int, tuple[int, int]]
    ) -> tuple[str, list[int], dict[int, int]]:
        assert path.name == TRACE.name
        return "NVIDIA H200", [times_ns * sum(map(len, stage)) for stage in found], dict.fromkeys(merges, times_ns // 3)

    return alone


def with_all_merges(trace: Trace, _seed: int = 0) -> Trace:
    """Return the trace with each possible merge as a variant of 1 us."""
    ops = list(trace.ops)
    for (first, *others), name in mergeable(trace).items():
        merge = Variant(name=name, settings=MERGED, kernels=(kernel(1000),), covers=tuple(others))
        ops[first] = msgspec.structs.replace(ops[first], variants=(*ops[first].variants, merge))
    return msgspec.structs.replace(trace, ops=tuple(ops))


def fork_of_convolutions() -> OpGraph:
    """Return `FORK` with convolutions 1 and 2, which may be merged."""
    ops = list(FORK.trace.ops)
    for op in (1, 2):
        ops[op] = msgspec.structs.replace(ops[op], target=CONVOLUTION)
    merge = Variant(name="merged_2", settings=MERGED, kernels=(kernel(100),), covers=(2,))
    ops[1] = msgspec.structs.replace(ops[1], variants=(merge,))
    return build_graph(msgspec.structs.replace(FORK.trace, ops=tuple(ops)), make_hardware())


def document(times_ns: dict[Stage, int], merged_ns: Mapping[Stage, int] | None = None) -> StageTimes:
    return StageTimes(
        schema="gpusim-stages/1",
        trace="fork",
        trace_sha256="",
        gpu="",
        date="",
        command="",
        gpusim="",
        stages=tuple(
            StageTime(groups=stage, time_ns=time_ns, merged_ns=(merged_ns or {}).get(stage))
            for stage, time_ns in times_ns.items()
        ),
    )


def test_stage_can_be_merged_if_its_groups_begin_with_the_convolutions_of_a_merge() -> None:
    """SqueezeNet: convolutions 5 and 7, each with the ReLU behind it."""
    trace = with_all_merges(read_trace(TRACE))
    merge = (5, len(trace.ops[5].variants))
    assert merge_of(trace, ((5, 6), (7, 8))) == merge_of(trace, ((7, 8), (5,))) == merge
    assert merge_of(trace, ((5, 6),)) is None
    assert merge_of(trace, ((5, 6, 7, 8),)) is None
    assert merge_of(trace, ((6,), (7, 8))) is None
    assert merge_of(trace, ((5, 12), (7, 8))) is None
    assert merge_of(read_trace(TRACE), ((5, 6), (7, 8))) is None


@pytest.mark.parametrize(
    ("together_ns", "merged_ns", "streams", "variants"),
    [(1500, 1200, 1, (0, 1, 0, 0)), (1500, 1600, 2, ()), (9000, 2100, 1, ()), (9000, 1900, 1, (0, 1, 0, 0))],
)
def test_stage_runs_side_by_side_in_turn_or_merged_whichever_is_measured_to_be_fastest(
    together_ns: int, merged_ns: int, streams: int, variants: tuple[int, ...]
) -> None:
    """In turn, the two convolutions take 2000 ns."""
    graph = fork_of_convolutions()
    both = ((1,), (2,))
    times_ns = {stage: 1000 * sum(map(len, stage)) for stage in stages_to_measure(graph, (2,))}
    times = document({**times_ns, both: together_ns}, {both: merged_ns})
    found = measured_ios(graph, 2, times, "stages", merging=True).check(graph)
    assert (found.stream_count, found.variants) == (streams, variants)
    without = measured_ios(graph, 2, times, "stages")
    assert (without.stream_count, without.variants) == (2 if together_ns < 2000 else 1, ())


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
    assert measured_ios(FORK, 2, document(measured), "stages").stream_count == streams


def test_a_stage_that_was_not_measured_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"^t\.stages\.json\.gz: \$\.stages: .*have no latency"):
        measured_ios(FORK, 2, document({}), "t.stages.json.gz")


def test_latencies_come_back_and_those_of_another_trace_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_times, "alone", fake(6000))
    graph = OpGraph.build(with_all_merges(read_trace(TRACE)), load_hardware("h200"))
    file = measure_stages_of(TRACE, graph, recipe(tmp_path), (4,), "test")
    assert file == stage_times_path(TRACE, recipe(tmp_path))
    times = read_stage_times(TRACE, recipe(tmp_path))
    assert [each.groups for each in times.stages] == stages_to_measure(graph, (4,))
    assert all(each.time_ns == 6000 * sum(map(len, each.groups)) for each in times.stages)
    merged = [each.groups for each in times.stages if each.is_faster_merged]
    assert {merge_of(graph.trace, groups) for groups in merged} == {merge_in(graph.trace, ops) for ops in PAIRS}
    other = TRACE.with_name("resnet50-infer-b1.json.gz")
    file.rename(stage_times_path(other, recipe(tmp_path)))
    with pytest.raises(RecipeError, match="another capture of 'resnet50-infer-b1'"):
        read_stage_times(other, recipe(tmp_path))


def test_stages_are_measured_once_and_predictions_use_them_with_merges_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_times, "alone", fake(6000))
    monkeypatch.setattr(stages, "with_merged", with_all_merges)
    wanted = recipe(tmp_path)
    said: list[str] = []
    for _ in range(2):
        stages.capture_stage(wanted, wanted.case, "test", said.append)
    (captured, measured) = said
    assert captured == f"captured {TRACE.name}"
    assert measured.endswith(f"stages of {TRACE.name}; 8 of 8 are faster merged")
    (predicted,) = stages.predict_stage(wanted, wanted.case, said.append)
    path = stages.trace_path(wanted.case[0], wanted)
    assert path == tmp_path / TRACE.name
    graph = OpGraph.build(read_trace(path), load_hardware("h200"))
    chosen = read_predictions(predicted, path).chosen(graph, "test")
    by_measured = [each.check(graph) for each in chosen.schedules if each.policy == MEASURED_IOS]
    assert {each.has_variants for each in by_measured} == {False, True}
    merged = next(each for each in by_measured if each.has_variants)
    assert covered_by(graph.trace, merged.variants) == {7: 5, **{second: first for first, second in PAIRS}}
    others = [each for each in chosen.schedules if each.policy == "ios"]
    assert not any(
        is_merge(graph.trace.ops[op].variants[number - 1])
        for each in others
        for op, number in enumerate(each.variants)
        if number
    )


def test_a_recipe_with_measured_stages_needs_trials(tmp_path: Path) -> None:
    file = tmp_path / "ios.toml"
    file.write_text(f'name = "ios"\npolicies = ["{MEASURED_IOS}"]\n[[case]]\ntrace = "{TRACE}"\n', encoding="utf-8")
    with pytest.raises(RecipeError, match=r"\$\.policies\[0\]: 'ios, measured stages' goes with trials"):
        read_recipe(file)
