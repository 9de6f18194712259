"""Contents of Python's objects, read without running code of their classes.

A class may say itself what attributes, class, length and items its objects have. Such code may be slow, fail, or make
another object each time.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Final

#: Value of an empty slot.
EMPTY: Final = object()
#: Containers whose items have places, and those whose items have none.
SERIES: Final = (list, tuple, deque)
CONTAINERS: Final = (*SERIES, dict, set, frozenset)
#: Types of objects that stand for one other.
ANSWERING: Final = (weakref.ref, weakref.ProxyType, weakref.CallableProxyType, ContextVar)

#: Takes addresses: of an object given as such, ctypes would ask its class.
_get = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p)
_dict_of = _get(("PyObject_GenericGetDict", ctypes.pythonapi))
_OF_TYPES: Final = vars(type)
#: Attributes in which descriptors have their function: a property, a cached one, a class method, another wrapper.
_HOLDING: Final = ("fget", "func", "__func__", "__wrapped__")
_DESCRIPTORS: Final = (property, classmethod, staticmethod)


def is_a(value: object, kinds: type | tuple[type, ...]) -> bool:
    """Whether an object's own class is one of these, or inherits from one. `isinstance` would ask the object, too."""
    return issubclass(type(value), kinds)


def bases_of(kind: type) -> tuple[type, ...]:
    """Return the method resolution order of a class."""
    bases: tuple[type, ...] = _OF_TYPES["__mro__"].__get__(kind)
    return bases


def module_of(kind: type) -> Any:
    """Return the Python module's name that a class has, None without one; what C code made may have anything."""
    try:
        return _OF_TYPES["__module__"].__get__(kind)
    except AttributeError:
        return None


def name_of(kind: type) -> str:
    """Return the name of a class."""
    name: str = _OF_TYPES["__name__"].__get__(kind)
    return name


def attributes_of(value: Any) -> dict[Any, Any]:
    """Return the very dict of an object's attributes, or of a class's, of which `vars` shows a view. It is not to be
    changed.
    """
    if is_a(value, type):
        view = _OF_TYPES["__dict__"].__get__(value)
        return next(each for each in gc.get_referents(view) if isinstance(each, dict))
    if type(value) is threading.local:
        return vars(value)
    found: dict[Any, Any] = _dict_of(id(value), None) if has_attributes(value) else {}
    return found


def owner_of(value: Any) -> Any:
    """Return the object whose method a function written in C is, as `append` of a list; any other value itself."""
    if not is_a(value, (types.BuiltinFunctionType, types.MethodWrapperType)):
        return value
    owner = value.__self__
    return value if owner is None or is_a(owner, (type, types.ModuleType)) else owner


def has_attributes(value: Any) -> bool:
    """Whether an object has a dict of attributes."""
    return bool(_OF_TYPES["__dictoffset__"].__get__(type(value)))


def slots_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names of an object's slots, with their descriptors."""
    for base in bases_of(type(value)):
        held = attributes_of(base)
        if "__slots__" in held:
            yield from ((key, of) for key, of in list(held.items()) if type(of) is types.MemberDescriptorType)


def in_slot(value: Any, slot: Any) -> Any:
    """Return what an object has in a slot, `EMPTY` without anything."""
    try:
        return slot.__get__(value)
    except AttributeError:
        return EMPTY


def length_of(held: Any) -> int:
    """Return the number of items in a container."""
    return int(_kind_of(held).__len__(held))


def items_of(held: Any) -> list[Any]:
    """Return what a list, tuple, deque or set holds, or the keys of a dict."""
    return list(_kind_of(held).__iter__(held))


def pairs_of(held: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """Return keys and values of a dict."""
    return list(dict.items(held))


def _kind_of(held: Any) -> Any:
    return next(kind for kind in CONTAINERS if is_a(held, kind))


def parts_of_partial(value: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return function, arguments and named arguments of a `functools.partial`, or `partialmethod`."""
    if is_a(value, functools.partialmethod):
        held = attributes_of(value)
        return held["func"], held["args"], held["keywords"]
    own = vars(functools.partial)
    return own["func"].__get__(value), own["args"].__get__(value), own["keywords"].__get__(value)


def answer_of(value: Any) -> Any:
    """Return what a weak reference or a context variable refers to, None if it is nothing."""
    if type(value) is ContextVar:
        return value.get(None)
    if is_a(value, weakref.ref):
        return weakref.ref.__call__(value)
    try:
        return value.__repr__.__self__  # Python has no other way to the object behind a proxy
    except ReferenceError:
        return None


def kept_by(cached: Any) -> list[Any]:
    """Return the function behind a `functools.lru_cache`, and the arguments and answers that it keeps: the garbage
    collector knows them.
    """
    own = attributes_of(cached)
    kept = [dict.get(own, "__wrapped__")]
    for part in gc.get_referents(cached):
        if type(part) is dict and part is not own:
            kept += dict.values(part)
        elif part is not own and not is_a(part, type):
            kept.append(part)
    return [part for part in kept if type(part) is not object and name_of(type(part)) != "_lru_list_elem"]


def contents_of(cell: types.CellType) -> Any:
    """Return the value in a closure's cell, None if there is none yet."""
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def function_in(value: Any) -> types.FunctionType | None:
    """Return the function of what a class has as a method, property or the like, None for anything else."""
    if type(value) is types.FunctionType:
        return value
    if is_a(value, functools.partial):
        held = [parts_of_partial(value)[0]]
    elif type(value) is types.MethodType:
        held = [value.__func__]
    elif is_a(value, _DESCRIPTORS):
        fields = vars(next(kind for kind in _DESCRIPTORS if is_a(value, kind)))
        held = [fields[key].__get__(value) for key in _HOLDING if key in fields]
    else:
        own = attributes_of(value)
        held = [own[key] for key in _HOLDING if key in own]
    return next((each for each in held if type(each) is types.FunctionType), None)
