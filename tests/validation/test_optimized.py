"""Recipes with baselines: measurement of a case, and resumption of an interrupted run."""

from __future__ import annotations

import contextlib
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import torch
from torch import nn

from gpusim.errors import CaptureError, GpuError, RecipeError, TrustError
from gpusim.formats.results import Baseline, read_all_results
from gpusim.formats.trace import Gpu, Timing
from gpusim.gpu.capture.models import ModelStep, default_loss
from gpusim.gpu.isolate import alone
from gpusim.gpu.optimize import measure as measuring
from gpusim.gpu.optimize import peers
from gpusim.gpu.optimize.measure import Asked, Measured, optimized
from gpusim.gpu.optimize.peers import Contender, Exact, tensors_of, user_step
from gpusim.validation import optimized as running
from gpusim.validation.optimized import optimize_cases
from gpusim.validation.recipe import read_recipe
from tests.support.optimizing import fast, net

ROOT = Path(__file__).parents[2]
RECIPE = """
name = "two"
against = ["eager", "torch_compile_own_graph"]
[[case]]
spec = "torchvision:googlenet"
mode = "infer"
batch = 1
against = ["torch_compile_max_autotune"]
[[case]]
spec = "torchvision:googlenet"
mode = "train"
batch = 8
"""


def timing(ns: int) -> Timing:
    return Timing(median_ns=ns, lo_ns=ns - 1, hi_ns=ns + 1, rounds=3)


def measured(*peers: Any, gpu: str = "NVIDIA H200") -> Measured:
    return Measured(
        gpu=Gpu(name=gpu, driver="1", cuda="13", torch="2", cudnn="9", sm_clock_mhz=1980, mem_clock_mhz=1),
        gpu_id="GPU-1",
        optimized=timing(400_000),
        peers={
            "eager": timing(4_000_000),
            **dict.fromkeys(peers, timing(600_000)),
            "torch_compile_own_graph": timing(500_000),
        },
        peer_bytes={"torch_compile_own_graph": 1000},
        deviations={"optimize": 1e-4, "torch_compile_own_graph": 1e-4},
        optimize_s=20.0,
        stages_s={"lowering": 12.0},
        compiled_before=False,
        sequential_ns=800_000,
        predicted_ns=390_000,
        predicted_interval_ns=(380_000, 420_000),
        predicted_sequential_ns=800_000,
        streams=4,
        policy="search",
        kernels_chosen=True,
        peak_bytes=900,
        worst_error=0.0,
        bit_equal=True,
        sensitive=True,
        frontend="inductor",
    )


def recipe_file(tmp_path: Path, text: str = RECIPE) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return path


def test_rows_are_of_the_optimized_step_with_its_baselines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Asked] = []
    monkeypatch.setattr(running, "alone", lambda work, each, keep: (asked.append(each), keep(measured())))
    recipe = read_recipe(recipe_file(tmp_path))
    results = optimize_cases(recipe, recipe.case, tmp_path / "out", "command", lambda _: None)
    assert [(each.peers, each.further) for each in asked] == [
        (("eager", "torch_compile_own_graph"), ("torch_compile_max_autotune",)),
        (("eager", "torch_compile_own_graph"), ()),
    ]
    (row, _) = results.cases
    assert (row.network, row.mode, row.batch, row.policy, row.kernels, row.frontend) == (
        "googlenet",
        "infer",
        1,
        "optimize",
        "chosen",
        "inductor",
    )
    assert (row.measured_ns, row.sequential_ns, row.eager_ns) == (400_000, 800_000, 4_000_000)
    assert (row.predicted_ns, row.predicted_interval_ns) == (390_000, (380_000, 420_000))
    assert row.baselines == {"eager": 4_000_000, "torch_compile_own_graph": 500_000}
    (written,) = read_all_results(tmp_path / "out").values()
    assert written == results


def test_an_interrupted_run_goes_on_and_a_failed_case_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = read_recipe(recipe_file(tmp_path))
    lines: list[str] = []

    def only_inference(work: Any, asked: Asked, keep: Any) -> None:
        if asked.mode == "train":
            raise CaptureError("it reads a value")
        keep(measured(*asked.peers, *asked.further))

    monkeypatch.setattr(running, "alone", only_inference)
    assert len(optimize_cases(recipe, recipe.case, tmp_path / "out", "c", lines.append).cases) == 1
    assert any("it reads a value" in line for line in lines)
    monkeypatch.setattr(
        running, "alone", lambda work, asked, keep: keep(measured()) if asked.mode == "train" else 1 / 0
    )
    assert len(optimize_cases(recipe, recipe.case, tmp_path / "out", "c", lines.append).cases) == 2
    assert "measured before: googlenet-infer-b1" in lines


def test_a_case_that_dies_with_its_last_peer_keeps_its_row_and_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = read_recipe(recipe_file(tmp_path))

    def dies(work: Any, asked: Asked, keep: Any) -> None:
        keep(measured(*asked.peers))
        raise GpuError("killed for memory")

    monkeypatch.setattr(running, "alone", dies)
    results = optimize_cases(recipe, recipe.case[:1], tmp_path / "out", "c", lambda _: None)
    assert [set(row.baselines) for row in results.cases] == [{"eager", "torch_compile_own_graph"}]
    monkeypatch.setattr(running, "alone", lambda work, asked, keep: keep(measured(*asked.peers, *asked.further)))
    results = optimize_cases(recipe, recipe.case[:1], tmp_path / "out", "c", lambda _: None)
    assert ["torch_compile_max_autotune" in row.baselines for row in results.cases] == [True]


def test_a_later_run_adds_only_the_baselines_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later the step took 440 us beside max-autotune's 660: 1.5x, not 660 over the 400 us of the first run."""
    recipe = read_recipe(recipe_file(tmp_path))
    monkeypatch.setattr(running, "alone", lambda work, asked, keep: keep(measured(*asked.peers)))
    first = optimize_cases(recipe, recipe.case[:1], tmp_path / "out", "c", lambda _: None).cases[0]
    asked: list[Asked] = []
    later = replace(
        measured(),
        optimized=timing(440_000),
        peers={"torch_compile_max_autotune": timing(660_000)},
        peer_bytes={"torch_compile_max_autotune": 2000},
        deviations={"optimize": 1.0, "torch_compile_max_autotune": 2e-4},
        optimize_s=1.0,
    )
    monkeypatch.setattr(running, "alone", lambda work, each, keep: (asked.append(each), keep(later)))
    lines: list[str] = []
    (row,) = optimize_cases(recipe, recipe.case[:1], tmp_path / "out", "c", lines.append, within_s=250).cases
    assert [(each.peers, each.further) for each in asked] == [((), ("torch_compile_max_autotune",))]
    assert measuring.FURTHER_S < asked[0].further_s < 250
    assert "adding torch_compile_max_autotune to googlenet-infer-b1" in lines
    assert (row.measured_ns, row.optimize_s, row.deviations["optimize"]) == (400_000, 20.0, 1e-4)
    assert row.baselines == first.baselines | {"torch_compile_max_autotune": 660_000}
    assert (row.over("torch_compile_max_autotune"), row.over("torch_compile_own_graph")) == (1.5, 1.25)
    assert row.baseline_peak_bytes["torch_compile_max_autotune"] == 2000


def test_slow_baselines_of_the_last_case_may_take_all_the_time_that_is_left(tmp_path: Path) -> None:
    recipe = read_recipe(recipe_file(tmp_path))
    case = recipe.case[0]
    assert running.asked_of(case, recipe, 400.0, last=True).further_s == 400.0 - running.LEAST_CASE_S
    assert running.asked_of(case, recipe, 400.0).further_s == measuring.FURTHER_S
    assert running.asked_of(case, recipe, None, last=True).further_s == measuring.FURTHER_S


def test_a_row_of_an_interrupted_run_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has few rounds and no deviations: nothing is added to it, and its time does not stay."""
    recipe = read_recipe(recipe_file(tmp_path))
    short = replace(measured(*recipe.against), deviations={})
    monkeypatch.setattr(running, "alone", lambda work, asked, keep: keep(short))
    optimize_cases(recipe, recipe.case[:1], tmp_path / "out", "c", lambda _: None)
    whole = replace(measured(*recipe.against, *recipe.case[0].against), optimized=timing(300_000))
    asked: list[Asked] = []
    monkeypatch.setattr(running, "alone", lambda work, each, keep: (asked.append(each), keep(whole)))
    (row,) = optimize_cases(recipe, recipe.case[:1], tmp_path / "out", "c", lambda _: None).cases
    assert asked[0].peers == tuple(recipe.against)
    assert (row.measured_ns, "optimize" in row.deviations) == (300_000, True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gpu": {"torch": "3.0"}}, "torch was"),
        ({"gpu": {"sm_clock_mhz": 1200}}, "SM clock in MHz was"),
        ({"frontend": "aten"}, "front end was"),
    ],
)
def test_baselines_of_unlike_runs_are_not_joined(
    change: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = read_recipe(recipe_file(tmp_path))
    monkeypatch.setattr(running, "alone", lambda work, asked, keep: keep(measured(*asked.peers)))
    first = optimize_cases(recipe, recipe.case[:1], tmp_path / "out", "c", lambda _: None).cases
    later = replace(measured("torch_compile_max_autotune"), **{k: v for k, v in change.items() if k != "gpu"})
    if "gpu" in change:
        later = replace(later, gpu=msgspec.structs.replace(later.gpu, **change["gpu"]))
    monkeypatch.setattr(running, "alone", lambda work, asked, keep: keep(later))
    lines: list[str] = []
    assert optimize_cases(recipe, recipe.case[:1], tmp_path / "out", "c", lines.append).cases == first
    assert any(said in line for line in lines)


def on_cpu(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    """Let `measure` run on the CPU, with `make` as maker of peers."""
    step = model_step("infer")
    monkeypatch.setattr(measuring, "require_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(measuring, "load_step", lambda *_, **__: step)
    monkeypatch.setattr(measuring, "gpu_facts", lambda _: measured().gpu)
    monkeypatch.setattr(measuring, "optimize", lambda target, inputs, warn, **options: fast(target, inputs))
    monkeypatch.setattr(measuring, "make", make)
    monkeypatch.setattr(measuring, "ROUND_MS", 1.0)


def asking(peers: tuple[str, ...], *further: str) -> Asked:
    return Asked("net", "infer", 4, "fp32", "contiguous", peers, further, 3, 0.02, 0)  # type: ignore[arg-type]


def itself(peer: str, step: ModelStep) -> Contender:
    return Contender(user_step(step, step.module, step.module), step.module)


def test_what_is_measured_is_kept_before_the_peers_that_take_longest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row after the first two peers, after all, with deviations, and twice for each further one that can be made."""

    def make(peer: str, step: ModelStep) -> Contender:
        if peer == "torch_compile_combo_kernels":
            raise ValueError("no such kernel\nand more")
        return itself(peer, step)

    on_cpu(monkeypatch, make)
    kept: list[Measured] = []
    first, third = ("eager", "torch_compile_own_graph"), "torch_compile_reduce_overhead"
    further = ("torch_compile_combo_kernels", "torch_compile_max_autotune")
    measuring.measure(asking((*first, third), *further), kept.append)
    every = {*first, third, further[1]}
    assert [set(each.peers) for each in kept] == [{*first}, {*first, third}, {*first, third}, every, every]
    ours = {"optimize", *first, third}
    assert [set(each.deviations) for each in kept] == [set(), set(), ours, ours, {*ours, further[1]}]
    assert "left out torch_compile_combo_kernels: no such kernel\n" in capsys.readouterr().err


def test_a_run_may_have_only_a_peer_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu(monkeypatch, itself)
    kept: list[Measured] = []
    measuring.measure(asking((), "torch_compile_max_autotune"), kept.append)
    assert [set(each.peers) for each in kept] == [{"torch_compile_max_autotune"}] * 2
    assert set(kept[-1].deviations) == {"optimize", "torch_compile_max_autotune"}


def test_a_peer_that_takes_too_long_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever ignores errors inside: the time is up again a second later."""

    def make(peer: str, step: ModelStep) -> Contender:
        while peer != "eager":
            with contextlib.suppress(Exception):
                threading.Event().wait(60)
        return itself(peer, step)

    on_cpu(monkeypatch, make)
    kept: list[Measured] = []
    measuring.measure(replace(asking(("eager",), "torch_compile_max_autotune"), further_s=0.05), kept.append)
    assert [set(each.peers) for each in kept] == [{"eager"}, {"eager"}]
    assert "left out torch_compile_max_autotune: not ready after 0.05 s" in capsys.readouterr().err
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_step_without_fp64_keeps_its_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def no_double(self: Exact, contender: Contender) -> float:
        raise RuntimeError("not implemented for 'Double'")

    on_cpu(monkeypatch, itself)
    monkeypatch.setattr(Exact, "deviation", no_double)
    kept: list[Measured] = []
    measuring.measure(asking(("eager",)), kept.append)
    assert kept[-1].deviations == {}
    assert "not compared with FP64: not implemented for 'Double'" in capsys.readouterr().err


def test_no_case_begins_without_time_and_each_knows_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first case takes 80 of 100 seconds, so the second is not begun."""
    now, begun = [0.0], []

    def takes_80_s(work: Any, asked: Asked, keep: Any) -> None:
        begun.append(asked.within_s)
        now[0] += 80.0
        keep(measured())

    monkeypatch.setattr(running, "alone", takes_80_s)
    monkeypatch.setattr(running, "perf_counter", lambda: now[0])
    recipe = read_recipe(recipe_file(tmp_path))
    lines: list[str] = []
    results = optimize_cases(recipe, recipe.case, tmp_path / "out", "c", lines.append, within_s=100.0)
    assert begun == [100.0]
    assert len(results.cases) == 1
    assert "no time is left for googlenet-train-b8" in lines
    with pytest.raises(RecipeError, match="no case that can be measured in 1 s"):
        optimize_cases(recipe, recipe.case, tmp_path / "none", "c", lines.append, within_s=1.0)


def test_a_case_that_its_time_ends_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def ends(work: Any, asked: Asked, keep: Any) -> None:
        keep(measured())
        now[0] += 100.0
        raise GpuError("the process of this step died")

    monkeypatch.setattr(running, "alone", ends)
    monkeypatch.setattr(running, "perf_counter", lambda: now[0])
    recipe = read_recipe(recipe_file(tmp_path))
    lines: list[str] = []
    results = optimize_cases(recipe, recipe.case[:1], tmp_path / "out", "c", lines.append, within_s=100.0)
    assert len(results.cases) == 1
    assert "no time is left for the rest of googlenet-infer-b1" in lines


def _sleeps(asked: Asked) -> None:
    with measuring.ended_after(asked.within_s, print):
        threading.Event().wait(60)


def test_a_case_ends_with_its_time() -> None:
    with pytest.raises(GpuError, match="the process of this step died"):
        alone(_sleeps, replace(asking(()), within_s=0.1))


def test_an_error_of_the_gpu_is_one_line() -> None:
    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nSearch for it")
    with (
        pytest.raises(GpuError, match=r"^CUDA error: an illegal memory access was encountered; this process"),
        measuring.errors_of_the_gpu(),
    ):
        raise error


def test_rows_of_another_gpu_are_not_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = read_recipe(recipe_file(tmp_path))
    monkeypatch.setattr(running, "alone", lambda work, asked, keep: keep(measured()))
    optimize_cases(recipe, recipe.case[:1], tmp_path / "out", "c", lambda _: None)
    monkeypatch.setattr(running, "alone", lambda work, asked, keep: keep(measured(gpu="NVIDIA A100")))
    lines: list[str] = []
    results = optimize_cases(recipe, recipe.case, tmp_path / "out", "c", lines.append)
    assert len(results.cases) == 1
    assert any("give another folder" in line for line in lines)


@pytest.mark.parametrize(
    ("text", "place", "problem"),
    [
        (RECIPE.replace('"eager", ', '"caffe", '), "$.against[0]", "caffe"),
        (RECIPE.replace('against = ["eager", "torch_compile_own_graph"]\n', ""), "$.case[0]", "against"),
        ('name = "x"\nagainst = ["eager"]\n[[case]]\ntrace = "googlenet-train-b8"\n', "$.case[0]", "give 'spec'"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(tmp_path: Path, text: str, place: str, problem: str) -> None:
    with pytest.raises(RecipeError, match=problem) as caught:
        read_recipe(recipe_file(tmp_path, text))
    assert caught.value.place == place


def test_files_of_the_recipe_run_only_where_they_are_trusted(tmp_path: Path) -> None:
    recipe = read_recipe(ROOT / "validate" / "compile.toml")
    with pytest.raises(TrustError):
        optimize_cases(recipe, recipe.case, tmp_path, "c", lambda _: None)


def test_the_committed_recipe_has_each_kind_in_two_sizes_and_nine_steps_with_more_baselines() -> None:
    recipe = read_recipe(ROOT / "validate" / "compile.toml")
    own = [case.spec.rpartition(":")[2] for case in recipe.case if case.spec and ".py:" in case.spec]
    kinds = {name.rpartition("_")[0] for name in own}
    assert sorted(own) == sorted(f"{kind}_{size}" for kind in kinds for size in ("small", "large"))
    assert sum(bool(case.against) for case in recipe.case) == 9
    assert all(case.mode == "infer" for case in recipe.case if case.against)


def model_step(mode: str = "train", dropout: float = 0.0) -> ModelStep:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    model = net(dropout).train(mode == "train")
    if mode == "infer":
        return ModelStep("net", model, (x,), None, None)
    return ModelStep("net", model, (x,), torch.tensor([0, 1, 2, 3]), default_loss)


def test_the_step_of_a_recipe_is_optimized_as_a_user_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "optimize", lambda target, inputs, warn, **options: fast(target, inputs))
    for mode in ("train", "infer"):
        step = model_step(mode)
        asked = replace(asking(()), mode=mode)
        found = optimized(step, step.module, asked)(*tensors_of(step))
        assert isinstance(found, torch.Tensor)


def test_a_step_that_comes_back_as_it_was_is_a_failed_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_it_was(target: Any, inputs: Any, warn: Any, **options: Any) -> Any:
        warn("it reads a value")
        return target

    monkeypatch.setattr(measuring, "optimize", as_it_was)
    step = model_step("infer")
    with pytest.raises(CaptureError, match="it reads a value"):
        optimized(step, step.module, asking(()))


def test_deviation_is_from_the_step_in_fp64_and_leaves_the_models_state() -> None:
    for mode in ("train", "infer"):
        step = model_step(mode)
        initial = {key: value.clone() for key, value in step.module.state_dict().items()}
        exact = Exact(step)
        good = Contender(user_step(step, step.module, step.module), step.module)
        found = exact.deviation(good)
        assert found is not None
        assert 0 < found < 1e-5
        bad = replace(good, call=user_step(step, step.module, lambda x, model=step.module: model(x * 1.01)))
        worse = exact.deviation(bad)
        assert worse is not None
        assert worse > 1e-3
        for key, value in step.module.state_dict().items():
            assert torch.equal(value, initial[key])


def test_the_reference_in_fp64_is_contiguous_and_of_any_layout_the_same() -> None:
    """On a GPU, FP64 channels last ended in an illegal access."""
    seen: list[bool] = []

    class Looks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.dtype == torch.float64:
                seen.append(x.is_contiguous())
            return x

    torch.manual_seed(0)
    model = nn.Sequential(Looks(), nn.Conv2d(3, 4, 3), Looks(), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(5))
    x = torch.randn(2, 3, 6, 6)
    model(x)
    model = model.to(memory_format=torch.channels_last).train()
    step = ModelStep("net", model, (x.to(memory_format=torch.channels_last),), torch.tensor([0, 1]), default_loss)
    exact = Exact(step)
    found = exact.deviation(Contender(user_step(step, model, model), model))
    assert found is not None
    assert found < 1e-5
    assert seen == [True, True]


def test_no_deviation_is_told_where_dropout_makes_every_step_another_one() -> None:
    step = model_step("train", dropout=0.5)
    contender = Contender(user_step(step, step.module, step.module), step.module)
    assert Exact(step).deviation(contender) is None


def test_every_baseline_of_recipes_is_made() -> None:
    assert set(get_args(Baseline)) == set(peers._CALLS)


def test_a_users_step_without_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(6, 3)
    step = ModelStep("own", model, (torch.randn(4, 6),), None, lambda output, target: output.square().mean())
    before = model.weight.clone()
    user_step(step, model, model)(*tensors_of(step))
    assert not torch.equal(before, model.weight)
