"""A memory plan as one list of instructions, in the order in which the host issues them.

The allocator's simulation, the engines' plan, the checks and the replay on a GPU all follow this one list, so that they
mean the same. Ops run on one stream, or on those of the plan (`gpusim.memplan.waits`). Copies out and copies back have
a stream each.

| instruction | what it does |
|---|---|
| run OP | the op as captured; what it makes is allocated |
| again OP | the op once more, without changing states such as running means; only `bring` is kept of its results |
| out S | a copy to the host, once what the ops' stream has been given so far has ended |
| free S | the memory is let go; where a copy out of it is under way, the ops' stream first waits for that |
| back S | memory is allocated, and a copy to it launched once what the ops' stream has so far has ended |
| barrier | the ops' stream waits for all copies so far |

Before an op that needs a storage on its way back, the ops' stream waits for that copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from gpusim.memplan.plan import MemoryPlan, Offload
from gpusim.memplan.storages import Storages

Kind = Literal["run", "again", "out", "free", "back", "barrier"]


class Instruction(msgspec.Struct, frozen=True, gc=False):
    """One row of the table above; a struct, because planners make millions of them."""

    kind: Kind
    op: int = -1
    storage: int = -1
    bring: frozenset[int] = frozenset()
    """For `again`: the storages that it brings back."""
    stream: int = 0
    """Stream of an op; for `back`, the stream whose memory the storage gets."""


Program = tuple[Instruction, ...]


def program_of(storages: Storages, plan: MemoryPlan, *, barriers_first: bool = True) -> Program:
    """Return the instructions of a plan; `gpusim.memplan.checks` decides whether they can run.

    A barrier does not wait for copies out that begin at its own op: those overlap with the following ops. Without
    `barriers_first` it does, as in plans replayed before 2026-11-24.
    """
    return _with_frees(storages, list(_actions(storages, plan, barriers_first)), frozenset(plan.held))


def _actions(storages: Storages, plan: MemoryPlan, barriers_first: bool) -> Iterator[Instruction]:
    """Yield everything except the frees that follow from last uses."""
    before: dict[int, list[Instruction]] = defaultdict(list)
    after: dict[int, list[Instruction]] = defaultdict(list)
    barriers = [(op, Instruction("barrier")) for op in plan.barriers]
    outs = [(offload.after, Instruction("out", storage=offload.storage)) for offload in plan.offloads]
    for op, instruction in barriers + outs if barriers_first else outs + barriers:
        after[op].append(instruction)
    for offload in plan.offloads:
        before[offload.free].append(Instruction("free", storage=offload.storage))
    order = plan.order or range(len(storages.trace.ops))
    stream = plan.op_streams or (0,) * len(storages.trace.ops)
    for offload in _by_need(storages, plan, order):
        before[offload.back].append(Instruction("back", storage=offload.storage, stream=stream[offload.back]))
    for redo in plan.redos:
        wanted = frozenset(redo.storages)
        before[redo.before] += [
            Instruction("again", op=op, bring=wanted & storages.writes[op], stream=stream[redo.before])
            for op in redo.ops
        ]
    for op in order:
        yield from before.get(op, ())
        yield Instruction("run", op=op, stream=stream[op])
        yield from after.get(op, ())


def _by_need(storages: Storages, plan: MemoryPlan, order: Sequence[int]) -> list[Offload]:
    """Return offloads in the order in which ops need them back: copies of one direction wait for each other."""
    place = {op: number for number, op in enumerate(order)}

    def need(offload: Offload) -> int:
        back = place[offload.back]
        return min((place[op] for op in storages.users[offload.storage] if place[op] >= back), default=len(place))

    return sorted(plan.offloads, key=need)


def op_streams_of(program: Program) -> int:
    """Return the number of streams of a program's ops."""
    return 1 + max((instruction.stream for instruction in program), default=0)


def needed(storages: Storages, instruction: Instruction) -> frozenset[int]:
    """Return the storages that must be available when an instruction is issued, or that it makes."""
    if instruction.kind == "run":
        return storages.touched[instruction.op]
    if instruction.kind == "again":
        made_here = storages.writes[instruction.op] - instruction.bring
        return (storages.touched[instruction.op] - made_here) | instruction.bring
    return frozenset((instruction.storage,)) if instruction.storage >= 0 else frozenset()


def _with_frees(storages: Storages, actions: list[Instruction], held: frozenset[int]) -> Program:
    """Insert a `free` after the last use of each storage, also before it is brought back."""
    stays = storages.initial | storages.results | held
    last_use: dict[int, int] = {}
    free_behind: dict[int, list[int]] = defaultdict(list)
    there: set[int] = set(storages.initial)
    touched = storages.touched
    for place, instruction in enumerate(actions):
        kind = instruction.kind
        if kind == "run":
            there |= touched[instruction.op]
            last_use.update(dict.fromkeys(touched[instruction.op], place))
            continue
        if kind == "free":
            there.discard(instruction.storage)
            last_use.pop(instruction.storage, None)
            continue
        fresh: frozenset[int] = frozenset()
        if kind == "back":
            fresh = frozenset((instruction.storage,))
        elif kind == "again":
            fresh = frozenset(s for s in instruction.bring if _makes_anew(storages, instruction.op, s))
        # Recomputed, or copied back, without an explicit free.
        for storage in (fresh & there) - storages.initial:
            free_behind[last_use[storage]].append(storage)
        needs = needed(storages, instruction)
        there |= needs
        last_use.update(dict.fromkeys(needs, place))
    for storage, place in last_use.items():
        if storage not in stays:
            free_behind[place].append(storage)
    program: list[Instruction] = []
    for place, instruction in enumerate(actions):
        program.append(instruction)
        if place in free_behind:
            program += [Instruction("free", storage=storage) for storage in sorted(free_behind[place])]
    return tuple(program)


def _makes_anew(storages: Storages, op: int, storage: int) -> bool:
    """Whether an op allocates a storage, rather than changing it in place."""
    return storage in storages.makes[op]
