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


def chain(storages: Storages, wanted: Iterable[int], available: Callable[[int], bool]) -> Chain | None:
    """The fewest ops that bring back the storages `wanted` from those `available`; None where nothing does.

    Nothing does where an op on the way may not run again, or where an available storage has been overwritten since.
    """
    ops: set[int] = set()
    built: set[int] = set()
    todo = list(wanted)
    turn = storages.first_backward
    while todo:
        storage = todo.pop()
        if storage in built:
            continue
        built.add(storage)
        writers = [op for op in storages.writers[storage] if op < turn]
        if not writers or storage in storages.initial:
            return None
        for op in writers:
            if op in ops:
                continue
            if not storages.may_run_again[op]:
                return None
            ops.add(op)
            for each in storages.inputs[op] - built:
                if each in storages.initial or available(each):
                    if not _unchanged_since(storages, op, each):
                        return None
                else:
                    todo.append(each)
    for op in ops:  # what is changed in place must be brought back itself
        if storages.writes[op] - frozenset(storages.makes[op]) - storages.states[op] - built:
            return None
    return Chain(tuple(sorted(ops)), frozenset(built))


def _forward(storages: Storages, storage: int) -> list[int]:
    return [op for op in storages.writers[storage] if op < storages.first_backward]


def _unchanged_since(storages: Storages, op: int, storage: int) -> bool:
    """Whether a storage has at the end of the forward pass the value that an op of it has read."""
    writers = _forward(storages, storage)
    return storages.version_read[op].get(storage, -1) == (writers[-1] if writers else -1)


def grouped_redos(storages: Storages, dropped: Iterable[int], place: Sequence[int]) -> tuple[Redo, ...] | None:
    """Recomputation of the storages `dropped`, each op at most once where its results are still wanted.

    The storage that is needed first brings what lies on its way, and that stays until it has been used. `place` has the
    place of each op in the launch order. None where one of them cannot be computed again.
    """
    wanted = frozenset(dropped)
    turn = storages.first_backward
    last = {s: max(place[op] for op in storages.users[s]) for s in storages.saved}
    first_op = {s: min((op for op in storages.users[s] if op >= turn), key=place.__getitem__) for s in wanted}
    brought: set[int] = set()
    redos: list[Redo] = []
    for storage in sorted(wanted, key=lambda s: (place[first_op[s]], s)):
        if storage in brought:
            continue
        before = first_op[storage]
        again = chain(storages, (storage,), partial(_there, last, place[before], wanted, brought))
        if again is None:
            return None
        brought |= again.storages & wanted
        redos.append(again.redo(before))
    return tuple(redos)


def _there(last: Mapping[int, int], now: int, wanted: Container[int], brought: Container[int], storage: int) -> bool:
    """Whether a storage is there at a place: saved and used later, and not let go, or back already."""
    return last.get(storage, -1) >= now and (storage not in wanted or storage in brought)


def separate_redos(storages: Storages, dropped: Iterable[int], gone: Iterable[int]) -> tuple[Redo, ...]:
    """Recomputation of the storages `dropped`, each by itself where it is first needed, from what is not `gone`.

    What lies on the way is let go at once, so that least memory is in use, and computed again for the next. What cannot
    be computed again stays.
    """
    turn = storages.first_backward
    absent = frozenset(gone)
    first = {s: min(op for op in storages.users[s] if op >= turn) for s in dropped}
    redos: list[Redo] = []
    for storage in sorted(first, key=lambda s: (first[s], s)):
        before = first[storage]
        there = {s for s in storages.saved if s not in absent and storages.users[s][-1] >= before}
        again = chain(storages, (storage,), there.__contains__)
        if again is not None:
            redos.append(again.redo(before))
    return tuple(redos)
