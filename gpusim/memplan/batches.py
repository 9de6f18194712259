"""The largest batch that a memory plan fits, from the plan of one batch."""

from __future__ import annotations

from typing import Final

from gpusim.memplan.evaluate import Outcome
from gpusim.memplan.program import Program
from gpusim.memplan.storages import Category, Storages
from gpusim.plan.allocator import rounded

#: Categories that grow with the batch; the rest of a step's memory does not.
_PER_SAMPLE: Final[frozenset[Category]] = frozenset(("activation", "activation_gradient", "input", "workspace"))


def largest_batch(storages: Storages, outcome: Outcome, limit_bytes: int) -> int:
    """Estimate the largest batch with which a plan of this kind fits a limit; 0 where none does.

    Parameters, their gradients and the optimizer's state are constant, everything else grows with the batch. Each
    instruction has a limit of its own: where most of the peak is constant, another one has the peak of a larger batch.
    """
    batches = [
        (limit_bytes - constant) * storages.trace.model.batch / (level - constant) if limit_bytes > constant else 0.0
        for constant, level in zip(constant_levels(storages, outcome.program), outcome.use.allocated_bytes, strict=True)
        if level > constant or limit_bytes <= constant
    ]
    return int(min(batches, default=0.0))


def constant_levels(storages: Storages, program: Program) -> list[int]:
    """Return the bytes live during each instruction that do not grow with the batch."""
    size = {
        s: rounded(storages.bytes[s]) for s, category in enumerate(storages.category) if category not in _PER_SAMPLE
    }
    live = {s for s in storages.initial if s in size}
    now = sum(size[s] for s in live)
    levels: list[int] = []
    for instruction in program:
        comes: tuple[int, ...] = ()
        if instruction.kind == "run":
            comes = tuple(storages.makes[instruction.op])
        elif instruction.kind == "again":
            comes = tuple(s for s in storages.makes[instruction.op] if s in instruction.bring)
        elif instruction.kind == "back":
            comes = (instruction.storage,)
        for storage in comes:
            if storage in size and storage not in live:
                live.add(storage)
                now += size[storage]
        levels.append(now)
        if instruction.kind == "free" and instruction.storage in live:
            live.remove(instruction.storage)
            now -= size[instruction.storage]
    return levels
