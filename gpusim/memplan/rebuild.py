"""Recomputation: the ops that bring back a freed storage."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpusim.memplan.plan import Redo
from gpusim.memplan.storages import Storages


@dataclass(frozen=True, slots=True)
class Chain:
    """Ops to run again, in recorded order, and all storages that they bring back: wanted ones and their inputs."""

    ops: tuple[int, ...]
    storages: frozenset[int]

    def redo(self, before: int) -> Redo:
        """Return the chain as an action of a plan."""
        return Redo(before, self.ops, tuple(sorted(self.storages)))


@dataclass(frozen=True, slots=True)
class Uses:
    """Uses of saved storages, by places of ops in a launch order."""

    first: dict[int, int]
    """Storage -> first op that needs it after the forward pass."""
    last: dict[int, int]
    """Storage -> place of its last use."""

    @classmethod
    def of(cls, storages: Storages, place: Sequence[int]) -> Uses:
        """Find the uses, given the place of each op."""
        turn = storages.first_backward
        return cls(
            first={
                s: min((op for op in storages.users[s] if op >= turn), key=place.__getitem__) for s in storages.saved
            },
            last={s: max(place[op] for op in storages.users[s]) for s in storages.saved},
        )


def chain(storages: Storages, wanted: Iterable[int], available: Callable[[int], bool]) -> Chain | None:
    """Return the fewest ops that bring back the storages `wanted` from those `available`; None where impossible.

    It is impossible where a necessary op may not run again, or where an available storage has been overwritten since.
    Wanted storages count as not available.
    """
    ops: set[int] = set()
    built: set[int] = set()
    changed: set[int] = set()
    todo = list(wanted)
    while todo:
        storage = todo.pop()
        if storage in built:
            continue
        built.add(storage)
        recipe = storages.recipes[storage]
        if recipe is None:
            return None
        ops.update(recipe.ops)
        changed |= recipe.changed
        for source, unchanged in recipe.sources:
            if source in built:
                continue
            if not available(source):
                todo.append(source)
            elif not unchanged:
                return None
    if not changed <= built:  # storages changed in place must be brought back, too
        return None
    return Chain(tuple(sorted(ops)), frozenset(built))


@dataclass(frozen=True, slots=True)
class _Grouped:
    """Recomputation of one storage and what comes with it, with the conditions under which it is valid."""

    redo: Redo
    built: frozenset[int]
    let_go: frozenset[int]
    """Storages that it brings back only because they are gone."""
    there: frozenset[int]
    """Storages that it is computed from."""


class GroupedRedos:
    """Recomputation with each op at most once while its results are still wanted; earlier results are reused while
    valid.
    """

    def __init__(
        self, storages: Storages, place: Sequence[int], uses: Uses, kept: frozenset[int] = frozenset()
    ) -> None:
        """Prepare recomputation. `place` has the place of each op in the launch order; storages `kept` stay although
        no op of the step needs them.
        """
        self._storages = storages
        self._place = place
        self._uses = uses
        self._kept = kept
        self._turn = {storage: (place[first], storage) for storage, first in uses.first.items()}
        self._known: dict[int, _Grouped] = {}

    def of(self, dropped: Iterable[int]) -> tuple[Redo, ...] | None:
        """Return the recomputation of the storages `dropped`; None where one of them cannot be recomputed.

        The storage that is needed first brings its intermediate results back, which stay until their use.
        """
        gone = set(dropped)
        redos: list[Redo] = []
        for storage in sorted(gone, key=self._turn.__getitem__):
            if storage not in gone:  # already brought back
                continue
            known = self._known.get(storage)
            if known is None or not (known.let_go <= gone and known.there.isdisjoint(gone)):
                known = self._find(storage, gone)
                if known is None:
                    return None
                self._known[storage] = known
            gone -= known.built
            redos.append(known.redo)
        return tuple(redos)

    def _find(self, storage: int, gone: Container[int]) -> _Grouped | None:
        """Find the recomputation of a storage where it is first needed."""
        before, last, kept = self._uses.first[storage], self._uses.last, self._kept
        now = self._place[before]

        def saved(source: int) -> bool:
            return last.get(source, -1) >= now

        def available(source: int) -> bool:
            return source in kept or (saved(source) and source not in gone)

        found = chain(self._storages, (storage,), available)
        if found is None:
            return None
        built = found.storages
        let_go = frozenset(s for s in built if s != storage and s not in kept and saved(s))
        recipes = filter(None, (self._storages.recipes[s] for s in built))
        sources = frozenset(source for recipe in recipes for source, _ in recipe.sources)
        return _Grouped(found.redo(before), built, let_go, sources - built - kept)


def grouped_redos(
    storages: Storages,
    dropped: Iterable[int],
    place: Sequence[int],
    uses: Uses,
    kept: frozenset[int] = frozenset(),
) -> tuple[Redo, ...] | None:
    """Return `GroupedRedos.of` for one set of storages."""
    return GroupedRedos(storages, place, uses, kept).of(dropped)


@dataclass(frozen=True, slots=True)
class _Alone:
    """Recomputation of one storage, with the conditions under which it is valid."""

    redo: Redo
    let_go: tuple[int, ...]
    """Storages that it brings back only because they are gone."""
    there: tuple[int, ...]
    """Storages that it is computed from."""
    used_until: int
    """Latest last use of the storages that it brings back because later ops do not need them."""


class SeparateRedos:
    """Recomputation of storages one by one; earlier results are reused while valid."""

    def __init__(self, storages: Storages, uses: Uses) -> None:
        """Prepare recomputation; `uses` are those of the recorded order."""
        self._storages = storages
        self._uses = uses
        self._alone: dict[int, _Alone] = {}

    def of(self, dropped: Iterable[int], gone: Iterable[int]) -> tuple[Redo, ...]:
        """Return the recomputation of each of the storages `dropped` where it is first needed, from storages not
        `gone`.

        Intermediate results are freed at once, for the least memory, and computed again for the next. Storages that
        cannot be recomputed stay.
        """
        absent = frozenset(gone)
        first = self._uses.first
        right: dict[int, _Alone] = {}
        for storage in sorted(set(dropped), key=lambda s: (first[s], s), reverse=True):  # sources first
            known = self._alone.get(storage)
            if known is None or not (absent.issuperset(known.let_go) and absent.isdisjoint(known.there)):
                known = self._find(storage, absent, right)
            if known is not None:
                right[storage] = self._alone[storage] = known
        return tuple(each.redo for each in reversed(right.values()))

    def _find(self, storage: int, absent: frozenset[int], right: Mapping[int, _Alone]) -> _Alone | None:
        """Find one recomputation as `chain` does; the valid ones of its sources are used unchanged."""
        first, last = self._uses.first, self._uses.last
        before = first[storage]
        ops: set[int] = set()
        built: set[int] = set()
        there: set[int] = set()
        changed: set[int] = set()
        todo = [storage]
        while todo:
            current = todo.pop()
            if current in built:
                continue
            known = right.get(current)
            if known is not None and known.used_until < before:  # found for a later op, when less was available
                built.update(known.redo.storages)
                ops.update(known.redo.ops)
                there.update(known.there)
                continue
            built.add(current)
            recipe = self._storages.recipes[current]
            if recipe is None:
                return None
            ops.update(recipe.ops)
            changed |= recipe.changed
            for source, unchanged in recipe.sources:
                if source in built:
                    continue
                if source in absent or last.get(source, -1) < before:
                    todo.append(source)
                elif unchanged:
                    there.add(source)
                else:
                    return None
        if not changed <= built:
            return None
        others = sorted(built - {storage})
        return _Alone(
            Chain(tuple(sorted(ops)), frozenset(built)).redo(before),
            let_go=tuple(s for s in others if last.get(s, -1) >= before),
            there=tuple(there),
            used_until=max((last[s] for s in others if last.get(s, before) < before), default=-1),
        )
