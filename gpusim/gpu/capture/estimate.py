"""Estimated traces without a GPU: operators recorded on meta tensors, kernel times from a model."""

from __future__ import annotations

import contextlib
import datetime
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch.overrides import TorchFunctionMode

from gpusim.errors import CaptureError
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.trace import Gpu, Trace
from gpusim.gpu.capture.capture import build_step
from gpusim.gpu.capture.joint_graph import joint_graph
from gpusim.gpu.capture.options import CaptureOptions
from gpusim.gpu.capture.rebuild import bare_trace
from gpusim.gpu.capture.record import record
from gpusim.gpu.capture.users_errors import line_of
from gpusim.gpu.replay.allowlist import not_listed
from gpusim.plan.estimated_kernels import BASIS, with_estimated_kernels
from gpusim.trace.check import check_trace

META = torch.device("meta")


def capture_estimated(options: CaptureOptions, hardware: HardwareModel, say: Callable[[str], None]) -> Trace:
    """Return the step of `options` as a trace for `hardware`'s GPU, made without that GPU: exact shapes, estimated
    times.

    Weights take host memory, activations none. Raises `CaptureError` for a step that depends on the elements of
    tensors, or has an operator without shape inference in torch.
    """
    if options.frontend != "aten" or options.variants:
        raise CaptureError("an estimate has neither variants nor kernels of Inductor: those are known where they run")
    say("recording its operators on tensors without elements")
    with as_on_a_gpu(), _refusing():
        step = build_step(options, META)
        recorded = record(joint_graph(step), own=True)
    bare = bare_trace(options, step, recorded, own=True)
    gpu = Gpu(
        name=hardware.gpu, driver="", cuda="", torch=str(torch.__version__), cudnn="", sm_clock_mhz=0, mem_clock_mhz=0
    )
    provenance = msgspec.structs.replace(
        bare.provenance, gpu=gpu, date=datetime.date.today().isoformat(), estimated=f"{BASIS} of {hardware.name}"
    )
    trace = with_estimated_kernels(msgspec.structs.replace(bare, provenance=provenance), hardware)
    check_trace(trace, options.spec)
    return trace


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Turn torch's errors about meta tensors into one line."""
    try:
        yield
    except _NotListedError as cause:
        place = line_of(cause)
        raise CaptureError(f"{place}: {cause}" if place else str(cause)) from cause
    except NotImplementedError as cause:
        problem = str(cause).partition("\n")[0]
        raise CaptureError(f"the step cannot be estimated: {problem}; capture it on its GPU") from cause


class _NotListedError(CaptureError):
    """An operator that a capture on the GPU refuses, where another device decomposes it."""


def _cudnn_rnn(*args: object, **kwargs: object) -> torch.Tensor:
    raise _NotListedError(not_listed("aten._cudnn_rnn.default"))


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Route attention, dropout and recurrent layers to the operators of a GPU, where other devices get a decomposition.

    A mode does not see calls from within torch's own functions, such as attention in `nn.MultiheadAttention`; for those
    the names are replaced.
    """
    functional = torch.nn.functional
    attention, dropout = functional.scaled_dot_product_attention, functional.dropout
    instead: dict[Any, Callable[..., torch.Tensor]] = {
        attention: _attention,
        dropout: _dropout,
        torch.dropout: lambda input, p, train: _dropout(input, p, train),
        **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _cudnn_rnn),
    }
    try:
        functional.scaled_dot_product_attention, functional.dropout = _attention, _dropout
        with _Instead(instead):
            yield
    finally:
        functional.scaled_dot_product_attention, functional.dropout = attention, dropout


class _Instead(TorchFunctionMode):
    """Mode that replaces some of torch's functions."""

    def __init__(self, instead: Mapping[Any, Callable[..., torch.Tensor]]) -> None:
        super().__init__()
        self.instead = instead

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        called = self.instead.get(function, function)
        return called(*args, **(kwargs or {}))


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Dropout as on a GPU, with a mask of one byte per element (aten/src/ATen/native/Dropout.cpp)."""
    if inplace:
        return torch.ops.aten.dropout_.default(input, p, training)
    if training and 0.0 < p < 1.0 and input.numel():
        return torch.ops.aten.native_dropout.default(input, p, training)[0]
    return torch.ops.aten.dropout.default(input, p, training)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    shape = (*query.shape[:-1], value.shape[-1])
    bias = attn_mask
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill(bias.logical_not(), -math.inf)
    if bias is not None:
        bias = bias.expand(*query.shape[:-1], key.shape[-2])
    if query.dim() < 4:
        query, key, value = (
            t.reshape(1, -1, *t.shape[-2:]) if t.dim() > 2 else t[None, None] for t in (query, key, value)
        )
        bias = bias if bias is None else bias.reshape(query.shape[0], -1, *bias.shape[-2:])
        return _attention(query, key, value, bias, dropout_p, is_causal, scale).reshape(shape)
    needs_gradient = any(t.requires_grad for t in (query, key, value))
    result = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, needs_gradient, dropout_p, is_causal, scale=scale
    )
    return result[0]
