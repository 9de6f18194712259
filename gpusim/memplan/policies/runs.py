"""What comes back at once where several storages are computed again: each brings those that it is computed from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class Runs:
    """Storages that are computed again, taken one by one, as long as none brings more than a limit with it.

    A storage brings all of them that it is computed from, directly or not. Looking that up takes as long as there are
    such storages, so it is done only where the parts that are connected in any direction are larger than the limit.
    """

    def __init__(self, sources: Mapping[int, Sequence[int]], sizes: Sequence[int], limit_bytes: float) -> None:
        self._sources = sources
        self._sizes = sizes
        self._limit_bytes = limit_bytes
        self._users: dict[int, list[int]] = {}
        """Of those taken, by what they are computed from."""
        self._part: dict[int, int] = {}
        """Of those taken: another of the same connected part, itself for the first."""
        self._part_bytes: dict[int, int] = {}
        """By the first of a part."""

    def add(self, storage: int) -> bool:
        """Take a storage; False where it, or what is computed from it, would bring more than the limit."""
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
        """Whether a storage and all that is computed again for it keep the limit."""
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
        """Of those that are computed from a storage, the ones that no other is computed from.

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
