"""Names that Python code uses: attributes, globals, keys, and the options of torch's layers."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Iterator

import torch


def is_torchs(module: str | None) -> bool:
    """Whether a Python module is torch's."""
    return (module or "").partition(".")[0] == "torch"


def is_users(module: str | None) -> bool:
    """Whether a Python module may be the user's: neither torch's nor of the standard library."""
    package = (module or "").partition(".")[0]
    return package == "__main__" or (package != "torch" and package not in sys.stdlib_module_names)


def methods(kind: type) -> Iterator[types.FunctionType]:
    """Yield the methods of a class that are not torch's."""
    for base in kind.__mro__:
        if base.__module__ != "builtins" and not is_torchs(base.__module__):
            yield from _functions(base)


def _functions(kind: type) -> Iterator[types.FunctionType]:
    for value in vars(kind).values():
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)  # a property's, a static method's
        if isinstance(function, types.FunctionType):
            yield function


@functools.lru_cache(maxsize=1024)
def options_of(kind: type) -> frozenset[str]:
    """Return the names that the `forward` of torch's own layers among a module's classes reads."""
    layers = [base for base in kind.__mro__ if is_torchs(base.__module__) and base is not torch.nn.Module]
    functions = [function for base in layers for function in _functions(base)]
    names, count = {"forward"}, 0
    while count != (count := len(names)):
        for function in functions:
            if function.__name__ in names:
                names |= names_of(function.__code__)
    return frozenset(names)


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> frozenset[str]:
    """Return the names that code uses, functions within it included, and its texts: keys of dicts."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_of(constant)
        elif isinstance(constant, str):
            names.add(constant)
    return frozenset(names)


@functools.lru_cache(maxsize=4096)
def globals_of(code: types.CodeType) -> frozenset[str]:
    """Return the global names that code loads, functions within it included; not the names of attributes."""
    loaded = (one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    inner = (globals_of(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(loaded).union(*inner)


def cells(function: types.FunctionType) -> Iterator[tuple[str, types.CellType]]:
    """Return the names and cells of a function's closure."""
    return zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
