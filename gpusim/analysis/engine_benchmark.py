"""Benchmark of the engines in schedules per second, measured in turns within one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from gpusim.engine.batch import BatchEngine
from gpusim.engine.fast import FastEngine
from gpusim.engine.reference import ReferenceEngine
from gpusim.engine.threads import cores
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.trace import Trace
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.policies.shared.list_scheduling import MIN_SHARE, FastLists
from gpusim.search.priorities import SHARES

SCHEDULES = 16
"""Number of distinct schedules that every engine simulates."""
MOST_STREAMS = 8
ROUNDS = 5
"""Number of rounds in which all measurements take turns. Batch measurements are repeated and the median counts. Single
simulations are divided over the rounds, each schedule once, because times of schedules differ by several times and all
must have equal weight."""


@dataclass(frozen=True)
class Rate:
    """Schedules and kernels simulated per second."""

    schedules_per_s: float
    kernels_per_s: float


@dataclass(frozen=True)
class Bench:
    """Rates of the engines per second of CPU time on one core, or of wall time on all cores."""

    trace: str
    kernels: int
    cores: int
    reference: Rate
    """Reference engine, `run` on existing plans."""
    fast: Rate
    """Fast engine on encoded plans."""
    fast_run: Rate
    """Fast engine, `run` on existing plans; most of the time encodes them."""
    fast_with_lowering: Rate
    """Fast engine in batches, from launch orders and streams to makespans."""
    fast_all_cores: Rate
    """Fast engine in batches, on all cores."""
    list_fast: Rate
    """List scheduler, from priorities to makespans."""
    ready_s: float
    """Time to compile the engine or, usually, to load it from the cache, in s."""
    makespans_equal: bool
    """True if the engines agree on every makespan."""

    @property
    def ratio(self) -> float:
        """Rate of the fast engine over the reference engine, without encoding."""
        return self.fast.schedules_per_s / self.reference.schedules_per_s


def bench(
    trace: Trace, hardware: HardwareModel, *, round_s: float = 0.2, report: Callable[[str], None] = lambda stage: None
) -> Bench:
    """Measure each engine for `round_s` seconds in each of `ROUNDS` rounds and return the rates."""
    graph = OpGraph.build(trace, hardware)
    begin = time.perf_counter()
    report("compile")
    lists, engine = FastLists(graph), BatchEngine(graph)
    made = [
        lists.schedule(_streams(number), graph.bottom_ns, SHARES[number // MOST_STREAMS % len(SHARES)]).schedule
        for number in range(SCHEDULES)
    ]
    orders = np.array([schedule.order for schedule in made], np.int32)
    streams = np.array([schedule.streams for schedule in made], np.int32)
    makespans = engine.evaluate(orders, streams, threads=1).makespan_ns
    ready = engine.encode(orders, streams)
    ready_s = time.perf_counter() - begin
    plans = [lower(graph, schedule) for schedule in made]
    reference, fast = ReferenceEngine(), FastEngine()
    expected = [0] * SCHEDULES
    priorities = np.tile(np.array(graph.bottom_ns), (SCHEDULES, 1))
    counts = [_streams(number) for number in range(SCHEDULES)]
    copies = 4 * cores()
    many_orders, many_streams = np.tile(orders, (copies, 1)), np.tile(streams, (copies, 1))

    def run_reference(number: int) -> None:
        expected[number] = reference.run(plans[number], graph.hardware, record=False).makespan_ns

    one_at_a_time: dict[str, Callable[[int], object]] = {
        "reference": run_reference,
        "fast_run": lambda number: fast.run(plans[number], graph.hardware),
    }
    all_at_once: dict[str, Callable[[], object]] = {
        "fast": ready.simulate,
        "fast_with_lowering": lambda: engine.evaluate(orders, streams, threads=1),
        "fast_all_cores": lambda: engine.evaluate(many_orders, many_streams),
        "list_fast": lambda: lists.makespans(priorities, counts, MIN_SHARE, threads=1),
    }
    seconds = dict.fromkeys(one_at_a_time, 0.0)
    rates: dict[str, list[float]] = {name: [] for name in all_at_once}
    for turn in range(ROUNDS):
        report(f"round {turn + 1} of {ROUNDS}")
        for name, run in one_at_a_time.items():
            numbers = range(turn, SCHEDULES, ROUNDS)
            for number in numbers:
                seconds[name] += _seconds_a_call(partial(run, number), round_s / len(numbers), time.thread_time)
        for name, work in all_at_once.items():
            schedules, clock = SCHEDULES, time.thread_time
            if name == "fast_all_cores":
                schedules, clock = copies * SCHEDULES, time.perf_counter
            rates[name].append(schedules / _seconds_a_call(work, round_s, clock))
    kernels = len(plans[0])
    medians = {name: statistics.median(samples) for name, samples in rates.items()}
    medians |= {name: SCHEDULES / spent for name, spent in seconds.items()}
    return Bench(
        trace=trace.name,
        kernels=kernels,
        cores=cores(),
        ready_s=ready_s,
        makespans_equal=expected == makespans.tolist() == ready.simulate().tolist(),
        **{name: Rate(rate, rate * kernels) for name, rate in medians.items()},
    )


def _streams(number: int) -> int:
    """Return the number of streams of schedule `number`, cycling from 1 to `MOST_STREAMS`."""
    return 1 + number % MOST_STREAMS


def _seconds_a_call(work: Callable[[], object], seconds: float, clock: Callable[[], float]) -> float:
    """Call `work` for about `seconds` and return the mean seconds per call on `clock`."""
    calls, begin = 0, clock()
    while True:
        work()
        calls += 1
        spent = clock() - begin
        if spent >= seconds:
            return spent / calls
