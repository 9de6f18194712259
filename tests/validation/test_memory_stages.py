"""Memory plans of a recipe in stages: a row after each plan, resumed, joined to another day's."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpusim.errors import GpuError, MeasurementError
from gpusim.formats.measurement import SCHEMA, Measurement, OutputCheck
from gpusim.formats.results import read_results
from gpusim.formats.trace import HostLink, Op, Trace, Variant, VariantSettings
from gpusim.gpu.replay import memory_replay
from gpusim.io.files import read_file
from gpusim.memplan.plan import MemoryPlan
from gpusim.plan.graph import OpGraph
from gpusim.trace.store import read_trace, structure_hash, write_trace
from gpusim.validation import memory_stages
from gpusim.validation.again import predict_again, trace_files
from gpusim.validation.memory_again import plans_path, read_replayed_plans
from gpusim.validation.recipe import Case, Recipe
from gpusim.validation.stages import measure_stage, predict_stage
from tests.validation.test_memory_again import FIRST
from tests.validation.test_recipes import GPU, timing

POLICIES = ("caffe", "vdnn_conv", "checkpoint")


class Replayed:
    """Stand-in for the replay on a GPU: 5 % slower than predicted; ends after `at_most` plans of a call."""

    def __init__(self) -> None:
        self.policies: list[str] = []
        self.variants: list[tuple[int, ...]] = []
        self.at_most = 99
        self.link: HostLink | None = None
        self.dropped: tuple[str, ...] = ()
        """Policies whose copies find no pinned memory."""

    def __call__(
        self,
        graph: OpGraph,
        plans: Sequence[MemoryPlan],
        *,
        on_plan: Callable[[int, MemoryPlan, Measurement], None],
        **_: Any,
    ) -> None:
        for number, plan in enumerate(plans):
            if number == self.at_most:
                raise GpuError("cut off")
            self.policies.append(plan.policy)
            self.variants.append(plan.variants)
            ran = MemoryPlan(policy=plan.policy) if plan.policy in self.dropped else plan
            on_plan(number, ran, msgspec.structs.replace(measurement(graph, plan), link=self.link))


def measurement(graph: OpGraph, plan: MemoryPlan) -> Measurement:
    outputs = OutputCheck(
        equal=True,
        bit_equal=True,
        sequential_repeats=True,
        worst_error=0.0,
        sequential_error=0.0,
        tolerance=1e-3,
        compared=9,
    )
    return Measurement(
        schema=SCHEMA,
        trace=graph.trace.name,
        trace_hash=structure_hash(graph.trace),
        policy=plan.policy,
        streams=plan.streams,
        schedule=timing(round(plan.predicted_ns * 1.05)),
        sequential=timing(130_000),
        predicted_ns=1,
        predicted_interval_ns=(1, 1),
        predicted_sequential_ns=1,
        hardware="h200",
        outputs=outputs,
        peak_bytes=plan.predicted_peak_bytes,
        sequential_peak_bytes=200,
        events=5,
        gpu=GPU,
        date="2025-01-01",
        command="",
    )


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Replayed:
    """No process of its own and no GPU."""
    stand_in = Replayed()
    monkeypatch.setattr(memory_replay, "replay_memory", stand_in)
    monkeypatch.setattr(memory_stages, "alone", lambda work, *args: work(*args))
    return stand_in


@pytest.fixture
def made(tmp_path: Path) -> tuple[Recipe, Path, Path]:
    """Return a recipe of a captured VGG-16 with predictions, its results' folder, and its trace.

    The folder has the results of another day, of other plans.
    """
    path = tmp_path / "traces" / "vgg16-train-b2.json.gz"
    path.parent.mkdir()
    captured = read_trace(trace_files(FIRST)["vgg16-train-b16"])
    write_trace(_of_batch(captured, 2), path)
    recipe = Recipe(
        name="memory",
        case=(Case(spec="torchvision:vgg16", mode="train", batch=2),),
        memory_policies=POLICIES,
        traces=str(path.parent),
    )
    predict_stage(recipe, recipe.case, lambda _: None)
    folder = tmp_path / "results"
    folder.mkdir()
    for file in (FIRST, plans_path(FIRST)):
        shutil.copy(file, folder / file.name)
    return recipe, folder, path


def _of_batch(trace: Trace, batch: int) -> Trace:
    return msgspec.structs.replace(trace, model=msgspec.structs.replace(trace.model, batch=batch))


def measured(recipe: Recipe, folder: Path) -> list[str]:
    said: list[str] = []
    measure_stage(recipe, recipe.case, folder, "command", said.append)
    return said


def test_plan_with_variants_is_stored_and_replayed_with_them(tmp_path: Path, replayed: Replayed) -> None:
    """All convolutions with a workspace run as captured but for it, and twice as long."""
    captured = read_trace(trace_files(FIRST)["vgg16-train-b16"])
    convolutions = {index for index, op in enumerate(captured.ops) if "conv" in op.target and op.workspace_bytes}

    def with_variant(op: Op) -> Op:
        slower = tuple(msgspec.structs.replace(kernel, dur_ns=2 * kernel.dur_ns) for kernel in op.kernels)
        variant = Variant(name="native", settings=VariantSettings(cudnn=False), kernels=slower, workspace_bytes=0)
        return msgspec.structs.replace(op, variants=(variant,))

    ops = tuple(with_variant(op) if index in convolutions else op for index, op in enumerate(captured.ops))
    write_trace(msgspec.structs.replace(captured, ops=ops), tmp_path / "vgg16-train-b16.json.gz")
    recipe = Recipe(
        name="memory",
        case=(Case(spec="torchvision:vgg16", mode="train", batch=16, variants=True),),
        memory_policies=("vdnn_conv", "vdnn_conv_m"),
        traces=str(tmp_path),
    )
    predict_stage(recipe, recipe.case, lambda _: None)
    measured(recipe, tmp_path / "results")
    assert replayed.policies == ["vdnn_conv", "vdnn_conv_m"]
    assert replayed.variants == [(), tuple(int(index in convolutions) for index in range(len(ops)))]
    (results,) = (tmp_path / "results").glob("memory_*.json")
    captured_row, optimal_row = read_results(results).cases
    assert optimal_row.predicted_ns > captured_row.predicted_ns
    assert optimal_row.predicted_peak_bytes < captured_row.predicted_peak_bytes
    traces = {"vgg16-train-b16": tmp_path / "vgg16-train-b16.json.gz"}
    assert predict_again(results, traces)[1].cases == (captured_row, optimal_row)


@pytest.mark.parametrize(("share", "budgets"), [(0.01, [0]), (1.0, [2864123904])])
def test_policy_without_a_plan_for_the_budget_has_its_own(tmp_path: Path, share: float, budgets: list[int]) -> None:
    """PyTorch's budget has no plan within a hundredth of the peak; its usual one, of half the activations, is kept."""
    path = tmp_path / "vgg16-train-b16.json.gz"
    write_trace(read_trace(trace_files(FIRST)["vgg16-train-b16"]), path)
    recipe = Recipe(
        name="memory",
        case=(Case(spec="torchvision:vgg16", mode="train", batch=16),),
        memory_policies=("torch_budget",),
        memory_budgets=(share,),
        traces=str(tmp_path),
    )
    plans = memory_stages.read_memory_predictions(memory_stages.predict_memory(path, recipe), path).plans
    assert [plan.budget_bytes for plan in plans] == budgets
    assert [plan.plan.policy for plan in plans] == ["torch_budget"]


def test_rows_join_those_of_another_day(replayed: Replayed, made: tuple[Recipe, Path, Path]) -> None:
    """No row of another day is lost, and each row's plan is at the same place."""
    recipe, folder, _ = made
    before = read_results(folder / FIRST.name)
    assert measured(recipe, folder) == ["measured 3 memory plans of vgg16-train-b2.json.gz"]
    (file,) = folder.glob("memory_*[0-9].json")
    after = read_results(file)
    assert after.cases[: len(before.cases)] == before.cases
    assert [row.policy for row in after.cases[len(before.cases) :]] == list(POLICIES)
    plans = read_replayed_plans(plans_path(file))
    assert [each.plan.predicted_ns for each in plans] == [row.predicted_ns for row in after.cases]


def test_row_stays_after_each_plan(replayed: Replayed, made: tuple[Recipe, Path, Path]) -> None:
    """A run that is cut off keeps the rows so far; the next one replays only what is missing."""
    recipe, folder, _ = made
    replayed.at_most = 2
    assert measured(recipe, folder) == ["failed: cut off"]
    rows = len(read_results(FIRST).cases)
    assert len(read_results(folder / FIRST.name).cases) == rows + 2
    measured(recipe, folder)
    assert len(read_results(folder / FIRST.name).cases) == rows + 3
    assert replayed.policies == list(POLICIES)
    assert measured(recipe, folder) == []
    assert replayed.policies == list(POLICIES)


def test_a_plan_whose_row_was_not_written_is_replayed_again(
    replayed: Replayed, made: tuple[Recipe, Path, Path]
) -> None:
    recipe, folder, _ = made
    earlier = (folder / FIRST.name).read_bytes()
    measured(recipe, folder)
    (folder / FIRST.name).write_bytes(earlier)
    measured(recipe, folder)
    assert replayed.policies == [*POLICIES, *POLICIES]
    assert len(read_replayed_plans(plans_path(folder / FIRST.name))) == len(read_results(folder / FIRST.name).cases)


def test_rows_of_another_capture_of_the_step_go(replayed: Replayed, made: tuple[Recipe, Path, Path]) -> None:
    recipe, folder, path = made
    measured(recipe, folder)
    trace = read_trace(path)
    again = msgspec.structs.replace(trace.provenance, command="captured again")
    write_trace(msgspec.structs.replace(trace, provenance=again), path)
    memory_stages.memory_predictions_path(path).unlink()
    predict_stage(recipe, recipe.case, lambda _: None)
    replayed.at_most = 1
    measured(recipe, folder)
    new = [row.policy for row in read_results(folder / FIRST.name).cases if row.trace == trace.name]
    assert new == ["caffe"]


def test_plan_without_its_pinned_memory_has_no_row(replayed: Replayed, made: tuple[Recipe, Path, Path]) -> None:
    """What ran is another plan than the predicted one."""
    recipe, folder, path = made
    replayed.dropped = ("vdnn_conv",)
    said = measured(recipe, folder)
    assert said[1:] == ["1 left out: the host has too little pinned memory for them"]
    new = [row.policy for row in read_results(folder / FIRST.name).cases if row.trace == read_trace(path).name]
    assert new == ["caffe", "checkpoint"]


@pytest.mark.parametrize(("rate", "said"), [(54.0, []), (20.8, ["20.8", "55.4"])])
def test_another_link_than_the_captures_is_said(
    replayed: Replayed, made: tuple[Recipe, Path, Path], rate: float, said: list[str]
) -> None:
    """Copies at another rate than the predicted one explain an error; the row keeps the rate of its replay."""
    recipe, folder, path = made
    trace = read_trace(path)
    assert trace.ground_truth is not None
    linked = msgspec.structs.replace(trace.ground_truth, link=HostLink(h2d_bytes_per_ns=55.3, d2h_bytes_per_ns=55.5))
    write_trace(msgspec.structs.replace(trace, ground_truth=linked), path)
    memory_stages.memory_predictions_path(path).unlink()
    predict_stage(recipe, recipe.case, lambda _: None)
    replayed.link = HostLink(h2d_bytes_per_ns=rate, d2h_bytes_per_ns=rate)
    lines = measured(recipe, folder)[1:]
    assert len(lines) == bool(said)
    assert all(number in line for number in said for line in lines)
    (row, *_) = [row for row in read_results(folder / FIRST.name).cases if row.trace == trace.name]
    assert row.link == replayed.link


def test_plans_of_the_first_day_are_not_replayed_again(
    replayed: Replayed, made: tuple[Recipe, Path, Path], tmp_path: Path
) -> None:
    _, folder, _ = made
    for name in ("vgg16-train-b16.json.gz", "vgg16-train-b16.memory.predicted.json.gz"):
        packed = FIRST.parent.parent / "traces" / "memory" / name
        (tmp_path / "traces" / name).write_bytes(read_file(packed, MeasurementError))
    recipe = Recipe(
        name="memory",
        case=(Case(spec="torchvision:vgg16", mode="train", batch=16),),
        memory_policies=POLICIES,
        traces=str(tmp_path / "traces"),
    )
    assert measured(recipe, folder) == []
    assert replayed.policies == []


def test_joined_results_are_predicted_again(replayed: Replayed, made: tuple[Recipe, Path, Path]) -> None:
    recipe, folder, path = made
    measured(recipe, folder)
    then, now = predict_again(folder / FIRST.name, {**trace_files(FIRST), path.name.split(".")[0]: path})
    new = len(then.cases) - len(POLICIES)
    assert [row.predicted_ns for row in now.cases[new:]] == [row.predicted_ns for row in then.cases[new:]]
