"""Models and losses of the user's own: the trace gives the same results, and nothing of the user's is changed."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F  # noqa: N812  (torch's own habit)

from gpusim.errors import CaptureError, GpuError
from gpusim.formats.trace import Timing
from gpusim.gpu.capture import capture as capture_module
from gpusim.gpu.capture import eager
from gpusim.gpu.capture import in_memory as front
from gpusim.gpu.capture.calls import State
from gpusim.gpu.capture.in_memory import function_step, model_step, options_of
from gpusim.gpu.capture.listen import Listener
from gpusim.gpu.profiling import ProfiledOps
from gpusim.gpu.replay.execute import Runner
from tests.support.helpers import kernel, make_trace, op
from tests.support.networks import CPU
from tests.support.user_steps import (
    Trainer,
    batch,
    captured,
    net,
    refused,
    states_after,
    train_step,
)

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


def test_model_on_another_gpu_is_refused() -> None:
    """A graph on one GPU would hold no kernels of another. Fake tensors have a device, but no memory there."""
    first = torch.device("cuda", 0)
    with FakeTensorMode():
        model = nn.LayerNorm(4, device="cuda:1")
        with pytest.raises(CaptureError, match=r"'weight' is on cuda:1, not on cuda:0: call torch.cuda.set_device"):
            model_step(model, torch.zeros(3, 4, device=first), first)
        with pytest.raises(CaptureError, match=r"the step computes on cuda:1, too; all of it must be on the same GPU"):
            Listener(first, [State("table", "constant", model.weight)])


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
    assert trace.model.spec == "tests.support.user_steps.Net"
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
