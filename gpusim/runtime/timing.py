"""Wall times of GPU work, measured fairly: warmed up, interleaved, as medians with intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

from gpusim.trace.schema import Timing
from gpusim.units import ms_to_ns

ROUNDS = 25
#: Graphs recorded of each contender. Two recordings of one schedule differ by up to 6 % on an H200 (each is steady to
#: 0.2 %), so a time is the median over several. With six, the range of their medians holds the true median in 97 % of
#: cases.
INSTANCES = 6
ROUNDS_PER_INSTANCE = 4
#: GPU time of one round of one contender, in ms: long against an event's resolution (about 1 us) and a launch.
ROUND_MS = 15.0
WARMUP_MS = 40.0


def median_interval(samples_ns: Sequence[int]) -> Timing:
    """Median with its 95 % interval by order statistics (binomial, normal approximation)."""
    ordered = sorted(samples_ns)
    n = len(ordered)
    half = 0.98 * math.sqrt(n)
    low = max(0, math.floor(n / 2 - half))
    high = min(n - 1, math.ceil(n / 2 + half))
    return Timing(median_ns=round(statistics.median(ordered)), lo_ns=ordered[low], hi_ns=ordered[high], rounds=n)


def time_interleaved(
    contenders: Mapping[str, Callable[[], object]], rounds: int = ROUNDS, round_ms: float = ROUND_MS
) -> dict[str, Timing]:
    """Time of one call of each contender, in rounds that take turns, so that drift of the clocks hits all alike.

    Each round times many calls between two CUDA events and takes their mean; the result is the median over rounds.
    """
    repeats = {name: _repeats(run, round_ms) for name, run in contenders.items()}
    samples: dict[str, list[int]] = {name: [] for name in contenders}
    for turn in range(rounds):
        names = list(contenders)
        for name in names if turn % 2 == 0 else names[::-1]:
            samples[name].append(_round(contenders[name], repeats[name]))
    return {name: median_interval(times) for name, times in samples.items()}


Recorder = Callable[[], Callable[[], object]]
"""Records one instance of a CUDA graph and returns its replay."""


def time_instances(
    recorders: Mapping[str, Recorder], instances: int = INSTANCES, rounds: int = ROUNDS_PER_INSTANCE
) -> dict[str, Timing]:
    """Time of each contender over several recordings: median of the instances' medians, and their range as interval.

    The contenders take turns, one recording alive at a time: graphs that share the GPU's memory with others run
    otherwise than alone.
    """
    samples: dict[str, list[int]] = {name: [] for name in recorders}
    for turn in range(instances):
        for name, make in list(recorders.items())[:: 1 if turn % 2 == 0 else -1]:
            samples[name].append(time_interleaved({name: make()}, rounds)[name].median_ns)
    return {
        name: Timing(
            median_ns=round(statistics.median(times)), lo_ns=min(times), hi_ns=max(times), rounds=instances * rounds
        )
        for name, times in samples.items()
    }


def _round(run: Callable[[], object], repeats: int) -> int:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return ms_to_ns(begin.elapsed_time(end) / repeats)


def _repeats(run: Callable[[], object], round_ms: float) -> int:
    """Warm up and find how many calls fill a round."""
    run()
    torch.cuda.synchronize()
    one_ms = max(_round(run, 3) / 1e6, 1e-3)
    for _ in range(max(1, round(WARMUP_MS / one_ms))):
        run()
    torch.cuda.synchronize()
    return max(3, round(round_ms / one_ms))
