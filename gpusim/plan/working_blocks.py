"""Blocks of a kernel that have work; the others begin and end (`gpusim.rules.idle_blocks`).

PyTorch launches 1,024 blocks to look up embedding bags, of any number. Each row of threads takes one bag and as many
features as it has threads.

Source: `EmbeddingBag_updateOutputKernel_sum_mean` and `EmbeddingBag_updateOutputKernel_max`, in
aten/src/ATen/native/cuda/EmbeddingBag.cu of PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from gpusim.formats.trace import Kernel, Op, Tensor

_LOOKUP = "EmbeddingBag_updateOutputKernel"


def working_blocks(kernel: Kernel, op: Op, tensors: Sequence[Tensor]) -> int:
    """Return the number of blocks of an op's kernel that have work: all of them but for lookups of embedding bags."""
    blocks = prod(kernel.grid)
    if _LOOKUP not in kernel.name:
        return blocks
    output = next((tensors[index].shape for index in op.writes if len(tensors[index].shape) == 2), None)
    if output is None:  # an imported trace without shapes
        return blocks
    threads, rows, _ = kernel.block
    bags, features = output
    return max(1, min(blocks, -(-bags * -(-features // threads) // rows)))
