"""A step's graph with products of a matrix and a vector as sums, which Inductor makes reductions of.

A product of one row or one column reads each element of its matrix once, so its time is that of reading the matrix.
torch has the same decomposition, but only where it also tunes every kernel by `coordinate_descent_tuning` (`mm` and
`bmm` in `torch/_inductor/decomposition.py`). Tuning takes minutes, so blocks have a size here that keeps enough bytes
on their way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any, Final

import torch
from torch import fx

from gpusim.formats.arguments import tensor_refs
from gpusim.formats.trace import Trace
from gpusim.gpu.inductor.functional import FunctionalGraph, with_strides
from gpusim.trace.element_sizes import DTYPE_BYTES

_ATEN: Final = torch.ops.aten
_CONVERT: Final = torch.ops.prims.convert_element_type.default
#: Products, with the place of the first matrix among the arguments.
_PRODUCTS: Final = {_ATEN.mm.default: 0, _ATEN.bmm.default: 0, _ATEN.addmm.default: 1, _ATEN.baddbmm.default: 1}
_PLACES: Final = {str(target): place for target, place in _PRODUCTS.items()}
#: Types of elements whose products are summed in 32 bits, as by a library.
_SUMMED: Final = frozenset({"float32", "bfloat16", "float16"})
#: Operators whose results Inductor writes to memory before anything reads them.
_IN_MEMORY: Final = frozenset(
    {*_PRODUCTS, _ATEN.sum.default, _ATEN.sum.dim_IntList, _ATEN.mean.default, _ATEN.mean.dim}
)
#: Least share of a step's bytes that the matrices must have: a guess, since no step near it was measured.
LEAST_FRAC: Final = 0.25
#: Key of a node's `meta["custom"]` for the bytes of an element of the matrix that it sums.
_ELEMENT: Final = "gpusim_gemv_bytes"
#: Bytes of a matrix's row that a block reads at once, rows of a block, and warps for each: within 13 % of the fastest
#: of 24 blocks on five matrices (research/2026-11-30-products-of-one-row.md). With one row they are up to 13 % faster,
#: but what the vector is computed by runs once for each row.
ROW_BYTES, ROWS, WARPS_A_ROW = 2048, 4, 2
#: Least warps of a block, and least blocks of a kernel: about two for each of an H200's 132 SMs.
LEAST_WARPS, LEAST_BLOCKS = 4, 256


def products_as_sums(graph: FunctionalGraph) -> FunctionalGraph:
    """Return the graph, changed in place, with each product of one row or column as a sum of products of elements.

    Sums have 32 bits, and so have the products: TF32 is not used.
    """
    values = dict(graph.values)
    with graph.fake_mode, torch.no_grad():
        for node in list(graph.module.graph.nodes):
            if not _is_gemv(node):
                continue
            summed = _as_sum(graph.module.graph, node)
            node.replace_all_uses_with(summed)
            if node in values:
                values[summed] = values.pop(node)
            graph.module.graph.erase_node(node)
    graph.module.graph.lint()
    graph.module.recompile()
    return replace(graph, values=values)


def mostly_gemv(trace: Trace) -> bool:
    """Whether the matrices of products of one row or column are a large share of the bytes that a step's calls use."""
    matrices = total = 0
    for op in trace.ops:
        total += sum(_bytes(trace, index) for index in {*op.reads, *op.writes})
        place = _PLACES.get(op.target)
        if place is not None:
            one, other = (trace.tensors[index] for index in tensor_refs(list(op.args[place : place + 2])))
            if _is_summed(one.shape, other.shape, one.dtype, other.dtype):
                matrices += max(_bytes(trace, index) for index in op.reads)
    return total > 0 and matrices >= LEAST_FRAC * total


def _bytes(trace: Trace, index: int) -> int:
    tensor = trace.tensors[index]
    return prod(tensor.shape) * DTYPE_BYTES.get(tensor.dtype, 0)


def _is_summed(one: Sequence[int], other: Sequence[int], dtype: str, other_dtype: str) -> bool:
    """Whether a sum can stand for the product of two matrices of these shapes and types."""
    return dtype == other_dtype and dtype in _SUMMED and one[-1] > 1 and 1 in (one[-2], other[-1])


def _is_gemv(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target not in _PRODUCTS:
        return False
    one, other = (argument.meta["val"] for argument in _matrices(node))
    dtypes = (str(each.dtype).removeprefix("torch.") for each in (one, other))
    return node.kwargs.get("alpha", 1) != 0 and _is_summed(one.shape, other.shape, *dtypes)


def _matrices(node: fx.Node) -> list[Any]:
    place = _PRODUCTS[node.target]
    return list(node.args[place : place + 2])


def _as_sum(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Add the sum that stands for a product, before it."""

    def call(function: Any, *args: Any) -> fx.Node:
        with graph.inserting_before(node):
            made = graph.call_function(function, args)
        made.meta.update({key: value for key, value in node.meta.items() if key == "custom"})
        made.meta["val"] = function(*fx.map_arg(args, lambda each: each.meta["val"]))
        return made

    def converted(argument: Any, dtype: torch.dtype) -> Any:
        return argument if argument.meta["val"].dtype == dtype else call(_CONVERT, argument, dtype)

    matrices = _matrices(node)
    vector = 0 if matrices[0].meta["val"].shape[-2] == 1 else 1
    if not _is_cheap(matrices[vector]):
        contiguous = torch.empty_like(matrices[vector].meta["val"], memory_format=torch.contiguous_format)
        matrices[vector] = with_strides(graph, matrices[vector], contiguous.stride(), node)
    one, other = (converted(argument, torch.float32) for argument in matrices)
    rank, matrix = one.meta["val"].dim(), matrices[1 - vector]
    rows, columns = call(_ATEN.unsqueeze.default, one, rank), call(_ATEN.unsqueeze.default, other, rank - 2)
    result = call(_ATEN.sum.dim_IntList, call(_ATEN.mul.Tensor, rows, columns), [rank - 1])
    result.meta["custom"] = {**result.meta.get("custom", {}), _ELEMENT: matrix.meta["val"].element_size()}
    if _PRODUCTS[node.target]:
        alpha, beta = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
        if alpha != 1:
            result = call(_ATEN.mul.Tensor, result, alpha)
        if beta != 0:
            added: Any = node.args[0]
            result = call(_ATEN.add.Tensor, result, added if beta == 1 else call(_ATEN.mul.Tensor, added, beta))
    return converted(result, node.meta["val"].dtype)


def _is_cheap(vector: fx.Node) -> bool:
    """Whether a vector can be computed from memory for every few rows of the matrix anew: elementwise, each from few.

    Inductor fuses with the sum what the vector is computed by, also the windows of a pooling.
    """
    waiting, seen = [vector], set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if node in seen or node.op != "call_function" or node.target in _IN_MEMORY:
            continue
        seen.add(node)
        elementwise = torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target == _CONVERT
        if not elementwise and not getattr(node.target, "is_view", False):
            return False
        waiting.extend(node.all_input_nodes)
    return True


@contextmanager
def blocks_of_sums() -> Iterator[None]:
    """Within this context Inductor's kernels of these sums have blocks as by `block_of`.

    `InductorChoices` (`torch/_inductor/choices.py`) is torch's own place for such a decision.
    """
    from torch._inductor.choices import InductorChoices
    from torch._inductor.codegen.triton import FixedTritonConfig
    from torch._inductor.virtualized import V

    class Choices(InductorChoices):
        def triton_kernel_kwargs(self, kernel_cls: Any, features: Any, groups: Any, kernel_kwargs: Any) -> Any:
            given = super().triton_kernel_kwargs(kernel_cls, features, groups, kernel_kwargs)
            element_bytes = _element_bytes(features)
            if not element_bytes or set(groups[0]) != {"x", "r0_"}:
                return given
            block = block_of(int(features.numel), int(features.reduction_numel), element_bytes)
            return {**given, "fixed_config": FixedTritonConfig(block), "override_persistent_reduction": False}

    with V.set_choices_handler(Choices()):
        yield


def _element_bytes(features: Any) -> int:
    """Return the most bytes of an element of the matrices that a kernel sums, or 0 if it reduces anything else."""
    found = []
    for node in features.reduction_nodes():
        marks = (origin.meta.get("custom") or {} for origin in node.node.get_origins())
        found.append(max((mark.get(_ELEMENT, 0) for mark in marks), default=0))
    return max(found, default=0) if all(found) else 0


def block_of(rows: int, summed: int, element_bytes: int) -> dict[str, int]:
    """Return the block of a kernel that sums matrices of as many rows and elements a row, as Triton's settings."""
    block_rows, columns = ROWS, ROW_BYTES // element_bytes
    while block_rows > 1 and rows < block_rows * LEAST_BLOCKS:
        block_rows //= 2
    while columns // 2 >= summed:
        columns //= 2
    warps = max(LEAST_WARPS, WARPS_A_ROW * block_rows)
    return {"XBLOCK": block_rows, "R0_BLOCK": columns, "num_warps": warps, "num_stages": 1}
