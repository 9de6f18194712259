"""A trace's update of the parameters is the optimizer's own, for any optimizer."""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own habit)

from gpusim.errors import CaptureError
from gpusim.gpu.capture.in_memory import options_of
from gpusim.gpu.capture.rebuild import Rebuilt, rebuild
from gpusim.gpu.capture.user_step import Untouched, record_step
from tests.support.networks import CPU
from tests.support.user_steps import (
    batch,
    captured,
    eager_states,
    net,
    states_after,
    train_step,
)

Make = Callable[[Any], torch.optim.Optimizer]
O = torch.optim  # noqa: E741
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: O.SGD(p, lr=0.1),
    "SGD momentum": lambda p: O.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD foreach": lambda p: O.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: O.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam fused": lambda p: O.Adam(p, fused=True),
    "Adam fused amsgrad": lambda p: O.Adam(p, fused=True, amsgrad=True),
    "AdamW fused": lambda p: O.AdamW(p, fused=True),
    "Adagrad fused": lambda p: O.Adagrad(p, fused=True, lr_decay=0.1),
    "Adagrad": lambda p: O.Adagrad(p),
    "Adagrad foreach": lambda p: O.Adagrad(p, foreach=True),
    "Muon": lambda p: O.Muon([q for q in p if q.dim() == 2], lr=0.01),
}
#: Optimizers that count their steps on the GPU, where torch supports it.
COUNTING: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": O.Adam,
    "AdamW": O.AdamW,
    "Adamax": O.Adamax,
    "NAdam": O.NAdam,
    "RAdam": O.RAdam,
    "RMSprop": O.RMSprop,
    "Adadelta": O.Adadelta,
    "ASGD": O.ASGD,
    "Rprop": O.Rprop,
}


@pytest.fixture
def counting_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch count on the CPU, too: the same code, on this machine."""
    modules = {importlib.import_module(kind.__module__) for kind in COUNTING.values()}
    for module in (*modules, importlib.import_module("torch.optim.optimizer")):
        monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda *_, **__: ["cpu"], raising=False)


def check_as_eager(model: nn.Module, optimizer: torch.optim.Optimizer) -> Rebuilt:
    """Check that one and three runs of the trace equal the second, and the second to fourth, step of the user's
    loop.
    """
    step = train_step(model, optimizer)
    with Untouched(step).around() as untouched:
        graph = record_step(step, untouched, 0)
        found = rebuild(step, graph, options_of(step, "x", "train", "fp32", False, 0, False), CPU)
    for steps in (1, 3):
        wanted = eager_states(model, optimizer, steps + 1)
        for name, tensor in states_after(found, steps).items():
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-4, atol=1e-6)
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_recorded_update_is_the_optimizers_own_for_one_and_three_steps(name: str) -> None:
    model = net()
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    found = check_as_eager(model, optimizer)
    assert {op.phase for op in found.trace.ops} == {"forward", "backward", "optimizer"}
    assert found.trace.model.optimizer == type(optimizer).__name__
    assert found.trace.model.fixed == ()


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", COUNTING)
def test_optimizer_that_can_count_on_the_gpu_does_so_in_a_trace(name: str, foreach: bool, counting_cpu: None) -> None:
    model = net(norm=False)  # behind batch norm some gradients are pure rounding, which Adam amplifies
    optimizer = COUNTING[name](model.parameters(), lr=0.01, foreach=foreach)
    found = check_as_eager(model, optimizer)
    assert found.trace.model.fixed == ()
    assert not any(group["capturable"] for group in optimizer.param_groups)
    assert not optimizer.state
    names = {t.name for t in found.trace.tensors if t.role == "optimizer_state"}
    assert any(each.endswith(".first.weight") for each in names)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.NAdam])
def test_optimizer_that_counts_on_the_host_is_fixed_at_its_step_and_says_so(kind: Any) -> None:
    model = net(norm=False)
    optimizer = kind(model.parameters())
    step = train_step(model, optimizer)
    found = captured(step)
    assert found.trace.model.fixed
    assert all(re.search(r"numbers of aten\.|elements of '_tensor_constant", text) for text in found.trace.model.fixed)
    wanted = eager_states(model, optimizer, 2)
    for name, tensor in states_after(found, 1).items():
        torch.testing.assert_close(tensor, wanted[name])


def test_groups_of_parameters_keep_their_own_options() -> None:
    model = net()
    groups = [
        {"params": model.first.parameters(), "lr": 0.5, "momentum": 0.5},
        {"params": [*model.norm.parameters(), *model.second.parameters()]},
    ]
    check_as_eager(model, torch.optim.SGD(groups, lr=0.01))


def test_optimizer_in_the_middle_of_its_training_goes_on_from_its_state() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = batch()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    check_as_eager(model, optimizer)
    for old, new in zip(before["state"].values(), optimizer.state_dict()["state"].values(), strict=True):
        assert torch.equal(old["momentum_buffer"], new["momentum_buffer"])


def test_optimizer_of_the_users_own_class() -> None:
    class Lion(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.01})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    if not state:
                        state["m"] = torch.zeros_like(p)
                    p.add_(state["m"].lerp(p.grad, 0.1).sign_(), alpha=-group["lr"])
                    state["m"].lerp_(p.grad, 0.01)

    model = net()
    found = check_as_eager(model, Lion(model.parameters()))
    assert found.trace.model.optimizer == "Lion"
    assert {t.name for t in found.trace.tensors if t.role == "optimizer_state"} >= {"m.first.weight", "m.norm.bias"}


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.SparseAdam])
def test_optimizer_that_no_trace_can_hold_is_refused(kind: Any) -> None:
    model = net()
    with pytest.raises(CaptureError, match=f"optimizer {kind.__name__} cannot be captured: "):
        train_step(model, kind(list(model.parameters())))
    with pytest.raises(CaptureError, match=r"expected a torch.optim.Optimizer, got float"):
        train_step(model, 0.1)  # type: ignore[arg-type]
