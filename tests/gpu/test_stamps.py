"""Times of pieces of work in one graph, with a stand-in for the GPU: a clock that each call moves on."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from gpusim.gpu.calibrate.stamps import REPLAYS, fork_and_join, measured_ns


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
        self.capturing = True

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


class Runner:
    def __init__(self) -> None:
        self.tensors: list[object] = ["first"]
        self.device = torch.device("cpu")


def test_each_replay_has_the_time_of_each_piece_without_its_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    pieces = [[partial(machine.work, 30), partial(machine.work, 4)], [], [partial(machine.work, 500)]]
    samples = measured_ns(Runner(), pieces, lambda number: machine.work(10_000 + number))  # type: ignore[arg-type]
    assert samples.tolist() == [[34, 0, 500]] * (REPLAYS - REPLAYS // 8)


def test_each_piece_starts_from_the_tensors_before_all(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, runner = Machine(monkeypatch), Runner()
    seen: list[object] = []

    def change() -> None:
        seen.append(runner.tensors[0])
        runner.tensors[0] = "changed"

    measured_ns(runner, [[change], [change]], lambda number: None)  # type: ignore[arg-type]
    assert seen == ["first", "changed", "first", "first"]  # once to warm up, once into the graph
    assert runner.tensors == ["first"]
    assert not machine.capturing


def test_calls_of_a_piece_fork_from_the_first_stream_and_join_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    lanes = [machine.lane() for _ in range(4)]
    fork_and_join(lanes, [lambda: None] * 3)
    assert machine.waits == [(1, 0), (2, 0), (0, 1), (0, 2)]


def test_one_stream_is_enough_for_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    samples = measured_ns(Runner(), [[]], lambda number: None)  # type: ignore[arg-type]
    assert samples.max() == 0
    assert len(machine.lanes) == 1
