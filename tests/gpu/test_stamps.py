"""Times of pieces of work in one graph, with a stand-in for the GPU: a clock that each call moves on."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from gpusim.gpu.calibrate.stamps import REPLAYS, fork_and_join, measured_ns
from tests.support.recording_clock import Machine


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
