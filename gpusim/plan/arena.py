"""One arena for all memory that a step allocates: storage offsets that let the streams of a schedule share bytes.

Two storages may share bytes only if every use of the first has ended before any use of the second starts, as ordered by
streams and events (`gpusim.plan.happens_before`), not by launch order. The largest storages are placed first, each at
the lowest offset without a conflict. This is greedy packing by size (Pisarchyk and Lee, "Efficient Memory Management
for Deep Neural Net Inference", 2020, section 5.2), with a partial order in place of lifetimes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpusim.formats.trace import Trace
from gpusim.plan.happens_before import HappensBefore
from gpusim.plan.sync import kept_storages, storages_touched

#: Alignment of storages, that of torch's allocator.
ALIGNMENT_BYTES: Final = 512


@dataclass(frozen=True)
class Arena:
    """Offsets of storages and total size, in bytes."""

    offsets: Mapping[int, int]
    bytes: int
    firsts: Mapping[int, tuple[int, ...]]
    """Storages that each op uses first; earlier contents of their bytes are dead by then."""


@dataclass(frozen=True)
class _Use:
    """A storage with bit masks of its users, and the users that no other one precedes."""

    storage: int
    bytes: int
    users: int
    known: int
    """Bit mask of the ops that have ended before any user starts."""
    firsts: tuple[int, ...]


def pack(trace: Trace, order: HappensBefore, doing: Mapping[int, int] | None = None, kept: bool = False) -> Arena:
    """Pack the storages that a step allocates into an arena; with `kept`, also results, which outlive the step.

    `doing` maps each fused op to the op that does its work.
    """
    uses = list(_uses(trace, order, doing or {}, kept))
    offsets: dict[int, int] = {}
    placed: list[tuple[int, int, _Use]] = []
    for use in sorted(uses, key=lambda each: (-each.bytes, each.storage)):
        offset = _lowest([(begin, end) for begin, end, other in placed if not _apart(use, other)], use.bytes)
        offsets[use.storage] = offset
        placed.append((offset, offset + use.bytes, use))
        placed.sort(key=lambda each: each[:2])
    firsts: dict[int, list[int]] = {}
    for use in uses:
        for op in use.firsts:
            firsts.setdefault(op, []).append(use.storage)
    return Arena(
        offsets,
        max((end for _, end, _ in placed), default=0),
        {op: tuple(storages) for op, storages in firsts.items()},
    )


def overlaps(
    trace: Trace, arena: Arena, order: HappensBefore, doing: Mapping[int, int] | None = None
) -> Iterator[tuple[int, int]]:
    """Yield pairs of storages that share bytes although their uses may overlap in time: none in a correct arena.

    The check compares single accesses and is independent of `pack`.
    """
    users: dict[int, set[int]] = {}
    lasting = kept_storages(trace)
    for op, touched in enumerate(storages_touched(trace)):
        actor = (doing or {}).get(op, op)
        if actor in order.before:
            for storage in touched:
                users.setdefault(storage, set()).add(actor)
    spans = sorted(
        (offset, offset + trace.storages[storage].bytes, storage) for storage, offset in arena.offsets.items()
    )
    for place, (_, end, storage) in enumerate(spans):
        for begin, _, other in spans[place + 1 :]:
            if begin >= end:
                break
            one, two = users.get(storage, set()), users.get(other, set())
            first = storage not in lasting and _all_before(order, one, two)
            if not first and (other in lasting or not _all_before(order, two, one)):
                yield storage, other


def _all_before(order: HappensBefore, one: set[int], other: set[int]) -> bool:
    return all(order.ends_before(first, second) for first in one for second in other)


def _uses(trace: Trace, order: HappensBefore, doing: Mapping[int, int], kept: bool) -> Iterator[_Use]:
    existing = {tensor.storage for tensor in trace.tensors if tensor.init is not None}
    left_out = existing if kept else kept_storages(trace) | existing
    users: dict[int, dict[int, None]] = {}
    for op, touched in enumerate(storages_touched(trace)):
        actor = doing.get(op, op)
        if actor in order.before:
            for storage in touched - left_out:
                users.setdefault(storage, {})[actor] = None
    for storage, ops in users.items():
        mask = 0
        for op in ops:
            mask |= 1 << op
        firsts = tuple(op for op in ops if not order.before[op] & mask)
        known = -1
        for op in firsts:
            known &= order.before[op]
        size = -(-max(1, trace.storages[storage].bytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        outlives = kept and storage in kept_storages(trace)
        yield _Use(storage, size, -1 if outlives else mask, known, firsts)


def _apart(one: _Use, other: _Use) -> bool:
    """Return True if all users of one storage have ended before any user of the other starts."""
    return not (one.users & ~other.known) or not (other.users & ~one.known)


def _lowest(taken: Sequence[tuple[int, int]], size: int) -> int:
    """Return the lowest offset with `size` free bytes; `taken` is sorted."""
    offset = 0
    for begin, end in taken:
        if begin - offset >= size:
            break
        offset = max(offset, end)
    return offset
