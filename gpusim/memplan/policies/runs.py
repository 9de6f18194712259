"""Storages that come back together under recomputation: each brings back its sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class Runs:
    """Recomputed storages, added one by one as long as none brings back more than a limit.

    A storage brings back all of its recomputed sources, direct or not. That lookup takes time in proportion to their
    number, so it runs only where the connected parts are larger than the limit.
    """

    def __init__(self, sources: Mapping[int, Sequence[int]], sizes: Sequence[int], limit_bytes: float) -> None:
        self._sources = sources
        self._sizes = sizes
        self._limit_bytes = limit_bytes
        self._users: dict[int, list[int]] = {}
        """Users among the added storages, by source."""
        self._part: dict[int, int] = {}
        """Another added storage of the same connected part; itself for the first."""
        self._part_bytes: dict[int, int] = {}
        """Bytes of a part, by its first storage."""

    def add(self, storage: int) -> bool:
        """Add a storage; False where it, or a storage computed from it, would bring back more than the limit."""
        near = [s for s in (*self._sources[storage], *self._users.get(storage, ())) if s in self._part]
        parts = {self._first(s) for s in near}
        part_bytes = self._sizes[storage] + sum(self._part_bytes[first] for first in parts)
        self._part[storage] = storage
        for source in self._sources[storage]:
            self._users.setdefault(source, []).append(storage)
        if part_bytes > self._limit_bytes and not all(map(self._within, self._furthest(storage))):
            del self._part[storage]
            for source in self._sources[storage]:
                self._users[source].pop()
            return False
        self._part_bytes[storage] = part_bytes
        for first in parts:
            self._part[first] = storage
        return True

    def _first(self, storage: int) -> int:
        while self._part[storage] != storage:
            self._part[storage] = storage = self._part[self._part[storage]]
        return storage

    def _within(self, storage: int) -> bool:
        """Whether a storage and all that is recomputed for it keep the limit."""
        reached, todo = {storage}, [storage]
        total = self._sizes[storage]
        while todo and total <= self._limit_bytes:
            for source in self._sources[todo.pop()]:
                if source in self._part and source not in reached:
                    reached.add(source)
                    todo.append(source)
                    total += self._sizes[source]
        return total <= self._limit_bytes

    def _furthest(self, storage: int) -> set[int]:
        """Return the users of a storage, direct or not, that have no user themselves.

        There is none where results of one op, each of which counts as a source of the other, are all there is.
        """
        reached, todo, ends = {storage}, [storage], set()
        while todo:
            current = todo.pop()
            further = self._users.get(current, ())
            if not further:
                ends.add(current)
            for user in further:
                if user not in reached:
                    reached.add(user)
                    todo.append(user)
        return ends
