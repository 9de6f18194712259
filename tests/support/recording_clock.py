"""A stand-in for a GPU that records and replays CUDA graphs: a clock that each call moves on."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch


class Machine:
    """Records calls while a graph is captured, repeats them when it is replayed, and has a clock in ns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns, self.recorded, self.capturing = 0, [], False
        self.waits: list[tuple[int, int]] = []
        monkeypatch.setattr(torch.cuda, "_compile_kernel", lambda source, name: self.stamp, raising=False)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "stream", lambda lane: nullcontext())
        monkeypatch.setattr(torch.cuda, "graph", lambda graph, **_: self)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch.cuda, "Stream", self.lane)
        self.lanes: list[Any] = []

    def __enter__(self) -> None:
        self.capturing, self.recorded = True, []

    def __exit__(self, *_: object) -> None:
        self.capturing = False

    def lane(self) -> Any:
        machine, number = self, len(self.lanes)

        class Lane:
            def wait_stream(self, other: Any) -> None:
                machine.waits.append((number, machine.lanes.index(other)))

        self.lanes.append(Lane())
        return self.lanes[-1]

    def stamp(self, grid: object, block: object, args: list[Any]) -> None:
        self.do(lambda: args[0].__setitem__(args[1], self.now_ns))

    def work(self, dur_ns: int) -> None:
        self.do(lambda: setattr(self, "now_ns", self.now_ns + dur_ns))

    def do(self, call: Any) -> None:
        if self.capturing:
            self.recorded.append(call)
        else:
            call()

    def replay(self) -> None:
        for call in self.recorded:
            call()
