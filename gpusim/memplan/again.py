"""Which ops may run once more in a step, and how: what recomputation rests on.

An op may run again where it draws no random numbers and changes no state. Batch norm in training does: it moves its
running mean and variance. It runs again without them, which changes none of its other results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpusim.formats.trace import Op, Tensor

#: Operator -> positions of arguments that are states it changes; None in their place leaves the results as they are
#: (in training, batch norm normalises by the mean and the variance of the batch).
STATE_ARGUMENTS: Final[dict[str, tuple[int, ...]]] = {
    "aten.cudnn_batch_norm.default": (3, 4),
    "aten.native_batch_norm.default": (3, 4),
    "aten.miopen_batch_norm.default": (3, 4),
}
#: Operator -> position of its probability of dropout; at 0, or left out, the op draws nothing that matters.
DROPOUT_ARGUMENT: Final[dict[str, int]] = {
    "aten._scaled_dot_product_efficient_attention.default": 5,
    "aten._scaled_dot_product_flash_attention.default": 3,
    "aten._scaled_dot_product_cudnn_attention.default": 5,
}


def states_of(op: Op, tensors: Sequence[Tensor]) -> frozenset[int]:
    """Storages that an op changes as a state, and leaves alone where it runs again."""
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
