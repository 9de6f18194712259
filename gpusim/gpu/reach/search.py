"""Python objects that a step's code can reach: the one search behind captures and what a captured step compares.

Followed are closures, defaults and attributes of functions, the globals that code names, Python modules that it
imports, what partials, methods, weak references and context variables stand for, functions behind a
`functools.lru_cache` with the answers kept, items of lists, tuples, deques, sets and dicts of up to 1,000, keys that
are models or optimizers, attributes and slots of objects, and parts of modules. What code names is also followed to
classes with their methods, and to Python modules. Of gpusim's own objects only what they run of the user's is followed
(`BEHIND`). Nothing is called on the way: see `raw`.
"""

from __future__ import annotations

import argparse
import functools
import gc
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import _lru_cache_wrapper
from itertools import count
from typing import Any, Final

import torch
from torch.optim import Optimizer

from gpusim.gpu.reach.names import (
    COMPUTED_KEY,
    MATCHED,
    asked_of,
    cells,
    globals_of,
    imports_of,
    is_gpusims,
    is_special,
    is_users,
    methods,
    methods_of_library,
    names_of,
    options_of,
    read_by_library,
)
from gpusim.gpu.reach.raw import (
    ANSWERING,
    CONTAINERS,
    answer_of,
    attributes_of,
    bases_of,
    contents_of,
    in_slot,
    is_a,
    items_of,
    kept_by,
    length_of,
    module_of,
    name_of,
    owner_of,
    pairs_of,
    parts_of_partial,
    slots_of,
)
from gpusim.gpu.reach.whole import ANY_OBJECT, attributes_by, attributes_of_self, whole_of

#: Types compared by value; other objects are compared by identity.
PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_LEAVES: Final = (*PLAIN, torch.Tensor, types.BuiltinFunctionType)
#: Attributes of an optimizer that are compared by themselves: tensors and options, for each parameter or group.
_OF_OPTIMIZERS: Final = frozenset(("state", "param_groups", "defaults"))
#: Types of options of torch's own layers.
_OPTIONS: Final = (*PLAIN, tuple, types.FunctionType, types.BuiltinFunctionType)
#: Depth of a search for all that lies there: a trainer in a list is 1, its model 2.
NEAR: Final = 4
#: Depth of a search for what code names: an attribute of a module is 1, an attribute of that 2.
DEEPEST: Final = 8
#: Longest container that is searched: a longer one is data.
MOST_PARTS: Final = 1_000
#: Largest array of Python's or of C's types that is compared: as many numbers.
MOST_BYTES: Final = 8 * MOST_PARTS
#: Attribute in which gpusim's own callables have the user's functions, models and optimizers that they run.
BEHIND: Final = "_behind"
#: With these code may read all values of a dict.
_ALL_OF_DICT: Final = frozenset(("items", "values", "get", COMPUTED_KEY))
#: Classes of the standard library whose instances hold what the user puts there.
_NAMESPACES: Final = (types.SimpleNamespace, argparse.Namespace)
_OF_MODULES: Final = frozenset(vars(torch.nn.Module()))
#: Types whose instances hold values, and attributes only in classes of the user's that inherit from them.
_HOLDERS: Final = (*CONTAINERS, types.FunctionType, functools.partial, _lru_cache_wrapper)
#: Types of objects that stand for another: going on to it is no step.
_STANDING: Final = (types.MethodType, *ANSWERING)


class Reach:
    """Objects that a step reaches from `roots` and its modules, `DEEPEST` steps far, as far as its code names them.

    `near`: under any name, as code may compute it and libraries have their own, but `NEAR` steps far, without classes
    and Python modules, and not into modules.
    """

    def __init__(
        self, roots: Iterable[Any] | Mapping[str, Any], modules: Iterable[torch.nn.Module] = (), near: bool = False
    ) -> None:
        self.names: set[str] = set()
        """Names that the code of the reached functions uses."""
        self._asked: set[str] = set()
        """Those of them that it asks for where an object may have no such attribute."""
        self.hidden: dict[int, torch.nn.Module] = {}
        """Modules that are no parts of the step's, by id: in a list, say."""
        self.tops: dict[int, tuple[str, torch.nn.Module]] = {}
        """Those of them that were found themselves, not as children of others, by id, with their names."""
        self.libraries: dict[int, types.ModuleType] = {}
        """Python modules of torch's and of the standard library, by id."""
        self.optimizers: dict[int, Optimizer] = {}
        """Optimizers, by id."""
        self.modules = list(modules)
        self._near = near
        self._methods_of: dict[int, tuple[type, list[tuple[str, types.FunctionType]]]] = {}
        self._seen: set[int] = set()
        self._reached: list[tuple[Any, str, int]] = []
        """With the name by which each was found, and how deep."""
        self._called: dict[int, set[str]] = {}
        """The names by which each object was found, by its id."""
        self._own = set(map(id, self.modules))
        named = roots.items() if isinstance(roots, Mapping) else (("", root) for root in roots)
        for name, root in (*named, *(("", module) for module in self.modules)):
            self._reach(root, name, 0)
        self._search()

    def __iter__(self) -> Iterator[tuple[Any, str]]:
        return ((value, name) for value, name, _ in self._reached)

    def _search(self) -> None:
        """Look into each object, and again once code uses further names of it: a method may read what leads to
        others.
        """
        depends: list[frozenset[str]] = []
        new: set[str] | None = None
        while new is None or new:
            before = set(self.names)
            for place, (value, name, depth) in enumerate(self._reached):  # grows meanwhile
                if place < len(depends) and (new or set()).isdisjoint(depends[place]):
                    continue
                self._look_into(value, name, depth)
                if place == len(depends):
                    depends.append(self._depends_on(value))
            new = self.names - before

    def _depends_on(self, value: Any) -> frozenset[str]:
        """Return the names of what is followed once code uses them."""
        if self._near:
            return frozenset()
        kind = value if is_a(value, type) else type(value)
        of_methods = [key for key, _ in (*self._methods_of[id(kind)][1], *methods_of_library(kind))]
        held = [*items_of(attributes_of(value)), *(items_of(value) if is_a(value, dict) else ())]
        texts = (text_of(key) for key in held if is_a(key, str))
        of_dict = (*_ALL_OF_DICT, *map(whole_of, self._names_of(value))) if is_a(value, dict) else ()
        return frozenset(
            (*of_methods, *texts, *(key for key, _ in slots_of(value)), *of_dict, MATCHED, *self._marks_of(value))
        )

    def _reach(self, value: Any, name: str, depth: int) -> None:
        if is_a(value, Optimizer):
            self.optimizers[id(value)] = value
            if not is_users(module_of(type(value))):
                return
        value = owner_of(value)
        if not is_a(value, _LEAVES):
            self._called.setdefault(id(value), set()).add(name)
        if is_a(value, _LEAVES) or id(value) in self._seen or depth > (NEAR if self._near else DEEPEST):
            return
        if is_a(value, torch.nn.Module) and (depth or self._near):
            self.tops[id(value)] = name, value
            for module in modules_in(value):
                if id(module) not in self._own and id(module) not in self._seen:
                    self.hidden[id(module)] = module
                    self._add(module, name, 0)
            return
        if is_gpusims(value):
            self._seen.add(id(value))
            for part in dict.get(attributes_of(value), BEHIND, ()):
                self._reach(part, name, depth)
            return
        if is_a(value, CONTAINERS) and length_of(value) > MOST_PARTS:
            return
        if is_a(value, types.ModuleType) and not is_users(dict.get(attributes_of(value), "__name__")):
            self.libraries[id(value)] = value
            return
        if self._is_followed(value):
            self._add(value, name, depth)

    def _is_followed(self, value: Any) -> bool:
        if self._near:
            return not is_a(value, (type, types.ModuleType))
        if is_a(value, type):
            return is_users(module_of(value))
        return type(value) is not types.FunctionType or is_users(value.__module__)

    def _add(self, value: Any, name: str, depth: int) -> None:
        self._seen.add(id(value))
        self._reached.append((value, name, depth))

    def _look_into(self, value: Any, name: str, depth: int) -> None:
        if not self._near:
            self._look_at_code(value, depth)
        elif is_a(value, torch.nn.Module):
            return
        for part_name, part in self._parts(value, name):
            self._reach(part, part_name, depth if is_a(value, _STANDING) else depth + 1)

    def _look_at_code(self, value: Any, depth: int) -> None:
        """Take the names that a function uses, or methods that the code names, and reach classes."""
        if type(value) is types.FunctionType:
            self._take_names(value.__code__)
        kind = value if is_a(value, type) else type(value)
        if id(kind) not in self._methods_of:
            self._methods_of[id(kind)] = kind, list(methods(kind))
            for base in bases_of(kind):
                self._reach(base, name_of(base), depth)
        if MATCHED in self.names:
            matched = (dict.get(attributes_of(base), MATCHED, ()) for base in bases_of(kind))
            self.names.update(key for keys in matched if is_a(keys, tuple) for key in keys if is_a(key, str))
        for method_name, method in self._methods_of[id(kind)][1]:
            if method_name in self.names or (is_users(method.__module__) and is_special(method_name)):
                self._take_names(method.__code__)
                self._reach(method, method_name, depth)

    def _take_names(self, code: types.CodeType) -> None:
        self.names.update(names_of(code))
        self._asked.update(asked_of(code))

    def _parts(self, value: Any, name: str) -> Iterator[tuple[str, Any]]:
        if is_a(value, (functools.partial, functools.partialmethod)):
            function, args, keywords = parts_of_partial(value)
            yield name, function
            yield from ((f"{name}[{place}]", part) for place, part in enumerate(args))
            yield from ((joined(name, key), part) for key, part in pairs_of(keywords))
        elif type(value) is types.MethodType:
            yield from ((name, part) for part in (value.__self__, value.__func__))
        elif type(value) is types.FunctionType:
            yield from self._parts_of_function(value, name)
        elif is_a(value, _lru_cache_wrapper):
            kept = kept_by(value)
            yield from ((name, part) for part in (kept if len(kept) <= 2 * MOST_PARTS else kept[:1]))
        elif type(value) is types.MappingProxyType:
            yield from ((name, held) for held in gc.get_referents(value))
        elif is_a(value, ANSWERING):
            yield name, answer_of(value)
        elif is_a(value, CONTAINERS) and not is_a(value, dict):
            yield from ((f"{name}[{place}]", part) for place, part in enumerate(items_of(value)))
        else:
            held = self.attributes(value)
            read = set(map(id, self.read_of(value, held)))
            for place, (key, part) in enumerate(pairs_of(held)):
                if id(key) in read:
                    yield joined(name, key), part
                if is_a(key, (torch.nn.Module, Optimizer)):
                    yield f"{name}[{place}]", key
            named = self.slots_of(value)
            yield from ((joined(name, key), in_slot(value, slot)) for key, slot in slots_of(value) if key in named)
        yield from ((joined(name, key), part) for key, part in pairs_of(self.beside(value)) if self._is_read(key))

    def _parts_of_function(self, function: types.FunctionType, name: str) -> Iterator[tuple[str, Any]]:
        """Of a library's function the closure and defaults only: there it has what is the user's."""
        yield from ((key, contents_of(cell)) for key, cell in cells(function))
        code, defaults = function.__code__, function.__defaults__ or ()
        if is_users(function.__module__):
            named = globals_of(code)
            in_order = [key for key in code.co_names if key in named]  # as the code has them, in each process
            for key in dict.fromkeys((*in_order, *sorted(named))):
                yield key, dict.get(function.__globals__, key)
            yield from ((key, sys.modules.get(key)) for key in imports_of(function))
        yield from zip(reversed(code.co_varnames[: code.co_argcount]), reversed(defaults), strict=False)
        yield from ((joined(name, key), part) for key, part in pairs_of(function.__kwdefaults__ or {}))

    @staticmethod
    def beside(value: Any) -> dict[Any, Any]:
        """Return the attributes of a function, or of a container of the user's own class."""
        return attributes_of(value) if is_a(value, _HOLDERS) else {}

    @staticmethod
    def attributes(value: Any) -> dict[Any, Any]:
        """Return a dict itself, or the dict of an object's attributes."""
        return value if is_a(value, dict) else attributes_of(value)

    def slots_of(self, value: Any) -> list[str]:
        """Return the names of an object's slots that code reads."""
        return [key for key, _ in slots_of(value) if self._is_read(key) or self.takes_all(value)]

    def _is_read(self, key: Any) -> bool:
        """Whether code may read an attribute, or a dict's value: it names it, or the key is no text."""
        return self._near or not is_a(key, str) or text_of(key) in self.names

    def _names_of(self, value: Any) -> set[str]:
        return self._called.get(id(value), set())

    def _marks_of(self, value: Any) -> list[str]:
        """Return the marks of code that takes all attributes of an object."""
        kinds = map(attributes_of_self, map(name_of, bases_of(type(value))))
        return [ANY_OBJECT, *map(attributes_by, self._names_of(value)), *kinds]

    def takes_all(self, value: Any) -> bool:
        """Whether code may take all attributes of an object, as `vars` does: of one of the user's, as far as its names
        tell.
        """
        kind = type(value)
        may_be_taken = is_users(module_of(kind)) or kind in _NAMESPACES
        others = (type, types.ModuleType, torch.nn.Module, Optimizer, dict)
        return may_be_taken and not is_a(value, others) and not self.names.isdisjoint(self._marks_of(value))

    def read_of(self, value: Any, held: dict[Any, Any]) -> list[Any]:
        """Return the keys of an object's attributes, or of a dict, that code reads."""
        if is_a(value, Optimizer):
            keys = [key for key in items_of(held) if text_of(key) not in _OF_OPTIMIZERS]
            return [key for key in keys if self._is_read(key)]
        if self._near or (held is value and self.reads_whole(held)):
            return items_of(held)
        if is_a(value, torch.nn.Module):
            return self._read_of_module(value, held)
        if self.takes_all(value):
            return items_of(held)
        named = [key for key in items_of(held) if self._is_read(key)]
        if held is value:
            return named
        others = read_by_library(type(value), self.names) - self.names
        return [*named, *(key for key in items_of(held) if is_a(key, str) and text_of(key) in others)]

    def _read_of_module(self, module: torch.nn.Module, held: dict[Any, Any]) -> list[Any]:
        kind: Any = type(module)
        options = options_of(kind)
        own = [(key, part) for key, part in pairs_of(held) if is_a(key, str) and text_of(key) not in _OF_MODULES]
        read = [
            key
            for key, part in own
            if (text_of(key) in options and is_a(part, _OPTIONS))
            or text_of(key) in self.names
            or text_of(key) == "forward"
        ]
        return read if any(text_of(key) == "forward" for key in read) else [*read, "forward"]

    def reads_whole(self, held: dict[Any, Any]) -> bool:
        """Whether code may read all of a dict, as far as its names tell."""
        by_name = not self.names.isdisjoint(map(whole_of, self._names_of(held)))
        return by_name or bool(self.names & _ALL_OF_DICT) or not any(map(self._is_read, items_of(held)))

    def hiding(self, value: Any, held: dict[Any, Any]) -> list[str]:
        """Return names of class attributes and methods that an object's own attribute may come to hide."""
        users = [base for base in bases_of(type(value)) if is_users(module_of(base))]
        own = {text_of(key) for key in items_of(held) if is_a(key, str)}
        return sorted({key for base in users for key in items_of(attributes_of(base))} & self.names - own)

    def absent(self, held: dict[Any, Any]) -> frozenset[str]:
        """Return names of attributes that code asks for, and that a dict of attributes does not have."""
        return frozenset(self._asked - {text_of(key) for key in items_of(held) if is_a(key, str)})

    def _is_called(self, key: str, value: Any) -> bool:
        return key in self.names or (type(value) is types.FunctionType and is_special(key))

    def inherited(self) -> list[tuple[type, set[str]]]:
        """Return for each class of the user's the names that it, or another class of an object's, says what they
        are.
        """
        found: dict[int, tuple[type, set[str]]] = {}
        for kind, _ in self._methods_of.values():
            held = [pair for base in bases_of(kind) for pair in pairs_of(attributes_of(base))]
            named = {key for key, of in held if self._is_called(key, of)}
            for base in bases_of(kind):
                found.setdefault(id(base), (base, set()))[1].update(named)
        return [(kind, names) for kind, names in found.values() if is_users(module_of(kind))]


@dataclass(frozen=True)
class Models:
    """Models and optimizers behind a step."""

    near: dict[str, torch.nn.Module]
    """Those that lie near, by their names."""
    further: list[torch.nn.Module]
    """Others that code names."""
    optimizers: list[Optimizer]


def models_behind(roots: Mapping[str, Any]) -> Models:
    """Return the models and optimizers that a step can reach from `roots`, by their names."""
    near = Reach(roots, near=True)
    modules: dict[str, torch.nn.Module] = {}
    for name, module in _outermost(near):
        modules[next(free for free in _free_names(name) if free not in modules)] = module
    further = Reach(roots.values(), [part for module in modules.values() for part in modules_in(module)])
    return Models(
        modules,
        [module for _, module in _outermost(further)],
        list((near.optimizers | further.optimizers).values()),
    )


def _outermost(reach: Reach) -> list[tuple[str, torch.nn.Module]]:
    """Return the modules found that are no parts of others found."""
    parts = {number: set(map(id, modules_in(module))) for number, (_, module) in reach.tops.items()}
    inner = {id_ for number, ids in parts.items() for id_ in ids & parts.keys() if number not in parts[id_]}
    return [top for number, top in reach.tops.items() if number not in inner]


def _free_names(name: str) -> Iterator[str]:
    """Yield names for a model: with points like those of its parts, then numbered."""
    name = re.sub(r"\[(\d+)\]", r".\1", name).strip(".")
    yield name
    yield from (f"{name}_{number}" for number in count(2))


def modules_in(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield a module and its parts, each once, in torch's order."""
    seen: set[int] = set()
    todo = [module]
    while todo:
        one = todo.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            held = dict.get(attributes_of(one), "_modules", {})
            held = held if is_a(held, dict) else dict.get(attributes_of(held), "_python_modules", {})  # of TorchScript
            todo += [part for _, part in reversed(pairs_of(held)) if is_a(part, torch.nn.Module)]


def text_of(key: str) -> str:
    """Return a text without what a class of the user's says of it."""
    return key if type(key) is str else str.__str__(key)


def joined(name: str, key: Any) -> str:
    """Return the name of an attribute, with its owner's."""
    shown = text_of(key) if is_a(key, str) else str(key) if type(key) in PLAIN else name_of(type(key))
    return f"{name}.{shown}" if name else shown
