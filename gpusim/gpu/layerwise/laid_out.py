"""Tensors laid out as they were traced, and operators run on them.

A layer's value has four dimensions (n, c, h, w). A traced tensor has these in dimensions of its own (`Frame`): several
in one, or one in several. A share has fewer samples or other parts; then the outermost size of a letter is smaller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from msgspec.structs import replace
from torch.nn import functional

from gpusim.errors import OptionError, ReplayError
from gpusim.formats.arguments import tensor_refs
from gpusim.formats.trace import Op, Trace
from gpusim.gpu.replay.encode import DTYPES, decode
from gpusim.gpu.replay.execute import make_initial
from gpusim.gpu.replay.operators import check_schemas, describe, resolve
from gpusim.gpu.replay.result_sizes import check_result_sizes
from gpusim.gpu.replay.tensors import flat_results
from gpusim.layerwise.frames import Row
from gpusim.layerwise.layers import DIMS, Layer, LayerOp
from gpusim.layerwise.operands import Call, Fixed, calls_of, is_creation
from gpusim.text import shortened, visible

Rows = tuple[Row, ...]
Interval = tuple[int, int]


def laid_out(value: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return a value of four dimensions as the traced tensor with these rows."""
    atoms = [(letter, size) for row in rows for letter, size in row if size > 1 or letter == "n"]
    sizes, places = _sizes(atoms, value.shape)
    split = value.reshape([size for letter in DIMS for size in sizes[letter] or [1]])
    first, starts = 0, {}
    for letter in DIMS:
        starts[letter] = first
        first += max(1, len(sizes[letter]))
    order = [starts[letter] + number for letter, number in places]
    order += [dimension for dimension in range(split.ndim) if dimension not in order]
    lengths = iter(sizes[letter][number] for letter, number in places)
    shape = [prod(next(lengths) for letter, size in row if size > 1 or letter == "n") for row in rows]
    return split.permute(order).reshape(shape)


def as_traced(value: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return a layer's output as truth values or integers, if it was traced as such; numbers keep the step's type."""
    traced = DTYPES[dtype]
    return value if traced.is_floating_point else value.to(traced)


def in_order(tensor: torch.Tensor, rows: Rows, samples: int) -> torch.Tensor:
    """Return the value of four dimensions of a traced tensor with these rows."""
    atoms = [(letter, size) for row in rows for letter, size in row if size > 1 or letter == "n"]
    extents = [prod(size for letter, size in atoms if letter == dim) for dim in DIMS]
    extents[0] = samples
    sizes, places = _sizes(atoms, extents)
    split = tensor.reshape([sizes[letter][number] for letter, number in places] or [1])
    order = [places.index((letter, number)) for letter in DIMS for number in range(len(sizes[letter]))]
    return (split.permute(order) if order else split).reshape(extents)


def _sizes(atoms: Sequence[tuple[str, int]], extents: Sequence[int]) -> tuple[dict[str, list[int]], list[Any]]:
    """Return the sizes of each letter's atoms, the first one as the extents have it, and (letter, number) by atom."""
    sizes: dict[str, list[int]] = {letter: [] for letter in DIMS}
    places = []
    for letter, size in atoms:
        places.append((letter, len(sizes[letter])))
        sizes[letter].append(size)
    for letter, extent in zip(DIMS, extents, strict=True):
        if sizes[letter]:
            sizes[letter][0] = extent // prod(sizes[letter][1:])
    return sizes, places


def features_to_channels(value: torch.Tensor, features: Row) -> torch.Tensor:
    """Put the features of each position into the channels, in their order; what is left of the channels is one.

    A letter may have positions and features, such as windows and heads: positions are outermost.
    """
    inner = {letter: [size for each, size in features if each == letter] for letter in DIMS}
    split, places, dimension = [], [], 0
    starts: dict[str, int] = {}
    for letter, extent in zip(DIMS, value.shape, strict=True):
        split += [extent // prod(inner[letter]), *inner[letter]]
        places.append(dimension)
        starts[letter] = dimension + 1
        dimension += 1 + len(inner[letter])
    order = []
    for each, _ in features:
        order.append(starts[each])
        starts[each] += 1
    n, c, h, w = places
    moved = value.reshape(split).permute(n, c, *order, h, w)
    return moved.reshape(split[n], -1, split[h], split[w])


def run_laid_out(op: LayerOp, inputs: Sequence[torch.Tensor], named: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Run a traced operator on inputs laid out for it, each sample by itself."""
    call: Call = op.options["call"]
    samples, device = inputs[0].shape[0], inputs[0].device
    tensors: dict[int, torch.Tensor | None] = {}
    for tensor, fixed in call.fixed.items():
        made = fixed_value(fixed, named, inputs[0])
        tensors[tensor] = made[:1].expand(samples, *made.shape[1:]) if fixed.repeated else made
    for tensor, (number, rows) in call.inputs.items():
        n, c, h, w = (slice(None, None, step) for step in call.steps.get(tensor, (1, 1, 1, 1)))
        tensors[tensor] = as_traced(laid_out(inputs[number][n, c, h, w], rows), call.trace.tensors[tensor].dtype)
    results = flat_results(_called(call.op, tensors, device))
    return in_order(results[op.options["result"]], op.options["rows"], samples)


def _called(op: Op, tensors: Mapping[int, torch.Tensor | None], device: torch.device) -> Any:
    """Call a traced operator. Raises `ReplayError` with the op and the reason of a failure."""
    args = decode(list(op.args), tensors, device)
    kwargs = {key: decode(value, tensors, device) for key, value in op.kwargs.items()}
    try:
        return resolve(op.target)(*args, **kwargs)
    except torch.cuda.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as cause:
        raise ReplayError(f"op {describe(op)} failed: {str(cause).partition(chr(10))[0]}") from cause


def with_fixed(
    op: LayerOp, value: torch.Tensor, named: Mapping[str, torch.Tensor], box: Sequence[Interval]
) -> torch.Tensor:
    """Return a share with a number or a fixed tensor added, multiplied ...; `box` is the share in the layer."""
    function, number = op.options["function"], op.options.get("number")
    if "fixed" not in op.options:
        return value + number if function == "add" else value - number
    other = _share_of_fixed(op, value, named, box)
    if function == "masked_fill":
        return value.masked_fill(other, number)
    if function == "_prelu_kernel":
        return torch.where(value > 0, value, value * other)
    result: torch.Tensor = getattr(torch, function)(value, other)
    return result


def _share_of_fixed(
    op: LayerOp, value: torch.Tensor, named: Mapping[str, torch.Tensor], box: Sequence[Interval]
) -> torch.Tensor:
    """Return a share's part of a fixed tensor that is broadcast to a layer's value."""
    rows: Rows = op.options["rows"]
    made = fixed_value(op.options["fixed"], named, value)
    made = made.reshape([1] * (len(rows) - made.ndim) + list(made.shape))
    whole = made.expand([prod(size for letter, size in row if letter != "n") for row in rows])
    ordered = in_order(whole, rows, 1)
    c, h, w = (slice(low, high) for low, high in box[1:])
    return ordered[:, c, h, w]


def attention(
    op: LayerOp,
    inputs: Sequence[torch.Tensor],
    named: Mapping[str, torch.Tensor],
    layer: Layer,
    box: Sequence[Interval],
) -> torch.Tensor:
    """Attention with heads in the channels and positions in height and width; `box` is the share in the layer.

    The share has some heads, and some queries with all keys.
    """
    options = op.options
    width = layer.output[1] // options["heads"]
    chosen = [inputs[number] for number in options.get("inputs", (0, 1, 2))]
    query, key, value = (x.reshape(x.shape[0], -1, width, x.shape[2] * x.shape[3]).transpose(2, 3) for x in chosen)
    causal, mask = bool(options.get("causal")), None
    heads, positions = slice(box[1][0] // width, box[1][1] // width), _positions(layer, box, query.device)
    if causal and len(positions) < layer.output[2] * layer.output[3]:
        whole = torch.ones(layer.output[2] * layer.output[3], key.shape[2], dtype=torch.bool, device=query.device)
        mask = whole.tril()[positions]
    if "fixed" in options:
        made = fixed_value(options["fixed"], named, query)
        made = made.reshape([1] * (4 - made.ndim) + list(made.shape))[:1]
        made = made[:, heads] if made.shape[1] > 1 else made
        mask = made[:, :, positions] if made.shape[2] > 1 else made
    mixed = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal and mask is None, scale=options.get("scale")
    )
    return mixed.transpose(2, 3).reshape(chosen[0].shape)


def attention_of_samples(
    op: LayerOp, inputs: Sequence[torch.Tensor], named: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Attention on tensors laid out as they were traced, each sample by itself."""
    options = op.options
    query, key, value = (laid_out(inputs[x], rows) for x, rows in zip(options["inputs"], options["rows"], strict=True))
    mask = fixed_value(options["fixed"], named, query) if "fixed" in options else None
    if mask is not None and mask.ndim == query.ndim:
        mask = mask[:1]  # the same for all samples
    mixed = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=options["causal"], scale=options["scale"]
    )
    return in_order(mixed, options["result"], inputs[0].shape[0])


def _positions(layer: Layer, box: Sequence[Interval], device: torch.device) -> torch.Tensor:
    """Return the numbers of a share's positions among those of the layer, row by row."""
    rows, columns = (torch.arange(low, high, device=device) for low, high in box[2:])
    return (rows[:, None] * layer.output[3] + columns).flatten()


def fixed_value(fixed: Fixed, named: Mapping[str, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Make a fixed tensor from parameters by name; of the dtype of `like` if it has fractions."""
    if not fixed.parameters:
        return _constant(fixed, like.dtype, like.device)
    return _made(fixed, named, like.dtype, like.device)


@lru_cache(maxsize=512)
def _constant(fixed: Fixed, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.no_grad():
        return _made(fixed, {}, dtype, device)


def _made(fixed: Fixed, named: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    trace = fixed.trace
    tensors: dict[int, torch.Tensor | None] = {t: each.clone() for t, each in _initial(fixed, device).items()}
    if fixed.parameters:  # which operators may take together with constants
        tensors = {
            t: each.to(dtype) if each is not None and each.is_floating_point() else each for t, each in tensors.items()
        }
    for tensor in fixed.parameters:
        tensors[tensor] = named[parameter_name(trace, tensor)]
    for index in fixed.ops:
        node = trace.ops[index]
        if is_creation(node):
            taken = tensor_refs(node.args)
            tensors |= {t: torch.empty((), dtype=DTYPES[trace.tensors[t].dtype], device=device) for t in taken}
        for output, result in zip(node.outputs, flat_results(_called(node, tensors, device)), strict=False):
            if output is not None:
                tensors[output] = result
    made = tensors[fixed.tensor]
    assert made is not None
    return made.to(dtype) if made.is_floating_point() else made


def parameter_name(trace: Trace, tensor: int) -> str:
    """Return the name of a parameter in the module; without one, its number."""
    return trace.tensors[tensor].name or f"parameter {tensor}"


@lru_cache(maxsize=512)
def _initial(fixed: Fixed, device: torch.device) -> dict[int, torch.Tensor]:
    """Make the tensors from before the step that a fixed tensor needs, but its parameters."""
    return make_initial(_alone(fixed), device, seed=0).tensors


def _alone(fixed: Fixed) -> Trace:
    """Return the trace with the operators of a fixed tensor alone."""
    trace = fixed.trace
    ops = tuple(trace.ops[index] for index in fixed.ops)
    taken = {t for op in ops for t in (*tensor_refs(op.args), *tensor_refs(op.kwargs))} | {fixed.tensor}
    tensors = tuple(
        each if index in taken and index not in fixed.parameters else replace(each, init=None)
        for index, each in enumerate(trace.tensors)
    )
    return replace(trace, ops=ops, tensors=tensors)


def check_layer(layer: Layer, device: torch.device) -> None:
    """Check the traced operators that a layer runs, as replay does.

    Raises `OperatorError` for one that replay does not run, and `OptionError` for a fixed tensor that cannot be made.
    """
    if not layer.ops:
        reason = layer.obstacle or "only its times are known"
        raise OptionError(f"layer '{shortened(visible(layer.name))}' cannot be run: {reason}")
    for op in layer.ops:
        for taken in calls_of(op):
            alone = _alone(taken) if isinstance(taken, Fixed) else replace(taken.trace, ops=(taken.op,))
            check_schemas(alone)
            check_result_sizes(alone, [resolve(each.target) for each in alone.ops], device)
