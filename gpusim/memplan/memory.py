"""The memory that a program takes: allocated and reserved, by category, instruction by instruction."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpusim.memplan.allocator import Block, CachingAllocator
from gpusim.memplan.program import Instruction, Program
from gpusim.memplan.storages import Category, Storages


@dataclass(frozen=True)
class Peak:
    """The moment at which most memory is allocated."""

    allocated_bytes: int
    place: int
    """Which instruction of the program."""
    op: int
    """The op that runs then, -1 for none."""
    live: tuple[int, ...]
    """Storages that are there, the largest first."""
    by_category: dict[Category, int]
    """Bytes asked for, by what they are; the rest of `allocated_bytes` is rounding."""


@dataclass(frozen=True)
class MemoryUse:
    """What a program takes over its instructions."""

    initial_bytes: int
    """Allocated before the step and throughout."""
    peak: Peak
    reserved_bytes: int
    """Most that the allocator has reserved; what it has beyond the peak is fragmentation."""
    allocated_bytes: tuple[int, ...]
    """Most allocated while each instruction is issued, its workspace included."""
    pinned_bytes: int
    """Host memory of what moves out."""
    peak_by_op: tuple[int, ...]
    """Most allocated while each op runs for the first time."""


def memory_of(storages: Storages, program: Program) -> MemoryUse:
    """Follow a program through the caching allocator. The program must be one that can run (`check_program`)."""
    before = CachingAllocator()
    for storage in sorted(storages.initial):
        before.allocate(storages.bytes[storage])
    pool = CachingAllocator()  # a graph's recording has a pool of its own
    blocks: dict[int, Block | None] = {}
    levels: list[int] = []
    peak_level, peak_place, peak_live = -1, 0, frozenset[int]()
    peak_by_op = [0] * len(storages.trace.ops)
    for place, instruction in enumerate(program):
        level = _follow(storages, pool, blocks, instruction)
        levels.append(before.allocated_bytes + level)
        if instruction.kind == "run":
            peak_by_op[instruction.op] = levels[-1]
        if level > peak_level:
            peak_level, peak_place, peak_live = level, place, frozenset(blocks)
    return MemoryUse(
        initial_bytes=before.allocated_bytes,
        peak=_peak(storages, program, before.allocated_bytes + max(peak_level, 0), peak_place, peak_live),
        reserved_bytes=before.reserved_bytes + pool.reserved_bytes,
        allocated_bytes=tuple(levels),
        pinned_bytes=pinned_bytes(storages, (i.storage for i in program if i.kind == "out")),
        peak_by_op=tuple(peak_by_op),
    )


def _follow(
    storages: Storages, pool: CachingAllocator, blocks: dict[int, Block | None], instruction: Instruction
) -> int:
    """Issue one instruction; the most that the pool had allocated meanwhile."""
    if instruction.kind in ("run", "again"):
        op = instruction.op
        passing: list[Block | None] = []
        for storage in storages.makes[op]:
            if instruction.kind == "run" or storage in instruction.bring:
                blocks[storage] = pool.allocate(storages.bytes[storage])
            else:
                passing.append(pool.allocate(storages.bytes[storage]))
        passing.append(pool.allocate(storages.workspace_bytes[op]))
        level = pool.allocated_bytes
        for block in reversed(passing):
            pool.release(block)
        return level
    if instruction.kind == "back":
        blocks[instruction.storage] = pool.allocate(storages.bytes[instruction.storage])
    level = pool.allocated_bytes
    if instruction.kind == "free":
        pool.release(blocks.pop(instruction.storage))
    return level


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
    """Host memory for copies of these storages: one pinned buffer each, for the whole step."""
    return sum(storages.bytes[storage] for storage in set(moved))
