"""Stand-ins for CUDA's streams and events on the CPU, and a detector of missing waits.

Ops run at once, in launch order. Each stream has a vector clock: the ends that it knows of on every other stream.
`Races` checks each operator that torch runs against the storages that it reads and writes, and records those whose last
writer or readers may not have ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

Clock = dict[int, int]


class Event:
    """Clock of its stream when it was recorded."""

    def __init__(self, clock: Clock) -> None:
        self.clock = dict(clock)


@dataclass
class Stream:
    """A stream by its number."""

    number: int
    clock: Clock = field(default_factory=dict)

    def record_event(self) -> Event:
        return Event(self.clock)

    def wait_event(self, event: Event) -> None:
        for stream, count in event.clock.items():
            self.clock[stream] = max(count, self.clock.get(stream, 0))

    def tick(self) -> tuple[int, int]:
        """Count another op of this stream; returns its number and place."""
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return self.number, self.clock[self.number]

    def knows(self, op: tuple[int, int]) -> bool:
        return self.clock.get(op[0], 0) >= op[1]


class Streams:
    """All streams of a test, in place of torch's."""

    def __init__(self) -> None:
        self.all = [Stream(0)]
        self.current = self.all[0]

    def make(self) -> Stream:
        self.all.append(Stream(len(self.all)))
        return self.all[-1]

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @property
    def joined(self) -> bool:
        """Whether the first stream knows that all others have ended."""
        return all(self.all[0].knows((stream.number, stream.clock.get(stream.number, 0))) for stream in self.all)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Put the stand-ins in the place of `torch.cuda`'s."""
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "Stream", streams.make)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams.current)
    monkeypatch.setattr(torch.cuda, "stream", streams.use)
    return streams


class Races(TorchDispatchMode):
    """Recorder of operators that use a storage before the op that they must follow is known to have ended."""

    def __init__(self, streams: Streams, given: list[torch.Tensor]) -> None:
        super().__init__()
        self.streams = streams
        self.found: list[str] = []
        self._kept: list[Any] = []  # prevents reuse of addresses
        self._writer: dict[int, tuple[int, int]] = {}
        self._readers: dict[int, list[tuple[int, int]]] = {}
        first = streams.current.tick()
        for tensor in given:
            self._writer[self._key(tensor)] = first

    def _key(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        self._kept.append(storage)
        return storage.data_ptr() if storage.nbytes() else id(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.set_, torch.ops.aten.empty):  # memory, and no work on the GPU
            made = func(*args, **(kwargs or {}))
            self._key(made)
            return made
        given = [(argument, value) for argument, value in zip(func._schema.arguments, args, strict=False)]
        given += [(a, (kwargs or {})[a.name]) for a in func._schema.arguments if a.name in (kwargs or {})]
        reads, writes = set(), set()
        for argument, value in given:
            written = argument.alias_info is not None and argument.alias_info.is_write
            for part in value if isinstance(value, list | tuple) else [value]:
                if isinstance(part, torch.Tensor):
                    (writes if written else reads).add(self._key(part))
        result = func(*args, **(kwargs or {}))
        results = {self._key(part) for part in self._flat(result)}
        if results <= reads and not writes and results:  # a view does nothing on the GPU
            return result
        writes |= results - reads
        for key in reads | writes:
            self._check(func, key, self._writer.get(key))
        for key in writes:
            for reader in self._readers.get(key, ()):
                self._check(func, key, reader)
        op = self.streams.current.tick()
        for key in reads - writes:
            self._readers.setdefault(key, []).append(op)
        for key in writes:
            self._writer[key] = op
            self._readers[key] = []
        return result

    def _flat(self, value: Any) -> list[torch.Tensor]:
        parts = value if isinstance(value, list | tuple) else [value]
        return [part for part in parts if isinstance(part, torch.Tensor)]

    def _check(self, func: Any, key: int, before: tuple[int, int] | None) -> None:
        if before is not None and not self.streams.current.knows(before):
            self.found.append(f"{func} on stream {self.streams.current.number} does not wait for {before}")
