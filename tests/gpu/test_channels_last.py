"""The style that makes a step's own graph channels last, on the CPU: results, strides and copies."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from gpusim.errors import CaptureError
from gpusim.gpu.capture.in_memory import function_step, options_of
from gpusim.gpu.capture.rebuild import Rebuilt, bare_trace, check_against_calls
from gpusim.gpu.capture.record import record
from gpusim.gpu.capture.user_step import Untouched, record_step
from gpusim.gpu.inductor import step as step_module
from gpusim.gpu.inductor.own_step import own_step
from gpusim.gpu.inductor.step import inductor_step
from gpusim.gpu.inductor.styles import CHANNELS_LAST, DEFAULT_STYLE
from tests.gpu.test_inductor import TOLERANCE, check_orders
from tests.support.networks import CPU, on_cpu


@pytest.mark.parametrize("name", ["grouped", "up_and_down", "indexed", "layouts"])
def test_training_ends_as_eager_does_in_any_legal_order(name: str) -> None:
    found = on_cpu(name, "train")
    recorded = inductor_step(found.graph, found.recorded, True, CHANNELS_LAST)
    options = dataclasses.replace(found.options, frontend="inductor")
    trace = bare_trace(options, found.step, recorded)
    check_orders(trace, recorded)
    calls = Rebuilt(found.trace, found.recorded, 0.0, 0.0)
    assert max(check_against_calls(calls, trace, recorded, found.graph, options, CPU)) < TOLERANCE


def strides(tensor: Any) -> list[int]:
    return [step for size, step in zip(tensor.shape, tensor.stride, strict=True) if size > 1]


def test_convolutions_are_channels_last_and_results_as_they_were() -> None:
    """Outputs, and gradients of weights; the step ends with eager's values in these strides."""
    found = on_cpu("layouts", "train")
    made = own_step(found.graph, found.recorded, True, CHANNELS_LAST)
    for mine, theirs in zip(
        (*made.outputs, *made.gradients), (*found.recorded.outputs, *found.recorded.gradients), strict=True
    ):
        assert strides(made.tensors[mine]) == strides(found.recorded.tensors[theirs])
    calls = [op for op in made.ops if op.target.startswith("aten.convolution")]
    assert {op.target for op in calls} == {"aten.convolution.default", "aten.convolution_backward.default"}
    for op in calls:
        for argument in op.args[:2]:
            tensor = made.tensors[argument["tensor"]]
            layout = torch.empty(tensor.shape).to(memory_format=torch.channels_last).stride()
            assert strides(tensor) == [step for size, step in zip(tensor.shape, layout, strict=True) if size > 1]


def copies(monkeypatch: pytest.MonkeyPatch, name: str, style: str) -> list[str]:
    """Return what each kernel of a training step reads that only copies it in another order."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    read: list[str] = []
    original = step_module.read_lines

    def is_copy(node: Any) -> bool:
        data = node.data if isinstance(node, ir.ComputedBuffer) else None
        return isinstance(data, ir.Pointwise) and data.num_reads() == 1 and data.inner_fn_opcount().num_ops == 1

    def noting(*given: Any) -> Any:
        for node in V.graph.scheduler.nodes:
            parts = [part.node for part in node.get_nodes()]
            if all(map(is_copy, parts)):
                read.extend(dep.name for part in parts for dep in part.get_reads())
        return original(*given)

    with monkeypatch.context() as patched:
        patched.setattr(step_module, "read_lines", noting)
        found = on_cpu(name, "train")
        inductor_step(found.graph, found.recorded, True, style)
    return read


def test_no_activation_is_copied_for_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor by itself copies activations for convolutions; here only the batch and weights, each once.

    The network has no pooling, whose gradient torch scatters by index.
    """
    before, after = (copies(monkeypatch, "residual", style) for style in (DEFAULT_STYLE, CHANNELS_LAST))
    assert all(name.startswith("arg") for name in after)
    assert len(set(after)) == len(after) < len(before)


def test_a_step_that_addresses_images_by_strides_is_refused() -> None:
    layer = nn.Conv2d(3, 4, 1).requires_grad_(False)

    def step(x: torch.Tensor) -> torch.Tensor:
        return layer(x).as_strided((2, 4), (100, 25)).relu()

    user = function_step(step, torch.randn(2, 3, 5, 5), CPU)
    options = options_of(user, "test.step", "infer", "fp32", False, 0, False, "inductor")
    with Untouched(user).around() as untouched:
        graph = record_step(user, untouched, options.seed)
    plain = record(graph)
    inductor_step(graph, plain, False)
    with pytest.raises(CaptureError, match="addresses memory of images by strides"):
        inductor_step(graph, plain, False, CHANNELS_LAST)
