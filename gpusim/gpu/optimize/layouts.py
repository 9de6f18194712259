"""Places of tensors in memory: address, shape and strides, compared with those that were there before.

A new `.data` shows nowhere else, and it may begin at the same address: a transposed or a shorter view of the old one.
torch's table for DLPack has a function that writes down one tensor's place. It is called in a compiled loop, since a
model of GoogLeNet's form has 277 tensors (research/2026-11-26-host-time.md). torch before 2.11 may have no such table.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from gpusim.gpu.optimize.unchanged import compiled

#: Attribute of tensors with the table, and place of the function in it: the sixth of its words.
_TABLE: Final = ("__dlpack_c_exchange_api__", b"dlpack_exchange_api", 5)
#: Words of a `DLTensor`: address, device, dimensions and type of elements, addresses of shape and strides, offset.
_WORDS: Final = 6
_DIMENSIONS: Final = 0xFFFFFFFF

_forget_error = types.ExternalFunction("PyErr_Clear", types.void())


@intrinsic
def _write_place(_: Any, function: Any, tensor: Any, words: Any) -> Any:
    """Call `int function(tensor, words)`; all are addresses."""

    def generate(__: Any, builder: Any, ___: Any, args: Any) -> Any:
        word = ir.IntType(64)
        kind = ir.FunctionType(ir.IntType(32), [word, word])
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])

    return types.int32(types.intp, types.intp, types.intp), generate


@intrinsic
def _word_at(_: Any, address: Any) -> Any:
    """Read the word at an address."""

    def generate(__: Any, builder: Any, ___: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], cgutils.intp_t.as_pointer()))

    return types.intp(types.intp), generate


@compiled
def _same_places(function: Any, tensors: Any, ends: Any, places: Any, words: Any) -> Any:
    """Whether each tensor has its words, shape and strides; those of a tensor end at `ends`. `words` is room for one
    tensor's.
    """
    room = words.ctypes.data
    place = 0
    for number in range(tensors.size):
        if _write_place(function, tensors[number], room) != 0:
            _forget_error()
            return False
        if words[0] != places[place] or words[1] != places[place + 1] or words[2] != places[place + 2]:
            return False
        if words[5] != places[place + 3]:
            return False
        place += 4
        for dimension in range(words[2] & _DIMENSIONS):
            if _word_at(words[3] + 8 * dimension) != places[place]:
                return False
            if _word_at(words[4] + 8 * dimension) != places[place + 1]:
                return False
            place += 2
        if place != ends[number]:
            return False
    return True


class Layouts:
    """Addresses, shapes and strides of tensors as they are now."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        function = _function()
        described = [function is not None and _words(function, tensor) for tensor in tensors]
        self._fast = [tensor for tensor, words in zip(tensors, described, strict=True) if words]
        self._slow = [tensor for tensor, words in zip(tensors, described, strict=True) if not words]
        found = [words for words in described if words]
        ends = np.cumsum(list(map(len, found)), dtype=np.intp)
        at = np.fromiter(map(id, self._fast), np.intp, len(self._fast))
        self._at = function or 0, at, ends, np.fromiter(chain.from_iterable(found), np.intp), np.zeros(_WORDS, np.intp)
        self._before = self._slow_now()

    def hold(self) -> bool:
        """Whether all are where they were, in the same shape."""
        if self._fast and not _same_places(*self._at):
            return False
        return not self._slow or self._slow_now() == self._before

    def _slow_now(self) -> list[tuple[Any, ...]]:
        readers = (torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride)
        return [tuple(map(read, self._slow)) for read in readers]


def _function() -> int | None:
    """Return the address of the function that describes one tensor, or None where torch has none."""
    attribute, name, place = _TABLE
    table = getattr(torch.Tensor, attribute, None)
    if table is None:
        return None
    pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    address = pointer(("PyCapsule_GetPointer", ctypes.pythonapi))(table, name)
    return (ctypes.c_void_p * _WORDS).from_address(address)[place]


def _words(function: int, tensor: torch.Tensor) -> list[int]:
    """Return a tensor's words, shape and strides; nothing where DLPack cannot describe it."""
    words = (ctypes.c_int64 * _WORDS)()
    call = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)
    try:
        call(function)(tensor, ctypes.addressof(words))
    except Exception:  # a type of elements that DLPack lacks
        return []
    sizes = (value for pair in zip(tensor.shape, tensor.stride(), strict=True) for value in pair)
    return [words[0], words[1], words[2], words[5], *sizes]
