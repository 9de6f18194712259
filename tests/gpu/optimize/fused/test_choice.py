"""ATen's kernels and Inductor's are tried within the budget, or Inductor's are left out with a reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own habit)

from gpusim.errors import CaptureError
from gpusim.formats.trace import Trace
from gpusim.gpu.capture.calls import Call
from gpusim.gpu.inductor import own_step, versions
from gpusim.gpu.optimize import captured, choose, make
from gpusim.gpu.optimize import fused as fusing
from gpusim.gpu.optimize.captured import Captured
from gpusim.gpu.optimize.choose import Wanted
from gpusim.gpu.optimize.executors import CpuExecutor
from tests.support.fused_steps import (
    adam,
    by_inductor,
    close,
)
from tests.support.optimizing import batches, fast, net, same_states


def test_both_are_tried_and_the_faster_is_reported() -> None:
    model = net().eval()
    x = batches(1)[0][0]
    lines: list[str] = []
    step = fast(model, x, budget_s=choose.KERNELS_FROM_S, say=lines.append)
    assert [line.partition(": ")[0] for line in lines if "predicted" in line] == [
        "ATen's kernels",
        "Inductor's kernels (default)",
    ]
    assert step.gain.frontend == "inductor"  # fewer kernels, by nominal times
    assert step.gain.without == ""
    plain = fast(model, x, frontends=("aten",))
    assert step.gain.optimized_ns < plain.gain.optimized_ns
    assert plain.gain.frontend == "aten"
    assert "kernels of ATen" in plain.gain.text
    with torch.no_grad():
        close(step(x), model(x))


def test_trials_of_both_in_turns_leave_the_users_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best schedules of both front ends are timed beside each other, by runs that train the user's model."""
    groups: list[int] = []

    def in_turns(each: Any, executor: Any) -> Any:
        groups.append(len(each))
        return choose.in_turns(each, executor)

    monkeypatch.setattr(make, "_promising", list)
    monkeypatch.setattr(make, "in_turns", in_turns)
    model = net()
    before, optimizer = copy.deepcopy(model.state_dict()), adam(model.parameters())
    fast(model, batches(1)[0], loss=F.cross_entropy, optimizer=optimizer, budget_s=choose.KERNELS_FROM_S)
    assert groups == [2]
    same_states(model.state_dict(), before)
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("wanted", "tried"),
    [
        (Wanted(2, None, None), True),
        (Wanted(2, choose.KERNELS_FROM_S / 2, None), False),
        (Wanted(2, choose.KERNELS_FROM_S / 2, None, frontends=("inductor",)), True),
        (Wanted(2, None, None, frontends=("aten",)), False),
    ],
)
def test_short_searches_compile_nothing(wanted: Wanted, tried: bool) -> None:
    assert wanted.inductor == tried


def test_searches_of_both_share_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets: list[float] = []
    original = choose.explore

    def explore(graph: Any, **options: Any) -> Any:
        budgets.append(options["budget_s"])
        return original(graph, **{**options, "budget_s": 0.02})

    monkeypatch.setattr(choose, "explore", explore)
    fast(nn.Linear(6, 3), batches(1)[0][0], budget_s=8.0)
    assert budgets == [4.0, 4.0]


class TwoTypes(nn.Module):
    """Two buffers in one memory, under different data types."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("floats", torch.ones(6))
        self.register_buffer("bits", self.floats.view(torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.floats).relu() + (self.bits % 7)


def left_out(model: nn.Module, x: torch.Tensor) -> str:
    """Return why a step has no kernels of Inductor's; ATen's run it, with a notice."""
    lines: list[str] = []
    step = fast(model, x, budget_s=choose.KERNELS_FROM_S, say=lines.append)
    assert step.gain.frontend == "aten"
    (line,) = [line for line in lines if line.startswith("left out Inductor's kernels (")]
    assert line.endswith(step.gain.without)
    assert step.gain.text.endswith(f"; without Inductor's kernels: {step.gain.without}")
    assert "\n" not in step.gain.text
    with torch.no_grad():
        close(step(x), model(x))
    return str(step.gain.without)


def test_what_the_seam_refuses_runs_as_aten_calls() -> None:
    model, x = TwoTypes(), batches(1)[0][0]
    assert "share memory under different data types" in left_out(model, x)
    with pytest.warns(UserWarning, match=r"share memory under different data types.*runs as it is"):
        assert fast(model, x, frontends=("inductor",)) is model


def test_another_torch_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "series", lambda: "2.12")
    assert "knows torch 2.11 and 2.13" in left_out(net().eval(), batches(1)[0][0])


def test_kernels_that_compute_something_else_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    original = captured.functions_of

    def functions_of(trace: Any, compiling: Any) -> Any:
        return [
            (lambda *args: None) if op.source else function
            for op, function in zip(trace.ops, original(trace, compiling), strict=True)
        ]

    monkeypatch.setattr(captured, "functions_of", functions_of)
    assert "away from eager's" in left_out(net().eval(), batches(1)[0][0])


def test_torchs_own_errors_leave_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("no such kernel\nand a long story")

    from gpusim.gpu.inductor import own_step

    monkeypatch.setattr(own_step, "compiled_calls", broken)
    assert "no such kernel" in left_out(net().eval(), batches(1)[0][0])


class Unmeasured(CpuExecutor):
    """Executor that cannot tell which kernels belong to Inductor's ops."""

    def measured(self, captured: Captured, eager_ns: int, say: Callable[[str], None]) -> Trace:
        if captured.frontend == "inductor":
            raise CaptureError("the profiler saw no kernel of this step")
        return super().measured(captured, eager_ns, say)


def test_kernels_that_cannot_be_measured_are_left_out() -> None:
    step = fast(net().eval(), batches(1)[0][0], budget_s=choose.KERNELS_FROM_S, executor=Unmeasured())
    assert (step.gain.frontend, step.gain.without) == ("aten", "the profiler saw no kernel of this step")


def test_compiling_changes_nothing_of_the_users() -> None:
    model = net(0.5)
    optimizer = adam(model.parameters())
    before, state, random = repr(model.state_dict()), repr(optimizer.state_dict()), torch.get_rng_state()
    by_inductor(model, batches(1)[0], loss=F.cross_entropy, optimizer=optimizer)
    assert (repr(model.state_dict()), repr(optimizer.state_dict())) == (before, state)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_memory_that_begins_at_an_odd_place_is_refused() -> None:
    from types import SimpleNamespace

    def state(begin: int, offset: int = 0) -> Any:
        storage = SimpleNamespace(data_ptr=lambda: begin)
        tensor = SimpleNamespace(
            untyped_storage=lambda: storage, data_ptr=lambda: begin + offset, device=torch.device("cuda")
        )
        return SimpleNamespace(live={0: tensor}, trace=SimpleNamespace(tensors=[SimpleNamespace(name="weight")]))

    fusing._check_aligned(state(64))
    for odd in (state(68), state(64, offset=4)):
        with pytest.raises(CaptureError, match="the memory of 'weight' does not begin at a multiple of 16 bytes"):
            fusing._check_aligned(odd)


def test_only_updates_in_place_are_kept_from_inductor() -> None:
    """`_fused_rms_norm` has their prefix, but is a layer."""

    def call(function: Any) -> Call:
        return Call(function.overloadpacket.__name__, function, (), {}, "forward", "")

    aten = torch.ops.aten
    calls = [call(each) for each in (aten._fused_rms_norm.default, aten.mm.default, aten._fused_adam_.default)]
    assert own_step.split(calls) == (calls[:2], calls[2:])
