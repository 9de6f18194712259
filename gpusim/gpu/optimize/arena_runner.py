"""Execution of a step in one arena: each storage has fixed bytes, shared as the schedule allows.

An ATen operator allocates its result itself, so a result is copied to its place. Where that costs time, it is only done
to check a schedule: with poison, bytes become NaN when they change hands, on the stream of their next user. A reader
without the necessary event then computes something else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from gpusim.formats.trace import Trace
from gpusim.gpu.replay.encode import DTYPES
from gpusim.gpu.replay.execute import Runner
from gpusim.plan.arena import Arena
from gpusim.plan.sync import works

#: Poison byte: NaN as floats of any width.
POISON = 0xFF
#: Poison byte of integers: they may be indices, and some operators read whatever an index points at.
NO_INDEX = 0


class ArenaRunner(Runner):
    """Runner of the user's own step with all results in one arena. `live` are the tensors from before the step."""

    def __init__(
        self,
        trace: Trace,
        device: torch.device,
        live: Mapping[int, torch.Tensor],
        arena: Arena,
        poison: bool = False,
        functions: list[Callable[..., Any]] | None = None,
    ) -> None:
        super().__init__(trace, device, own=True, functions=functions)
        self.arena, self.poison = arena, poison
        self.memory = torch.zeros(max(1, arena.bytes), dtype=torch.uint8, device=device)
        self.bind(dict(live))
        for index, tensor in enumerate(trace.tensors):
            if tensor.storage in arena.offsets and tensor.dtype in DTYPES:
                self.tensors[index] = self._view(index)
        self._integers = {
            t.storage for t in trace.tensors if t.dtype in DTYPES and not DTYPES[t.dtype].is_floating_point
        }
        firsts = Counter(storage for storages in arena.firsts.values() for storage in storages)
        self._in_parts = {storage for storage, users in firsts.items() if users > 1}
        """Storages that several ops begin to write, in any order: poison of one would hit what another wrote."""
        self._made = [self._is_made(op) for op in range(len(trace.ops))]

    def _view(self, index: int) -> torch.Tensor:
        tensor = self.trace.tensors[index]
        dtype = DTYPES[tensor.dtype]
        begin = self.arena.offsets[tensor.storage] // dtype.itemsize + tensor.offset
        memory = self.memory[: self.memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        return torch.empty(0, dtype=dtype, device=self.device).set_(
            memory.untyped_storage(), begin, tensor.shape, tensor.stride
        )

    def _is_made(self, op: int) -> bool:
        """Whether an op only views memory whose views exist from the start."""
        node = self.trace.ops[op]
        mine = [index for index in node.outputs if index is not None]
        return not works(node) and all(self.trace.tensors[index].storage in self.arena.offsets for index in mine)

    def run(self, op: int) -> None:
        """Run one op on the current stream; with poison, memory that it is the first to use is poisoned before."""
        if self._made[op]:
            return
        if self.poison:
            for storage in self.arena.firsts.get(op, ()):
                if storage not in self._in_parts:
                    self._spoil(storage)
        super().run(op)

    def spoil(self) -> None:
        """Poison all of the arena: nothing of an earlier run of the step is there for an op that runs too early."""
        self.memory.fill_(POISON)
        for storage in self._integers & self.arena.offsets.keys():
            self._spoil(storage)

    def _spoil(self, storage: int) -> None:
        begin = self.arena.offsets[storage]
        value = NO_INDEX if storage in self._integers else POISON
        self.memory[begin : begin + self.trace.storages[storage].bytes].fill_(value)

    def _keep(self, op: int, index: int, part: Any) -> None:
        memory = self.tensors[index]
        if self.trace.tensors[index].storage not in self.arena.offsets or memory is None:
            super()._keep(op, index, part)
        elif memory.shape != part.shape or memory.dtype != part.dtype:
            super()._keep(op, index, part)  # its size depends on the library: memory of its own
        elif part.numel() and part.untyped_storage().data_ptr() != self.memory.untyped_storage().data_ptr():
            memory.copy_(part)

    def _check_declared(self, op: int, index: int, part: torch.Tensor) -> None:
        """Do nothing: all results share memory here, and the step is the user's own."""

    def release(self, storages: Iterable[int]) -> None:
        """Do nothing: bytes are reused by their place."""

    def drop_temporaries(self) -> None:
        """Do nothing: the arena stays."""
