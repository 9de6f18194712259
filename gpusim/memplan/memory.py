"""Memory of a program: allocated and reserved, by category, instruction by instruction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpusim.memplan.program import Program, op_streams_of
from gpusim.memplan.storages import Category, Storages
from gpusim.notebook import ShortRepr
from gpusim.plan.allocator import Block, CachingAllocator, rounded


@dataclass(frozen=True, repr=False)
class Peak(ShortRepr):
    """The point of largest allocated memory."""

    allocated_bytes: int
    place: int
    """Index of the program's instruction."""
    op: int
    """Op that runs then, -1 for none."""
    live: tuple[int, ...]
    """Live storages, largest first."""
    by_category: dict[Category, int]
    """Requested bytes by category; the rest of `allocated_bytes` is rounding."""


@dataclass(frozen=True, repr=False)
class MemoryUse(ShortRepr):
    """Memory of a program over its instructions."""

    initial_bytes: int
    """Bytes allocated before the step and throughout."""
    peak: Peak
    reserved_bytes: int
    """Peak of the reserved memory, in bytes; its excess over the allocated peak is fragmentation."""
    allocated_bytes: tuple[int, ...]
    """Peak allocation during each instruction, its workspace included, in bytes."""
    pinned_bytes: int
    """Host memory of the copies out, in bytes."""
    peak_by_op: tuple[int, ...]
    """Peak allocation while each op runs for the first time, in bytes."""


def memory_of(storages: Storages, program: Program) -> MemoryUse:
    """Simulate a program on the caching allocator. The program must be runnable (`check_program`)."""
    before = pool_before(storages)
    levels, reserved_bytes = _levels(storages, program)
    levels = [before.allocated_bytes + level for level in levels]
    peak_by_op = [0] * len(storages.trace.ops)
    for level, instruction in zip(levels, program, strict=True):
        if instruction.kind == "run":
            peak_by_op[instruction.op] = level
    most = max(levels, default=before.allocated_bytes)
    place = levels.index(most) if levels else 0
    return MemoryUse(
        initial_bytes=before.allocated_bytes,
        peak=_peak(storages, program, most, place, live_after(storages, program[: place + 1])),
        reserved_bytes=before.reserved_bytes + reserved_bytes,
        allocated_bytes=tuple(levels),
        pinned_bytes=pinned_bytes(storages, (i.storage for i in program if i.kind == "out")),
        peak_by_op=tuple(peak_by_op),
    )


def peak_bytes_of(storages: Storages, program: Program, initial_bytes: int) -> int:
    """Return only the peak of `memory_of`, given the bytes before the step: for planners that try many programs."""
    return max(levels_of(storages, program, initial_bytes), default=initial_bytes)


def levels_of(storages: Storages, program: Program, initial_bytes: int) -> list[int]:
    """Return only the bytes allocated during each instruction, given those before the step."""
    levels, _ = _levels(storages, program)
    return [initial_bytes + level for level in levels]


def needs_at_once(storages: Storages, order: Sequence[int] = ()) -> list[int]:
    """Return what each op takes at least, in bytes: its tensors, its workspace, and all that must stay since an earlier
    op of the order (empty: as recorded).
    """
    stays = storages.initial | storages.results
    size = [rounded(each) for each in storages.bytes]
    there = sum(size[s] for s in storages.initial)
    needs = [0] * len(storages.touched)
    for op in order or range(len(needs)):
        there += sum(size[s] for s in storages.makes[op] if s in stays)
        needs[op] = there + rounded(storages.workspace_bytes[op])
        needs[op] += sum(size[s] for s in storages.touched[op] if s not in stays)
    return needs


def pool_before(storages: Storages) -> CachingAllocator:
    """Return the allocator with the memory from before the step."""
    before = CachingAllocator()
    for storage in sorted(storages.initial):
        before.allocate(storages.bytes[storage])
    return before


def _levels(storages: Storages, program: Program) -> tuple[list[int], int]:
    """Return the step's own peak allocation during each instruction, and the bytes that its pools reserve.

    A graph's recording has a pool of its own for each stream.
    """
    pools = [CachingAllocator() for _ in range(op_streams_of(program))]
    size, workspace, makes = storages.bytes, storages.workspace_bytes, storages.makes
    blocks: dict[int, tuple[CachingAllocator, Block | None]] = {}
    levels: list[int] = []
    others_bytes = 0
    """What all pools but the present one have allocated."""
    pool = pools[0]
    for instruction in program:
        kind = instruction.kind
        if len(pools) > 1 and pool is not pools[instruction.stream]:
            pool = pools[instruction.stream]
            others_bytes = sum(each.allocated_bytes for each in pools) - pool.allocated_bytes
        if kind == "free":
            levels.append(others_bytes + pool.allocated_bytes)
            owner, block = blocks.pop(instruction.storage)
            before_bytes = owner.allocated_bytes
            owner.release(block)
            if owner is not pool:
                others_bytes -= before_bytes - owner.allocated_bytes
        elif kind in ("run", "again"):
            passing: list[Block | None] = []
            for storage in makes[instruction.op]:
                block = pool.allocate(size[storage])
                if kind == "run" or storage in instruction.bring:
                    blocks[storage] = (pool, block)
                else:
                    passing.append(block)
            passing.append(pool.allocate(workspace[instruction.op]))
            levels.append(others_bytes + pool.allocated_bytes)
            for block in reversed(passing):
                pool.release(block)
        else:
            if kind == "back":
                blocks[instruction.storage] = (pool, pool.allocate(size[instruction.storage]))
            levels.append(others_bytes + pool.allocated_bytes)
    return levels, sum(each.reserved_bytes for each in pools)


def live_after(storages: Storages, program: Program) -> set[int]:
    """Return the step's own storages that are live after the last of these instructions, or during it."""
    live: set[int] = set()
    for instruction in program:
        if instruction.kind == "run":
            live.update(storages.makes[instruction.op])
        elif instruction.kind == "again":
            live.update(s for s in storages.makes[instruction.op] if s in instruction.bring)
        elif instruction.kind == "back":
            live.add(instruction.storage)
        elif instruction.kind == "free":
            live.discard(instruction.storage)
    return live


def _peak(storages: Storages, program: Program, allocated_bytes: int, place: int, live: Iterable[int]) -> Peak:
    there = sorted({*live, *storages.initial}, key=lambda storage: (-storages.bytes[storage], storage))
    by_category: dict[Category, int] = {}
    for storage in there:
        category = storages.category[storage]
        by_category[category] = by_category.get(category, 0) + storages.bytes[storage]
    op = program[place].op if program else -1
    if op >= 0 and storages.workspace_bytes[op]:
        by_category["workspace"] = storages.workspace_bytes[op]
    return Peak(allocated_bytes, place, op, tuple(there), by_category)


def pinned_bytes(storages: Storages, moved: Iterable[int]) -> int:
    """Return the host memory for copies of these storages, in bytes: one pinned buffer each, for the whole step."""
    return sum(storages.bytes[storage] for storage in set(moved))
