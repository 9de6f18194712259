"""Python objects that a step's code can reach, as far as it names them."""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import _lru_cache_wrapper
from typing import Any, Final

import torch
from torch.optim import Optimizer

from gpusim.gpu.reach.names import (
    COMPUTED_KEY,
    cells,
    globals_of,
    is_special,
    is_torchs,
    is_users,
    methods,
    names_of,
    options_of,
    read_by_library,
)

#: Types compared by value; other objects are compared by identity.
PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_LEAVES: Final = (*PLAIN, torch.Tensor, Optimizer, types.BuiltinFunctionType)
#: Types of options of torch's own layers.
_OPTIONS: Final = (*PLAIN, tuple, types.FunctionType, types.BuiltinFunctionType)
#: Depth of the search for modules and optimizers within objects: a trainer in a list is 1, its model 2.
DEPTH: Final = 4
#: Longest container that is searched: a longer one is data.
MOST_PARTS: Final = 1_000
#: Depth of the search by names: an attribute of a module is 1, an attribute of that 2.
DEEPEST: Final = 8
#: With these code may read all values of a dict.
_ALL_OF_DICT: Final = frozenset(("items", "values", "get", COMPUTED_KEY))
_OF_MODULES: Final = frozenset(vars(torch.nn.Module()))
#: Types whose instances hold values, and attributes only in classes of the user's that inherit from them.
_HOLDERS: Final = (dict, list, tuple, set, deque, types.FunctionType, functools.partial)


#: Types of objects that refer to one other.
ANSWERING: Final = frozenset((weakref.ref, ContextVar))


class Reach:
    """Objects with attributes, functions and containers that a step reaches from `roots` and its modules."""

    def __init__(self, roots: Iterable[Any], modules: Iterable[torch.nn.Module]) -> None:
        self.names: set[str] = set()
        """Names that the code of the reached functions uses."""
        self.hidden: dict[int, torch.nn.Module] = {}
        """Modules that are no parts of the step's, by id: in a list, say."""
        self.tops: dict[int, torch.nn.Module] = {}
        """Those of them that were found themselves, not as children of others, by id."""
        self.libraries: dict[int, types.ModuleType] = {}
        """Python modules of torch's and of the standard library, by id."""
        self.optimizers: dict[int, Optimizer] = {}
        """Optimizers, by id."""
        self.modules = list(modules)
        self._methods_of: dict[type, list[tuple[str, types.FunctionType]]] = {}
        self.reached: dict[int, tuple[Any, str, int]] = {}
        """By id, with the name by which each was found, and how deep."""
        for root in (*roots, *self.modules):
            self._reach(root, "", 0)
        self._own = set(map(id, self.modules))
        count = -1
        while count != (count := len(self.names) + len(self.reached)):  # a method may read what leads to others
            for value, name, depth in list(self.reached.values()):
                self._look_into(value, name, depth)

    @property
    def classes(self) -> list[type]:
        """Classes of what was reached, and those reached themselves."""
        return list(self._methods_of)

    def __iter__(self) -> Iterator[tuple[Any, str]]:
        return ((value, name) for value, name, _ in self.reached.values())

    def _reach(self, value: Any, name: str, depth: int) -> None:
        if isinstance(value, Optimizer):
            self.optimizers[id(value)] = value
        if isinstance(value, _LEAVES) or id(value) in self.reached or depth > DEEPEST:
            return
        if isinstance(value, torch.nn.Module) and depth:
            self.tops[id(value)] = value
            others = [module for module in value.modules() if id(module) not in self._own | self.reached.keys()]
            self.hidden.update((id(module), module) for module in others)
            self.reached.update((id(module), (module, name, 0)) for module in others)
            return
        if isinstance(value, list | tuple | dict | set | deque) and len(value) > MOST_PARTS:
            return
        if isinstance(value, types.FunctionType | type) and not is_users(value.__module__):
            return
        if isinstance(value, types.ModuleType) and not is_users(value.__name__):
            self.libraries[id(value)] = value
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
        for method_name, method in self._methods_of[kind]:
            if method_name in self.names or (is_users(method.__module__) and is_special(method_name)):
                self.names.update(names_of(method.__code__))
                self._reach(method, method_name, depth)
        for part_name, part in self._parts(value, name):
            self._reach(part, part_name, depth + 1)

    def _parts(self, value: Any, name: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, functools.partial):
            yield from ((name, part) for part in (value.func, *value.args, *value.keywords.values()))
        elif isinstance(value, types.MethodType):
            yield from ((name, part) for part in (value.__self__, value.__func__))
        elif isinstance(value, types.FunctionType):
            yield from ((key, contents_of(cell)) for key, cell in cells(value))
            held = value.__globals__
            yield from ((key, held[key]) for key in globals_of(value.__code__) if key in held)
            yield from ((name, part) for part in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()))
        elif isinstance(value, _lru_cache_wrapper):
            yield name, value.__wrapped__
        elif isinstance(value, types.MappingProxyType):
            yield from ((name, held) for held in gc.get_referents(value))
        elif type(value) in ANSWERING:
            yield name, answer_of(value)
        elif isinstance(value, list | tuple | deque):
            yield from ((f"{name}[{place}]", part) for place, part in enumerate(elements(value)))
        else:
            held = self.attributes(value)
            whole = isinstance(value, dict) and self.reads_whole(held)
            read = held if whole else self.read_of(value, held)
            yield from ((joined(name, key), lying_at(held, key)) for key in read if key in held)
            yield from ((joined(name, key), getattr(value, key, None)) for key in self.slots_of(value))
        held = self.beside(value)
        yield from ((joined(name, key), held[key]) for key in held if key in self.names)

    @staticmethod
    def beside(value: Any) -> dict[str, Any]:
        """Return the attributes of a function, or of a container of the user's own class."""
        held = getattr(value, "__dict__", None) if isinstance(value, _HOLDERS) else None
        return held if isinstance(held, dict) and held is not value else {}

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

    def read_of(self, value: Any, held: Mapping[Any, Any]) -> list[Any]:
        """Return the keys of an object's attributes, or of a dict, that code reads by name."""
        if isinstance(value, torch.nn.Module):
            kind: Any = type(value)
            own = held.keys() - _OF_MODULES
            options = [key for key in own & options_of(kind) if isinstance(held[key], _OPTIONS)]
            if is_torchs(kind.__module__):
                return [*{*options, "forward"}]
            return [*{*options, *(own & self.names), "forward"}]
        read = self.names if held is value else self.names | read_by_library(type(value), self.names)
        return [key for key in held if not isinstance(key, str) or key in read]

    def reads_whole(self, held: dict[Any, Any]) -> bool:
        """Whether code may read all of a dict, as far as its names tell."""
        return bool(self.names & _ALL_OF_DICT) or not any(not isinstance(k, str) or k in self.names for k in held)

    def hiding(self, value: Any, held: dict[Any, Any]) -> list[str]:
        """Return names of class attributes and methods that an object's own attribute may come to hide."""
        users = [base for base in type(value).__mro__ if is_users(base.__module__)]
        return sorted({key for base in users for key in vars(base)} & self.names - held.keys())

    def _is_called(self, key: str, value: Any) -> bool:
        return key in self.names or (isinstance(value, types.FunctionType) and is_special(key))

    def inherited(self) -> dict[type, set[str]]:
        """Return for each class of the user's the names that it, or another class of an object's, says what they
        are.
        """
        found: dict[type, set[str]] = {}
        for kind in self._methods_of:
            named = {key for base in kind.__mro__ for key, of in vars(base).items() if self._is_called(key, of)}
            for base in kind.__mro__:
                found.setdefault(base, set()).update(named)
        return {kind: names for kind, names in found.items() if is_users(kind.__module__)}


def joined(name: str, key: Any) -> str:
    """Return the name of an attribute, with its owner's."""
    return f"{name}.{key}" if name else str(key)


def lying_at(held: Mapping[Any, Any], key: Any) -> Any:
    """Return what a dict holds: a lookup of the user's own class may make another object each time."""
    return dict.__getitem__(held, key) if isinstance(held, dict) else held[key]


def elements(held: list[Any] | tuple[Any, ...] | deque[Any]) -> Iterator[Any]:
    """Return what a list, tuple or deque holds, past an iterator of the user's own class."""
    kind: Any = next(kind for kind in (list, tuple, deque) if isinstance(held, kind))
    iterator: Iterator[Any] = kind.__iter__(held)
    return iterator


def answer_of(value: Any) -> Any:
    """Return what a weak reference or a context variable refers to, None if it is nothing."""
    return value.get(None) if isinstance(value, ContextVar) else value()


def contents_of(cell: types.CellType) -> Any:
    """Return the value in a closure's cell, None if there is none yet."""
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def reachable(function: Any) -> tuple[dict[str, torch.nn.Module], list[Optimizer]]:
    """Return the modules and optimizers that a function can reach, by the names that it has for them."""
    modules: dict[str, torch.nn.Module] = {}
    optimizers: list[Optimizer] = []
    seen: set[int] = set()

    def look(value: Any, name: str, depth: int) -> None:
        if isinstance(value, PLAIN) or id(value) in seen or depth > DEPTH:
            return
        seen.add(id(value))
        if isinstance(value, torch.nn.Module):
            modules[name] = value
        elif isinstance(value, Optimizer):
            optimizers.append(value)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                look(part, name, depth + 1)
        elif isinstance(value, types.MethodType):
            look(value.__self__, name, depth)
            look(value.__func__, name, depth)
        elif isinstance(value, types.FunctionType):
            for key, part in _names_of(value).items():
                look(part, key, depth + 1)
        elif isinstance(value, weakref.ref):
            look(value(), name, depth)
        elif isinstance(value, list | tuple | dict | set | deque) and len(value) > MOST_PARTS:
            return  # data, not a trainer
        elif isinstance(value, list | tuple | set | deque):
            for place, part in enumerate(value):
                look(part, f"{name}.{place}", depth + 1)
        elif isinstance(value, dict):
            for key, part in value.items():
                look(part, f"{name}.{key}", depth + 1)
            for place, key in enumerate(value):
                if isinstance(key, torch.nn.Module | Optimizer):
                    look(key, f"{name}.{place}", depth + 1)
        elif not isinstance(value, type | types.ModuleType | torch.Tensor):
            for key, part in _attributes_of(value):
                look(part, key, depth + 1)

    look(function, "", 0)
    return ({"": next(iter(modules.values()))} if len(modules) == 1 else modules), optimizers


def _names_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the values that a function's code refers to by name: closure, globals, defaults."""
    code = function.__code__
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    values = {name: cell.cell_contents for name, cell in cells.items() if _is_filled(cell)}
    values |= {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return values | {f"default.{place}": value for place, value in enumerate(defaults)}


def _attributes_of(value: object) -> Iterator[tuple[str, Any]]:
    """Yield an object's attributes, those in slots too."""
    yield from getattr(value, "__dict__", {}).items()
    for base in type(value).__mro__:
        if "__slots__" in vars(base):
            slots = [key for key, of in vars(base).items() if isinstance(of, types.MemberDescriptorType)]
            yield from ((key, getattr(value, key)) for key in slots if hasattr(value, key))


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # not assigned yet
        return False
