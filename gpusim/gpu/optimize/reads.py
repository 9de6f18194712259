"""Python values that a step's code may read: attributes, globals and closures, as they were at its capture.

A captured step repeats GPU work with the numbers of its capture. Watched are values whose names occur in the code of
the step, and the options of torch's own layers that are floating-point numbers (a dropout's rate, a norm's momentum).
What the code only counts or keeps elsewhere may change.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from operator import is_
from typing import Any, Final

import torch
from torch.optim import Optimizer

from gpusim.gpu.capture.user_step import DEPTH, MOST_PARTS

#: Types compared by value; other objects are compared by identity.
PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_LEAVES: Final = (*PLAIN, torch.Tensor, Optimizer, type, types.ModuleType, types.BuiltinFunctionType)
#: Longest list of plain values that is compared by value.
MOST_VALUES: Final = 64
_OF_MODULES: Final = frozenset(vars(torch.nn.Module()))
_METHODS: Final = ("forward", "__call__")


class Reads:
    """Values of now that the functions and objects of a step may read, and the attributes of its modules."""

    def __init__(self, roots: Iterable[Any], modules: Iterable[torch.nn.Module]) -> None:
        self._names = set(_METHODS)
        self._methods_of: dict[type, list[types.FunctionType]] = {}
        self._reached: dict[int, tuple[Any, str, int]] = {}
        """Objects with attributes, functions and containers, with the name by which each was found, and how deep."""
        for root in (*roots, *modules):
            self._reach(root, "", 0)
        count = -1
        while count != (count := len(self._names) + len(self._reached)):  # a method may read what leads to others
            for value, name, depth in list(self._reached.values()):
                self._look_into(value, name, depth)
        self._holders: list[dict[Any, Any]] = []
        self._keys: list[Any] = []
        self._shown: list[str] = []
        self._cells: list[tuple[str, types.CellType, Any]] = []
        self._lists: list[tuple[str, list[Any], list[Any]]] = []
        for value, name, _ in self._reached.values():
            self._watch(value, name)
        self._values = list(map(dict.get, self._holders, self._keys))
        self._names.clear()
        self._methods_of.clear()
        self._reached.clear()

    def changed(self) -> str | None:
        """Return the name of a changed value, or None. Called at each step, so it loops in C where nothing changed."""
        values = list(map(dict.get, self._holders, self._keys))
        if not all(map(is_, values, self._values)):
            for name, now, before in zip(self._shown, values, self._values, strict=True):
                if not _same(now, before):
                    return name
        for name, cell, before in self._cells:
            if not _same(_contents(cell), before):
                return name
        for name, items, former in self._lists:
            if len(items) != len(former) or not all(map(_same, items, former)):
                return name
        return None

    # --- What the code can reach ---

    def _reach(self, value: Any, name: str, depth: int) -> None:
        if isinstance(value, _LEAVES) or id(value) in self._reached or depth > DEPTH:
            return
        if isinstance(value, torch.nn.Module) and depth:
            return  # all modules of the step are roots
        if isinstance(value, list | tuple | dict) and len(value) > MOST_PARTS:
            return
        if isinstance(value, types.FunctionType) and _is_torchs(value.__module__):
            return
        self._reached[id(value)] = (value, name, depth)

    def _look_into(self, value: Any, name: str, depth: int) -> None:
        if isinstance(value, types.FunctionType):
            self._names.update(_names_of(value.__code__))
        kind = type(value)
        if kind not in self._methods_of:
            self._methods_of[kind] = list(_methods(kind))
        for method in self._methods_of[kind]:
            if method.__name__ in self._names:
                self._names.update(_names_of(method.__code__))
        for part_name, part in self._parts(value, name):
            self._reach(part, part_name, depth + 1)

    def _parts(self, value: Any, name: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, functools.partial):
            yield from ((name, part) for part in (value.func, *value.args, *value.keywords.values()))
        elif isinstance(value, types.MethodType):
            yield from ((name, part) for part in (value.__self__, value.__func__))
        elif isinstance(value, types.FunctionType):
            yield from ((key, _contents(cell)) for key, cell in _cells(value))
            yield from ((key, value.__globals__[key]) for key in self._globals(value) if key in value.__globals__)
            yield from ((name, part) for part in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()))
        elif isinstance(value, list | tuple):
            yield from ((f"{name}[{place}]", part) for place, part in enumerate(value))
        else:
            held = self._attributes(value)
            yield from ((_joined(name, key), held[key]) for key in self._read_of(value, held) if key in held)

    @staticmethod
    def _attributes(value: Any) -> dict[Any, Any]:
        return value if isinstance(value, dict) else getattr(value, "__dict__", None) or {}

    def _globals(self, function: types.FunctionType) -> list[str]:
        return [key for key in _names_of(function.__code__) if key in function.__globals__]

    def _read_of(self, value: Any, held: dict[Any, Any]) -> list[Any]:
        """Return the keys of an object's attributes, or of a dict, that code reads by name."""
        if isinstance(value, torch.nn.Module):
            if _is_torchs(type(value).__module__):
                return [key for key, part in held.items() if type(part) is float]
            return [key for key in held.keys() - _OF_MODULES if key in self._names] + ["forward"]
        return [key for key in held if not isinstance(key, str) or key in self._names]

    # --- What is compared ---

    def _watch(self, value: Any, name: str) -> None:
        if isinstance(value, types.FunctionType):
            self._cells += [(key, cell, _contents(cell)) for key, cell in _cells(value)]
            self._add(value.__globals__, self._globals(value), "")
        elif isinstance(value, list):
            if len(value) <= MOST_VALUES and all(isinstance(part, PLAIN) for part in value):
                self._lists.append((name, value, list(value)))
        elif not isinstance(value, tuple | functools.partial | types.MethodType):
            held = self._attributes(value)
            self._add(held, self._read_of(value, held), name or type(value).__name__)

    def _add(self, holder: dict[Any, Any], keys: Iterable[Any], name: str) -> None:
        for key in keys:
            self._holders.append(holder)
            self._keys.append(key)
            self._shown.append(_joined(name, key))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, PLAIN) and isinstance(other, PLAIN):
        return type(one) is type(other) and (one == other or (one != one and other != other))
    return one is other


def _joined(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _is_torchs(module: str | None) -> bool:
    return (module or "").partition(".")[0] == "torch"


def _methods(kind: type) -> Iterator[types.FunctionType]:
    """Yield the methods of a class that are not torch's."""
    for base in kind.__mro__:
        if base.__module__ != "builtins" and not _is_torchs(base.__module__):
            for value in vars(base).values():
                function = getattr(value, "fget", value)  # a property's
                if isinstance(function, types.FunctionType):
                    yield function


@functools.lru_cache(maxsize=4096)
def _names_of(code: types.CodeType) -> frozenset[str]:
    """Return the names that code uses, functions within it included, and its texts: keys of dicts."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_of(constant)
        elif isinstance(constant, str):
            names.add(constant)
    return frozenset(names)


def _cells(function: types.FunctionType) -> Iterator[tuple[str, types.CellType]]:
    return zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
