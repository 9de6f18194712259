"""What kind of work an op does, as far as policies tell ops apart: by the name of its operator."""

from __future__ import annotations

import re

from gpusim.plan.graph import OpGraph

#: Convolutions, matrix products and attention, forward and backward, by operator name (`aten.addmm.default`). Fused
#: pointwise kernels are named after all that went into them, convolutions too, and do not count.
_COMPUTE = re.compile(
    r"^(?!triton_(poi|red|per)).*([._]|^)(conv(olution|\d|_)|(add|b)*mm\b|matmul|linear\b|.*attention)"
)
_CONVOLUTION = "aten.convolution."
#: Place of `groups` in the arguments of `aten.convolution`.
_GROUPS = 8


def is_compute_intensive(graph: OpGraph, op: int) -> bool:
    """Whether an op is a convolution, a matrix product or attention, forward or backward."""
    return bool(_COMPUTE.search(graph.trace.ops[op].target))


def is_attention(graph: OpGraph, op: int) -> bool:
    """Whether an op is attention as one kernel, forward or backward."""
    return "attention" in graph.trace.ops[op].target


def is_depthwise(graph: OpGraph, op: int) -> bool:
    """Whether an op is a forward convolution in groups: the light half of a separable one."""
    call = graph.trace.ops[op]
    return call.target.startswith(_CONVOLUTION) and len(call.args) > _GROUPS and call.args[_GROUPS] != 1
