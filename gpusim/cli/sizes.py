"""Options with sizes: `8GiB`, or a bare number of MiB."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import click

from gpusim.arguments import size_bytes
from gpusim.errors import OptionError
from gpusim.text import short_value
from gpusim.units import MIB

Function = TypeVar("Function", bound=Callable[..., Any])


def size_option(*names_and_help: str, least: int = 1) -> Callable[[Function], Function]:
    """Return a decorator that adds a size option of at least `least` bytes; takes click's names and the help text."""
    *names, text = names_and_help
    return click.option(*names, callback=partial(_size, least), default=None, metavar="SIZE", help=text)


def _size(least: int, _context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """Parse a size and return it in bytes; a bare number is in MiB. Raises `OptionError`."""
    if text is None:
        return None
    size = size_bytes(text, least, MIB)
    if size is None:
        raise OptionError(f"{parameter.opts[0]} {short_value(text)}: a size such as 8GiB, or a number of MiB")
    return size
