"""Gradients and settings around a captured step act as in eager, or are refused."""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own habit)

from gpusim.gpu.optimize import dynamo, front
from gpusim.gpu.optimize.callable import OptimizedStep
from gpusim.gpu.optimize.choose import Wanted
from gpusim.gpu.optimize.executors import CpuExecutor, Ready
from gpusim.gpu.optimize.steps import tf32
from tests.support.optimizing import (
    Twins,
    batches,
    captures,
    close,
    eager_step,
    fast,
    hidden,
    net,
    same_states,
    sgd,
    tick,
)

Change = Callable[[Any], Any]


# --- Gradients from elsewhere ---


@pytest.mark.parametrize("late", [False, True])
def test_an_old_gradient_of_a_frozen_parameter_is_cleared_as_by_eager(late: bool) -> None:
    twins = Twins(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    data = batches(4)
    twins.train(data[:1])
    for model in (twins.model, twins.other):
        model.left.requires_grad_(False)
        if late:
            model.left.zero_grad()
    twins.train(data[1:3])
    for model in (twins.model, twins.other):
        if late:
            model.left.weight.grad = torch.ones_like(model.left.weight)
    twins.train(data[3:])
    for one, other in zip(twins.model.parameters(), twins.other.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
    same_states(twins.model.state_dict(), twins.other.state_dict())


def test_inference_leaves_gradients_where_they_are() -> None:
    model = net()
    gradient = model.left.weight.grad = torch.ones_like(model.left.weight)
    step = fast(model.eval(), batches(1)[0][0])
    assert isinstance(step, OptimizedStep)
    step(batches(1)[0][0])
    assert model.left.weight.grad is gradient


def test_training_where_gradients_are_off_fails_as_eager_does() -> None:
    twins = Twins(sgd)
    before = copy.deepcopy(twins.model.state_dict())
    with torch.no_grad(), pytest.raises(Exception, match="depends on no parameter"):
        twins.fast(*batches(1)[0])
    same_states({k: v for k, v in twins.model.state_dict().items() if "weight" in k},
                {k: v for k, v in before.items() if "weight" in k})  # fmt: skip


# --- Surroundings ---


@pytest.mark.parametrize("draw", [random.random, lambda: float(np.random.rand())])
def test_random_numbers_of_the_host_are_not_captured(draw: Callable[[], float]) -> None:
    """A rare other path of the code would never be taken."""
    model = net().eval()

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(x) if draw() > 1e-9 else x

    with pytest.warns(UserWarning, match="draws random numbers on the host"):
        assert fast(step, batches(1)[0][0]) is step


def test_autocast_around_a_call_has_a_step_of_its_own_that_casts_weights_anew() -> None:
    """Within one autocast eager keeps the cast weights, which a captured step would keep for ever."""
    model = net().eval()
    step, x = fast(model, batches(1)[0][0]), batches(1)[0][0]
    for factor in (1.0, 5.0):
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            model.head.weight.mul_(factor)
            mine = step(x)
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            wanted = model(x)
        assert mine.dtype == wanted.dtype == torch.bfloat16
        torch.testing.assert_close(mine, wanted, rtol=1e-2, atol=1e-2)
    assert len(step._variants) == 2
    with torch.no_grad():
        close(step(x), model(x))


def test_autocast_within_a_step_casts_weights_anew() -> None:
    """A context that ends within the step forgets the cast weights, so the next step takes those of the update."""

    def made(model: nn.Module) -> Any:
        optimizer = sgd(model.parameters())

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    model, other = net(), net()
    mine, theirs = fast(made(model), batches(1)[0]), made(other)
    assert isinstance(mine, OptimizedStep)
    for x, y in batches(4):
        torch.testing.assert_close(mine(x, y), theirs(x, y))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("behind", ["a first call", "an evaluation"])
def test_optimizing_within_autocast_leaves_no_casts_of_the_weights_of_trials(behind: str) -> None:
    """AdamW has no state yet, so the first call runs the user's own step."""
    model, other = net(), net()
    mine, theirs = (eager_step(each, torch.optim.AdamW(each.parameters(), lr=0.05)) for each in (model, other))
    (x, y) = data = batches(1)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step = fast(mine, data)
        found = step(*data) if behind == "a first call" else F.cross_entropy(model(x), y)
    assert isinstance(step, OptimizedStep)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = theirs(*data) if behind == "a first call" else F.cross_entropy(other(x), y)
    assert torch.equal(found, wanted)


def test_precision_of_products_that_changes_is_captured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net().eval()
    step, x = fast(model, batches(1)[0][0]), batches(1)[0][0]
    made = captures(step)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", not torch.backends.cudnn.allow_tf32)
    close(step(x), model(x))
    assert made == [1]


SETTINGS: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "type of new tensors": (torch.set_default_dtype, torch.float64, torch.float32),
    "deterministic kernels": (torch.use_deterministic_algorithms, True, False),
    "attention": (torch.backends.cuda.enable_flash_sdp, False, True),
    "device of new tensors": (torch.set_default_device, "cpu", None),
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_other_settings_of_torchs_have_a_step_of_their_own(kind: str) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x + torch.zeros(6) + float(torch.are_deterministic_algorithms_enabled())

    x = batches(1)[0][0]
    captured = fast(step, x)
    made = captures(captured)
    change, new, former = SETTINGS[kind]
    for value in (new, former, new):
        change(value)
        try:
            found, wanted = captured(x), step(x)
        finally:
            change(former)
        close(found, wanted)
        assert found.dtype == wanted.dtype
    assert made == [1]


def test_torchs_newer_settings_of_tf32_leave_the_model_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> bool:
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch._C, "_get_cublas_allow_tf32", refuse)
    model = net().eval()
    with pytest.warns(UserWarning, match="TF32 is set by `fp32_precision`"):
        assert fast(model, batches(1)[0][0]) is model
    with pytest.raises(Exception, match="fp32_precision"):
        tf32()


def test_inference_mode_around_optimizing_and_calls() -> None:
    model, x = net().eval(), batches(1)[0][0]
    with torch.inference_mode():
        step = fast(model, x)
        inside = step(x)
    assert isinstance(step, OptimizedStep)
    close(step(x), inside)
    close(step(x), model(x))


@pytest.mark.parametrize("module", [front, dynamo])
def test_a_step_is_captured_while_its_gpu_is_the_current_one(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call on another shape may come from a thread that never chose a GPU."""
    now: list[torch.device] = []
    prepared: list[list[torch.device]] = []

    @contextlib.contextmanager
    def current(device: torch.device) -> Iterator[None]:
        now.append(device)
        yield
        now.pop()

    class Noting(CpuExecutor):
        def prepare(self, *given: Any) -> Ready:
            prepared.append(list(now))
            return super().prepare(*given)

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        return dynamo.compiled(graph, inputs, Wanted(3, 0.02, None), Noting())

    monkeypatch.setattr(module, "current", current)
    model, x = net().eval(), batches(1)[0][0]
    compiled = torch.compile(model, backend=backend, dynamic=False)
    step = fast(model, x, executor=Noting()) if module is front else compiled
    with torch.no_grad():
        for given in (x, x[:2]):
            close(step(given), model(given))
    assert prepared
    assert all(each == [CpuExecutor.device] for each in prepared)


def test_threads_may_call_one_step() -> None:
    model = net().eval()
    step = fast(model, batches(1)[0][0])
    wrong: list[int] = []

    def work(seed: int) -> None:
        for x, _ in batches(60, size=4 + seed % 2, seed=seed):
            with torch.no_grad():
                if not torch.allclose(step(x), model(x), atol=1e-5):
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(step._variants) == 2


class Waits(nn.Module):
    """A module whose call lasts until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.left = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.entered.set()
        assert self.left.wait(60)
        return x


def in_thread(work: Callable[[], object]) -> list[Exception]:
    """Run work in another thread, and return its error, if any."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as cause:
            errors.append(cause)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return errors


def test_modules_of_other_threads_are_no_layers_of_a_recorded_step() -> None:
    """The other module's call begins in one run that is recorded, and ends in the next."""
    x = batches(1)[0][0]
    waits = Waits()
    other = threading.Thread(target=lambda: waits(x))
    model = net().eval()

    ticks = hidden(0)

    def begin_or_end() -> None:
        run = tick(ticks)
        if run == 3:  # the first of the recording
            other.start()
            assert waits.entered.wait(60)
        elif run == 4:
            waits.left.set()
            other.join()

    runs = hidden(begin_or_end)

    def step(x: torch.Tensor) -> torch.Tensor:
        runs[0]()
        with torch.no_grad():
            return model(x)

    assert isinstance(fast(step, x), OptimizedStep)
    assert ticks[0] > 3


def calls_in_thread(step: Callable[..., Any], x: torch.Tensor) -> list[Any]:
    """Return a hidden function that returns the errors of a call in another thread.

    A step raises them: behind an `assert` of pytest's lie some thousand objects, which the search would look into.
    """
    return hidden(lambda: in_thread(lambda: step(x)))


def test_a_captured_step_runs_while_another_is_recorded() -> None:
    """The hooks of the recording are none of the user's."""
    x = batches(1)[0][0]
    inner, model = fast(net().eval(), x), net(seed=1).eval()
    (variant,) = inner._variants.values()
    calls, ticks = calls_in_thread(inner, x), hidden(0)

    def step(x: torch.Tensor) -> torch.Tensor:
        tick(ticks)
        for error in calls[0]():
            raise error
        with torch.no_grad():
            return model(x)

    before = variant.calls
    assert isinstance(fast(step, x), OptimizedStep)
    assert variant.calls - before == ticks[0] > 5


def test_one_step_is_optimized_at_a_time() -> None:
    """Meanwhile new shapes run as they are, and what the step itself optimizes comes back."""
    x = batches(1)[0][0]
    model = net(seed=1).eval()
    inner = fast(model, x)
    made = captures(inner)
    calls = calls_in_thread(inner, x[:2])

    def step(x: torch.Tensor) -> torch.Tensor:
        for error in calls[0]():
            raise error
        with torch.no_grad():
            return model(x)

    assert isinstance(fast(step, x), OptimizedStep)
    assert made == []
    close(inner(x[:2]), model(x[:2]))
    assert made == [1]
    with pytest.warns(UserWarning, match="a part of a step that is being optimized"):
        fast(lambda x: fast(model, x)(x), x)


@pytest.mark.parametrize("doing", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_of_a_step_are_refused_with_a_line(doing: Callable[[Any], Any]) -> None:
    """A copy would train the original's parameters."""
    with pytest.raises(TypeError, match="copy the model or its state_dict"):
        doing(fast(net().eval(), batches(1)[0][0]))


def test_a_models_own_copy_is_untouched_by_the_step() -> None:
    model = net()
    optimizer = sgd(model.parameters())
    step = fast(eager_step(model, optimizer), batches(1)[0])
    step(*batches(1)[0])
    twin = copy.deepcopy(model)
    before = copy.deepcopy(twin.state_dict())
    step(*batches(2)[1])
    same_states(twin.state_dict(), before)
