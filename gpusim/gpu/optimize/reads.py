"""Python values that a step's code may read: attributes, globals and closures, as they were at its capture.

A captured step repeats GPU work with the numbers of its capture. Watched are values whose names occur in the code of
the step (attributes of objects, classes and Python modules, slots, keys of dicts), attributes that it asks for by
`getattr` or `hasattr` and that are not there, containers of up to 1,000 values (of dicts that code reads by name the
keys only), small arrays, what weak references and context variables refer to, what methods of schedulers and
collections read, options of the user's own in an optimizer's groups, code and defaults of functions, classes and dicts
of objects, and the options that the `forward` of torch's own layers reads. Of torch and the standard library: functions
and classes that code names. What the code only counts or keeps elsewhere may change. Not watched are names computed
while the step runs, longer containers, what lies deeper than eight attributes, whether a cached function is to answer
anew, and what libraries answer: the environment, files, clocks.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final

import numpy as np
import torch

from gpusim.gpu.optimize.steps import value_of
from gpusim.gpu.optimize.unchanged import MISSING, Absent, Contents, Functions, Items, KeyedValues, Natures, all_same
from gpusim.gpu.reach.names import cells, globals_of, imports_of, is_torchs, options_of
from gpusim.gpu.reach.raw import ANSWERING, answer_of, attributes_of, contents_of, has_attributes, is_a, items_of
from gpusim.gpu.reach.search import MOST_BYTES, MOST_PARTS, PLAIN, Reach, joined

#: Values whose attributes are not watched in a dict that the user may replace; those of modules are `Places`'.
_NO_OWNERS: Final = (type, torch.nn.Module, types.FunctionType, types.MethodType, functools.partial)
_PLAIN_HOLDERS: Final = (dict, list, tuple, set, frozenset, deque, OrderedDict, defaultdict)
#: Types of what code calls, or finds such things in.
_CALLED: Final = (types.FunctionType, types.BuiltinFunctionType, type, types.ModuleType)
_OF_EVERY_MODULE: Final = ("__call__", "_wrapped_call_impl", "_call_impl", "__getattr__")
#: Questions of code to torch that the key of a captured step does not answer.
_ASKED: Final[dict[str, Callable[[], bool]]] = {
    "is_grad_enabled": torch.is_grad_enabled,
    "is_inference_mode_enabled": torch.is_inference_mode_enabled,
}
#: Names of torch's that set or ask whether gradients are recorded.
_GRADIENT_MODES: Final = frozenset(
    ("no_grad", "enable_grad", "set_grad_enabled", "is_grad_enabled", "requires_grad", "requires_grad_")
)


class Reads:
    """Values of now that the functions and objects of a step may read, and the attributes of its modules."""

    def __init__(self, roots: Iterable[Any], modules: Iterable[torch.nn.Module], sets_modes: bool = False) -> None:
        """`sets_modes`: the step itself says whether gradients are recorded."""
        reach = Reach(roots, modules)
        self.hidden = list(reach.hidden.values())
        """Modules that are no parts of the step's."""
        self._holders: list[dict[Any, Any]] = []
        self._keys: list[Any] = []
        self._shown: list[str] = []
        self._classes: dict[int, type] = {}
        """Classes whose attributes are in one of these dicts, by the dict's id."""
        self._slots: list[tuple[Any, str]] = []
        """Objects with the names of their watched slots."""
        self._others: list[tuple[str, Callable[[], Any]]] = []
        """Names and readers of values that lie in no dict of the user's: slots and closures."""
        self._whole: list[tuple[str, dict[Any, Any]]] = []
        """Dicts, all of which is compared, with their order."""
        self._keyed: list[tuple[str, dict[Any, Any]]] = []
        """Dicts, all keys of which are compared, with their order."""
        self._lists: list[tuple[str, list[Any]]] = []
        self._series: list[tuple[str, Collection[Any]]] = []
        """Objects that yield others in an order that no dict or list has."""
        self._absent: list[tuple[dict[Any, Any], frozenset[str]]] = []
        """Dicts of attributes, with names that code asks for and that they do not have."""
        self._equal: list[tuple[str, Callable[[], Any]]] = []
        """Names and readers of values that are compared as a whole."""
        functions = []
        for value, name in reach:
            self._watch(reach, value, name)
            functions += [value] if type(value) is types.FunctionType else []
        self._watch_classes(reach)
        self._watch_libraries(reach)
        self._watch_groups(reach)
        for module in self.hidden:
            self._add(vars(module), ("training",), type(module).__name__)
        if not sets_modes:
            self._others += [(name, ask) for name, ask in _ASKED.items() if name in reach.names]
        self._natures = Natures(value for value, _ in reach if _is_owner(value))
        self._functions = Functions(functions)
        self._in_dicts = KeyedValues(self._holders, self._keys)
        self._first = list(self._in_dicts.values), [getattr(owner, key, MISSING) for owner, key in self._slots]
        """What lay in dicts and slots when this was made."""
        self._first_inside = [(held, dict(held)) for _, held in self._whole], [(i, list(i)) for _, i in self._lists]
        """Whole dicts and lists, with what they held then."""
        self._came = Absent([held for held, _ in self._absent], [names for _, names in self._absent])
        self.names = frozenset(reach.names)
        """Names that the code uses."""
        self._others_before = self._others_now()
        self._keep()
        self.gradients = any("grad" in name for name in reach.names - _GRADIENT_MODES)
        """Whether the code may read gradients: it names them, or a function of torch's for them."""

    def changed(self) -> str | None:
        """Return the name of a changed value, or None. Called at each step."""
        if not self._natures.hold():
            return "__class__ or __dict__"
        if not self._functions.hold():
            return "__code__ or __defaults__"
        for changed in (self._changed_in_dicts, self._came.came, self._changed_of_others, self._changed_inside):
            name = changed()
            if name is not None:
                return name
        return None

    def put_back(self) -> None:
        """Restore what dicts, lists, classes and slots had when this was made."""
        dicts, lists = self._first_inside
        for held, contents in dicts:
            kind: Any = OrderedDict if isinstance(held, OrderedDict) else dict
            now, then = (list(chain.from_iterable(kind.items(each))) for each in (held, kind(contents)))
            if not (len(now) == len(then) and all_same(now, then)):
                kind.clear(held)
                kind.update(held, contents)
        for items, kept in lists:
            if not (len(items) == len(kept) and all_same(items, kept)):
                list.__setitem__(items, slice(None), kept)
        in_dicts, in_slots = self._first
        for holder, key, before, now in zip(self._holders, self._keys, in_dicts, self._in_dicts.now(), strict=True):
            if now is before:
                continue
            kind = self._classes.get(id(holder))
            if kind is not None:
                _set_attribute(kind, key, before)
            elif before is MISSING:
                dict.pop(holder, key, None)
            else:
                dict.__setitem__(holder, key, before)
        for (owner, key), before in zip(self._slots, in_slots, strict=True):
            if getattr(owner, key, MISSING) is not before:
                _set_attribute(owner, key, before)

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

    # --- Containers ---

    def _keep(self) -> None:
        """Take the contents of now as those to compare with."""
        self._contents, self._items = (
            Contents([held for _, held in self._whole], [held for _, held in self._keyed]),
            Items(items for _, items in self._lists),
        )
        self._inside_before = list(map(list, self._inside()))
        self._series_before = [list(items) for _, items in self._series]
        self._equal_before = [read() for _, read in self._equal]

    def _inside(self) -> Iterator[Iterable[Any]]:
        yield from (chain.from_iterable(held.items()) for _, held in self._whole)
        yield from (items_of(held) for _, held in self._keyed)
        yield from (items for _, items in self._lists)

    def _changed_inside(self) -> str | None:
        """Return the name of a changed container. Other objects with the same values are those to find from now on."""
        if not (self._contents.hold() and self._items.hold()):
            named = chain(self._whole, self._keyed, self._lists)
            for (name, _), now, before in zip(named, map(list, self._inside()), self._inside_before, strict=True):
                if not _same_items(now, before):
                    return name
            self._keep()
        for (name, items), former in zip(self._series, self._series_before, strict=True):
            if not (len(items) == len(former) and all_same(items, former)) and not _same_items(list(items), former):
                return name
        for (name, read), value in zip(self._equal, self._equal_before, strict=True):
            if read() != value:
                return name
        return None

    # --- What is compared ---

    def _watch_absent(self, reach: Reach, held: dict[Any, Any]) -> None:
        """Watch names of attributes that code asks for, and that a dict of attributes does not have."""
        names = reach.absent(held)
        if names:
            self._absent.append((held, names))

    def _watch(self, reach: Reach, value: Any, name: str) -> None:
        if has_attributes(value) and not is_a(value, type):
            self._watch_absent(reach, attributes_of(value))
        beside = reach.beside(value)
        if beside or is_a(value, (dict, list, deque)):
            named = reach.names & beside.keys()
            self._add(beside, [*named, *reach.hiding(value, beside)], name)
        if type(value) is types.FunctionType:
            self._others += [(key, partial(contents_of, cell)) for key, cell in cells(value)]
            self._add(value.__globals__, globals_of(value.__code__), "")
            self._add(sys.modules, sys.modules.keys() & imports_of(value), "")
            if value.__kwdefaults__:
                self._whole.append((name, value.__kwdefaults__))
        elif is_a(value, functools.partial):
            self._whole.append((name, value.keywords))
        elif is_a(value, list):
            self._lists.append((name, value))
        elif is_a(value, deque):
            self._series.append((name, value))
        elif is_a(value, set):
            self._equal.append((name, value.copy))
        elif is_a(value, np.ndarray):
            if value.size <= MOST_PARTS and not value.dtype.hasobject:
                self._equal.append((name, value.tobytes))
        elif is_a(value, ANSWERING):
            self._others.append((name, partial(answer_of, value)))
        elif _is_memory(value):
            self._equal.append((name, partial(_bytes_of, value)))
        elif not is_a(value, (type, tuple, frozenset, types.MethodType)):
            self._watch_object(reach, value, name or type(value).__name__)

    def _watch_object(self, reach: Reach, value: Any, shown: str) -> None:
        held = reach.attributes(value)
        if is_a(value, dict) and reach.reads_whole(held):
            self._whole.append((shown, held))
            if is_a(value, OrderedDict):
                self._series.append((shown, value))
            return
        self._add(held, reach.read_of(value, held), shown)
        if is_a(value, dict) or reach.takes_all(value):
            self._keyed.append((shown, held))
        if not is_a(value, dict):
            self._add(held, reach.hiding(value, held), shown)
        slots = reach.slots_of(value)
        self._slots += [(value, key) for key in slots]
        self._others += [(joined(shown, key), partial(getattr, value, key, MISSING)) for key in slots]

    def _watch_classes(self, reach: Reach) -> None:
        """Watch what the user's classes have under names that code uses, and the functions of torch's layers."""
        for kind, names in reach.inherited():
            held = attributes_of(kind)
            self._classes[id(held)] = kind
            self._add(held, names, kind.__name__)
            self._watch_absent(reach, held)
        kinds: list[Any] = [type(module) for module in (*reach.modules, *self.hidden)]
        layers = {base: options_of(kind) for kind in kinds for base in kind.__mro__}
        for kind, options in layers.items():
            if is_torchs(kind.__module__):
                called = _OF_EVERY_MODULE if kind is torch.nn.Module else options
                held = attributes_of(kind)
                self._classes[id(held)] = kind
                self._add(held, [key for key in called if isinstance(held.get(key), _CALLED)], kind.__name__)

    def _watch_libraries(self, reach: Reach) -> None:
        """Watch functions and classes of torch's and of the standard library that code uses: others may replace
        them.
        """
        kinds: list[Any] = [type(module) for module in (*reach.modules, *self.hidden)]
        layers = frozenset[str]().union(*map(options_of, kinds))
        todo = list(reach.libraries.values())
        for library in todo:
            held = vars(library)
            named = [(key, held[key]) for key in reach.names & held.keys()]
            todo += [part for _, part in named if isinstance(part, types.ModuleType) and part not in todo]
            self._add(held, [key for key, part in named if isinstance(part, _CALLED)], library.__name__)
        functional = vars(torch.nn.functional)
        self._add(functional, layers & functional.keys(), "torch.nn.functional")

    def _watch_groups(self, reach: Reach) -> None:
        """Watch options of the user's own among those of optimizers."""
        for optimizer in reach.optimizers.values():
            for number, group in enumerate(optimizer.param_groups):
                keys = reach.names & (group.keys() - optimizer.defaults.keys() - {"params"})
                self._others += [(key, partial(_option, optimizer, number, key)) for key in keys]
                self._absent.append((group, frozenset(reach.names - group.keys())))

    def _add(self, holder: dict[Any, Any], keys: Iterable[Any], name: str) -> None:
        for key in keys:
            self._holders.append(holder)
            self._keys.append(key)
            self._shown.append(joined(name, key))


def _option(optimizer: torch.optim.Optimizer, number: int, key: str) -> Any:
    """Return an option of a group: a loaded checkpoint brings new dicts."""
    groups = optimizer.param_groups
    return groups[number].get(key, MISSING) if number < len(groups) else MISSING


def _set_attribute(owner: Any, key: str, value: Any) -> None:
    """Set an attribute past the owner's own code, or remove it where it was `MISSING`; what refuses that stays."""
    base: Any = type if isinstance(owner, type) else object
    with contextlib.suppress(AttributeError, TypeError):
        if value is MISSING:
            base.__delattr__(owner, key)
        else:
            base.__setattr__(owner, key, value)


def _is_memory(value: Any) -> bool:
    """Whether it is an array of few bytes: of Python's, or of C's types."""
    memory = _memory_of(value)
    return memory is not None and memory.nbytes <= MOST_BYTES


def _memory_of(value: Any) -> memoryview | None:
    try:
        return memoryview(value)
    except (TypeError, ValueError, BufferError):  # a closed one has none
        return None


def _bytes_of(value: Any) -> bytes | None:
    memory = _memory_of(value)
    return None if memory is None else memory.tobytes()


def _is_owner(value: Any) -> bool:
    """Whether the user may give an object another class, or another dict of attributes."""
    return type(value) not in _PLAIN_HOLDERS and not is_a(value, _NO_OWNERS)


def _first_other(names: Sequence[str], values: Sequence[Any], before: Sequence[Any]) -> str | None:
    """Return the name of the first value that is not the same as before."""
    rows = zip(names, values, before, strict=True)
    return next((name for name, value, former in rows if not _same(value, former)), None)


def _same_items(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(_same, some, others))


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, PLAIN) and isinstance(other, PLAIN):
        inexact = isinstance(one, float | complex)  # the sign of a zero counts, and nan is nan
        return type(one) is type(other) and (value_of(one) == value_of(other) if inexact else one == other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    return False
