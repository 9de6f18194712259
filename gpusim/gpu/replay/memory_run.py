"""Execution of a memory plan's instructions on tensors: freeing, copies out and back, and recomputation.

The same code runs on a GPU, with streams and events, and on the CPU, where `Inline` has neither, so that results can be
compared without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from gpusim.formats.trace import Trace
from gpusim.gpu.replay.execute import Runner
from gpusim.gpu.replay.fusion import Call
from gpusim.gpu.replay.tensors import placed_results
from gpusim.memplan.again import STATE_ARGUMENTS
from gpusim.memplan.program import Program
from gpusim.memplan.storages import size_only


class Lanes(Protocol):
    """Execution of ops and copies, and their mutual waits."""

    def out(self, host: torch.Tensor, memory: torch.Tensor) -> Any:
        """Copy to the host after all ops so far; returns a token of the copy's end."""

    def back(self, memory: torch.Tensor, host: torch.Tensor, after: Any | None) -> Any:
        """Copy from the host after all ops so far and the copy `after`; returns a token of the copy's end."""

    def wait(self, token: Any) -> None:
        """Let the following ops wait for a copy."""

    def finish(self) -> None:
        """Let later work on the ops' stream wait for all copies."""


class Inline:
    """Sequential execution on the CPU."""

    def out(self, host: torch.Tensor, memory: torch.Tensor) -> None:
        host.copy_(memory)

    def back(self, memory: torch.Tensor, host: torch.Tensor, after: None) -> None:
        memory.copy_(host)

    def wait(self, token: None) -> None:
        pass

    def finish(self) -> None:
        pass


class CudaLanes:
    """A stream for ops, one for copies out, one for copies back."""

    def __init__(self) -> None:
        self.ops, self.outs, self.backs = (torch.cuda.Stream() for _ in range(3))
        self.events = 0
        self._last: dict[int, torch.cuda.Event] = {}

    def out(self, host: torch.Tensor, memory: torch.Tensor) -> torch.cuda.Event:
        return self._copy(self.outs, host, memory, None)

    def back(self, memory: torch.Tensor, host: torch.Tensor, after: torch.cuda.Event | None) -> torch.cuda.Event:
        return self._copy(self.backs, memory, host, after)

    def wait(self, token: torch.cuda.Event) -> None:
        self.ops.wait_event(token)

    def finish(self) -> None:
        for event in self._last.values():
            self.ops.wait_event(event)
        self._last.clear()

    def _copy(
        self, stream: torch.cuda.Stream, to: torch.Tensor, source: torch.Tensor, after: torch.cuda.Event | None
    ) -> torch.cuda.Event:
        begin, end = torch.cuda.Event(), torch.cuda.Event()
        begin.record(self.ops)
        stream.wait_event(begin)
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
        end.record(stream)
        self.events += 2
        self._last[stream.stream_id] = end
        return end


class HostBuffers:
    """Host memory for the storages that move out, pinned where there is a GPU; kept for all runs of a step."""

    def __init__(self, pinned: bool, limit_bytes: int | None = None) -> None:
        self.pinned = pinned
        self.limit_bytes = limit_bytes
        self._of: dict[int, torch.Tensor] = {}

    @property
    def total_bytes(self) -> int:
        """Size of all buffers, in bytes."""
        return sum(buffer.numel() for buffer in self._of.values())

    def prepare(self, sizes: dict[int, int]) -> int | None:
        """Allocate missing buffers; where the host has too little memory, returns the bytes that these storages then
        have.
        """
        for storage, size in sizes.items():
            if storage in self._of and self._of[storage].numel() >= size:
                continue
            over = self.limit_bytes is not None and self.total_bytes + size > self.limit_bytes
            buffer = None if over else self._buffer(size)
            if buffer is None:
                return sum(sizes[s] for s in sizes if s in self._of)
            self._of[storage] = buffer
        return None

    def _buffer(self, size: int) -> torch.Tensor | None:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned)
        except RuntimeError:  # torch has no error class for unavailable pinned memory
            return None

    def of(self, storage: int, size: int) -> torch.Tensor:
        """Return the buffer of a storage."""
        return self._of[storage][:size]


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor over a storage, for recreation over other memory."""

    index: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def over(self, storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
        return torch.empty(0, dtype=self.dtype, device=device).set_(storage, self.offset, self.shape, self.stride)


class MemoryRunner(Runner):
    """Runner that can free storages and bring them back."""

    def __init__(
        self,
        trace: Trace,
        device: torch.device,
        own: bool = False,
        functions: list[Callable[..., Any]] | None = None,
    ) -> None:
        super().__init__(trace, device, own=own, functions=functions)
        self._gone: dict[int, tuple[int, list[_View]]] = {}
        """Bytes and tensors of each freed storage."""

    def views(self, storage: int) -> list[_View]:
        """Return the existing tensors of a storage."""
        return [
            _View(index, t.dtype, t.storage_offset(), tuple(t.shape), tuple(t.stride()))
            for index in self._of_storage[storage]
            if (t := self.tensors[index]) is not None
        ]

    def memory(self, storage: int) -> torch.Tensor:
        """Return all bytes of a live storage."""
        tensor = next(t for i in self._of_storage[storage] if (t := self.tensors[i]) is not None)
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())

    def let_go(self, storage: int) -> None:
        """Drop every tensor of a storage; its tensors come back with `allocate` or `run_again`."""
        self._gone[storage] = (self.memory(storage).numel(), self.views(storage))
        self.release((storage,))

    def allocate(self, storage: int) -> torch.Tensor:
        """Allocate new memory for a freed storage, with its tensors over it; returns its bytes."""
        memory = torch.empty(self._gone[storage][0], dtype=torch.uint8, device=self.device)
        self._restore(storage, memory.untyped_storage())
        return memory

    def _restore(self, storage: int, memory: torch.UntypedStorage) -> None:
        for view in self._gone.pop(storage, (0, []))[1]:
            self.tensors[view.index] = view.over(memory, self.device)

    def arguments(self, op: int, without: Container[int] = ()) -> Call:
        """Return `Runner.arguments`, with a placeholder for a freed tensor of which only the size matters."""
        index = size_only(self.trace.ops[op])
        if index is None or self.tensors[index] is not None:
            return super().arguments(op, without)
        gradient = self.tensors[self.trace.ops[op].args[0]["tensor"]]
        assert gradient is not None
        self.tensors[index] = gradient.new_empty(1).expand(self.trace.tensors[index].shape)
        try:
            return super().arguments(op, without)
        finally:
            self.tensors[index] = None

    def run_again(self, op: int, bring: frozenset[int]) -> None:
        """Run an op again without its states, and keep only results in the storages `bring`."""
        node = self.trace.ops[op]
        args, kwargs = self.arguments(op)
        for position in STATE_ARGUMENTS.get(node.target, ()):
            args[position] = None
        results = placed_results(node.target, self.call(op, args, kwargs), len(node.outputs))
        for index, part in zip(node.outputs, results or (), strict=True):
            if index is None or self.trace.tensors[index].storage not in bring:
                continue
            storage = self.trace.tensors[index].storage
            self._keep(op, index, part)
            self._restore(storage, part.untyped_storage())

    def drop_temporaries(self) -> None:
        """Drop temporaries as `Runner` does; nothing is to come back."""
        super().drop_temporaries()
        self._gone.clear()


@dataclass
class ProgramRunner:
    """Executor of a program's instructions."""

    runner: MemoryRunner
    buffers: HostBuffers
    lanes: Lanes
    _out: dict[int, Any] = field(default_factory=dict)
    _back: dict[int, Any] = field(default_factory=dict)

    def prepare(self, program: Program) -> int | None:
        """Allocate the host buffers of a program, as `HostBuffers.prepare`."""
        storages = self.runner.trace.storages
        return self.buffers.prepare({i.storage: storages[i.storage].bytes for i in program if i.kind == "out"})

    def run(self, program: Program, needs: Iterable[frozenset[int]]) -> None:
        """Run the program once; `needs` are the storages that each instruction needs
        (`gpusim.memplan.program.needed`).
        """
        runner, lanes = self.runner, self.lanes
        self._out.clear()
        self._back.clear()
        for instruction, wanted in zip(program, needs, strict=True):
            storage = instruction.storage
            if instruction.kind in ("run", "again"):
                for each in wanted & self._back.keys():
                    lanes.wait(self._back.pop(each))
                if instruction.kind == "run":
                    runner.run(instruction.op)
                else:
                    runner.run_again(instruction.op, instruction.bring)
            elif instruction.kind == "out":
                self._copy_out(storage)
            elif instruction.kind == "free":
                if storage in self._out:
                    lanes.wait(self._out.pop(storage))
                runner.let_go(storage)
            elif instruction.kind == "back":
                self._copy_back(storage)
            else:
                lanes.finish()
        lanes.finish()

    # A copy has a function of its own: a local variable of `run` would keep the memory beyond its `free`.

    def _copy_out(self, storage: int) -> None:
        memory = self.runner.memory(storage)
        self._out[storage] = self.lanes.out(self.buffers.of(storage, memory.numel()), memory)

    def _copy_back(self, storage: int) -> None:
        memory = self.runner.allocate(storage)
        after = self._out.pop(storage, None)
        self._back[storage] = self.lanes.back(memory, self.buffers.of(storage, memory.numel()), after)
