"""Tensors of a step whose elements do not depend on data: a step may read these, and repeats the same each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from gpusim.gpu.replay.operators import is_random, written_arguments

#: Operators whose results have elements that follow from numbers and shapes alone.
_FILLING: Final = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        *("arange", "eye", "full", "full_like", "linspace", "logspace", "new_full", "new_ones", "new_zeros", "ones"),
        *("ones_like", "scalar_tensor", "tril_indices", "triu_indices", "zeros", "zeros_like"),
    )
)
#: Operators whose results have no elements yet.
_EMPTY: Final = frozenset((torch.ops.aten.empty_like, torch.ops.aten.new_empty, torch.ops.aten.new_empty_strided))


class Constants:
    """Tensors by the origin of their elements; `is_of_host` and `memory` are the listener's."""

    def __init__(self, is_of_host: Callable[[torch.Tensor], bool], memory: Callable[[torch.Tensor], int]) -> None:
        self._is_of_host, self._memory = is_of_host, memory
        self._known = WeakTensorKeyDictionary()
        self._fixed = WeakTensorKeyDictionary()
        self._overwritten: set[int] = set()
        """Memory of such tensors to which other elements were written."""

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Whether its elements are the host's, or constants of the code: `torch.tensor(3.0)`, and what is computed from
        it.
        """
        return (tensor in self._known and self._memory(tensor) not in self._overwritten) or self._is_of_host(tensor)

    def is_fixed(self, tensor: torch.Tensor) -> bool:
        """Whether its elements are known, or follow from shapes: `torch.arange(8)`, and what is computed from it."""
        return (tensor in self._fixed and self._memory(tensor) not in self._overwritten) or self.is_known(tensor)

    def makes_fixed(self, function: Any, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the results of a call on these tensors are fixed."""
        if function.overloadpacket in _FILLING:
            return True
        other = is_random(function) or function.overloadpacket in _EMPTY
        return bool(tensors) and not other and all(map(self.is_fixed, tensors))

    def write(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that a call is about to write elements that are not fixed."""
        if function._schema.is_mutable:
            self._overwritten |= set(map(self._memory, written_arguments(function, args, kwargs)))

    def keep(self, result: torch.Tensor, known: bool, fixed: bool) -> None:
        """Note what the result of a call is."""
        for tensors, belongs in ((self._known, known), (self._fixed, fixed)):
            if belongs:
                tensors[result] = True
            else:
                tensors.pop(result, None)
