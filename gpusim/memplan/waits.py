"""Waits of a memory plan on several streams: which earlier instructions each one waits for.

Lowering, checks and replay follow the same waits. An instruction waits for

1. the ops whose results or memory it needs, as in a schedule without memory actions;
2. the copy or the recomputation that brought a storage back;
3. before it changes a storage: recomputation and copies out that read it;
4. where memory was freed that its stream had allocated: all that used it on other streams. An allocator gives freed
   memory to the same stream again, so this holds for the next instruction that this stream gets. Freed memory counts as
   free at once, and the peak is that of the launch order, on any number of streams.

A wait that follows from earlier ones is left out (`gpusim.rules.waits`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from gpusim.memplan.program import Instruction, Program, op_streams_of
from gpusim.memplan.storages import Storages
from gpusim.rules.waits import wait_for


@dataclass(frozen=True)
class Waits:
    """Queue of each instruction, and the instructions that it waits for, all by place in the program."""

    queues: int
    """Number of queues: those of ops, one for copies out, one for copies back."""
    queue: tuple[int, ...]
    """Queue of each instruction; -1 where it has no work on the GPU."""
    before: tuple[tuple[int, ...], ...]
    """Instructions of other queues to wait for."""
    ends: tuple[int, ...]
    """Last instructions of all queues but the first, for which that waits at the end."""

    @property
    def out(self) -> int:
        """Queue of the copies out; the copies back have the next one."""
        return self.queues - 2

    def recorded(self) -> frozenset[int]:
        """Return the instructions that others wait for."""
        return frozenset(self.ends).union(*self.before)


def waits_of(storages: Storages, program: Program, *, copies: bool = True) -> Waits:
    """Return the waits of a program that can run (`gpusim.memplan.checks`); without `copies`, as if there were none."""
    queued = _Queued(storages, op_streams_of(program) + 2)
    for place, instruction in enumerate(program):
        queued.add(place, instruction, copies)
    return Waits(
        queued.queues,
        tuple(queued.queue),
        tuple(queued.before),
        tuple(place for queue, place in sorted(queued.last.items()) if queue),
    )


@dataclass
class _Queued:
    """Waits of the instructions so far."""

    storages: Storages
    queues: int
    queue: list[int] = field(default_factory=list)
    before: list[tuple[int, ...]] = field(default_factory=list)
    last: dict[int, int] = field(default_factory=dict)
    """Queue -> its last instruction."""
    ran: dict[int, int] = field(default_factory=dict)
    """Op -> where it ran first."""
    brought: dict[int, int] = field(default_factory=dict)
    """Storage -> the copy or recomputation that brought it back last."""
    readers: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Storage -> recomputation and copies out that read it, since it was changed."""
    users: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Storage -> instructions that used its present memory."""
    owner: dict[int, int] = field(default_factory=dict)
    """Storage -> the stream that allocated its present memory."""
    pending: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Stream -> instructions that its next one waits for."""
    out: dict[int, int] = field(default_factory=dict)
    """Storage -> its last copy out."""

    def __post_init__(self) -> None:
        self.known = [[0] * self.queues for _ in range(self.queues)]
        """Instructions of each queue that each queue knows to have ended."""
        self.latest = [-1] * self.queues
        """Scratch space of `wait_for`."""
        self.ended: list[list[int]] = []
        """What is known at the end of each instruction."""
        self.at: list[int] = []
        """Number of each instruction in its queue."""

    def add(self, place: int, instruction: Instruction, copies: bool) -> None:
        """Add the next instruction."""
        kind, storage, stream = instruction.kind, instruction.storage, instruction.stream
        if kind == "run":
            self._run(place, instruction.op, stream)
        elif kind == "again":
            self._again(place, instruction)
        elif kind == "out" and copies:
            self._issue(place, self.queues - 2, self.users[storage] | self._writers(storage))
            self.out[storage] = place
            self.readers[storage].add(place)
            self.users[storage].add(place)
        elif kind == "back":
            self.owner[storage], self.users[storage] = stream, set()
            if not copies:
                self._skip()
                return
            waits = self.pending[stream] | {self.out[storage]}
            self._issue(place, self.queues - 1, waits | ({self.last[stream]} if stream in self.last else set()))
            self.brought[storage] = place
            self.users[storage].add(place)
        else:
            if kind == "free":
                self._free(storage)
            elif kind == "barrier":
                copied = {self.last[queue] for queue in (self.queues - 2, self.queues - 1) if queue in self.last}
                for each in range(self.queues - 2):
                    self.pending[each] |= copied
            self._skip()

    def _run(self, place: int, op: int, stream: int) -> None:
        storages = self.storages
        for storage in storages.makes[op]:
            self.owner[storage] = stream
        if not storages.working[op]:
            self._skip()
            return
        waits = {self.ran[before] for before in self.storages.working_preds[op]}
        waits |= {self.brought[storage] for storage in storages.touched[op] if storage in self.brought}
        for storage in storages.writes[op]:
            waits |= self.readers.pop(storage, set())
        for storage in storages.touched[op]:
            owner = self.owner.get(storage, stream)
            if owner != stream and not self.users[storage]:  # allocated by a call without a kernel
                waits |= self.pending[owner] | ({self.last[owner]} if owner in self.last else set())
        self._issue(place, stream, waits | self.pending.pop(stream, set()))
        self.ran[op] = place
        for storage in storages.touched[op] | storages.writes[op]:
            self.users[storage].add(place)

    def _again(self, place: int, instruction: Instruction) -> None:
        storages, op, stream = self.storages, instruction.op, instruction.stream
        made = [storage for storage in storages.makes[op] if storage in instruction.bring]
        for storage in made:
            self.owner[storage], self.users[storage] = stream, set()
            self.brought.pop(storage, None)
        if not storages.working[op]:
            self._skip()
            return
        needs = storages.touched[op] - frozenset(storages.makes[op])
        waits = {self.ran[before] for before in self.storages.working_preds[op] if before in self.ran}
        waits |= {self.brought[storage] for storage in needs if storage in self.brought}
        for storage in instruction.bring:
            waits |= self.readers.pop(storage, set())
        self._issue(place, stream, waits | self.pending.pop(stream, set()))
        for storage in instruction.bring:
            self.brought[storage] = place
        for storage in needs | instruction.bring:
            self.users[storage].add(place)
        for storage in needs - instruction.bring:
            self.readers[storage].add(place)

    def _writers(self, storage: int) -> set[int]:
        return {self.brought[storage]} if storage in self.brought else set()

    def _free(self, storage: int) -> None:
        owner = self.owner.pop(storage, 0)
        self.pending[owner] |= {user for user in self.users.pop(storage, ()) if self.queue[user] != owner}
        self.brought.pop(storage, None)

    def _skip(self) -> None:
        self.queue.append(-1)
        self.before.append(())
        self.ended.append([])
        self.at.append(0)

    def _issue(self, place: int, queue: int, waits: Iterable[int]) -> None:
        """Add an instruction to a queue, with the waits that its queue does not know to have ended."""
        befores, known = tuple(waits), self.known[queue]
        needed = [0] * len(befores)
        clocks = (self.queue, self.ended, self.at, range(place), self.latest)
        count = wait_for(known, befores, 0, len(befores), *clocks, needed, 0)
        known[queue] += 1
        self.queue.append(queue)
        self.before.append(tuple(needed[:count]))
        self.ended.append(known.copy())
        self.at.append(known[queue])
        self.last[queue] = place
