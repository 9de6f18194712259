"""Kinds of ops that policies distinguish, by operator name."""

from __future__ import annotations

import re

from gpusim.plan.graph import OpGraph

#: Convolutions, matrix products and attention, forward and backward, by operator name (`aten.addmm.default`). Fused
#: pointwise kernels are named after all fused ops, including convolutions, and do not count.
_COMPUTE = re.compile(
    r"^(?!triton_(poi|red|per)).*([._]|^)(conv(olution|\d|_)|(add|b)*mm\b|matmul|linear\b|.*attention)"
)
_CONVOLUTION = "aten.convolution."
#: Position of `groups` in the arguments of `aten.convolution`.
_GROUPS = 8


def is_compute_intensive(graph: OpGraph, op: int) -> bool:
    """Return True for a convolution, matrix product or attention, forward or backward."""
    return bool(_COMPUTE.search(graph.trace.ops[op].target))


def is_attention(graph: OpGraph, op: int) -> bool:
    """Return True for fused attention, forward or backward."""
    return "attention" in graph.trace.ops[op].target


def is_depthwise(graph: OpGraph, op: int) -> bool:
    """Return True for a forward grouped convolution, the light half of a separable one."""
    call = graph.trace.ops[op]
    return call.target.startswith(_CONVOLUTION) and len(call.args) > _GROUPS and call.args[_GROUPS] != 1
