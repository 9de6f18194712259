"""Variants of an op under other library settings: other algorithms, layouts, kernels.

The settings are those that torch offers for a single call: cuDNN or not, its autotuner, deterministic algorithms, TF32,
the layout of the arguments, the library of matrix products, and alternative lowerings (`compositions`). Layout
conversions are part of the variant, so the tensors between ops and all other kernels stay as in the trace.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from gpusim.formats.trace import Op, Tensor, Trace, VariantSettings
from gpusim.gpu.quiet import quiet
from gpusim.gpu.replay.decompositions import composed, compositions_for
from gpusim.gpu.replay.fusion import Call, Kept, fused
from gpusim.gpu.replay.tensors import flat_results, placed_results

Result = TypeVar("Result")

#: Operators that have variants, in addition to those of `compositions`.
CONVOLUTIONS = ("aten.convolution.default", "aten.convolution_backward.default")
PRODUCTS = tuple(
    f"aten.{name}.{overload}" for name in ("mm", "addmm", "bmm", "baddbmm") for overload in ("default", "out")
)

#: Settings to try for each, by name.
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
    """Return the settings to try for an op, by name; none for most ops, and none that equal the captured ones."""
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
    """Apply the settings within this context, process-wide: one thread at a time."""
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
    """Set the library without torch's one-time warning that choosing one is experimental."""
    with quiet():
        torch.backends.cuda.preferred_blas_library(name)


def call_variant(
    function: Any, args: list[Any], kwargs: dict[str, Any], settings: VariantSettings, outputs: list[Tensor | None]
) -> list[Any]:
    """Call an operator under these settings; the results are flat, with the strides of `outputs`. Raises its errors.

    Calls left to cuDNN's autotuner run in a separate thread. torch keeps the algorithm of a convolution's first call in
    a thread for all later calls with the same arguments, with or without the autotuner: in one thread, either all calls
    with these arguments would be autotuned or none.
    """
    if not settings.benchmark:
        return call_here(function, args, kwargs, settings, outputs)
    return in_autotuned_thread(lambda: call_here(function, args, kwargs, settings, outputs))


def in_autotuned_thread(call: Callable[[], Result]) -> Result:
    """Run `call` in the thread of autotuned calls, on the caller's current stream, and return its result. Raises its
    errors.
    """
    stream = torch.cuda.current_stream() if torch.cuda.is_available() else None

    def there() -> Result:
        with torch.no_grad(), torch.cuda.stream(stream):
            return call()

    return _autotuned().submit(there).result()


@functools.cache
def _autotuned() -> ThreadPoolExecutor:
    """Return the thread of autotuned calls, one for the life of the process."""
    return ThreadPoolExecutor(1, thread_name_prefix="autotuned")


def call_here(
    function: Any, args: list[Any], kwargs: dict[str, Any], settings: VariantSettings, outputs: list[Tensor | None]
) -> list[Any]:
    """Run `call_variant` in this thread."""
    target = str(function)
    if settings.composition is not None:
        function = composed(target, settings.composition)
    with applied(settings):
        if settings.memory_format is not None:
            layout = torch.channels_last if settings.memory_format == "channels_last" else torch.contiguous_format
            args = [_converted(value, layout) for value in args]
            kwargs = {name: _converted(value, layout) for name, value in kwargs.items()}
        result = function(*args, **kwargs)
    results = placed_results(target, result, len(outputs))
    if results is None:
        return flat_results(result)  # the caller says what is wrong
    return [_as_traced(part, tensor) for part, tensor in zip(results, outputs, strict=True)]


def call_chain(
    targets: tuple[str, ...],
    calls: list[Call],
    settings: VariantSettings,
    outputs: list[list[Tensor | None]],
    kept: Kept,
) -> list[list[Any]]:
    """Call a chain of operators as one fused call under these settings; results per op, as of `call_variant`."""
    assert settings.composition is not None
    function = fused(targets, settings.composition)
    with applied(settings):
        results = function(calls, settings.memory_format == "channels_last", kept)
    # cuDNN's batch norm returns one tensor more than torch's; it is left out.
    return [
        [_as_traced(part, tensor) for part, tensor in zip(parts, tensors, strict=False)]
        for parts, tensors in zip(results, outputs, strict=True)
    ]


def _converted(value: Any, layout: torch.memory_format) -> Any:
    """Return a 4-dimensional tensor in another layout; other values unchanged."""
    if isinstance(value, torch.Tensor) and value.dim() == 4:
        return value.contiguous(memory_format=layout)
    return value


def _as_traced(part: Any, tensor: Tensor | None) -> Any:
    """Return a result with the strides of the trace, which its readers were captured with."""
    if tensor is None or not isinstance(part, torch.Tensor) or tuple(part.stride()) == tensor.stride:
        return part
    copy = torch.empty_strided(tensor.shape, tensor.stride, dtype=part.dtype, device=part.device)
    return copy.copy_(part)
