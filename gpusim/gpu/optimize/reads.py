"""Python values that a step's code may read: attributes, globals and closures, as they were at its capture.

A captured step repeats GPU work with the numbers of its capture. Watched are values whose names occur in the code of
the step (attributes of objects, classes and Python modules, slots, keys of dicts), short lists, the sizes of dicts, the
classes and dicts of objects, and the options that the `forward` of torch's own layers reads. What the code only counts
or keeps elsewhere may change. Not watched are names computed while the step runs, sets, long lists, the order of dicts,
attributes of dicts, and the standard library's and torch's modules.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch.optim import Optimizer

from gpusim.gpu.capture.user_step import DEPTH, MOST_PARTS
from gpusim.gpu.optimize.names import cells, globals_of, is_torchs, is_users, methods, names_of, options_of
from gpusim.gpu.optimize.unchanged import MISSING, KeyedValues, Natures, all_same

#: Types compared by value; other objects are compared by identity.
PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_LEAVES: Final = (*PLAIN, torch.Tensor, Optimizer, types.BuiltinFunctionType)
#: Types of options of torch's own layers.
_OPTIONS: Final = (*PLAIN, tuple, types.FunctionType, types.BuiltinFunctionType)
#: Longest list, or dict that code does not read by name, whose elements are compared.
MOST_VALUES: Final = 256
#: With these methods code reads all values of a dict.
_ALL_OF_DICT: Final = frozenset(("items", "values"))
#: Values whose attributes are not watched in a dict that the user may replace; those of modules are `Places`'.
_NO_OWNERS: Final = (dict, list, tuple, type, torch.nn.Module, types.FunctionType, types.MethodType, functools.partial)
_OF_MODULES: Final = frozenset(vars(torch.nn.Module()))
_METHODS: Final = ("forward", "__call__")
#: Names of torch's that set or ask whether gradients are recorded.
_GRADIENT_MODES: Final = frozenset(
    ("no_grad", "enable_grad", "set_grad_enabled", "is_grad_enabled", "requires_grad", "requires_grad_")
)


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
        self._others: list[tuple[str, Callable[[], Any]]] = []
        """Names and readers of values that lie in no dict of the user's: of classes, slots and closures; and the sizes
        of dicts.
        """
        self._lists: list[tuple[str, list[Any], list[Any]]] = []
        for value, name, _ in self._reached.values():
            self._watch(value, name)
        self._natures = Natures(value for value, _, _ in self._reached.values() if not isinstance(value, _NO_OWNERS))
        self._in_dicts = KeyedValues(self._holders, self._keys)
        self._others_before = self._others_now()
        self.gradients = any("grad" in name for name in self._names - _GRADIENT_MODES)
        """Whether the code may read gradients: it names them, or a function of torch's for them."""
        self._names.clear()
        self._methods_of.clear()
        self._reached.clear()

    def changed(self) -> str | None:
        """Return the name of a changed value, or None. Called at each step."""
        if not self._natures.hold():
            return "__class__ or __dict__"
        for changed in (self._changed_in_dicts, self._changed_of_others, self._changed_in_lists):
            name = changed()
            if name is not None:
                return name
        return None

    def _changed_in_dicts(self) -> str | None:
        """If other objects have the same values, they are those to find from now on."""
        if self._in_dicts.hold():
            return None
        values = self._in_dicts.now()
        name = _first_other(self._shown, values, self._in_dicts.values)
        if name is None:
            self._in_dicts.keep(values)
        return name

    def _changed_of_others(self) -> str | None:
        values = self._others_now()
        if all_same(values, self._others_before):
            return None
        return _first_other([name for name, _ in self._others], values, self._others_before)

    def _others_now(self) -> list[Any]:
        return [read() for _, read in self._others]

    def _changed_in_lists(self) -> str | None:
        for name, items, former in self._lists:
            if len(items) != len(former):
                return name
            if not all_same(items, former) and not all(map(_same, items, former)):
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
        if isinstance(value, types.FunctionType | type) and not is_users(value.__module__):
            return
        if isinstance(value, types.ModuleType) and not is_users(value.__name__):
            return
        self._reached[id(value)] = (value, name, depth)

    def _look_into(self, value: Any, name: str, depth: int) -> None:
        if isinstance(value, types.FunctionType):
            self._names.update(names_of(value.__code__))
        kind = value if isinstance(value, type) else type(value)
        if kind not in self._methods_of:
            self._methods_of[kind] = list(methods(kind))
            for base in kind.__mro__:
                self._reach(base, base.__name__, depth)
        for method in self._methods_of[kind]:
            if method.__name__ in self._names:
                self._names.update(names_of(method.__code__))
                self._reach(method, method.__name__, depth)
        for part_name, part in self._parts(value, name):
            self._reach(part, part_name, depth + 1)

    def _parts(self, value: Any, name: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, functools.partial):
            yield from ((name, part) for part in (value.func, *value.args, *value.keywords.values()))
        elif isinstance(value, types.MethodType):
            yield from ((name, part) for part in (value.__self__, value.__func__))
        elif isinstance(value, types.FunctionType):
            yield from ((key, _contents(cell)) for key, cell in cells(value))
            yield from ((key, value.__globals__[key]) for key in self._globals(value) if key in value.__globals__)
            yield from ((name, part) for part in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()))
        elif isinstance(value, list | tuple):
            yield from ((f"{name}[{place}]", part) for place, part in enumerate(value))
        else:
            held = self._attributes(value)
            yield from ((_joined(name, key), held[key]) for key in self._read_of(value, held) if key in held)
            yield from ((_joined(name, key), getattr(value, key, None)) for key in self._slots_of(value))

    @staticmethod
    def _attributes(value: Any) -> dict[Any, Any]:
        held = value if isinstance(value, dict) else getattr(value, "__dict__", None)
        return {} if held is None else held

    def _slots_of(self, value: Any) -> list[str]:
        kind = type(value)
        users = [base for base in kind.__mro__ if is_users(base.__module__)]
        slots = (key for base in users for key, of in vars(base).items() if isinstance(of, types.MemberDescriptorType))
        return [key for key in slots if key in self._names]

    def _globals(self, function: types.FunctionType) -> list[str]:
        return [key for key in globals_of(function.__code__) if key in function.__globals__]

    def _read_of(self, value: Any, held: Mapping[Any, Any]) -> list[Any]:
        """Return the keys of an object's attributes, or of a dict, that code reads by name."""
        if isinstance(value, torch.nn.Module):
            kind: Any = type(value)
            own = held.keys() - _OF_MODULES
            options = [key for key in own & options_of(kind) if isinstance(held[key], _OPTIONS)]
            if is_torchs(kind.__module__):
                return [*{*options, "forward"}]
            return [*{*options, *(own & self._names), "forward"}]
        named = [key for key in held if not isinstance(key, str) or key in self._names]
        if isinstance(value, dict) and len(held) <= MOST_VALUES and (not named or self._names & _ALL_OF_DICT):
            return list(held)
        return named

    # --- What is compared ---

    def _watch(self, value: Any, name: str) -> None:
        if isinstance(value, types.FunctionType):
            self._others += [(key, partial(_contents, cell)) for key, cell in cells(value)]
            self._add(value.__globals__, self._globals(value), "")
        elif isinstance(value, list):
            self._lists += [(name, value, list(value))] if len(value) <= MOST_VALUES else []
        elif isinstance(value, type):
            attributes = vars(value)
            keys = self._read_of(value, attributes)
            self._others += [(_joined(name, key), partial(attributes.get, key, MISSING)) for key in keys]
        elif not isinstance(value, tuple | functools.partial | types.MethodType):
            held = self._attributes(value)
            shown = name or type(value).__name__
            self._add(held, self._read_of(value, held), shown)
            if isinstance(value, dict):
                self._others.append((shown, partial(len, held)))
            else:
                self._add(held, self._hiding(value, held), shown)
            slots = self._slots_of(value)
            self._others += [(_joined(shown, key), partial(getattr, value, key, MISSING)) for key in slots]

    def _hiding(self, value: Any, held: dict[Any, Any]) -> list[str]:
        """Return names of plain class attributes that an object's own attribute may come to hide."""
        users = [base for base in type(value).__mro__ if is_users(base.__module__)]
        plain = {key for base in users for key, of in vars(base).items() if isinstance(of, (*PLAIN, tuple))}
        return sorted(key for key in plain & self._names if key not in held)

    def _add(self, holder: dict[Any, Any], keys: Iterable[Any], name: str) -> None:
        for key in keys:
            self._holders.append(holder)
            self._keys.append(key)
            self._shown.append(_joined(name, key))


def _first_other(names: Sequence[str], values: Sequence[Any], before: Sequence[Any]) -> str | None:
    """Return the name of the first value that is not the same as before."""
    rows = zip(names, values, before, strict=True)
    return next((name for name, value, former in rows if not _same(value, former)), None)


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, PLAIN) and isinstance(other, PLAIN):
        return type(one) is type(other) and (one == other or (one != one and other != other))
    if isinstance(one, tuple) and isinstance(other, tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    return False


def _joined(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
