"""Checks of arguments of the Python functions, with one-line errors."""

from __future__ import annotations

import math
import operator
import os
from numbers import Real
from pathlib import Path

from gpusim.defaults import MAX_BUDGET_S, MAX_MEMORY_BYTES
from gpusim.errors import OptionError
from gpusim.units import parse_bytes


def whole(argument: str, value: object, low: int, high: int | None, problem: str) -> int:
    """Return `value`, no boolean, as a whole number from `low` to `high`, numpy's included. Raises `OptionError`."""
    if not isinstance(value, bool):
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
        else:
            if low <= number and (high is None or number <= high):
                return number
    raise OptionError(problem, argument=argument, value=_shown(value))


def real(argument: str, value: object, problem: str) -> float:
    """Return `value` as a finite number; booleans are refused. Raises `OptionError`."""
    if not isinstance(value, bool) and isinstance(value, Real):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise OptionError(problem, argument=argument, value=_shown(value))


def check_budget(budget_s: object) -> None:
    """Raise `OptionError` unless it is a possible search time in s: above 0, at most `MAX_BUDGET_S`."""
    problem = f"the search takes between 0 and {MAX_BUDGET_S:.0f} seconds"
    if not 0 < real("budget_s", budget_s, problem) <= MAX_BUDGET_S:
        raise OptionError(problem, argument="budget_s", value=budget_s)


def _shown(value: object) -> object:
    """Return a value for a message: text in quotes, since `streams='8'` is no number and `streams=8` is one."""
    return repr(value) if isinstance(value, str) else value


def text(argument: str, value: object, problem: str) -> str:
    """Return `value` if it is text. Raises `OptionError`."""
    if not isinstance(value, str):
        raise OptionError(problem, argument=argument, value=value)
    return value


def instance(argument: str, value: object, kind: type, problem: str) -> None:
    """Raise `OptionError` with the value's type unless it is of `kind`."""
    if not isinstance(value, kind):
        raise OptionError(problem, argument=argument, value=type(value).__name__)


def file_path(argument: str, value: object) -> Path:
    """Return `value` as a path. Raises `OptionError` if it is no path, or has a NUL character."""
    if not isinstance(value, str | os.PathLike) or "\0" in str(value):
        raise OptionError("the path of a file", argument=argument, value=repr(value))
    return Path(value)


def memory_bytes(limit: int | str | None, argument: str = "memory_limit", least: int = 1) -> int | None:
    """Return a memory limit in bytes, from a number of bytes or text such as `8GiB`. Raises `OptionError`."""
    if limit is None:
        return None
    size = size_bytes(limit, least)
    if size is None:
        raise OptionError("a size such as 8GiB, or a number of bytes", argument=argument, value=limit)
    return size


def size_bytes(size: object, least: int, bare: int = 1) -> int | None:
    """Return a size in bytes, from a number of bytes or text with a unit or a number of `bare` bytes.

    None for anything that is no size from `least` bytes to `MAX_MEMORY_BYTES`.
    """
    try:
        count = parse_bytes(size, bare) if isinstance(size, str) else int(size)  # type: ignore[call-overload]
    except (ValueError, TypeError, OverflowError):
        return None
    is_size = isinstance(size, str) or (not isinstance(size, bool | bytes | bytearray) and count == size)
    return count if is_size and least <= count <= MAX_MEMORY_BYTES else None
