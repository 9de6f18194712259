"""Running a memory plan's instructions on tensors: what is let go, copied out and back, and computed again.

The same code runs on a GPU, with streams and events, and on the CPU, where `Inline` has neither: so results can be
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
from gpusim.gpu.replay.tensors import flat_results
from gpusim.memplan.again import STATE_ARGUMENTS
from gpusim.memplan.program import Program
from gpusim.memplan.storages import size_only


class Lanes(Protocol):
    """Where ops and copies run, and how they wait for each other."""

    def out(self, host: torch.Tensor, memory: torch.Tensor) -> Any:
        """Copy to the host behind all ops so far; a token of its end."""

    def back(self, memory: torch.Tensor, host: torch.Tensor, after: Any | None) -> Any:
        """Copy from the host behind all ops so far and the copy `after`; a token of its end."""

    def wait(self, token: Any) -> None:
        """The ops that follow wait for a copy."""

    def finish(self) -> None:
        """All copies have ended before what follows on the ops' stream."""


class Inline:
    """One after the other, on the CPU."""

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
        """Of all buffers."""
        return sum(buffer.numel() for buffer in self._of.values())

    def prepare(self, sizes: dict[int, int]) -> int | None:
        """Allocate what is missing; where the host gives no more, the bytes that these storages have by then."""
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
        except RuntimeError:  # torch has no error of its own for pinned memory that cannot be had
            return None

    def of(self, storage: int, size: int) -> torch.Tensor:
        """The buffer of a storage."""
        return self._of[storage][:size]


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor over a storage, to be made again over other memory."""

    index: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def over(self, storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
        return torch.empty(0, dtype=self.dtype, device=device).set_(storage, self.offset, self.shape, self.stride)


class MemoryRunner(Runner):
    """A runner that can let go of storages and bring them back."""

    def __init__(
        self,
        trace: Trace,
        device: torch.device,
        own: bool = False,
        functions: list[Callable[..., Any]] | None = None,
    ) -> None:
        super().__init__(trace, device, own=own, functions=functions)
        self._gone: dict[int, tuple[int, list[_View]]] = {}
        """Storage -> its bytes and its tensors, where it was let go."""

    def views(self, storage: int) -> list[_View]:
        """The tensors that there are of a storage."""
        return [
            _View(index, t.dtype, t.storage_offset(), tuple(t.shape), tuple(t.stride()))
            for index in self._of_storage[storage]
            if (t := self.tensors[index]) is not None
        ]

    def memory(self, storage: int) -> torch.Tensor:
        """All bytes of a storage that is there."""
        tensor = next(t for i in self._of_storage[storage] if (t := self.tensors[i]) is not None)
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())

    def let_go(self, storage: int) -> None:
        """Drop every tensor of a storage; what it had comes back with `restore` or `run_again`."""
        self._gone[storage] = (self.memory(storage).numel(), self.views(storage))
        self.release((storage,))

    def allocate(self, storage: int) -> torch.Tensor:
        """New memory for a storage that was let go, and its tensors over it; its bytes."""
        memory = torch.empty(self._gone[storage][0], dtype=torch.uint8, device=self.device)
        self._restore(storage, memory.untyped_storage())
        return memory

    def _restore(self, storage: int, memory: torch.UntypedStorage) -> None:
        for view in self._gone.pop(storage, (0, []))[1]:
            self.tensors[view.index] = view.over(memory, self.device)

    def arguments(self, op: int, without: Container[int] = ()) -> Call:
        """As `Runner.arguments`; in place of a tensor that is gone and whose size alone matters, one of that size."""
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
        """Run an op once more without its states, and keep of its results what is of the storages `bring`."""
        node = self.trace.ops[op]
        args, kwargs = self.arguments(op)
        for position in STATE_ARGUMENTS.get(node.target, ()):
            args[position] = None
        results = flat_results(self.call(op, args, kwargs))
        for index, part in zip(node.outputs, results, strict=True):
            if index is None or self.trace.tensors[index].storage not in bring:
                continue
            storage = self.trace.tensors[index].storage
            self._keep(op, index, part)
            self._restore(storage, part.untyped_storage())

    def drop_temporaries(self) -> None:
        """As `Runner.drop_temporaries`; nothing is to come back."""
        super().drop_temporaries()
        self._gone.clear()


@dataclass
class ProgramRunner:
    """Issues the instructions of a program."""

    runner: MemoryRunner
    buffers: HostBuffers
    lanes: Lanes
    _out: dict[int, Any] = field(default_factory=dict)
    _back: dict[int, Any] = field(default_factory=dict)

    def prepare(self, program: Program) -> int | None:
        """Have the host buffers of a program; as `HostBuffers.prepare`."""
        storages = self.runner.trace.storages
        return self.buffers.prepare({i.storage: storages[i.storage].bytes for i in program if i.kind == "out"})

    def run(self, program: Program, needs: Iterable[frozenset[int]]) -> None:
        """Run it once; `needs` are the storages that each instruction needs (`gpusim.memplan.program.needed`)."""
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
                memory = runner.memory(storage)
                self._out[storage] = lanes.out(self.buffers.of(storage, memory.numel()), memory)
            elif instruction.kind == "free":
                if storage in self._out:
                    lanes.wait(self._out.pop(storage))
                runner.let_go(storage)
            elif instruction.kind == "back":
                memory = runner.allocate(storage)
                after = self._out.pop(storage, None)
                self._back[storage] = lanes.back(memory, self.buffers.of(storage, memory.numel()), after)
            else:
                lanes.finish()
        lanes.finish()
