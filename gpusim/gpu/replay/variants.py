"""Running an op under other settings of its library: other algorithms, other layouts, other kernels.

What torch lets one choose for a single call: cuDNN or not, its autotuner, deterministic algorithms, TF32, the layout of
the arguments, the library of matrix products, and the same result by other operators (`compositions`). Conversions of
layouts are part of the variant, so the tensors between ops stay as the trace has them, and so do all other kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from gpusim.formats.trace import Op, Tensor, Trace, VariantSettings
from gpusim.gpu.quiet import quiet
from gpusim.gpu.replay.decompositions import composed, compositions_for
from gpusim.gpu.replay.fusion import Call, Kept, fused
from gpusim.gpu.replay.tensors import flat_results

#: Operators that have variants, beside those of `compositions`.
CONVOLUTIONS = ("aten.convolution.default", "aten.convolution_backward.default")
PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default")

#: What is tried for each: name and settings.
CONVOLUTION_SETTINGS: dict[str, VariantSettings] = {
    "benchmark": VariantSettings(benchmark=True),
    "deterministic": VariantSettings(deterministic=True),
    "channels_last": VariantSettings(memory_format="channels_last"),
    "channels_last_benchmark": VariantSettings(memory_format="channels_last", benchmark=True),
    "no_tf32": VariantSettings(tf32=False),
    "native": VariantSettings(cudnn=False),
}
PRODUCT_SETTINGS: dict[str, VariantSettings] = {
    "cublas": VariantSettings(blas="cublas"),
    "cublaslt": VariantSettings(blas="cublaslt"),
    "no_tf32": VariantSettings(tf32=False),
}


def settings_for(op: Op, trace: Trace) -> dict[str, VariantSettings]:
    """The settings to try for an op, by name; none for most ops, and none that ask for what already is."""
    tried: dict[str, VariantSettings] = {}
    if op.target in CONVOLUTIONS:
        tried = CONVOLUTION_SETTINGS
    elif op.target in PRODUCTS:
        tried = PRODUCT_SETTINGS
    else:
        return compositions_for(op, trace)
    return {
        name: settings
        for name, settings in tried.items()
        if (settings.tf32 is None or trace.model.dtype == "tf32")
        and (settings.memory_format is None or trace.model.memory_format == "contiguous")
    }


@contextmanager
def applied(settings: VariantSettings) -> Iterator[None]:
    """The settings hold within; afterwards everything is as before. Process-wide: one thread at a time."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, matmul.allow_tf32)
    library = torch.backends.cuda.preferred_blas_library() if settings.blas is not None else None
    try:
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic = (
            settings.cudnn,
            settings.benchmark,
            settings.deterministic,
        )
        if settings.tf32 is not None:
            cudnn.allow_tf32 = matmul.allow_tf32 = settings.tf32
        if settings.blas is not None:
            _set_library_quietly(settings.blas)
            torch.backends.cuda.preferred_blas_library(settings.blas)
        yield
    finally:
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, matmul.allow_tf32 = before
        if library is not None:
            torch.backends.cuda.preferred_blas_library(library)


@functools.cache
def _set_library_quietly(name: str) -> None:
    """torch says once in a process, at the first library set, that choosing one is experimental."""
    with quiet():
        torch.backends.cuda.preferred_blas_library(name)


def call_variant(
    function: Any, args: list[Any], kwargs: dict[str, Any], settings: VariantSettings, outputs: list[Tensor | None]
) -> list[Any]:
    """Call an operator under these settings; results have the strides of `outputs`, flat. Raises what it raises.

    What cuDNN's autotuner is to choose runs in a thread of its own. torch keeps the algorithm of a convolution's first
    call in a thread for every further one of the same arguments, whether the autotuner is on by then or not: in one
    thread, either all calls of these arguments would have been autotuned or none.
    """
    if not settings.benchmark:
        return call_here(function, args, kwargs, settings, outputs)
    stream = torch.cuda.current_stream() if torch.cuda.is_available() else None

    def call() -> list[Any]:
        with torch.no_grad(), torch.cuda.stream(stream):
            return call_here(function, args, kwargs, settings, outputs)

    return _autotuned().submit(call).result()


@functools.cache
def _autotuned() -> ThreadPoolExecutor:
    """The thread of autotuned calls, one for the life of the process."""
    return ThreadPoolExecutor(1, thread_name_prefix="autotuned")


def call_here(
    function: Any, args: list[Any], kwargs: dict[str, Any], settings: VariantSettings, outputs: list[Tensor | None]
) -> list[Any]:
    """As `call_variant`, in this thread."""
    if settings.composition is not None:
        function = composed(str(function), settings.composition)
    with applied(settings):
        if settings.memory_format is not None:
            layout = torch.channels_last if settings.memory_format == "channels_last" else torch.contiguous_format
            args = [_converted(value, layout) for value in args]
            kwargs = {name: _converted(value, layout) for name, value in kwargs.items()}
        results = flat_results(function(*args, **kwargs))
    return [_as_traced(part, tensor) for part, tensor in zip(results, outputs, strict=True)]


def call_chain(
    targets: tuple[str, ...],
    calls: list[Call],
    settings: VariantSettings,
    outputs: list[list[Tensor | None]],
    kept: Kept,
) -> list[list[Any]]:
    """Call operators that feed each other as one, under these settings; results as those of `call_variant`, by op."""
    assert settings.composition is not None
    function = fused(targets, settings.composition)
    with applied(settings):
        results = function(calls, settings.memory_format == "channels_last", kept)
    # cuDNN's batch norm returns one tensor more than torch's, which is left out there.
    return [
        [_as_traced(part, tensor) for part, tensor in zip(parts, tensors, strict=False)]
        for parts, tensors in zip(results, outputs, strict=True)
    ]


def _converted(value: Any, layout: torch.memory_format) -> Any:
    """A 4-dimensional tensor in another layout; anything else as it is."""
    if isinstance(value, torch.Tensor) and value.dim() == 4:
        return value.contiguous(memory_format=layout)
    return value


def _as_traced(part: Any, tensor: Tensor | None) -> Any:
    """A result with the strides that the trace has for it: the ops that read it were captured with those."""
    if tensor is None or not isinstance(part, torch.Tensor) or tuple(part.stride()) == tensor.stride:
        return part
    copy = torch.empty_strided(tensor.shape, tensor.stride, dtype=part.dtype, device=part.device)
    return copy.copy_(part)
