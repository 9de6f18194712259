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
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

import torch

from gpusim.gpu.optimize.names import cells
from gpusim.gpu.optimize.reach import MOST_VALUES, PLAIN, Reach, contents_of, joined
from gpusim.gpu.optimize.unchanged import MISSING, KeyedValues, Natures, all_same

#: Values whose attributes are not watched in a dict that the user may replace; those of modules are `Places`'.
_NO_OWNERS: Final = (dict, list, tuple, type, torch.nn.Module, types.FunctionType, types.MethodType, functools.partial)
#: Names of torch's that set or ask whether gradients are recorded.
_GRADIENT_MODES: Final = frozenset(
    ("no_grad", "enable_grad", "set_grad_enabled", "is_grad_enabled", "requires_grad", "requires_grad_")
)


class Reads:
    """Values of now that the functions and objects of a step may read, and the attributes of its modules."""

    def __init__(self, roots: Iterable[Any], modules: Iterable[torch.nn.Module]) -> None:
        reach = Reach(roots, modules)
        self._holders: list[dict[Any, Any]] = []
        self._keys: list[Any] = []
        self._shown: list[str] = []
        self._others: list[tuple[str, Callable[[], Any]]] = []
        """Names and readers of values that lie in no dict of the user's: of classes, slots and closures; and the sizes
        of dicts.
        """
        self._lists: list[tuple[str, list[Any], list[Any]]] = []
        for value, name in reach:
            self._watch(reach, value, name)
        self._natures = Natures(value for value, _ in reach if not isinstance(value, _NO_OWNERS))
        self._in_dicts = KeyedValues(self._holders, self._keys)
        self._others_before = self._others_now()
        self.gradients = any("grad" in name for name in reach.names - _GRADIENT_MODES)
        """Whether the code may read gradients: it names them, or a function of torch's for them."""

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

    def _watch(self, reach: Reach, value: Any, name: str) -> None:
        if isinstance(value, types.FunctionType):
            self._others += [(key, partial(contents_of, cell)) for key, cell in cells(value)]
            self._add(value.__globals__, reach.globals_of(value), "")
        elif isinstance(value, list):
            self._lists += [(name, value, list(value))] if len(value) <= MOST_VALUES else []
        elif isinstance(value, type):
            attributes = vars(value)
            keys = reach.read_of(value, attributes)
            self._others += [(joined(name, key), partial(attributes.get, key, MISSING)) for key in keys]
        elif not isinstance(value, tuple | functools.partial | types.MethodType):
            held = reach.attributes(value)
            shown = name or type(value).__name__
            self._add(held, reach.read_of(value, held), shown)
            if isinstance(value, dict):
                self._others.append((shown, partial(len, held)))
            else:
                self._add(held, reach.hiding(value, held), shown)
            slots = reach.slots_of(value)
            self._others += [(joined(shown, key), partial(getattr, value, key, MISSING)) for key in slots]

    def _add(self, holder: dict[Any, Any], keys: Iterable[Any], name: str) -> None:
        for key in keys:
            self._holders.append(holder)
            self._keys.append(key)
            self._shown.append(joined(name, key))


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
