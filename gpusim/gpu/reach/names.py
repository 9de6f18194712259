"""Names that Python code uses: attributes, globals, keys, and the options of torch's layers."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import Any, Final

import torch

from gpusim.gpu.reach.raw import attributes_of, bases_of, function_in, is_a, module_of, pairs_of
from gpusim.gpu.reach.whole import marks_of

#: Special methods that a step does not call by itself.
_NEVER_CALLED: Final = frozenset(
    {
        *("__init__", "__new__", "__del__", "__repr__", "__str__", "__format__", "__dir__", "__sizeof__", "__copy__"),
        *("__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__init_subclass__"),
        *("__class_getitem__", "__subclasshook__", "__setattr__", "__delattr__", "__post_init__"),
    }
)
#: Stands among the names of code that reads a place in a container by a computed key, such as a loop's.
COMPUTED_KEY: Final = "[...]"
#: Class attribute with the names of the attributes that a pattern by places reads.
MATCHED: Final = "__match_args__"
#: Instructions before the reading of a place whose key is no computed text: a constant, or parts of a tensor.
_NOT_COMPUTED: Final = frozenset(("LOAD_CONST", "LOAD_SMALL_INT", "BUILD_SLICE", "BUILD_TUPLE", "UNARY_NEGATIVE"))
#: Python modules with classes whose instances hold values of the user's, beside those of `torch.nn`.
_LIBRARIES: Final = ("collections", "multiprocessing.sharedctypes", "torch.distributions", "torch.optim", "weakref")
_OURS: Final = ("torch", "gpusim")
#: Methods that torch calls.
_TORCHS: Final = frozenset(("forward", "backward", "setup_context"))


def is_special(method: str) -> bool:
    """Whether a step may call a method of this name without naming it."""
    return method in _TORCHS or (method.startswith("__") and method.endswith("__") and method not in _NEVER_CALLED)


def is_torchs(module: Any) -> bool:
    """Whether a Python module, by its name, is torch's."""
    return _package(module) == "torch"


def is_users(module: Any) -> bool:
    """Whether a Python module, by its name, may be the user's: no part of torch, of gpusim or the standard library."""
    package = _package(module)
    return package == "__main__" or (package not in _OURS and package not in sys.stdlib_module_names)


def is_gpusims(value: Any) -> bool:
    """Whether an object is a function of gpusim's own, or of a class of it."""
    return _package(value.__module__ if type(value) is types.FunctionType else module_of(type(value))) == "gpusim"


def _package(module: Any) -> str:
    """Return the package of a module's name; a class that C code made may have anything as `__module__`."""
    return str.partition(module, ".")[0] if is_a(module, str) else ""


def methods(kind: type) -> Iterator[tuple[str, types.FunctionType]]:
    """Yield names and functions of a class's methods that are not torch's."""
    for base in bases_of(kind):
        if _package(module_of(base)) not in ("builtins", "torch"):
            yield from _functions(base)


def _functions(kind: type) -> Iterator[tuple[str, types.FunctionType]]:
    for name, value in pairs_of(attributes_of(kind)):
        function = function_in(value)
        if function is not None:
            yield name, function


def options_of(kind: type) -> frozenset[str]:
    """Return the names that the `forward` of torch's own layers among a module's classes reads."""
    return _options_of(tuple(base for base in bases_of(kind) if is_torchs(module_of(base))))


@functools.lru_cache(maxsize=1024)
def _options_of(kinds: tuple[type, ...]) -> frozenset[str]:
    functions = [each for kind in kinds if kind is not torch.nn.Module for each in _functions(kind)]
    names, count = {"forward"}, 0
    while count != (count := len(names)):
        for name, function in functions:
            if name in names:
                names |= names_of(function.__code__)
    return frozenset(names)


def read_by_library(kind: type, called: Collection[str]) -> frozenset[str]:
    """Return the names that the methods of a class read which are no code of the user's, where code of the user's calls
    these: a scheduler's rates, the dict of a `UserDict`.
    """
    functions = list(methods_of_library(kind))
    names, count = set[str](), -1
    while functions and count != (count := len(names)):
        for name, function in functions:
            if name in called or name in names or is_special(name):
                names |= names_of(function.__code__)
    return frozenset(names)


def methods_of_library(kind: type) -> Iterator[tuple[str, types.FunctionType]]:
    """Yield names and functions of a class's methods that read values of the user's, and are no code of theirs."""
    for base in bases_of(kind):
        if _of_library(module_of(base)):
            yield from _functions(base)


def _of_library(module: Any) -> bool:
    return is_a(module, str) and str.startswith(module, _LIBRARIES)


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> frozenset[str]:
    """Return the names that code uses, functions within it included, and its texts: keys of dicts."""
    names = set(code.co_names)
    instructions = list(dis.get_instructions(code))
    for before, one in pairwise(instructions):
        reads = one.opname == "BINARY_SUBSCR" or (one.opname == "BINARY_OP" and one.argrepr == "[]")
        if reads and before.opname not in _NOT_COMPUTED:
            names.add(COMPUTED_KEY)
        if one.opname == "MATCH_CLASS" and one.arg:  # with as many places
            names.add(MATCHED)
    names.update(marks_of(code))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_of(constant)
        elif isinstance(constant, str):
            names.add(constant)
        elif isinstance(constant, tuple | frozenset):  # of a loop over names
            names.update(each for each in constant if isinstance(each, str))
    return frozenset(names)


@functools.lru_cache(maxsize=4096)
def asked_of(code: types.CodeType) -> frozenset[str]:
    """Return the names of attributes that code asks for where an object may have none: by `hasattr` or `getattr`, or
    within reach of an `AttributeError`. Functions within it are included.
    """
    names, asks = set[str](), False
    for one in dis.get_instructions(code):
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME") and one.argval in ("hasattr", "getattr"):
            asks = True  # its first text is the name
        elif asks and one.opname == "LOAD_CONST" and isinstance(one.argval, str):
            names.add(one.argval)
            asks = False
        elif "AttributeError" in code.co_names and one.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names.add(one.argval)
    inner = (asked_of(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(names).union(*inner)


@functools.lru_cache(maxsize=4096)
def globals_of(code: types.CodeType) -> frozenset[str]:
    """Return the global names that code loads, functions within it included; not the names of attributes."""
    loaded = (one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    inner = (globals_of(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(loaded).union(*inner)


def imports_of(function: types.FunctionType) -> list[str]:
    """Return the names of Python modules that a function's own code imports, functions within it included."""
    package: Any = dict.get(function.__globals__, "__package__")
    names: dict[str, None] = {}
    for level, name in _imports_of(function.__code__):
        if level and is_a(package, str):
            base = str.rsplit(package, ".", level - 1)[0]
            name = f"{base}.{name}" if name else base
        names.update(dict.fromkeys((name.partition(".")[0], name)))
    return list(names)


@functools.lru_cache(maxsize=4096)
def _imports_of(code: types.CodeType) -> tuple[tuple[int, str], ...]:
    """Return the levels of relative imports, 0 for others, and the names."""
    instructions = [one for one in dis.get_instructions(code) if one.opname != "EXTENDED_ARG"]
    found = [
        (level.argval, one.argval)  # the names to import lie in between
        for level, one in zip(instructions, instructions[2:], strict=False)
        if one.opname == "IMPORT_NAME"
    ]
    for constant in code.co_consts:
        found += _imports_of(constant) if isinstance(constant, types.CodeType) else ()
    return tuple(found)


def cells(function: types.FunctionType) -> Iterator[tuple[str, types.CellType]]:
    """Return the names and cells of a function's closure."""
    return zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
