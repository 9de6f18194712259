"""A link's rates from measured copy times; the benchmarks themselves need a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from gpusim.formats.hardware import load_hardware
from gpusim.formats.trace import HostLink
from gpusim.gpu.calibrate import memsets
from gpusim.gpu.calibrate.copies import CopyBench, fastest_link, line, link_of, turn_costs_ns
from gpusim.gpu.calibrate.memsets import memset_ns, memset_waits_ns
from gpusim.rules.copies import MANY_PENDING
from gpusim.units import MIB


def test_rate_is_the_difference_of_two_sizes() -> None:
    """2 MiB more in 1,024 and 2,048 ns: the fixed cost of each copy cancels out."""
    costs_ns = {2 * MIB: {"d2h": 5_000.0, "h2d": 7_000.0}, 4 * MIB: {"d2h": 6_024.0, "h2d": 9_048.0}}
    assert link_of(costs_ns) == HostLink(d2h_bytes_per_ns=2048.0, h2d_bytes_per_ns=1024.0)


def test_times_that_say_nothing_give_no_link() -> None:
    assert link_of({1: {"d2h": 5.0, "h2d": 7.0}, 2: {"d2h": 5.0, "h2d": 8.0}}) is None


def test_line_takes_its_rate_from_the_largest_sizes() -> None:
    assert line({100: 60.0, 1000: 150.0, 2000: 250.0}) == (50.0, 10.0)


def test_cost_of_a_copy_leaves_its_kernel_out() -> None:
    """Kernels of 10, copies out of 100, copies back of 200, and 5 per turn: each copy costs its time and the 5."""

    class Made(CopyBench):
        def __init__(self) -> None:
            pass

        def pairs(self, size, count):  # type: ignore[no-untyped-def]
            return [(torch.zeros(1), torch.zeros(1))] * count

        def graph_ns(self, ops, lanes):  # type: ignore[no-untyped-def]
            return 10.0 * len(ops)

        def in_turns_ns(self, turns):  # type: ignore[no-untyped-def]
            copies_ns = {"d2h": 100.0, "h2d": 200.0}
            return sum(10.0 + 5.0 + copies_ns[direction] for _, direction, _ in turns)

    assert turn_costs_ns(Made(), 4) == {"d2h": 105.0, "h2d": 205.0}


def replayed(*pieces: tuple[str, float, float]) -> list[dict[str, Any]]:
    """Make profiler events, in us, from kinds, starts and durations."""
    return [{"cat": kind, "ts": start, "dur": dur} for kind, start, dur in pieces]


def test_memset_takes_the_time_between_its_kernels() -> None:
    alone = replayed(("kernel", 0, 5), ("gpu_memset", 6, 1), ("kernel", 9, 5), ("gpu_memset", 15, 1), ("kernel", 18, 5))
    assert memset_ns(alone) == 4_000
    assert memset_ns(replayed(("kernel", 0, 5), ("kernel", 5, 5), ("kernel", 10, 5))) is None


def test_only_memsets_beside_the_copies_count() -> None:
    """The first one, of 4 us, is before the copy, the last one after it; the second takes 9."""
    turns = replayed(("kernel", 0, 5), ("gpu_memset", 6, 1), ("kernel", 9, 5), ("gpu_memset", 17, 3), ("kernel", 23, 5))
    after = replayed(("gpu_memset", 29, 1), ("kernel", 32, 5))
    copy = replayed(("gpu_memcpy", 8, 20))
    assert memset_ns([*turns[:2], *copy, *turns[2:], *after]) == 9_000


def test_waits_of_memsets_are_what_they_take_longer_beside_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 us alone, 7 beside copies out, 13 beside copies back: 3 and 9 longer."""

    class Made(CopyBench):
        def __init__(self) -> None:
            pass

        def copies(self, size, count, direction):  # type: ignore[no-untyped-def]
            assert count >= 4 * MANY_PENDING  # most of the time as many have yet to start, as in a plan
            return [lambda: None] * count

        def forget(self) -> None:
            pass

        def profiled_events(self, ops, lanes):  # type: ignore[no-untyped-def]
            gap = {(): 4, ("d2h",): 7, ("h2d",): 13}[tuple(lanes)]
            turn = replayed(("kernel", 1, 5), ("gpu_memset", 7, 1), ("kernel", 6 + gap, 5))
            return [*replayed(*(("gpu_memcpy", 0, 99) for _ in lanes)), *turn]

    monkeypatch.setattr(memsets, "spin_cycles", lambda _: 1)
    monkeypatch.setattr(memsets.torch, "empty", lambda *_, **__: None)
    assert memset_waits_ns(Made()) == {"d2h": 3_000, "h2d": 9_000}


def reaching(rate: float) -> HostLink:
    return HostLink(h2d_bytes_per_ns=rate, d2h_bytes_per_ns=rate)


@pytest.mark.parametrize(
    ("first", "others", "kept", "asked"),
    [
        (54.0, (), 54.0, 0),  # usual: no other process is asked
        (20.8, (55.0,), 55.0, 1),
        (52.2, (55.0,), 55.0, 1),
        (20.8, (None, 55.0), 55.0, 2),  # another process without pinned memory
        (20.8, (19.0, 30.0), 30.0, 2),  # really slow here: three processes agree
        (20.8, (19.0, 18.0), 20.8, 2),
        (None, (), None, 0),  # no pinned memory at all
    ],
)
def test_a_slow_link_is_measured_in_other_processes(
    first: float | None, others: Sequence[float | None], kept: float | None, asked: int
) -> None:
    """One process in a few has a link far below the GPU's usual rates, which plans that copy would inherit."""
    links = [None if rate is None else reaching(rate) for rate in others]
    calls: list[None] = []

    def again() -> HostLink | None:
        calls.append(None)
        return links[len(calls) - 1]

    usual = load_hardware("h200").copies
    reached = fastest_link(None if first is None else reaching(first), usual, again)
    assert reached == (None if kept is None else reaching(kept))
    assert len(calls) == asked
