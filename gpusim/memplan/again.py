"""Rules for running an op again in a step, the basis of recomputation.

An op may run again where it draws no random numbers and changes no state. Batch norm in training changes its running
mean and variance; it runs again without them, which changes none of its other results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpusim.formats.trace import Op, Tensor

#: Operator -> positions of arguments that are states it changes; replaced by None, the results stay the same (in
#: training, batch norm normalizes by the mean and the variance of the batch).
STATE_ARGUMENTS: Final[dict[str, tuple[int, ...]]] = {
    "aten.cudnn_batch_norm.default": (3, 4),
    "aten.native_batch_norm.default": (3, 4),
    "aten.miopen_batch_norm.default": (3, 4),
}
#: Operator -> position of its dropout probability; at 0, or left out, its random numbers do not matter.
DROPOUT_ARGUMENT: Final[dict[str, int]] = {
    "aten._scaled_dot_product_efficient_attention.default": 5,
    "aten._scaled_dot_product_flash_attention.default": 3,
    "aten._scaled_dot_product_cudnn_attention.default": 5,
}


def states_of(op: Op, tensors: Sequence[Tensor]) -> frozenset[int]:
    """Return the storages that an op changes as states, and leaves alone when it runs again."""
    states: set[int] = set()
    for position in STATE_ARGUMENTS.get(op.target, ()):
        if position < len(op.args) and isinstance(op.args[position], dict):
            index = op.args[position].get("tensor")
            if isinstance(index, int):
                states.add(tensors[index].storage)
    return frozenset(states)


def draws(op: Op) -> bool:
    """Whether an op draws random numbers that matter."""
    position = DROPOUT_ARGUMENT.get(op.target)
    without_dropout = position is not None and (len(op.args) <= position or op.args[position] == 0)
    return op.random and not without_dropout
