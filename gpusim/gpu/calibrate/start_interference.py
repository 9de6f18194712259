"""Start interference: the time a kernel loses to others that start while it runs (`graph.busy_ns`,
`graph.busy_starts`).

One op's calls, or the calibration network's, run between two stamps next to chains of one-thread kernels that only
count cycles. Those take no room and no bandwidth, so any loss comes from their starts and ends. A single end, or an end
and a start, next to a call shows that it is the starts.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from gpusim.defaults import DEFAULT_SEED
from gpusim.formats.rules import Rule
from gpusim.gpu.calibrate.microbench import event_ns, graph_ns, graph_of, profiled_names, spin_cycles
from gpusim.gpu.calibrate.network import branching
from gpusim.gpu.calibrate.stamps import Stamps
from gpusim.units import NS_PER_US

#: Calls of one op in a row, repetitions of each case in a graph, and replays of a graph.
CALLS, DRAWS, REPLAYS = 12, 4, 12
#: Concurrent chains: their number, and the duration of each of their kernels in us.
CONCURRENT_CHAINS: Final = ((1, 20.0), (1, 5.0), (1, 2.0), (1, 0.5), (2, 2.0), (2, 0.5), (4, 20.0), (4, 5.0), (4, 2.0))
#: Name of the case with one concurrent kernel that only runs.
RUNS: Final = "a kernel that only runs"
#: Network whose kernels give the loss by number of starts, and its inference batch.
NETWORK, NETWORK_BATCH = "calibration network", 1
#: Candidates for the half point, in starts.
HALVES = tuple(number / 10 for number in range(1, 200))
#: Approximate gap between kernels, and duration of a spin before a single event, in us.
GAP_US, LEAD_US = 0.9, 8.0
#: Largest loss to a concurrent kernel that only runs, as a fraction of the loss to many starts.
RUNS_FRAC = 0.25

Call = Callable[[], object]


@dataclass(frozen=True)
class Subject:
    """A measured subject: its call, the calls in a row, and the kernels per call."""

    call: Call
    calls: int = CALLS
    kernels: int = 1


@dataclass(frozen=True)
class Single:
    """Loss of a call to one concurrent event, in ns."""

    end_ns: float
    """Loss to an end while it runs."""
    start_ns: float
    """Loss to an end and the following start, while it runs."""
    late_ns: float
    """Loss to such a start after it has ended."""


@dataclass(frozen=True)
class Lost:
    """Kernel time of one subject alone, its extra time next to a running kernel, and the further loss where others
    start.

    In ns. A graph with branches has a small overhead of its own, so starts are compared with the case of one running
    kernel, not with the kernel alone.
    """

    alone_ns: float
    runs_ns: float
    by_starts: tuple[tuple[float, float], ...]
    """Starts while a kernel and its gap pass, and the loss to them in ns; in the order of `CONCURRENT_CHAINS`."""

    def limit_ns(self, half: float) -> float:
        """Return the loss to many starts, in ns, if `half` starts cost half of it: least squares."""
        shares = [(starts / (starts + half), lost_ns) for starts, lost_ns in self.by_starts]
        return sum(share * lost_ns for share, lost_ns in shares) / sum(share * share for share, _ in shares)

    def squares(self, half: float) -> float:
        """Return the residual squares of that fit, relative to the limit."""
        limit_ns = self.limit_ns(half)
        return sum((starts / (starts + half) - lost_ns / limit_ns) ** 2 for starts, lost_ns in self.by_starts)


def check_interference() -> Rule:
    """Measure the rule. Needs a GPU."""
    measured = subjects()
    return judged({name: measure(subject) for name, subject in measured.items()}, measure_single(measured["GEMM"].call))


def judged(losses: Mapping[str, Lost], single: Single) -> Rule:
    """Return the rule, from the losses of each op and the network, and a GEMM's loss to a single end or start."""
    network = losses[NETWORK]
    half = half_starts(network)
    numbers = {
        "busy_starts": half,
        "busy_ns": network.limit_ns(half),
        "GEMM: more beside a single end": single.end_ns,
        "GEMM: more beside a single start": single.start_ns,
        "GEMM: more beside a start after it": single.late_ns,
    }
    for name, lost in losses.items():
        numbers |= {f"{name}: alone": lost.alone_ns, f"{name}: more beside {RUNS}": lost.runs_ns}
        for (width, hold_us), (starts, lost_ns) in zip(CONCURRENT_CHAINS, lost.by_starts, strict=True):
            chains = f"{width} chain{'s' if width > 1 else ''} of {hold_us:g} us"
            numbers[f"{name}: more than that beside {chains} ({starts:.2g} starts)"] = lost_ns
        numbers[f"{name}: limit"] = lost.limit_ns(half)
    limits_ns = [lost.limit_ns(half) for lost in losses.values()]
    runs_ns = statistics.median(lost.runs_ns for lost in losses.values())
    return Rule(
        name="start interference",
        rule="a kernel loses time to each start of another while it runs, less to each the more there are; to one that "
        "only runs it loses next to nothing",
        holds=runs_ns <= RUNS_FRAC * statistics.median(limits_ns)
        and max(single.end_ns, single.late_ns) < single.start_ns,
        found=f"in the {NETWORK} {numbers['busy_ns']:.0f} ns where there are many, half of it at {half:.1f} starts; "
        f"{min(limits_ns):.0f} to {max(limits_ns):.0f} ns by op; {runs_ns:+.0f} ns beside {RUNS}; a GEMM "
        f"{single.start_ns:+.0f} ns beside one start, {single.end_ns:+.0f} beside one end, {single.late_ns:+.0f} to a "
        "start after it",
        numbers=numbers,
    )


def half_starts(lost: Lost) -> float:
    """Return the number of starts that cost half of the limit: least squares."""
    return min(HALVES, key=lost.squares)


def subjects() -> dict[str, Subject]:
    """Return calls of one small kernel each, and the calibration network, where each kernel follows another."""
    x = torch.randn(1, 128, 28, 28, device="cuda")
    mean, var, weight, bias = (torch.rand(128, device="cuda") for _ in range(4))
    a, b = torch.randn(196, 512, device="cuda"), torch.randn(512, 128, device="cuda")
    parts, filters = [x, x], torch.randn(128, 1, 3, 3, device="cuda")
    network, batch = branching(NETWORK_BATCH)
    network, batch = network.cuda().eval(), batch.cuda()

    def step() -> object:
        with torch.no_grad():
            return network(batch)

    step()
    return {
        "ReLU": Subject(lambda: torch.relu(x)),
        "concatenation": Subject(lambda: torch.cat(parts, 1)),
        "batch norm": Subject(lambda: torch.batch_norm(x, weight, bias, mean, var, False, 0.1, 1e-5, True)),
        "GEMM": Subject(lambda: a @ b),
        "depthwise convolution": Subject(lambda: torch.conv2d(x, filters, padding=1, groups=128)),
        "max pooling": Subject(lambda: torch.max_pool2d(x, 3, 1, 1)),
        "softmax": Subject(lambda: torch.softmax(a, 1)),
        "sum": Subject(lambda: x.sum((0, 2, 3))),
        NETWORK: Subject(step, calls=1, kernels=len(profiled_names(step))),
    }


def measure(subject: Subject, seed: int = DEFAULT_SEED) -> Lost:
    """Measure the losses of `subject`'s kernels; all cases are in one CUDA graph, in shuffled order."""
    rng = random.Random(seed)
    cycles_per_us = spin_cycles(1000) / 1000

    def spin(time_us: float) -> None:
        torch.cuda._sleep(round(time_us * cycles_per_us))

    graph = graph_of([[[subject.call] * subject.calls]])
    span_us = 1.8 * event_ns(graph.replay) / NS_PER_US + 20.0
    cases: list[tuple[int, float]] = [(0, 0.0), (1, span_us), *CONCURRENT_CHAINS] * DRAWS
    rng.shuffle(cases)
    stamps = Stamps(len(cases), torch.device("cuda"))
    lanes = [torch.cuda.Stream() for _ in range(1 + max(width for width, _ in CONCURRENT_CHAINS))]
    with torch.cuda.stream(lanes[0]):  # libraries initialize on first use of a stream
        subject.call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=lanes[0], capture_error_mode="thread_local"):
        for number, (width, hold_us) in enumerate(cases):
            subject.call()
            for lane in lanes[1 : 1 + width]:
                lane.wait_stream(lanes[0])
                with torch.cuda.stream(lane):
                    if hold_us < span_us:
                        spin(rng.random() * (hold_us + 1))
                    for _ in range(max(1, round(span_us / (hold_us + 0.5)))):
                        spin(hold_us)
            spin(3 + 3 * rng.random())  # the others are under way, at a random phase
            stamps.begin(number)
            for _ in range(subject.calls):
                subject.call()
            stamps.end(number)
            for lane in lanes[1 : 1 + width]:
                lanes[0].wait_stream(lane)
    times = _replayed(graph, stamps, cases, subject.calls * subject.kernels)
    periods_ns = {hold_us: graph_ns([[[lambda: spin(hold_us)] * 40]]) / 40 for _, hold_us in CONCURRENT_CHAINS}  # noqa: B023
    alone_ns, runs_ns = times[(0, 0.0)], times[(1, span_us)]
    return Lost(
        alone_ns,
        runs_ns - alone_ns,
        tuple(
            (width * times[width, hold] / periods_ns[hold], times[width, hold] - runs_ns)
            for width, hold in CONCURRENT_CHAINS
        ),
    )


def measure_single(call: Call, seed: int = DEFAULT_SEED) -> Single:
    """Measure a call of several us with one concurrent end, with an end and a start, and with a start after it."""
    rng = random.Random(seed)
    cycles_per_us = spin_cycles(1000) / 1000

    def spin(time_us: float) -> None:
        torch.cuda._sleep(round(time_us * cycles_per_us))

    takes_us = event_ns(graph_of([[[call] * CALLS]]).replay) / NS_PER_US / CALLS
    # Times of the end, from the end of the spin before the stamp; a start follows an end by a gap.
    within = [GAP_US + takes_us * (0.15 + 0.7 * number / 15) for number in range(16)]
    after = [2 * GAP_US + takes_us + 0.2 * number for number in range(16)]
    cases = [("end", at) for at in within] + [("start", at - GAP_US) for at in within] + [("late", at) for at in after]
    cases = [*cases, *[("alone", 0.0)] * 16] * DRAWS
    rng.shuffle(cases)
    stamps = Stamps(len(cases), torch.device("cuda"))
    lanes = [torch.cuda.Stream() for _ in range(2)]
    with torch.cuda.stream(lanes[0]):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=lanes[0], capture_error_mode="thread_local"):
        for number, (kind, at_us) in enumerate(cases):
            call()
            lanes[1].wait_stream(lanes[0])
            with torch.cuda.stream(lanes[1]):
                spin(LEAD_US + at_us if kind != "alone" else 4 * (LEAD_US + takes_us))
                if kind in ("start", "late"):
                    spin(4 * (LEAD_US + takes_us))
            spin(LEAD_US)
            stamps.begin(number)
            call()
            stamps.end(number)
            lanes[0].wait_stream(lanes[1])
    times = _replayed(graph, stamps, [kind for kind, _ in cases], 1)
    return Single(*(times[kind] - times["alone"] for kind in ("end", "start", "late")))


def _replayed(graph: Any, stamps: Stamps, cases: Sequence[Any], kernels: int) -> dict[Any, float]:
    """Return the mean time of one kernel in each case, in ns."""
    times_of: dict[Any, list[float]] = {}
    for sample in stamps.replayed_ns(graph, REPLAYS, unused=2).tolist():  # the first may include initialization
        for case, time_ns in zip(cases, sample, strict=True):
            times_of.setdefault(case, []).append(time_ns / kernels)
    return {case: statistics.fmean(times) for case, times in times_of.items()}
