"""Times of the optimized step and its baselines, in turns: whose they are, in which state of launches, of how long."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from gpusim.gpu.optimize import measure as measuring
from gpusim.gpu.optimize.measure import times_in_turns


def test_contenders_take_turns_and_times_are_of_one_call() -> None:
    """A clock that each call advances by its own time: 2 ms and 5 ms."""
    now, log = [0], []

    def taking(name: str, ns: int) -> Any:
        def call(x: int) -> None:
            now[0] += ns
            log.append((name, x))

        return call

    calls = {"short": taking("short", 2_000_000), "long": taking("long", 5_000_000)}
    found = times_in_turns(calls, [(1,), (2,)], rounds=4, clock=lambda: now[0])
    assert {name: timing.median_ns for name, timing in found.items()} == {"short": 2_000_000, "long": 5_000_000}
    names = [name for name, _ in log]
    assert sum(a != b for a, b in pairwise(names)) >= 4
    assert {x for _, x in log} == {1, 2}


def test_launches_are_slow_in_each_part_of_a_round_and_fast_times_leave_them_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    now = [0]

    def call(_: int) -> None:
        now[0] += 1_000_000
        log.append("call")

    monkeypatch.setattr(measuring, "make_launches_slow", lambda: log.append("slow"))
    times_in_turns({"": call, "other": call}, [(1,)], 2, lambda: now[0], 1.0)
    assert log.count("slow") == 4
    assert log[-8:] == ["slow", *["call"] * 3] * 2
    log.clear()

    def make_fast() -> bool:
        log.append("fast")
        return True

    monkeypatch.setattr(measuring, "make_launches_fast", make_fast)
    assert measuring.fast_times({"": call}, [(1,)])[""] > 0
    assert log[0] == "fast"
    assert set(log) == {"fast", "call"}
    monkeypatch.setattr(measuring, "make_launches_fast", lambda: False)
    assert measuring.fast_times({"": call}, [(1,)]) == {}


def test_what_a_round_takes_besides_its_calls_hardly_counts_in_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]

    def wait() -> None:
        now[0] += 1_500_000

    def call(_: int) -> None:
        now[0] += 1_000_000

    monkeypatch.setattr(measuring, "_wait", wait)
    times = {ms: times_in_turns({"": call}, [(1,)], 3, lambda: now[0], ms)[""].median_ns for ms in (30.0, 300.0)}
    assert times[30.0] > 1_070_000
    assert times[300.0] < 1_010_000
