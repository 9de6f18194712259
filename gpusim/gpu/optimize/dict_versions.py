"""Detection of changed dicts by the count of changes that torch's compiler keeps for each.

A step of many modules is checked at each call. Comparing one number a dict takes less than half the time of comparing
all values (Python 3.11; research/2026-11-26-host-time.md), and holds more: a value that was changed and changed back
counts as a change.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final

Version = Callable[[dict[Any, Any]], int]

#: Changes in a row after which dicts are taken to change at every call, so that counts save nothing.
MOST_CHANGES: Final = 16


class DictVersions:
    """Dicts, with the versions at which they were last found in order."""

    def __init__(self, dicts: Iterable[dict[Any, Any]]) -> None:
        self._dicts = list({id(each): each for each in dicts}.values())
        self._version_of = version_of()
        self._versions: list[int] = []
        self._changes = 0
        self.mark()

    def unchanged(self) -> bool:
        """Whether no dict was changed since `mark`; False where that is unknown."""
        if self._version_of is None or list(map(self._version_of, self._dicts)) != self._versions:
            return False
        self._changes = 0
        return True

    def mark(self) -> None:
        """Take the dicts of now as in order."""
        if self._version_of is None:
            return
        self._changes += 1
        if self._changes > MOST_CHANGES:
            self._version_of = None
        else:
            self._versions = list(map(self._version_of, self._dicts))


@functools.lru_cache(maxsize=1)
def version_of() -> Version | None:
    """Return torch's function for the version of a dict, or None where torch has none that works with this Python."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None  # torch keeps the versions in a map without a lock
    try:
        from torch._C._dynamo.guards import dict_version
    except ImportError:
        return None
    found: Version = dict_version
    return found if works(found) else None


class _Probe:
    """An object whose attributes are set as code sets them."""

    def __init__(self) -> None:
        self.value = 0


def works(version: Version) -> bool:
    """Whether a version stays while a dict does, and is another after each kind of change."""
    probe = _Probe()
    held = vars(probe)

    def by_attribute() -> None:
        probe.value = 1

    def by_item() -> None:
        held["value"] = 2

    def by_update() -> None:
        held.update(value=3)

    def by_new() -> None:
        held["other"] = 4

    def by_removal() -> None:
        del held["other"]

    try:
        for change in (by_attribute, by_item, by_update, by_new, by_removal, held.clear):
            before = version(held)
            if version(held) != before:
                return False
            change()
            if version(held) == before:
                return False
    except Exception:  # torch refuses Pythons that it does not know with errors of several kinds
        return False
    return True
