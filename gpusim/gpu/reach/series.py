"""Objects that yield values once each, iterators, generators and queues written in C: whether a step has taken some.

How far such an object is lies in C, so it is read as far as Python shows it: remaining length, a generator's place and
variables, what an iterator of `itertools` would be pickled as, the objects behind it. Nothing is taken meanwhile. One
of the user's own class keeps its place in attributes, which are compared as others.
"""

from __future__ import annotations

import gc
import itertools
import operator
import queue
import types
import warnings
from collections.abc import Iterable
from typing import Any, Final

from gpusim.gpu.reach.names import is_users
from gpusim.gpu.reach.raw import attributes_of, bases_of, is_a, module_of, pairs_of

#: Iterators behind each other that are looked at: `enumerate` over `zip` over lists is 3.
_DEEPEST: Final = 4


def is_series(value: Any) -> bool:
    """Whether an object is one of these."""
    kind = type(value)
    if kind is queue.SimpleQueue:
        return True
    return not is_users(module_of(kind)) and any("__next__" in attributes_of(base) for base in bases_of(kind))


def progress_of(value: Any, depth: int = 0) -> tuple[Any, ...]:
    """Return numbers that change where something is taken."""
    kind = type(value)
    if kind is queue.SimpleQueue:
        return (value.qsize(),)
    numbers: list[Any] = [number for _, number in pairs_of(attributes_of(value)) if type(number) is int]
    behind: Iterable[Any] = gc.get_referents(value)
    if kind is types.GeneratorType:
        frame = value.gi_frame
        if frame is None:
            return ()
        variables = list(frame.f_locals.values())
        numbers += [frame.f_lasti, *map(id, variables)]
        behind = variables
    elif any("__length_hint__" in attributes_of(base) for base in bases_of(kind)):
        numbers.append(operator.length_hint(value))
    elif kind is itertools.count:
        numbers.append(repr(value))
    elif kind is itertools.cycle and "__reduce__" in attributes_of(kind):  # Python 3.14 has none
        with warnings.catch_warnings(action="ignore"):  # from Python 3.12 on deprecated
            behind = [part for parts in value.__reduce__()[1:] for part in parts]
    parts = [part for each in behind for part in (each if is_a(each, tuple) else (each,))]
    if depth < _DEEPEST:
        numbers += [progress_of(part, depth + 1) for part in parts if part is not value and is_series(part)]
    return tuple(numbers)


class SeriesOf:
    """Series among some objects, with how far they are now."""

    def __init__(self, named: Iterable[tuple[Any, str]]) -> None:
        self._before = [(value, name, progress_of(value)) for value, name in named if is_series(value)]

    def advanced(self) -> str | None:
        """Return the name of one from which something was taken since, or None."""
        return next((name for value, name, before in self._before if progress_of(value) != before), None)
