"""Steps of the user's own: any optimizer, loss and step function; the trace gives the same results.

On the CPU, through the functions that a capture on the GPU goes through, but for times and profiles.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own habit)

from gpusim.errors import CaptureError, GpuError
from gpusim.formats.trace import Mode, Timing, Trace
from gpusim.gpu.capture import capture as capture_module
from gpusim.gpu.capture import eager
from gpusim.gpu.capture import in_memory as front
from gpusim.gpu.capture.calls import JointGraph
from gpusim.gpu.capture.in_memory import function_step, model_step, options_of
from gpusim.gpu.capture.rebuild import Rebuilt, rebuild
from gpusim.gpu.capture.user_step import Untouched, UserStep, record_step
from gpusim.gpu.profiling import ProfiledOps
from gpusim.gpu.replay.execute import InitialState, Runner
from gpusim.trace.check import check_trace
from gpusim.trace.dependencies import dependencies
from tests.support.helpers import kernel, make_trace, op, with_kernels
from tests.support.networks import CPU

CLASSES = 5


def captured(step: UserStep, mode: Mode = "train", dtype: Any = "fp32") -> Rebuilt:
    """Capture a step as a trace, checked against the model's own."""
    options = options_of(step, "tests.x", mode, dtype, False, 0, False)
    with Untouched(step).around() as untouched:
        graph = record_step(step, untouched, 0)
        found = rebuild(step, graph, options, CPU)
    check_trace(with_kernels(found.trace), "t")
    return found


def listened(step: UserStep) -> JointGraph:
    with Untouched(step).around() as untouched:
        return record_step(step, untouched, 0)


def refused(step: UserStep) -> str:
    with pytest.raises(CaptureError) as caught:
        captured(step)
    text = str(caught.value)
    assert "\n" not in text
    return text


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0, norm: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.second = nn.Linear(8, CLASSES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(self.norm(self.first(x).relu())))


def net(seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 6, generator=generator), torch.randint(0, CLASSES, (4,), generator=generator)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer | None, **options: Any) -> UserStep:
    x, y = batch()
    return model_step(model, (x,), CPU, targets=(y,), loss=F.cross_entropy, optimizer=optimizer, **options)


def states_after(found: Rebuilt, steps: int) -> dict[str, torch.Tensor]:
    """Return parameters and buffers after `steps` runs of the trace alone."""
    trace = found.trace
    runner = Runner(trace, CPU)
    runner.bind(InitialState.copy_of(found.recorded.initial).tensors)
    for _ in range(steps):
        runner.run_in_order()
    return {t.name: runner.tensors[i] for i, t in enumerate(trace.tensors) if t.role in ("parameter", "buffer")}  # type: ignore[misc]


def eager_states(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> dict[str, torch.Tensor]:
    """Return parameters and buffers of a copy after `steps` steps of its own."""
    model, optimizer = copy.deepcopy((model, optimizer))
    x, y = batch()
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def ops_of(trace: Trace, target: str) -> list[int]:
    return [index for index, op in enumerate(trace.ops) if op.target.startswith(f"aten.{target}")]


# --- Optimizers ---

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


# --- Clipping, autocast, inputs ---


@pytest.mark.parametrize("clip", [{"clip_grad_norm": 0.01}, {"clip_grad_value": 1e-3}])
def test_gradients_are_clipped_before_the_update(clip: dict[str, float]) -> None:
    model = net()
    found = captured(train_step(model, torch.optim.SGD(model.parameters(), lr=1.0), **clip))
    own = copy.deepcopy(model)
    optimizer = torch.optim.SGD(own.parameters(), lr=1.0)
    x, y = batch()
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(own(x), y).backward()
        if "clip_grad_norm" in clip:
            torch.nn.utils.clip_grad_norm_(own.parameters(), clip["clip_grad_norm"])
        else:
            torch.nn.utils.clip_grad_value_(own.parameters(), clip["clip_grad_value"])
        optimizer.step()
    after = states_after(found, 1)
    for name, parameter in own.named_parameters():
        torch.testing.assert_close(after[name], parameter)
    clipping = [op.phase for op in found.trace.ops if "norm" in op.target and "_foreach" in op.target]
    assert set(clipping) <= {"optimizer"}


def test_autocast_multiplies_in_bf16_and_keeps_parameters_in_fp32() -> None:
    model = net()
    step = train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), autocast=torch.bfloat16)
    found = captured(step, dtype="bf16")
    trace = found.trace
    assert {t.dtype for t in trace.tensors if t.role == "parameter"} == {"float32"}
    products = [op for op in trace.ops if op.target.startswith(("aten.addmm.", "aten.mm."))]
    assert products
    assert {trace.tensors[op.outputs[0]].dtype for op in products if op.outputs[0] is not None} == {"bfloat16"}


def test_autocast_in_fp16_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"autocast=torch.float16: only torch.bfloat16"):
        train_step(net(), None, autocast=torch.float16)


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, pair: dict[str, Any], scale: float, *, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.layer(pair["a"] + pair["b"][0]) * scale * mask}


def test_several_inputs_keywords_and_structures() -> None:
    torch.manual_seed(0)
    model = Several()
    pair = {"a": torch.randn(2, 6), "b": [torch.randn(2, 6)]}
    mask, targets = torch.ones(2, 3), (torch.zeros(2, 3), {"weight": torch.rand(2, 3)})

    def loss(output: dict[str, torch.Tensor], wanted: torch.Tensor, more: dict[str, torch.Tensor]) -> torch.Tensor:
        return ((output["logits"] - wanted).square() * more["weight"]).mean()

    step = model_step(model, (pair, 0.5), CPU, targets=targets, loss=loss, kwargs={"mask": mask})
    trace = captured(step).trace
    names = {t.name for t in trace.tensors if t.init is not None}
    assert names >= {"input.0", "input.1", "input.2", "target.0", "target.1", "layer.weight"}
    assert trace.model.batch == 2
    assert len([t for t in trace.tensors if t.role == "gradient"]) == 2
    assert not [op for op in trace.ops if op.phase == "optimizer"]


def test_model_that_returns_its_loss_needs_no_loss_function() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).square().mean()

    torch.manual_seed(0)
    model = Own()
    step = model_step(model, torch.randn(3, 6), CPU, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert captured(step).trace.model.batch == 3


@pytest.mark.parametrize(
    ("loss", "complaint"),
    [
        (None, "the model, without loss=, returns a tensor of shape [4, 5]"),
        (lambda output, y: 3.0, "the loss function returns float"),
        (lambda output, y: output.detach().sum(), "a number that depends on no parameter"),
    ],
)
def test_loss_that_cannot_be_differentiated_is_refused(loss: Any, complaint: str) -> None:
    model, (x, y) = net(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert complaint in refused(model_step(model, x, CPU, targets=y, loss=loss, optimizer=optimizer))


def test_inference_is_forward_alone_in_the_models_mode() -> None:
    model = net().eval()
    trace = captured(model_step(model, batch()[0], CPU), "infer").trace
    assert {op.phase for op in trace.ops} == {"forward"}
    assert trace.model.optimizer is None
    assert not [op for op in trace.ops if op.target.startswith("aten.") and set(op.writes) - set(op.outputs)]


# --- Modules ---


def test_dropout_stays_random_and_gives_the_models_own_results() -> None:
    model = net(dropout=0.5)
    found = captured(train_step(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    assert len([op for op in found.trace.ops if op.random]) == 1
    assert found.loss_error == 0.0


def test_layers_and_phases_are_those_of_the_model() -> None:
    model = net()
    trace = captured(train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))).trace
    layers = {(op.phase, op.layer) for op in trace.ops if op.target.startswith(("aten.addmm.", "aten.mm."))}
    assert layers == {("forward", "first"), ("forward", "second"), ("backward", "first"), ("backward", "second")}
    assert {op.layer for op in trace.ops if op.phase == "optimizer"} == {""}


def test_shared_and_frozen_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(6, 6).requires_grad_(False)
            self.body = nn.Linear(6, 6)
            self.again = self.body

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.again(self.body(self.frozen(x)).relu())

    torch.manual_seed(0)
    model = Tied()
    x, y = batch()
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    found = captured(model_step(model, x, CPU, targets=y, loss=F.cross_entropy, optimizer=optimizer))
    assert len([t for t in found.trace.tensors if t.role == "parameter"]) == 4
    assert len([t for t in found.trace.tensors if t.role == "gradient"]) == 2


def test_everything_of_the_users_is_as_before() -> None:
    model = net(dropout=0.5)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    x, y = batch()
    F.cross_entropy(model(x), y).backward()
    gradients = [p.grad for p in model.parameters()]
    values = [g.clone() for g in gradients if g is not None]
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    captured(model_step(model, x, CPU, targets=y, loss=F.cross_entropy, optimizer=optimizer))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not optimizer.state
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(torch.equal(v, g) for v, g in zip(values, gradients, strict=True) if g is not None)


def test_everything_is_as_before_after_a_refusal() -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(batch()[0]).sum()
        loss.backward()
        optimizer.step()
        return loss.item()

    refused(function_step(step, (), CPU))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())


# --- Step functions ---


class Trainer:
    """A user's own training loop, with its objects as attributes."""

    def __init__(self, **options: Any) -> None:
        self.model = net(**options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.seen = 0

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss

    def accumulate(self, x: torch.Tensor, y: torch.Tensor) -> None:
        for part in (slice(0, 2), slice(2, 4)):
            (F.cross_entropy(self.model(x[part]), y[part]) / 2).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_step_function_is_recorded_as_it_is_with_its_model_and_optimizer_found() -> None:
    trainer = Trainer(dropout=0.5)
    found = captured(function_step(trainer.step, batch(), CPU))
    assert [op.phase for op in found.trace.ops][-1] == "optimizer"
    assert {op.phase for op in found.trace.ops} == {"forward", "backward", "optimizer"}
    assert found.trace.model.optimizer == "SGD"
    assert found.trace.model.network == "step"
    names = {t.name for t in found.trace.tensors if t.init is not None}
    assert names >= {"first.weight", "norm.running_mean", "momentum_buffer.second.weight", "input.0", "input.1"}
    assert {op.layer for op in found.trace.ops if op.phase == "backward"} >= {"first", "norm", "second"}
    assert len(found.recorded.outputs) == 1


def test_step_function_accumulates_gradients_over_parts_of_a_batch() -> None:
    trainer = Trainer()
    own = copy.deepcopy(trainer)
    found = captured(function_step(trainer.accumulate, batch(), CPU))
    for _ in range(4):
        own.accumulate(*batch())
    after = states_after(found, 3)
    for name, parameter in own.model.named_parameters():
        torch.testing.assert_close(after[name], parameter)
    assert len(ops_of(found.trace, "addmm")) == 4 - 2  # the second layer has no bias


def test_gradients_that_nobody_clears_are_added_to_as_in_the_users_loop() -> None:
    model = net()
    x, y = batch()

    def step() -> None:
        F.cross_entropy(model(x), y).backward()

    trace = captured(function_step(step, (), CPU)).trace
    added = {t.name for t in trace.tensors if t.init is not None and t.name.startswith("grad.")}
    assert added == {f"grad.{name}" for name, _ in model.named_parameters()}
    assert all(parameter.grad is None for parameter in model.parameters())


def line_of(function: Callable[..., Any], text: str) -> str:
    lines, first = inspect.getsourcelines(function)
    return f"{__file__}:{first + next(i for i, line in enumerate(lines) if text in line)}: "


def steps_that_cannot_be_captured() -> dict[str, tuple[Callable[..., Any], str]]:
    model, (x, _) = net(), batch()
    calls = {"made": 0}

    def item() -> Any:
        value = model(x).sum()
        return value.item()  # here

    def condition() -> Any:
        out = model(x)
        if out.sum() > 0:  # here
            return out * 2
        return out

    def to_numpy() -> Any:
        return model(x).detach().numpy()  # here

    def to_list() -> Any:
        return model(x).detach().tolist()  # here

    def shape_from_data() -> Any:
        out = model(x)
        return out[out > 0]  # here

    def shape_from_changing_data() -> Any:
        model.zero_grad()
        out = model(x)
        out[out > 0].sum().backward()  # here
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad)  # type: ignore[arg-type]

    def sparse() -> Any:
        table = torch.ones(4, 2, requires_grad=True)
        loss = F.embedding(torch.tensor([1, 3]), table, sparse=True).sum()
        return torch.autograd.grad(loss, table)  # here

    def python_state() -> Any:
        calls["made"] += 1
        out = model(x)
        if calls["made"] % 2:
            out = out * 2  # here
        return out.relu()

    return {
        "item": (item, "reads the elements of a tensor (item(), or a condition)"),
        "condition": (condition, "reads the elements of a tensor (item(), or a condition)"),
        "to_numpy": (to_numpy, "reads the elements of a tensor (numpy())"),
        "to_list": (to_list, "reads the elements of a tensor (tolist())"),
        "shape_from_data": (shape_from_data, "depends on data"),
        "shape_from_changing_data": (shape_from_changing_data, "depends on data"),
        "sparse": (sparse, "makes a tensor of layout sparse_coo"),
        "python_state": (python_state, "the step is not the same each time"),
    }


@pytest.mark.parametrize("case", steps_that_cannot_be_captured())
def test_step_that_cannot_be_captured_is_refused_with_the_line_of_the_users_code(case: str) -> None:
    function, complaint = steps_that_cannot_be_captured()[case]
    text = refused(function_step(function, (), CPU))
    assert text.startswith(line_of(function, "# here")), text
    assert complaint in text


def test_step_without_operators_is_refused() -> None:
    assert refused(function_step(lambda x: x, batch()[0], CPU)) == "the step of 'lambda' calls no operator on cpu"


def test_squeeze_in_place_may_give_back_an_earlier_tensor() -> None:
    """Found with `torch.func.vmap` of a linear layer, which squeezes what it has just unsqueezed."""
    weight = torch.randn(6, 1)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x @ weight
        y.unsqueeze(2).squeeze_(2).mul_(2.0)
        return y + 1.0

    x, _ = batch()
    found = captured(function_step(step, x, CPU), mode="infer")
    runner = Runner(found.trace, CPU)
    runner.bind(InitialState.copy_of(found.recorded.initial).tensors)
    runner.run_in_order()
    (result,) = (index for index, tensor in enumerate(found.trace.tensors) if tensor.role == "output")
    torch.testing.assert_close(runner.tensors[result], step(x))
    (squeezed,) = ops_of(found.trace, "squeeze_")
    (scaled,) = ops_of(found.trace, "mul_")
    assert squeezed in dependencies(found.trace)[scaled]


def test_error_of_the_users_own_code_is_one_line_with_its_place() -> None:
    model = net()

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    text = refused(function_step(step, torch.randn(2, 3), CPU))
    assert re.search(r"test_capture_user.py:\d+: the step of 'step' fails: mat1 and mat2", text), text


def test_operator_that_replay_does_not_run_is_refused_with_its_line() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.qr(x)[0]  # here

    text = refused(function_step(step, torch.randn(3, 3), CPU))
    assert text.startswith(line_of(step, "# here")), text
    assert "aten.linalg_qr.default" in text
    assert "allow-list" in text


def test_number_that_the_host_changes_from_step_to_step_is_named_as_fixed() -> None:
    model, x = net(), batch()[0]
    rate = {"now": 1.0}

    def step() -> torch.Tensor:
        rate["now"] *= 0.5
        return model(x) * rate["now"]  # here

    (fixed,) = captured(function_step(step, (), CPU)).trace.model.fixed
    assert fixed == f"{line_of(step, '# here')}numbers of aten.mul.Tensor"


def test_constants_may_be_read() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        scale = torch.tensor(2.0) * 3
        return x * scale if scale.item() > 1 else x

    trace = captured(function_step(step, torch.randn(3), CPU), "infer").trace
    assert len(ops_of(trace, "mul")) >= 1


# --- What is asked for ---


def test_names_batch_and_dtype_follow_from_the_step() -> None:
    model, x = net(), batch()[0]
    options = options_of(model_step(model, x, CPU), "a.B", "infer", None, False, 0, False)
    assert (options.batch, options.dtype, options.memory_format) == (4, "tf32", "contiguous")
    options = options_of(model_step(model.bfloat16(), x.bfloat16(), CPU), "a.B", "infer", None, False, 0, False)
    assert options.dtype == "bf16"
    assert model_step(model, x, CPU).network == "net"
    assert model_step(model, x, CPU, name="mine").network == "mine"


def test_dtype_that_no_trace_has_is_refused() -> None:
    step = model_step(net().half(), batch()[0].half(), CPU)
    with pytest.raises(CaptureError, match=r"inputs of torch.float16: a step must compute in float32 or bfloat16"):
        options_of(step, "a.B", "infer", None, False, 0, False)
    with pytest.raises(CaptureError, match=r"dtype 'fp8': one of fp32, tf32, bf16"):
        options_of(model_step(net(), batch()[0], CPU), "a.B", "infer", "fp8", False, 0, False)  # type: ignore[arg-type]


def test_model_on_another_device_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"'first.weight' is on meta; move the model and its inputs to cpu first"):
        model_step(net().to("meta"), batch()[0], CPU)


def test_what_is_no_model_and_no_function_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"model: expected a torch.nn.Module, got int"):
        model_step(3, (), CPU)  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match=r"step function: expected a callable, got int"):
        function_step(3, (), CPU)  # type: ignore[arg-type]


def test_without_a_gpu_both_say_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for ask in (lambda: front.capture(net(), batch()[0]), lambda: front.capture_step(lambda: None)):
        with pytest.raises(GpuError, match=r"^no GPU: "):
            ask()


# --- All of a capture, with the GPU's edge replaced ---


@pytest.fixture
def no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake times and profiles; everything else runs as on a GPU."""

    class Recorder:
        def __init__(self, *_: Any) -> None:
            pass

        def record(self, *_: Any, **__: Any) -> Any:
            return self

        def replay(self) -> None:
            pass

    def profile(runner: Runner, *_: Any) -> ProfiledOps:
        return ProfiledOps([(kernel(1000),) if op.writes else () for op in runner.trace.ops], 1.0, (), [])

    timing = Timing(median_ns=1000, lo_ns=1000, hi_ns=1000, rounds=1)
    gpu = make_trace([op("a", "x")]).provenance.gpu
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(front, "require_gpu", lambda: CPU)
    monkeypatch.setattr(eager, "EAGER_ROUNDS", 2)
    monkeypatch.setattr(capture_module, "host_times", lambda runner, *_: [5000] * len(runner.trace.ops))
    monkeypatch.setattr(capture_module, "GraphRecorder", Recorder)
    monkeypatch.setattr(capture_module, "gpu_facts", lambda replay: gpu)
    monkeypatch.setattr(capture_module, "profile_ops", profile)
    monkeypatch.setattr(capture_module, "op_workspaces", lambda runner, *_: [0] * len(runner.trace.ops))
    monkeypatch.setattr(capture_module, "alone", lambda *_: (timing, None))


def test_capture_of_a_model_gives_a_whole_trace_and_leaves_the_model_alone(no_gpu_needed: None) -> None:
    model, (x, y) = net(), batch()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    before, flags = copy.deepcopy(model.state_dict()), torch.backends.cuda.matmul.allow_tf32
    trace = front.capture(model, (x,), targets=(y,), loss=F.cross_entropy, optimizer=optimizer, clip_grad_norm=1.0)
    assert trace.name == "net-train-b4"
    assert trace.model.spec == "tests.gpu.test_capture_user.Net"
    assert trace.ground_truth is not None
    assert trace.ground_truth.eager.median_ns > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not optimizer.state
    assert torch.backends.cuda.matmul.allow_tf32 == flags


def test_capture_of_a_step_function_gives_a_whole_trace_with_one_pace(no_gpu_needed: None) -> None:
    trainer = Trainer()
    before = copy.deepcopy(trainer.model.state_dict())
    trace = front.capture_step(trainer.step, batch(), name="mine")
    assert trace.name == "mine-train-b4"
    assert trace.ground_truth is not None
    assert len({op.host_ns for op in trace.ops}) == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.model.state_dict().items())
    assert not trainer.optimizer.state


def test_step_of_one_pace_scales_all_ops_alike() -> None:
    trace = make_trace([op("a", "x"), op("b", "y")])
    assert eager.paced(trace, [100, 300], {None: 200}) == [50, 150]
    assert eager.paced(trace, [0, 0], {None: 200}) == [0, 0]


def test_process_of_its_own_does_not_run_the_users_script_again(tmp_path: Path) -> None:
    """A script without `if __name__ == "__main__"` captures, too."""
    script = tmp_path / "script.py"
    lines = "import os", "from gpusim.gpu.isolate import alone", "print('ran', alone(os.getpid) != os.getpid())"
    script.write_text("\n".join(lines))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    found = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert found.stdout == "ran True\n", found.stderr
