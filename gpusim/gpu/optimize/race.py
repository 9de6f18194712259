"""The race check: a schedule run at paces that streams and events allow, with freed bytes poisoned.

A schedule is right where the results are the same at any pace of its streams. The order is that of `HappensBefore`: ops
that no event orders may be swapped. `hurried` and `delayed` swap exactly the ops that a missing event would let swap,
so that detection does not depend on chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gpusim.formats.trace import Trace
from gpusim.gpu.optimize.arena_runner import ArenaRunner
from gpusim.gpu.replay.encode import DTYPES
from gpusim.gpu.replay.execute import InitialState, results_of
from gpusim.plan.arena import ALIGNMENT_BYTES, Arena, pack
from gpusim.plan.graph import OpGraph
from gpusim.plan.happens_before import HappensBefore, data_races
from gpusim.plan.schedule import Schedule
from gpusim.plan.sync import SyncPlan, plan_sync, works
from gpusim.trace.fusion import covered_by, place_fused

Results = dict[int, torch.Tensor]
Functions = list[Callable[..., Any]]


@dataclass(frozen=True)
class Racing:
    """A schedule's launch order with its events, some of which may have been removed."""

    trace: Trace
    order: Sequence[int]
    streams: Sequence[int]
    waits: Sequence[Sequence[int]]
    variants: Sequence[int]
    covered: Mapping[int, int]

    @classmethod
    def of(cls, graph: OpGraph, schedule: Schedule) -> Racing:
        """Return the schedule with all necessary events."""
        covered = covered_by(graph.trace, schedule.variants)
        order, streams = place_fused(schedule.order, schedule.streams, covered)
        sync = plan_sync(graph.trace, graph.preds, order, streams, covered)
        return cls(graph.trace, order, streams, sync.waits, schedule.variants, covered)

    @property
    def events(self) -> list[tuple[int, int]]:
        """Waits of the schedule, in launch order: the op that waits, and the op for whose end it waits."""
        return [(op, earlier) for op, waits in zip(self.order, self.waits, strict=False) for earlier in waits]

    def without(self, number: int) -> Racing:
        """Return the schedule without one of its waits, by its place in `events`."""
        waits: list[tuple[int, ...]] = []
        for events in self.waits:
            kept = events if not 0 <= number < len(events) else (*events[:number], *events[number + 1 :])
            number -= len(events)
            waits.append(tuple(kept))
        return replace(self, waits=waits)

    @property
    def happens_before(self) -> HappensBefore:
        """Order given by the remaining events."""
        return HappensBefore.of(self.trace, self.order, self.streams, self.waits)

    @property
    def sync(self) -> SyncPlan:
        """The remaining events as a plan for a recording in an arena, which needs no release of memory.

        Every stream begins after the start of the step, and the step ends with the last op of each stream.
        """
        last: dict[int, int] = {}
        roots: set[int] = set()
        for op, waits in zip(self.order, self.waits, strict=False):
            if works(self.trace.ops[op]):
                if self.streams[op] not in last and not waits:
                    roots.add(self.streams[op])
                last[self.streams[op]] = op
        ends = tuple(op for stream, op in last.items() if stream)
        records = frozenset({*ends, *(earlier for waits in self.waits for earlier in waits)})
        nothing: tuple[tuple[int, ...], ...] = ((),) * len(self.order)
        return SyncPlan(tuple(map(tuple, self.waits)), nothing, records, ends, frozenset(roots - {0}))

    def arena(self, planned: HappensBefore) -> Arena:
        """Return an arena packed for `planned`, with bytes of their own for integers.

        Integers may be indices. Where an event is missing, other contents of their bytes would be read as indices, and
        a kernel that reads outside its memory ends the process.
        """
        arena = pack(self.trace, planned, self.covered, kept=True)
        whole = {t.storage for t in self.trace.tensors if t.dtype in DTYPES and not DTYPES[t.dtype].is_floating_point}
        offsets, end = dict(arena.offsets), arena.bytes
        for storage in sorted(whole & offsets.keys()):
            offsets[storage] = end
            end += -(-max(1, self.trace.storages[storage].bytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return replace(arena, offsets=offsets, bytes=end)

    def results(
        self,
        state: InitialState,
        device: torch.device,
        order: Sequence[int],
        seed: int,
        arena: Arena,
        functions: Functions | None = None,
    ) -> Results:
        """Return the results of the ops one by one in `order`, in an arena with freed bytes poisoned.

        `state` is restored afterwards. `functions` are the resolved calls of the ops, where they exist already.
        """
        runner = ArenaRunner(self.trace, device, state.tensors, arena, poison=True, functions=functions)
        runner.choose(self.variants)
        runner.spoil()
        state.restore()
        torch.manual_seed(seed)
        ordered = set(order)
        try:
            for op in range(len(self.trace.ops)):
                if op not in ordered:
                    runner.run(op)
            for op in order:
                runner.run(op)
            return results_of(self.trace, runner.tensors)
        finally:
            state.restore()


def hurried(order: HappensBefore, op: int) -> list[int]:
    """Return an order in which `op` runs as early as streams and events allow."""
    first = [each for each in order.before if order.ends_before(each, op)]
    return [*first, op, *(each for each in order.before if each != op and not order.ends_before(each, op))]


def delayed(order: HappensBefore, op: int) -> list[int]:
    """Return an order in which `op` runs as late as streams and events allow."""
    behind = [each for each in order.before if order.ends_before(op, each)]
    return [*(each for each in order.before if each != op and not order.ends_before(op, each)), op, *behind]


@dataclass(frozen=True)
class Disorder:
    """Two ops that use the same bytes and that a missing event leaves unordered."""

    first: int
    """The one that a right schedule runs first."""
    then: int


def disorders(racing: Racing, number: int) -> Iterator[Disorder]:
    """Yield the ops that use the same bytes in any order without one wait, by its place in `events`; none if the wait
    is unnecessary.

    Dependencies are between storages. Two columns of a matrix share no byte, and `empty_like` reads none: nothing
    changes without such a wait.
    """
    trace, planned = racing.trace, racing.happens_before
    doing: dict[int, list[int]] = {}
    for op in range(len(trace.ops)):
        doing.setdefault(racing.covered.get(op, op), []).append(op)
    seen: set[Disorder] = set()
    for race in data_races(trace, racing.without(number).happens_before, racing.covered):
        ordered = planned.ends_before(race.op, race.other)
        found = Disorder(race.op, race.other) if ordered else Disorder(race.other, race.op)
        pairs = ((one, other) for one in doing[race.op] for other in doing[race.other])
        if found not in seen and any(_share_bytes(trace, one, other, race.storage) for one, other in pairs):
            seen.add(found)
            yield found


def _share_bytes(trace: Trace, one: int, other: int, storage: int) -> bool:
    """Whether one of two ops writes bytes of a storage that the other one uses."""
    written, used = ([_bytes_of(trace, op, storage, uses) for op in (one, other)] for uses in (False, True))
    return bool((written[0] & used[1] | written[1] & used[0]).any())


def _bytes_of(trace: Trace, op: int, storage: int, uses: bool) -> torch.Tensor:
    """Return a mask of the bytes of a storage that an op writes; with `uses`, of those that it reads, too."""
    touched = torch.zeros(trace.storages[storage].bytes, dtype=torch.bool)
    for index in _tensors_of(trace, op, uses):
        tensor = trace.tensors[index]
        if tensor.storage == storage and 0 not in tensor.shape:
            size = DTYPES[tensor.dtype].itemsize if tensor.dtype in DTYPES else 1
            elements = torch.zeros(len(touched) // size, dtype=torch.bool)
            elements.as_strided(tensor.shape, tensor.stride, tensor.offset).fill_(True)
            touched[: len(elements) * size] |= elements.repeat_interleave(size)
    return touched


def _tensors_of(trace: Trace, op: int, uses: bool) -> Iterator[int]:
    yield from trace.ops[op].writes
    if uses and not _reads_only_shape(trace.ops[op].target):
        yield from trace.ops[op].reads


def _reads_only_shape(target: str) -> bool:
    """Whether an operator takes only the shape and the type of its tensor."""
    name = target.partition(".")[2].partition(".")[0]
    return name.startswith("new_") or name.endswith("_like")
