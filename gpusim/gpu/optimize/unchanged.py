"""Objects in the user's dicts, lists and functions, compared by identity with those of before, in a compiled loop.

Most of what a call depends on lies in dicts: parameters, attributes, globals, states. A model of GoogLeNet's form has
more than a thousand such values, and a loop of Python's over them, even one in `map`, took most of a call
(research/2026-11-26-host-time.md). So numba compiles it. It calls functions of Python's C interface with the addresses
of objects, which `id` returns, and holds the GIL. What is compared is kept alive: no other object gets its
address.
"""

from __future__ import annotations

import contextlib
import types as types_of_python
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from operator import is_
from typing import Any, Final, TypeVar, cast

import numba
import numpy as np
from numba import types

from gpusim.gpu.reach.raw import attributes_of, has_attributes

Function = TypeVar("Function", bound=Callable[..., Any])

#: Value of a missing key.
MISSING: Final = object()
#: Address of a missing key's value.
_NULL: Final = 0

_get = types.ExternalFunction("PyDict_GetItem", types.intp(types.intp, types.intp))
_dict_of = types.ExternalFunction("PyObject_GenericGetDict", types.intp(types.intp, types.intp))
_class_of = types.ExternalFunction("PyObject_Type", types.intp(types.intp))
_let_go = types.ExternalFunction("Py_DecRef", types.void(types.intp))
_size_of = types.ExternalFunction("PyList_Size", types.intp(types.intp))
_item_of = types.ExternalFunction("PyList_GetItem", types.intp(types.intp, types.intp))
_code_of = types.ExternalFunction("PyFunction_GetCode", types.intp(types.intp))
_defaults_of = types.ExternalFunction("PyFunction_GetDefaults", types.intp(types.intp))
_keywords_of = types.ExternalFunction("PyFunction_GetKwDefaults", types.intp(types.intp))
_length_of = types.ExternalFunction("PyDict_Size", types.intp(types.intp))
_next = types.ExternalFunction("PyDict_Next", types.int32(types.intp, types.intp, types.intp, types.intp))


def compiled(function: Function) -> Function:
    """Compile a function at its first call, and keep it on disk where that is possible. It holds the GIL."""
    dispatcher: Any = numba.njit(function)
    with contextlib.suppress(RuntimeError):  # no directory to write to
        dispatcher.enable_caching()
    return cast(Function, dispatcher)


@compiled
def _same_values(dicts: Any, keys: Any, values: Any, positions: Any, entry: Any) -> Any:
    """Whether each dict has the value under the key; all are addresses. Where a dict still has the key at its known
    position, nothing is looked up, which takes three times as long. `entry` is room for one.
    """
    room = entry.ctypes.data
    for place in range(dicts.size):
        entry[0] = positions[place]
        if positions[place] >= 0 and _next(dicts[place], room, room + 8, room + 16) and entry[1] == keys[place]:
            if entry[2] != values[place]:
                return False
        elif _get(dicts[place], keys[place]) != values[place]:
            return False
    return True


@compiled
def _find(dicts: Any, keys: Any, positions: Any, entry: Any) -> Any:
    """Write the position of each key in its dict, -1 where it is not there; all are addresses."""
    room = entry.ctypes.data
    for place in range(dicts.size):
        positions[place] = -1
        entry[0] = position = 0
        while _next(dicts[place], room, room + 8, room + 16):
            if entry[1] == keys[place]:
                positions[place] = position
                break
            position = entry[0]


@compiled
def _same_contents(dicts: Any, ends: Any, keys: Any, values: Any, entry: Any) -> Any:
    """Whether the dicts have these keys and values in this order; those of a dict end at `ends`. A value without an
    address may be any. `entry` is room for one.
    """
    room = entry.ctypes.data
    place = 0
    for number in range(dicts.size):
        entry[0] = 0  # position in the dict; then key and value
        while _next(dicts[number], room, room + 8, room + 16):
            if place == ends[number] or entry[1] != keys[place]:
                return False
            if values[place] != _NULL and entry[2] != values[place]:
                return False
            place += 1
        if place != ends[number]:
            return False
    return True


@compiled
def _same_items(lists: Any, ends: Any, values: Any) -> Any:
    """Whether the lists have these values; those of a list end at `ends`."""
    place = 0
    for number in range(lists.size):
        if _size_of(lists[number]) != ends[number] - place:
            return False
        for item in range(ends[number] - place):
            if _item_of(lists[number], item) != values[place]:
                return False
            place += 1
    return True


@compiled
def _same_sizes(dicts: Any, sizes: Any) -> Any:
    """Whether each dict, by its address, has as many keys."""
    same = True
    for place in range(dicts.size):
        same &= _length_of(dicts[place]) == sizes[place]
    return same


@compiled
def _same_functions(functions: Any, codes: Any, defaults: Any, keywords: Any) -> Any:
    """Whether each function has its code and its defaults; all are addresses."""
    for place in range(functions.size):
        if _code_of(functions[place]) != codes[place]:
            return False
        if _defaults_of(functions[place]) != defaults[place] or _keywords_of(functions[place]) != keywords[place]:
            return False
    return True


@compiled
def _same_dicts(owners: Any, dicts: Any) -> Any:
    """Whether each object has its attributes in the dict; all are addresses."""
    for place in range(owners.size):
        held = _dict_of(owners[place], _NULL)
        _let_go(held)
        if held != dicts[place]:
            return False
    return True


@compiled
def _same_classes(objects: Any, classes: Any) -> Any:
    """Whether each object is of the class; all are addresses."""
    for place in range(objects.size):
        kind = _class_of(objects[place])
        _let_go(kind)
        if kind != classes[place]:
            return False
    return True


class Natures:
    """Classes of objects, and the dicts of their attributes, as they are now: the user may assign others."""

    def __init__(self, objects: Iterable[Any]) -> None:
        self._objects = list(objects)
        owners = list(filter(has_attributes, self._objects))
        self._classes, self._dicts = list(map(type, self._objects)), list(map(attributes_of, owners))
        self._classes_at = _addresses(self._objects), _addresses(self._classes)
        self._dicts_at = _addresses(owners), _addresses(self._dicts)

    def hold(self) -> bool:
        """Whether the objects have the same classes and dicts."""
        return bool(_same_classes(*self._classes_at) and _same_dicts(*self._dicts_at))


class KeyedValues:
    """Values of dicts, each under one key, as they were when last kept."""

    def __init__(self, holders: Iterable[dict[Any, Any]], keys: Iterable[Any]) -> None:
        self._holders = list(holders)
        own = {id(held): {key: key for key in dict.keys(held)} for held in self._holders}
        self._keys = [own[id(held)].get(key, key) for held, key in zip(self._holders, keys, strict=True)]
        """Where a dict has a key, its own object, not an equal one."""
        self._at = _addresses(self._holders), _addresses(self._keys)
        self._positions, self._entry = np.empty(len(self._keys), np.intp), np.zeros(3, np.intp)
        self.keep(self.now())

    def now(self) -> list[Any]:
        """Return the values of now, `MISSING` where there is none."""
        return list(map(dict.get, self._holders, self._keys, repeat(MISSING)))

    def keep(self, values: list[Any]) -> None:
        """Take these values as those to compare with."""
        self.values = values
        self._values_at = _addresses(values)
        self._values_at[np.fromiter(map(is_, values, repeat(MISSING)), np.bool_, len(values))] = _NULL
        _find(*self._at, self._positions, self._entry)

    def hold(self) -> bool:
        """Whether the same objects are there."""
        if not self._holders:
            return True
        return bool(_same_values(*self._at, self._values_at, self._positions, self._entry))


class Contents:
    """All keys and values of dicts, in their order, as they are now; of the dicts in `of_keys` the keys only."""

    def __init__(self, holders: Sequence[dict[Any, Any]], of_keys: Sequence[dict[Any, Any]] = ()) -> None:
        self._holders = [*holders, *of_keys]
        self._keys = list(chain.from_iterable(map(dict.keys, self._holders)))
        self._values = list(chain.from_iterable(map(dict.values, holders)))
        ends = np.cumsum(list(map(len, self._holders)), dtype=np.intp)
        values = np.full(len(self._keys), _NULL, np.intp)
        values[: len(self._values)] = _addresses(self._values)
        kept = _addresses(self._keys), values
        self._at = _addresses(self._holders), ends, *kept, np.zeros(3, np.intp)

    def hold(self) -> bool:
        """Whether the same objects are there, in the same order, and no others."""
        return not self._holders or bool(_same_contents(*self._at))


class Items:
    """All items of lists, as they are now."""

    def __init__(self, holders: Iterable[list[Any]]) -> None:
        self._holders = list(holders)
        self._values = list(chain.from_iterable(self._holders))
        ends = np.cumsum(list(map(len, self._holders)), dtype=np.intp)
        self._at = _addresses(self._holders), ends, _addresses(self._values)

    def hold(self) -> bool:
        """Whether the same objects are there, in the same order, and no others."""
        return not self._holders or bool(_same_items(*self._at))


class Absent:
    """Names that are no keys of dicts now. A dict as large as before has none of them, unless another key has gone."""

    def __init__(self, holders: Sequence[dict[Any, Any]], names: Sequence[frozenset[str]]) -> None:
        self._holders, self._names = list(holders), list(names)
        self._at = _addresses(self._holders), self._sizes()

    def came(self) -> str | None:
        """Return a name that a dict has by now, or None."""
        if not self._holders or _same_sizes(*self._at):
            return None
        for held, names in zip(self._holders, self._names, strict=True):
            if not names.isdisjoint(held):
                return min(names & held.keys())
        self._at = self._at[0], self._sizes()
        return None

    def _sizes(self) -> Any:
        return np.fromiter(map(len, self._holders), np.intp, len(self._holders))


class Functions:
    """Code and defaults of functions, as they are now: the user may assign others to the same function."""

    def __init__(self, functions: Iterable[types_of_python.FunctionType]) -> None:
        self._functions = list(functions)
        self._kept = [(each.__code__, each.__defaults__, each.__kwdefaults__) for each in self._functions]
        columns = zip(*self._kept, strict=True)
        self._at = _addresses(self._functions), *(_addresses_or_null(list(column)) for column in columns)

    def hold(self) -> bool:
        """Whether the functions have the same code and defaults."""
        return not self._functions or bool(_same_functions(*self._at))


def all_same(some: Iterable[Any], others: Iterable[Any]) -> bool:
    """Whether two series, equally long, have the same objects: for a few, or for what no dict holds."""
    return all(map(is_, some, others))


def _addresses_or_null(values: Sequence[Any]) -> Any:
    return np.fromiter((_NULL if value is None else id(value) for value in values), np.intp, len(values))


def _addresses(values: Sequence[Any]) -> Any:
    return np.fromiter(map(id, values), np.intp, len(values))
