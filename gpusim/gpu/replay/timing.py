"""Wall times of GPU work: warmed up, interleaved, as medians with intervals."""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns
from typing import Protocol

import msgspec
import torch

from gpusim.formats.trace import Timing
from gpusim.gpu.launch_state import make_launches_slow
from gpusim.units import ms_to_ns

ROUNDS = 25
#: Recordings per contender: addresses of tensors change the time of one whose tensors nearly fill the L2 cache
#: (research/2026-11-23-capture-and-replay.md). An odd number: one is in the middle.
RECORDINGS = 7
#: Rounds, and their length in ms, for comparing recordings.
TRIAL_ROUNDS, TRIAL_MS = 3, 6.0
#: Least free memory for one more recording, in multiples of a recording's size.
MEMORY_RESERVE = 2.0
#: GPU time of one round of one contender, in ms: long against an event's resolution (about 1 us) and a launch.
ROUND_MS = 10.0
WARMUP_MS = 25.0
#: Calls whose time says how many fill a round.
FIRST_CALLS = 3
#: Calls in a row, and rounds of them, where many different calls are compared.
BRIEF_CALLS, BRIEF_ROUNDS = 5, 3
#: For how much longer than the host takes the GPU is held back, and clock cycles of a spin for 1 ns.
HEAD_START, SPIN_CYCLES_PER_NS = 2.0, 2.0


def median_interval(samples_ns: Sequence[int]) -> Timing:
    """Return the median with its 95 % interval by order statistics (binomial, normal approximation)."""
    ordered = sorted(samples_ns)
    n = len(ordered)
    half = 0.98 * math.sqrt(n)
    low = max(0, math.floor(n / 2 - half))
    high = min(n - 1, math.ceil(n / 2 + half))
    return Timing(median_ns=round(statistics.median(ordered)), lo_ns=ordered[low], hi_ns=ordered[high], rounds=n)


def time_interleaved(
    contenders: Mapping[str, Callable[[], object]],
    rounds: int = ROUNDS,
    round_ms: float = ROUND_MS,
    launches: Callable[[], object] | None = None,
) -> dict[str, Timing]:
    """Return the time of one call of each contender, in rounds that take turns, so that clock drift affects all alike.

    Each round times many calls between two CUDA events and takes their mean; the result is the median over rounds.
    Launches are made slow before each contender's part of a round, as another process may make them fast at any time;
    `launches` is called instead, if given.
    """
    launches = launches or make_launches_slow
    launches()
    repeats = {name: _repeats(run, round_ms) for name, run in contenders.items()}
    samples: dict[str, list[int]] = {name: [] for name in contenders}
    for turn in range(rounds):
        names = list(contenders)
        for name in names if turn % 2 == 0 else names[::-1]:
            launches()
            samples[name].append(_round(contenders[name], repeats[name]))
    return {name: median_interval(times) for name, times in samples.items()}


def interleaved_ns(one_ns: int, rounds: int = ROUNDS, round_ms: float = ROUND_MS) -> int:
    """Return how long `time_interleaved` times a contender that takes `one_ns` a call, in ns."""
    return one_ns * (1 + FIRST_CALLS + _warm_calls(one_ns) + rounds * _calls(one_ns, round_ms))


def queued_ns(work: Callable[[], object], calls: int = 20) -> float:
    """GPU time of one call in ns, where the host is slower: it queues all calls while the GPU is held back.

    Launches are in their slow state.
    """
    make_launches_slow()
    begin_ns = perf_counter_ns()
    for _ in range(calls):
        work()
    host_ns = perf_counter_ns() - begin_ns
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(round(HEAD_START * SPIN_CYCLES_PER_NS * host_ns))
    begin.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e6 / calls


def brief_ns(work: Callable[[], object]) -> float:
    """GPU time of one call in ns, after one that loads its kernels: for a comparison of many different calls.

    It is the median of a few rounds of few calls in a row. A call as long as `ROUND_MS` is timed alone, so that it
    costs no more than three times its length; of two such times the shorter counts, as the host may have paused.
    """
    work()
    alone_ns = _round(work, 1)
    if alone_ns >= ms_to_ns(ROUND_MS):
        alone_ns = min(alone_ns, _round(work, 1))
    if alone_ns >= ms_to_ns(ROUND_MS):
        return alone_ns
    return statistics.median(queued_ns(work, BRIEF_CALLS) for _ in range(BRIEF_ROUNDS))


def host_ns_behind(work: Callable[[], object], calls: int = 10) -> float:
    """Return the median host time of one call in ns, of `calls` in a row, queued behind a kernel that outlasts them.

    The pace of calls in a row differs from the time of one call into an empty queue, by a factor of 2 for graphs of
    some hundred kernels on an H200. The median leaves out calls that wait for room in the queue.
    """
    torch.cuda.synchronize()
    begin_ns = perf_counter_ns()
    work()
    once_ns = perf_counter_ns() - begin_ns
    torch.cuda._sleep(round(HEAD_START * SPIN_CYCLES_PER_NS * once_ns * calls))
    times_ns: list[int] = []
    for _ in range(calls):
        begin_ns = perf_counter_ns()
        work()
        times_ns.append(perf_counter_ns() - begin_ns)
    torch.cuda.synchronize()
    return statistics.median(times_ns)


class Recording(Protocol):
    """A recorded graph that can be replayed, with its memory size."""

    peak_bytes: int

    def replay(self) -> None:
        """Replay the graph once."""


Recorder = Callable[[], Recording]
"""Maker of one more recording of a contender."""


def time_typical(
    recorders: Mapping[str, Recorder], recordings: int = RECORDINGS, rounds: int = ROUNDS
) -> dict[str, Timing]:
    """Return the time of each contender's recording of median time, all timed in turns.

    Where memory does not hold all of them they are timed in groups, each in turns with the first contender. A
    prediction does not know state and addresses, so it is compared with the middle recording, for the sequential
    graph as for the others. `fastest_ns` and `slowest_ns` of the result give the spread.
    """
    kept: dict[str, Recording] = {}
    spread: dict[str, list[int]] = {}
    timings: dict[str, Timing] = {}
    for name, make in recorders.items():
        first = next(iter(kept), name)
        gc.collect()
        torch.cuda.empty_cache()  # of dropped recordings
        if len(kept) > 1 and free_bytes() <= (recordings + 1) * kept[first].peak_bytes:
            timings = _time_in_turns(kept, rounds) | timings
            kept = {first: kept[first]}
        kept[name], spread[name] = pick_typical(make, recordings)
    timings = _time_in_turns(kept, rounds) | timings
    return {
        name: msgspec.structs.replace(
            timing,
            fastest_ns=min(*spread[name], timing.median_ns),
            slowest_ns=max(*spread[name], timing.median_ns),
        )
        for name, timing in timings.items()
    }


def _time_in_turns(recordings: Mapping[str, Recording], rounds: int) -> dict[str, Timing]:
    return time_interleaved({name: recording.replay for name, recording in recordings.items()}, rounds)


def pick_typical(make: Recorder, recordings: int) -> tuple[Recording, list[int]]:
    """Return the recording of median time out of several, and the times of all in ns.

    They are alive together, so that each gets other addresses; with little memory there are fewer.
    """
    alive: list[Recording] = []
    times: list[int] = []
    while not alive or (len(alive) < recordings and free_bytes() > MEMORY_RESERVE * alive[0].peak_bytes):
        alive.append(make())
        times.append(time_interleaved({"": alive[-1].replay}, TRIAL_ROUNDS, TRIAL_MS)[""].median_ns)
    middle = sorted(times)[(len(times) - 1) // 2]
    return alive[times.index(middle)], times


def free_bytes() -> int:
    """Return the free memory of the GPU, in bytes."""
    return torch.cuda.mem_get_info()[0]


def _round(run: Callable[[], object], repeats: int) -> int:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return ms_to_ns(begin.elapsed_time(end) / repeats)


def _repeats(run: Callable[[], object], round_ms: float) -> int:
    """Warm up, and return the number of calls that fill a round."""
    run()
    torch.cuda.synchronize()
    one_ns = _round(run, FIRST_CALLS)
    for _ in range(_warm_calls(one_ns)):
        run()
    torch.cuda.synchronize()
    return _calls(one_ns, round_ms)


def _warm_calls(one_ns: int) -> int:
    return max(1, round(WARMUP_MS * 1e6 / max(one_ns, 1000)))


def _calls(one_ns: int, round_ms: float) -> int:
    return max(3, round(round_ms * 1e6 / max(one_ns, 1000)))
