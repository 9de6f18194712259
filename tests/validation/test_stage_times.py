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
    Stage,
    measure_stages_of,
    measured_ios,
    read_stage_times,
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

    def alone(_: object, path: Path, found: Sequence[Stage]) -> tuple[str, list[int]]:
        assert path == TRACE
        return "NVIDIA H200", [times_ns] * len(found)

    return alone


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
    slow = {stage: together_ns if len(stage) > 1 else ns for stage, ns in times_ns.items()}
    assert measured_ios(FORK, 2, slow).stream_count == streams


def test_a_stage_that_was_not_measured_is_refused() -> None:
    with pytest.raises(RecipeError, match="was not measured"):
        measured_ios(FORK, 2, {})


def test_latencies_come_back_and_those_of_another_trace_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_times, "alone", fake(5000))
    graph = OpGraph.build(read_trace(TRACE), load_hardware("h200"))
    file = measure_stages_of(TRACE, graph, recipe(tmp_path), (4,), "test")
    assert file == stage_times_path(TRACE, recipe(tmp_path))
    times_ns = read_stage_times(TRACE, recipe(tmp_path))
    assert list(times_ns) == stages_to_measure(graph, (4,))
    assert set(times_ns.values()) == {5000}
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
    assert said == [f"measured the stages of {TRACE.name}"]
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
