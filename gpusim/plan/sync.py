"""Events of a schedule and release of memory, by vector clocks over streams (`gpusim.rules.waits`).

The clocks that tell which waits are needed also tell when no other stream still reads a storage allocated on one
stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain

from gpusim.formats.trace import Op, Trace
from gpusim.rules.waits import find_waits
from gpusim.trace.dependencies import dependencies, handles, reads_writes_storages


@dataclass(frozen=True)
class SyncPlan:
    """Ops whose events to wait for, and storages to release, before each position in the launch order."""

    waits: tuple[tuple[int, ...], ...]
    releases: tuple[tuple[int, ...], ...]
    records: frozenset[int]
    """Ops after which an event is recorded."""
    ends: tuple[int, ...]
    """Ops whose events the first stream waits for at the end."""
    roots: frozenset[int]
    """Streams whose first op waits for nothing and that must wait for the start of the step."""
    early: tuple[int, ...] = ()
    """Storages to allocate on the first stream before the step, because unordered ops write parts of them. Allocated by
    the first of those ops, another stream could write memory that its last user still reads."""

    @property
    def events(self) -> int:
        """Number of events recorded for dependencies."""
        return len(self.records)


def plan_sync(
    trace: Trace,
    preds: Sequence[Sequence[int]],
    order: Sequence[int],
    streams: Sequence[int],
    covered: Mapping[int, int] | None = None,
) -> SyncPlan:
    """Return waits and releases of a legal schedule: `order` has op indices, `streams` the stream by op index.

    `covered` maps each fused op to the op that does its work, which then also needs its storages.
    """
    return plan_sync_of(StepSync.of(trace, preds, covered or {}), order, streams)


@dataclass(frozen=True, slots=True)
class StepSync:
    """What the sync plans of all schedules of a step share."""

    preds: Sequence[int]
    """Predecessors with GPU work of all ops with GPU work, concatenated."""
    first_pred: Sequence[int]
    """Place in `preds` of the first predecessor of each op, and behind the last."""
    works: Sequence[bool]
    """True for ops with GPU work (`works`)."""
    touched: Sequence[frozenset[int]]
    """Storages that each op needs, with those of ops fused into it."""
    kept: frozenset[int]
    early: tuple[int, ...]

    @classmethod
    def of(cls, trace: Trace, preds: Sequence[Sequence[int]], covered: Mapping[int, int]) -> StepSync:
        """Return it for a step; arguments as of `plan_sync`."""
        touched = storages_touched(trace)
        for op, doing in covered.items():
            touched[doing] |= touched[op]
        working = through_views(trace, preds)
        return cls(
            [*chain.from_iterable(working)],
            [*accumulate(map(len, working), initial=0)],
            [works(op) for op in trace.ops],
            touched,
            kept_storages(trace),
            written_in_parts(trace),
        )


@dataclass(frozen=True, slots=True)
class _Waited:
    """Waits of a schedule, with the clocks of its ops, as `find_waits` fills them."""

    order: Sequence[int]
    """Ops with GPU work, in launch order."""
    waits: Sequence[int]
    first_wait: Sequence[int]
    ended: Sequence[Sequence[int]]
    place: Sequence[int]

    @classmethod
    def of(cls, step: StepSync, order: Sequence[int], streams: Sequence[int]) -> _Waited:
        ops, n_streams = len(step.works), max(streams, default=0) + 1
        order = [op for op in order if step.works[op]]
        known = [[0] * n_streams for _ in range(n_streams)]
        ended = [[0] * n_streams if working else [] for working in step.works]
        place, launched, latest, last = [0] * ops, [0] * ops, [-1] * n_streams, [-1] * n_streams
        waits, first_wait = [0] * (len(step.preds) + n_streams), [0] * (len(order) + 1)
        clocks = (known, ended, place, launched, latest, last)
        count = find_waits(order, streams, 0, step.first_pred, step.preds, *clocks, first_wait, waits)
        return cls(order, waits[:count], first_wait, ended, place)


def count_events(step: StepSync, order: Sequence[int], streams: Sequence[int]) -> int:
    """Return the number of events of a legal schedule (`SyncPlan.events`); arguments as of `plan_sync_of`."""
    return len(set(_Waited.of(step, order, streams).waits))


def plan_sync_of(step: StepSync, order: Sequence[int], streams: Sequence[int]) -> SyncPlan:
    """Return waits and releases of a legal schedule, as `plan_sync`."""
    waited = _Waited.of(step, order, streams)
    begun: set[int] = {0}
    roots: set[int] = set()
    waits: list[tuple[int, ...]] = []
    releases: list[tuple[int, ...]] = []
    memory = _Memory.of(step, order, streams, waited.place)
    memory.owner.update(dict.fromkeys(step.early, 0))
    position = 0
    for op in order:
        stream = streams[op]
        if not step.works[op]:
            waits.append(())
            releases.append(())
            memory.use(op, None)
            continue
        needed = tuple(waited.waits[waited.first_wait[position] : waited.first_wait[position + 1]])
        position += 1
        if not needed and stream not in begun:
            roots.add(stream)
        begun.add(stream)
        waits.append(needed)
        releases.append(memory.release(stream, waited.ended[op]))
        memory.use(op, stream)
    ends = tuple(waited.waits[waited.first_wait[position] :])
    return SyncPlan(tuple(waits), tuple(releases), frozenset(waited.waits), ends, frozenset(roots), step.early)


def program_order_releases(trace: Trace) -> tuple[tuple[int, ...], ...]:
    """Return the storages to release before each op when all ops run on one stream."""
    n = len(trace.ops)
    return plan_sync(trace, dependencies(trace), range(n), [0] * n).releases


def through_views(trace: Trace, preds: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return dependencies between ops with GPU work; a dependency on a view becomes one on the view's sources."""
    real: list[tuple[int, ...]] = []
    for before in preds:
        working: set[int] = set()
        for p in before:
            working.update((p,) if works(trace.ops[p]) else real[p])
        real.append(tuple(sorted(working)))
    return [deps if works(trace.ops[op]) else () for op, deps in enumerate(real)]


def works(op: Op) -> bool:
    """Return True if an op has GPU work; an op that writes counts even without a recorded kernel."""
    return bool(op.kernels or op.writes)


@dataclass
class _Memory:
    """Live storages: owner stream, users and remaining uses of each, and dead ones to release once users have ended."""

    remaining: dict[int, int]
    touched: Sequence[frozenset[int]]
    kept: frozenset[int]
    streams: Sequence[int]
    place: Sequence[int]
    owner: dict[int, int] = field(default_factory=dict)
    users: dict[int, list[int]] = field(default_factory=dict)
    dead: dict[int, list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, step: StepSync, order: Sequence[int], streams: Sequence[int], place: Sequence[int]) -> _Memory:
        remaining: dict[int, int] = {}
        for op in order:
            for storage in step.touched[op]:
                remaining[storage] = remaining.get(storage, 0) + 1
        return cls(remaining, step.touched, step.kept, streams, place)

    def use(self, op: int, stream: int | None) -> None:
        """Record the launch of op `op` on `stream`; for a view (None), only the remaining uses change."""
        for storage in self.touched[op]:
            if storage in self.kept:
                continue
            if stream is not None:
                self.owner.setdefault(storage, stream)
                self.users.setdefault(storage, []).append(op)
            self.remaining[storage] -= 1
            if not self.remaining[storage] and storage in self.owner:
                self.dead.setdefault(self.owner[storage], []).append(storage)

    def release(self, stream: int, known: Sequence[int]) -> tuple[int, ...]:
        """Return the storages allocated on `stream` that its next op may release: all users are known to have ended.

        `known` is what is known at the end of that op, which adds only the op itself to what is known at its start.
        """
        free: list[int] = []
        wait: list[int] = []
        streams, place = self.streams, self.place
        for storage in self.dead.get(stream, ()):
            for user in self.users[storage]:  # a plain loop: steps may have a million ops
                if known[streams[user]] < place[user]:
                    wait.append(storage)
                    break
            else:
                free.append(storage)
        self.dead[stream] = wait
        return tuple(free)


def written_in_parts(trace: Trace) -> tuple[int, ...]:
    """Return the storages written through several tensors and returned by no op, which no single op may allocate."""
    if trace.model.frontend != "inductor":
        return ()  # an operator either returns what it writes or gets it as argument
    there = {t.storage for t in trace.tensors if t.init is not None}
    for op in trace.ops:
        given = handles(op)
        there |= {trace.tensors[t].storage for t in op.outputs if t is not None and t not in given}
    written: dict[int, set[int]] = {}
    for op in trace.ops:
        for tensor in op.writes:
            written.setdefault(trace.tensors[tensor].storage, set()).add(tensor)
    return tuple(sorted(s for s, tensors in written.items() if len(tensors) > 1 and s not in there))


def storages_touched(trace: Trace) -> list[frozenset[int]]:
    """Return the storages that each op needs: read, written, or seen through a view."""
    elements = reads_writes_storages(trace)
    result = []
    for op, (read, written) in zip(trace.ops, elements, strict=True):
        mentioned = (*handles(op), *(t for t in op.outputs if t is not None))
        seen = {trace.tensors[t].storage for t in mentioned}
        result.append(frozenset(read | written | seen))
    return result


def kept_storages(trace: Trace) -> frozenset[int]:
    """Return the storages that live throughout: those that exist before the step, and its results."""
    return frozenset(t.storage for t in trace.tensors if t.init is not None or t.role in ("output", "gradient"))
