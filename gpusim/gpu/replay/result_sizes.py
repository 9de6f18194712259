"""Check of result sizes against the trace before a call: torch evaluates shapes alone.

Sizes among the arguments (`repeat`, `constant_pad_nd`, the upsampling operators ...) may request any amount of memory.
The same call on torch's fake tensors, which have no memory, gives the shapes of its results. Shapes and types of real
results are compared with the trace again after the call (`gpusim.gpu.replay.execute`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from gpusim.errors import OperatorError
from gpusim.formats.arguments import renumbered, tensor_refs
from gpusim.formats.trace import Op, Trace
from gpusim.gpu.replay.encode import DTYPES, decode
from gpusim.gpu.replay.saved_facts import VARYING
from gpusim.gpu.replay.tensors import flat_results

#: Errors that leave the shapes unknown or the call refused: then the call itself gives the reason, or its results are
#: checked.
_UNKNOWN = (
    UnsupportedOperatorException,
    DynamicOutputShapeException,
    RuntimeError,
    TypeError,
    ValueError,
    IndexError,
    AttributeError,
    OverflowError,
    AssertionError,
)


def check_result_sizes(trace: Trace, functions: list[Callable[..., Any]], device: torch.device) -> None:
    """Raise `OperatorError` for the first op whose results would not have the declared shapes and types.

    Ops with the same operator, arguments and shapes are evaluated once. A call that torch cannot evaluate, or refuses,
    is left to the check after the call, and so are results whose shape depends on a library's version.
    """
    seen: set[tuple[Any, ...]] = set()
    # A fallback would run the operator on real tensors of these sizes.
    with _quiet(), FakeTensorMode(allow_fallback_kernels=False), torch.no_grad():
        for index, op in enumerate(trace.ops):
            key = _key(trace, op)
            if key in seen:
                continue
            seen.add(key)
            problem = _problem(trace, op, functions[index], device)
            if problem:
                raise OperatorError(f"{trace.name}: $.ops[{index}]: operator '{op.target}' is refused: {problem}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from printing a traceback for each call that it refuses."""
    log = logging.getLogger(fake_tensor.__name__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _key(trace: Trace, op: Op) -> tuple[Any, ...]:
    """Return a key of everything that determines the shapes of an op's results, and of their declarations."""
    numbers: dict[int, int] = {}
    for tensor in tensor_refs([*op.args, *op.kwargs.values()]):
        numbers.setdefault(tensor, len(numbers))

    def of(value: Any) -> Any:
        if isinstance(value, dict):
            return tuple((key, of(part)) if key != "tensor" else (key, numbers[part]) for key, part in value.items())
        return tuple(of(part) for part in value) if isinstance(value, list | tuple) else (type(value), value)

    shapes = [(t.shape, t.stride, t.offset, t.dtype) for t in (trace.tensors[index] for index in numbers)]
    results = [None if o is None else (trace.tensors[o].shape, trace.tensors[o].dtype) for o in op.outputs]
    return (op.target, of(op.args), of(op.kwargs), tuple(shapes), tuple(results))


def _problem(trace: Trace, op: Op, function: Callable[..., Any], device: torch.device) -> str:
    tensors: list[torch.Tensor | None] = []
    places: dict[int, int] = {}
    for index in tensor_refs([*op.args, *op.kwargs.values()]):
        if index not in places:
            places[index] = len(tensors)
            tensors.append(_without_memory(trace, index, device))
    args = decode(renumbered(list(op.args), places), tensors, device)
    kwargs = {key: decode(renumbered(value, places), tensors, device) for key, value in op.kwargs.items()}
    try:
        results = flat_results(function(*args, **kwargs))
    except _UNKNOWN:
        return ""
    for place, (result, computed) in enumerate(zip(op.outputs, results, strict=False)):
        if result is None or place in VARYING.get(op.target, ()) or not isinstance(computed, FakeTensor):
            continue
        declared = trace.tensors[result]
        # Fake statistics of some norms have another dtype than the real ones; dtypes are checked after the call.
        if tuple(computed.shape) != declared.shape:
            return f"it makes a tensor of shape {list(computed.shape)}, its trace has shape {list(declared.shape)}"
    return ""


def _without_memory(trace: Trace, index: int, device: torch.device) -> torch.Tensor:
    """Make a fake tensor as declared in the trace, on a storage of the declared size."""
    tensor = trace.tensors[index]
    dtype = DTYPES[tensor.dtype]
    if 0 in tensor.shape:
        return torch.empty_strided(tensor.shape, tensor.stride, dtype=dtype, device=device)
    storage = torch.empty(trace.storages[tensor.storage].bytes // dtype.itemsize, dtype=dtype, device=device)
    return storage.as_strided(tensor.shape, tensor.stride, tensor.offset)
