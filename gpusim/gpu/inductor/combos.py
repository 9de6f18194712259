"""Combo kernels: Inductor launches independent kernels as one. Which steps may gain, read from their kernels."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Final

from gpusim.formats.trace import KERNEL, Op, Trace
from gpusim.trace.dependencies import dependencies
from gpusim.trace.element_sizes import DTYPE_BYTES

#: Most kernels that torch joins (`combo_kernel_max_num_nodes` in `torch/_inductor/config.py`).
MOST_JOINED: Final = 8
#: Largest kernel worth joining, in bytes read and written: an H200 moves them in about the time of a launch.
SMALL_BYTES: Final = 4 << 20
#: Least share of a step's launches that combo kernels must save: fewer gain less than another style of compiling costs.
LEAST_SAVED_FRAC: Final = 0.05


def promises_combos(trace: Trace, device: str) -> bool:
    """Whether combo kernels could save a share of a step's launches that is worth compiling it again.

    On a CPU torch joins no kernels.
    """
    return device != "cpu" and saved_launches(trace) >= max(1.0, LEAST_SAVED_FRAC * len(trace.ops))


def saved_launches(trace: Trace) -> int:
    """Return the number of launches that combo kernels would save: small kernels at one depth of the step, joined."""
    depths: list[int] = []
    for before in dependencies(trace):
        depths.append(1 + max((depths[op] for op in before), default=0))
    at_depth = Counter(depth for depth, op in zip(depths, trace.ops, strict=True) if _is_small(trace, op))
    return sum(count - -(-count // MOST_JOINED) for count in at_depth.values())


def _is_small(trace: Trace, op: Op) -> bool:
    if op.target != KERNEL:
        return False
    tensors = (trace.tensors[index] for index in (*op.reads, *op.writes))
    return sum(prod(tensor.shape) * DTYPE_BYTES.get(tensor.dtype, 0) for tensor in tensors) <= SMALL_BYTES
