"""Python objects that a step's code can reach, as far as it names them."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch.optim import Optimizer

from gpusim.gpu.capture.user_step import DEPTH, MOST_PARTS
from gpusim.gpu.optimize.names import cells, globals_of, is_torchs, is_users, methods, names_of, options_of

#: Types compared by value; other objects are compared by identity.
PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_LEAVES: Final = (*PLAIN, torch.Tensor, Optimizer, types.BuiltinFunctionType)
#: Types of options of torch's own layers.
_OPTIONS: Final = (*PLAIN, tuple, types.FunctionType, types.BuiltinFunctionType)
#: Longest list, or dict that code does not read by name, whose elements are compared.
MOST_VALUES: Final = 256
#: With these methods code reads all values of a dict.
_ALL_OF_DICT: Final = frozenset(("items", "values"))
_OF_MODULES: Final = frozenset(vars(torch.nn.Module()))
_METHODS: Final = ("forward", "__call__")


class Reach:
    """Objects with attributes, functions and containers that a step reaches from `roots` and its modules."""

    def __init__(self, roots: Iterable[Any], modules: Iterable[torch.nn.Module]) -> None:
        self.names = set(_METHODS)
        """Names that the code of the reached functions uses."""
        self._methods_of: dict[type, list[types.FunctionType]] = {}
        self.reached: dict[int, tuple[Any, str, int]] = {}
        """By id, with the name by which each was found, and how deep."""
        for root in (*roots, *modules):
            self._reach(root, "", 0)
        count = -1
        while count != (count := len(self.names) + len(self.reached)):  # a method may read what leads to others
            for value, name, depth in list(self.reached.values()):
                self._look_into(value, name, depth)

    def __iter__(self) -> Iterator[tuple[Any, str]]:
        return ((value, name) for value, name, _ in self.reached.values())

    def _reach(self, value: Any, name: str, depth: int) -> None:
        if isinstance(value, _LEAVES) or id(value) in self.reached or depth > DEPTH:
            return
        if isinstance(value, torch.nn.Module) and depth:
            return  # all modules of the step are roots
        if isinstance(value, list | tuple | dict) and len(value) > MOST_PARTS:
            return
        if isinstance(value, types.FunctionType | type) and not is_users(value.__module__):
            return
        if isinstance(value, types.ModuleType) and not is_users(value.__name__):
            return
        self.reached[id(value)] = (value, name, depth)

    def _look_into(self, value: Any, name: str, depth: int) -> None:
        if isinstance(value, types.FunctionType):
            self.names.update(names_of(value.__code__))
        kind = value if isinstance(value, type) else type(value)
        if kind not in self._methods_of:
            self._methods_of[kind] = list(methods(kind))
            for base in kind.__mro__:
                self._reach(base, base.__name__, depth)
        for method in self._methods_of[kind]:
            if method.__name__ in self.names:
                self.names.update(names_of(method.__code__))
                self._reach(method, method.__name__, depth)
        for part_name, part in self._parts(value, name):
            self._reach(part, part_name, depth + 1)

    def _parts(self, value: Any, name: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, functools.partial):
            yield from ((name, part) for part in (value.func, *value.args, *value.keywords.values()))
        elif isinstance(value, types.MethodType):
            yield from ((name, part) for part in (value.__self__, value.__func__))
        elif isinstance(value, types.FunctionType):
            yield from ((key, contents_of(cell)) for key, cell in cells(value))
            yield from ((key, value.__globals__[key]) for key in self.globals_of(value) if key in value.__globals__)
            yield from ((name, part) for part in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()))
        elif isinstance(value, list | tuple):
            yield from ((f"{name}[{place}]", part) for place, part in enumerate(value))
        else:
            held = self.attributes(value)
            yield from ((joined(name, key), held[key]) for key in self.read_of(value, held) if key in held)
            yield from ((joined(name, key), getattr(value, key, None)) for key in self.slots_of(value))

    @staticmethod
    def attributes(value: Any) -> dict[Any, Any]:
        """Return a dict itself, or the dict of an object's attributes."""
        held = value if isinstance(value, dict) else getattr(value, "__dict__", None)
        return {} if held is None else held

    def slots_of(self, value: Any) -> list[str]:
        """Return the names of an object's slots that code reads."""
        kind = type(value)
        users = [base for base in kind.__mro__ if is_users(base.__module__)]
        slots = (key for base in users for key, of in vars(base).items() if isinstance(of, types.MemberDescriptorType))
        return [key for key in slots if key in self.names]

    @staticmethod
    def globals_of(function: types.FunctionType) -> list[str]:
        """Return the names of a function's globals."""
        return [key for key in globals_of(function.__code__) if key in function.__globals__]

    def read_of(self, value: Any, held: Mapping[Any, Any]) -> list[Any]:
        """Return the keys of an object's attributes, or of a dict, that code reads by name."""
        if isinstance(value, torch.nn.Module):
            kind: Any = type(value)
            own = held.keys() - _OF_MODULES
            options = [key for key in own & options_of(kind) if isinstance(held[key], _OPTIONS)]
            if is_torchs(kind.__module__):
                return [*{*options, "forward"}]
            return [*{*options, *(own & self.names), "forward"}]
        named = [key for key in held if not isinstance(key, str) or key in self.names]
        if isinstance(value, dict) and len(held) <= MOST_VALUES and (not named or self.names & _ALL_OF_DICT):
            return list(held)
        return named

    def hiding(self, value: Any, held: dict[Any, Any]) -> list[str]:
        """Return names of plain class attributes that an object's own attribute may come to hide."""
        users = [base for base in type(value).__mro__ if is_users(base.__module__)]
        plain = {key for base in users for key, of in vars(base).items() if isinstance(of, (*PLAIN, tuple))}
        return sorted(key for key in plain & self.names if key not in held)


def joined(name: str, key: Any) -> str:
    """Return the name of an attribute, with its owner's."""
    return f"{name}.{key}" if name else str(key)


def contents_of(cell: types.CellType) -> Any:
    """Return the value in a closure's cell, None if there is none yet."""
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
