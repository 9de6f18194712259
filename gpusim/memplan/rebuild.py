"""Which ops bring back a storage that was let go: the chain of recomputation."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from gpusim.memplan.plan import Redo
from gpusim.memplan.storages import Storages


@dataclass(frozen=True, slots=True)
class Chain:
    """Ops to run again, in recorded order, and all storages that they bring back: those wanted, and what they need."""

    ops: tuple[int, ...]
    storages: frozenset[int]

    def redo(self, before: int) -> Redo:
        """The chain as an action of a plan."""
        return Redo(before, self.ops, tuple(sorted(self.storages)))


@dataclass(frozen=True, slots=True)
class Uses:
    """When saved storages are used, by the places of ops in a launch order."""

    first: dict[int, int]
    """Storage -> the op that needs it first after the forward pass."""
    last: dict[int, int]
    """Storage -> the place of its last use."""

    @classmethod
    def of(cls, storages: Storages, place: Sequence[int]) -> Uses:
        """For the place of each op."""
        turn = storages.first_backward
        return cls(
            first={
                s: min((op for op in storages.users[s] if op >= turn), key=place.__getitem__) for s in storages.saved
            },
            last={s: max(place[op] for op in storages.users[s]) for s in storages.saved},
        )


def chain(storages: Storages, wanted: Iterable[int], available: Callable[[int], bool]) -> Chain | None:
    """The fewest ops that bring back the storages `wanted` from those `available`; None where nothing does.

    Nothing does where an op on the way may not run again, or where an available storage has been overwritten since.
    What is wanted counts as not available.
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
    if not changed <= built:  # what is changed in place must be brought back itself
        return None
    return Chain(tuple(sorted(ops)), frozenset(built))


def grouped_redos(
    storages: Storages, dropped: Iterable[int], place: Sequence[int], uses: Uses
) -> tuple[Redo, ...] | None:
    """Recomputation of the storages `dropped`, each op at most once where its results are still wanted.

    The storage that is needed first brings what lies on its way, and that stays until it has been used. `place` has the
    place of each op in the launch order. None where one of them cannot be computed again.
    """
    wanted = frozenset(dropped)
    first, last = uses.first, uses.last
    brought: set[int] = set()
    redos: list[Redo] = []
    for storage in sorted(wanted, key=lambda s: (place[first[s]], s)):
        if storage in brought:
            continue
        before = first[storage]
        again = chain(storages, (storage,), partial(_there, last, place[before], wanted, brought))
        if again is None:
            return None
        brought |= again.storages & wanted
        redos.append(again.redo(before))
    return tuple(redos)


def _there(last: Mapping[int, int], now: int, wanted: Container[int], brought: Container[int], storage: int) -> bool:
    """Whether a storage is there at a place: saved and used later, and not let go, or back already."""
    return last.get(storage, -1) >= now and (storage not in wanted or storage in brought)


@dataclass(frozen=True, slots=True)
class _Alone:
    """Recomputation of one storage, and for which choices it is the right one."""

    redo: Redo
    let_go: tuple[int, ...]
    """What it brings back only since it is gone."""
    there: tuple[int, ...]
    """What it is computed from."""
    used_until: int
    """The latest last use of what it brings back since nobody needs it any more."""


class SeparateRedos:
    """Recomputation of storages each by itself; what was found for other choices serves as far as it still holds."""

    def __init__(self, storages: Storages, uses: Uses) -> None:
        """`uses` are those of the recorded order."""
        self._storages = storages
        self._uses = uses
        self._alone: dict[int, _Alone] = {}

    def of(self, dropped: Iterable[int], gone: Iterable[int]) -> tuple[Redo, ...]:
        """Recomputation of the storages `dropped`, each by itself where it is first needed, from what is not `gone`.

        What lies on the way is let go at once, so that least memory is in use, and computed again for the next. What
        cannot be computed again stays.
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
        """As `chain` has it; what is `right` for a source is taken as it is."""
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
            if known is not None and known.used_until < before:  # found for a later op, when less was there
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
