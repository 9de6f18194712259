"""What code takes as a whole: all of a dict, as `**` does, or all attributes of an object, as `vars` does.

Code has names alone, so what it takes is known by the name by which it has it: of `options` in `trainer.options`. Marks
of such names stand among the names that code uses.
"""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Iterator
from typing import Final

#: Methods that take all of a dict, or a key that may be computed; and what takes all of its argument.
_TAKEN: Final = frozenset(("pop", "popitem", "setdefault", "copy", "format_map"))
_TAKING: Final = frozenset(("dict", "deepcopy", "copy", "update"))
#: Functions that take all attributes of their argument.
_TAKING_ATTRIBUTES: Final = frozenset(("vars", "asdict", "astuple"))
#: Instructions that load what lies in an object, a module or a closure.
_OF_OBJECTS: Final = frozenset(("LOAD_ATTR", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"))
#: Mark of code that takes all attributes of an object of which only a local name is known.
ANY_OBJECT: Final = "*.__dict__"


def whole_of(name: str) -> str:
    """Return the mark of code that takes all of a dict by this name."""
    return f"{_last(name)}{{**}}"


def attributes_by(name: str) -> str:
    """Return the mark of code that takes all attributes of an object by this name."""
    return f"{_last(name)}.__dict__"


def attributes_of_self(kind: str) -> str:
    """Return the mark of methods of this class that take all attributes of their own object."""
    return f"{kind}().__dict__"


def _last(name: str) -> str:
    """Return the last name of `trainer.options` or of an item, such as `options[0]`."""
    return name.rpartition(".")[2].partition("[")[0]


def marks_of(code: types.CodeType) -> Iterator[str]:
    """Yield the marks of what code takes as a whole; a local name also stands for the attribute put there."""
    own = _own_keywords(code)
    kind = code.co_qualname.rpartition(".")[0].rpartition(".")[2]  # the class of a method
    loaded: list[tuple[str, bool]] = []  # and whether it is a local name alone
    stands_for: dict[str, str] = {}
    dicts: int | None = None  # where the arguments begin of what takes all of them
    objects: int | None = None
    before = ""

    def attributes(name: str, local: bool) -> Iterator[str]:
        if local and name == "self" and kind:
            yield attributes_of_self(kind)
            return
        yield attributes_by(name)
        if local:
            yield ANY_OBJECT

    for one in dis.get_instructions(code):
        if one.opname.startswith("LOAD_"):  # constants, too: keys
            several = one.argval if isinstance(one.argval, tuple) else (one.argval,)
            for name in (each for each in several if isinstance(each, str)):
                if name in _TAKEN:
                    yield from (whole_of(of) for of, _ in loaded[-1:])
                if name == "__dict__" and loaded:
                    yield from attributes(*loaded[-1])
                dicts = len(loaded) if name in _TAKING else dicts
                objects = len(loaded) + 1 if name in _TAKING_ATTRIBUTES else objects
                local = one.opname.startswith("LOAD_FAST") and name not in stands_for
                loaded.append((stands_for.get(name, name), local))
        elif one.opname.startswith("STORE_FAST") and before in _OF_OBJECTS and loaded and isinstance(one.argval, str):
            stands_for[one.argval] = loaded[-1][0]
        elif one.opname in ("DICT_MERGE", "DICT_UPDATE"):
            yield from (whole_of(name) for name, _ in loaded[-1:] if name != own)
        elif one.opname == "BINARY_OP" and one.argrepr in ("|", "|="):
            yield from (whole_of(name) for name, _ in loaded[-2:])
        elif one.opname == "MATCH_MAPPING":  # the rest of it may have a name
            yield from (whole_of(name) for name, _ in loaded[-1:])
        elif one.opname.startswith("CALL"):
            yield from (whole_of(name) for name, _ in (loaded[dicts:] if dicts is not None else ()))
            for each in loaded[objects:] if objects is not None else ():
                yield from attributes(*each)
            dicts = objects = None
        before = one.opname


def _own_keywords(code: types.CodeType) -> str:
    """Return the name of a function's `**kwargs`, or "": a dict of the call's own, which it may hand on."""
    place = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    return code.co_varnames[place] if code.co_flags & inspect.CO_VARKEYWORDS else ""
