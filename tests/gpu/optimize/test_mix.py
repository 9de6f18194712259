"""Kernels chosen region by region in an optimized step: where it is tried, what it takes, and results as eager's."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own habit)

from gpusim.errors import CaptureError
from gpusim.formats.trace import Trace
from gpusim.gpu.optimize import cache, choose, make, mix
from gpusim.gpu.optimize.captured import Captured, capture_bound
from gpusim.gpu.optimize.executors import CpuExecutor
from gpusim.gpu.optimize.fused import fused
from gpusim.gpu.optimize.optimizers import LearningRates
from gpusim.gpu.optimize.steps import Given
from gpusim.gpu.optimize.variant import Variant
from gpusim.plan.graph import OpGraph
from gpusim.policies.random_schedules import random_schedule
from tests.support.networks import Branches, image
from tests.support.optimizing import batches, eager_step, fast

FAST_NS, SLOW_NS = 1_000, 40_000


@pytest.fixture(autouse=True)
def _short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Very short searches, and time for everything else however slow this machine is."""
    original = choose.explore
    monkeypatch.setattr(choose, "explore", lambda graph, **given: original(graph, **{**given, "budget_s": 0.02}))
    monkeypatch.setattr(make, "LIMIT_S", {"infer": 1e4, "train": 1e4})
    monkeypatch.setattr(make, "CHOICE_S", {"infer": 1e4, "train": 1e4})


class Net(nn.Module):
    """A softmax between products, and elementwise calls that Inductor fuses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.first(x).softmax(-1)
        return self.last(self.second(weights).sigmoid() * 2 + 1)


class Uneven(CpuExecutor):
    """Executor on which some ops are slow: those of ATen and of Inductor with these words in their names."""

    def __init__(self, aten: tuple[str, ...] = ("sigmoid",), inductor: tuple[str, ...] = ("softmax",)) -> None:
        self.slow = {"aten": aten, "inductor": inductor}

    def measured(self, captured: Captured, eager_ns: int, say: Callable[[str], None]) -> Trace:
        trace = super().measured(captured, eager_ns, say)
        slow = self.slow[captured.frontend]

        def timed(op: Any) -> Any:
            ns = SLOW_NS if any(word in op.name for word in slow) else FAST_NS
            return msgspec.structs.replace(op, kernels=tuple(msgspec.structs.replace(k, dur_ns=ns) for k in op.kernels))

        return msgspec.structs.replace(trace, ops=tuple(map(timed, trace.ops)))


def made(executor: Uneven | None = None, **options: Any) -> tuple[nn.Module, Any, list[str]]:
    torch.manual_seed(0)
    model = Net().eval()
    lines: list[str] = []
    given = {"budget_s": choose.KERNELS_FROM_S, "executor": executor or Uneven(), "say": lines.append, **options}
    return model, fast(model, batches(1)[0][0], **given), lines


def same(step: Any, model: nn.Module) -> None:
    with torch.no_grad():
        for x, _ in batches(3):
            torch.testing.assert_close(step(x), model(x), rtol=1e-4, atol=1e-5)


def by_region(lines: list[str]) -> list[str]:
    return [line for line in lines if "by region" in line]


def test_each_region_runs_the_faster_kernels() -> None:
    """ATen's softmax beside Inductor's fused kernel; the second start has them from the cache and searches nothing."""
    model, step, lines = made()
    (line,) = by_region(lines)
    assert line.startswith("ATen's and Inductor's kernels, by region: ")
    assert line.endswith("Inductor's in 4 of 5 regions")
    assert step.gain.mixed
    assert step.gain.kernels_chosen
    assert step.gain.frontend == "inductor"
    assert "kernels of ATen and Inductor by region" in step.gain.text
    assert step.gain.optimized_ns < SLOW_NS
    same(step, model)
    model, again, lines = made()
    assert not [line for line in lines if line.startswith(("compiling", "searching"))]
    assert again.gain.decided_by == "what was found before"
    assert again.gain.mixed
    same(again, model)


def test_kernels_that_torchs_cache_has_lost_are_chosen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made()
    monkeypatch.setattr("gpusim.gpu.optimize.kept_step.stored_text", lambda _: None)
    model, step, lines = made()
    assert any("chosen region by region, which takes a search" in line for line in lines)
    assert step.gain.mixed
    same(step, model)


@pytest.mark.parametrize(
    ("executor", "frontend"),
    [
        (Uneven(("sigmoid", "softmax"), ()), "inductor"),  # one has all the faster regions
        (Uneven((), ("softmax", "sigmoid", "addmm")), "aten"),  # and is far ahead
    ],
)
def test_one_front_end_stays_alone_where_no_region_of_the_other_is_faster(executor: Uneven, frontend: str) -> None:
    model, step, lines = made(executor)
    assert by_region(lines) == []
    assert step.gain.frontend == frontend
    assert not step.gain.mixed
    same(step, model)


@pytest.mark.parametrize("frontends", [("aten",), ("inductor",)])
def test_one_front_end_is_not_mixed_with_what_nobody_asked_for(frontends: tuple[str, ...]) -> None:
    _, step, lines = made(frontends=frontends)
    assert by_region(lines) == []
    assert step.gain.frontend == frontends[0]


def test_training_with_mixed_kernels_is_eagers() -> None:
    """Losses, parameters and the optimizer's state over some steps."""
    torch.manual_seed(0)
    models = [Net()]
    models.append(copy.deepcopy(models[0]))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in models]
    lines: list[str] = []
    step = fast(models[0], batches(1)[0], loss=F.cross_entropy, optimizer=optimizers[0], executor=Uneven(),
                budget_s=choose.KERNELS_FROM_S, say=lines.append)  # fmt: skip
    assert len(by_region(lines)) == 1
    assert step.gain.mixed
    eager = eager_step(models[1], optimizers[1])
    for x, y in batches(4):
        torch.testing.assert_close(step(x, y), eager(x, y), rtol=1e-4, atol=1e-5)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_mixed_kernels_that_do_not_run_leave_those_of_each_front_end() -> None:
    class Failing(Uneven):
        def anchored(self, captured: Captured, trace: Trace) -> Trace:
            raise CaptureError("it does not run")

    model, step, lines = made(Failing())
    assert by_region(lines) == ["left out kernels by region: it does not run"]
    assert not step.gain.mixed
    same(step, model)


def test_wrong_mixed_kernels_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that computes something else in the mixed step only."""
    original = mix.bound

    def bound(*given: Any) -> Captured:
        found = original(*given)
        functions = list(found.functions or ())
        place = next(n for n, op in enumerate(found.trace.ops) if op.source)
        functions[place] = lambda *args: [arg.zero_() for arg in args if isinstance(arg, torch.Tensor)][:0]
        found.functions = functions
        return found

    monkeypatch.setattr(mix, "bound", bound)
    model, step, lines = made()
    assert len(by_region(lines)) == 1
    assert "away from eager's" in by_region(lines)[0]
    assert not step.gain.mixed
    same(step, model)


def test_a_choice_without_time_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "CHOICE_S", {"infer": 0.0, "train": 0.0})
    _, step, lines = made()
    assert by_region(lines) == []
    assert not step.gain.mixed


def test_a_mixed_step_that_cannot_be_kept_whole_has_no_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    monkeypatch.setattr(make, "kept_step", lambda *_: None)
    _, step, lines = made()
    assert step.gain.mixed
    assert any(line.startswith("not kept in the cache") for line in lines)
    assert list(tmp_path.glob("*.json")) == []


def test_equal_regions_that_would_wait_for_each_other_are_exchanged_one_by_one() -> None:
    """Two regions and no more than one of them with Inductor's kernels; each saves a nanosecond."""

    class Regions:
        def mixed(self, fused: set[int]) -> set[int]:
            if len(fused) > 1:
                raise CaptureError("these regions would wait for each other")
            return fused

    choice: Any = mix.RegionChoice.__new__(mix.RegionChoice)
    timed = {"calls": 10, "kernels": 20}
    choice.timed = {side: type("Timed", (), {"predicted_ns": ns}) for side, ns in timed.items()}
    choice.mixer, choice.predict, choice.trace = Regions(), lambda fused: 10 - len(fused), lambda fused: fused
    choice._classes, choice._saved_ns = [[0, 1]], len
    best = choice.choose(lambda: 1.0)
    assert (best.fused, best.predicted_ns, best.tries) == ({0}, 9, 2)  # the second: 0 alone, taken back


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_random_choices_and_schedules_in_a_poisoned_arena_compute_the_same() -> None:
    from gpusim.gpu.optimize.on_cuda import CudaExecutor

    executor = CudaExecutor(poison=True)
    check_random_choices(executor, image(8).to(executor.device))


def check_random_choices(executor: Any, x: torch.Tensor, choices: int = 12) -> None:
    """Run random choices of regions of an Inception block, each in a random schedule."""
    torch.manual_seed(0)
    model = Branches().to(x.device).eval()
    given = Given(model, None, None)
    step = given.step((x.clone(),), {}, executor.device)
    inputs, rates = [tensor for _, tensor in step.named.values()], LearningRates([], executor.device)
    calls = capture_bound(step, rates, given.options(step, 0), inputs)
    kernels = fused(step, calls, "given_layout")
    timed = [mix.Profiled(each, executor.measured(each, 0, lambda _: None), 1) for each in (calls, kernels)]
    choice = mix.RegionChoice(*timed, lambda _: 1)
    draw = random.Random(0)
    for number in range(choices):
        chosen = {region for region in range(len(choice.regions.regions)) if draw.random() < 0.5}
        mixed = mix.Mix(choice, chosen, 1, 1).made(step)
        graph = OpGraph.build(mixed.trace, executor.hardware()[0])
        ready = executor.prepare(mixed.captured, mixed.trace, random_schedule(graph, number, 0))
        with torch.no_grad():
            for each in (x, x.flip(0) * 0.5):
                found = Variant(mixed.captured, rates, ready).run([each])
                torch.testing.assert_close(found, model(each), rtol=1e-3, atol=1e-3)
