"""The happens-before order of a schedule from streams and events alone, which reuse of memory may rely on.

Launch order does not order ops on different streams. An op starts after its predecessor on its stream, after the ops
whose events its stream waits for, and after everything that precedes those.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from gpusim.formats.trace import Trace
from gpusim.plan.sync import SyncPlan, works
from gpusim.trace.dependencies import reads_writes_storages


@dataclass(frozen=True)
class HappensBefore:
    """Partial order of ops with GPU work: bit masks of the ops that have ended before each starts, and direct edges."""

    before: Mapping[int, int]
    edges: Mapping[int, tuple[int, ...]]
    """Direct predecessors of each op: on its stream, and through waits."""

    @classmethod
    def of(
        cls, trace: Trace, order: Sequence[int], streams: Sequence[int], waits: Sequence[Iterable[int]]
    ) -> HappensBefore:
        """Return the order of a schedule; `waits` has the ops whose events are waited for at each position in `order`.

        Waits before an op hold for its stream from then on. Ops without GPU work are left out.
        """
        before: dict[int, int] = {}
        edges: dict[int, tuple[int, ...]] = {}
        last: dict[int, int] = {}
        for place, op in enumerate(order):
            if not works(trace.ops[op]):
                continue
            stream = streams[op]
            direct = tuple(dict.fromkeys((*([last[stream]] if stream in last else []), *waits[place])))
            ended = 0
            for earlier in direct:
                ended |= before[earlier] | 1 << earlier
            before[op], edges[op] = ended, direct
            last[stream] = op
        return cls(before, edges)

    @classmethod
    def of_plan(cls, trace: Trace, order: Sequence[int], streams: Sequence[int], sync: SyncPlan) -> HappensBefore:
        """Return the order of a schedule with the waits of `sync`."""
        return cls.of(trace, order, streams, sync.waits)

    def ends_before(self, op: int, other: int) -> bool:
        """Return True if `op` has ended before `other` starts."""
        return bool(self.before[other] >> op & 1)

    def any_order(self, random: Random) -> list[int]:
        """Return a random sequential order of the ops that respects streams and events."""
        waiting = {op: len(direct) for op, direct in self.edges.items()}
        after: dict[int, list[int]] = {op: [] for op in self.edges}
        for op, direct in self.edges.items():
            for earlier in direct:
                after[earlier].append(op)
        ready = [op for op, count in waiting.items() if not count]
        order: list[int] = []
        while ready:
            op = ready.pop(random.randrange(len(ready)))
            order.append(op)
            for later in after[op]:
                waiting[later] -= 1
                if not waiting[later]:
                    ready.append(later)
        return order


@dataclass(frozen=True)
class Race:
    """A data race: two ops that may run concurrently, one of which writes a storage that the other uses."""

    op: int
    other: int
    storage: int


def data_races(trace: Trace, order: HappensBefore, doing: Mapping[int, int] | None = None) -> Iterator[Race]:
    """Yield unordered pairs of accesses to one storage, at least one of them a write.

    `doing` maps each fused op to the op that does its work (`gpusim.trace.fusion.covered_by`).
    """
    writers: dict[int, list[int]] = {}
    users: dict[int, list[int]] = {}
    for op, (read, written) in enumerate(reads_writes_storages(trace)):
        actor = (doing or {}).get(op, op)
        if actor in order.before:
            for storage in read | written:
                users.setdefault(storage, []).append(actor)
            for storage in written:
                writers.setdefault(storage, []).append(actor)
    for storage, writing in writers.items():
        yield from _unordered(order, storage, writing, users[storage])


def _unordered(order: HappensBefore, storage: int, writing: Collection[int], using: Collection[int]) -> Iterator[Race]:
    seen: set[tuple[int, int]] = set()
    for one in writing:
        for other in using:
            pair = (min(one, other), max(one, other))
            if (
                one != other
                and pair not in seen
                and not (order.ends_before(one, other) or order.ends_before(other, one))
            ):
                seen.add(pair)
                yield Race(one, other, storage)
