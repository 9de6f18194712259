"""Concurrent chains of calls between two kernels that record the time: predicted from the time of each chain alone.

`judge` compares the chains that `gpusim calibrate --rules` measures with their predictions.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from gpusim.engine.base import Engine
from gpusim.engine.fast import FastEngine
from gpusim.formats.concurrent_chains import ConcurrentChains
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.rules import SMALL_PRODUCTS, Rule
from gpusim.formats.trace import Kernel
from gpusim.plan.kernels import Fits
from gpusim.plan.tasks import Plan, Task

#: Largest error of a prediction that agrees with its measurement.
TOLERANCE = 0.05


@dataclass(frozen=True)
class Chain:
    """Calls in sequence, each with the same kernels."""

    tasks: tuple[Task, ...]
    """Kernels of one call; of their times alone only the ratios count."""
    call_ns: float
    """Measured time of a call in the chain alone, with its gaps."""
    calls: int = 1

    def alone(self, gap_ns: float) -> tuple[Task, ...]:
        """Return the kernels of a call with the times that add up to its own, after their gaps."""
        delays_ns = len(self.tasks) * gap_ns + sum(task.extra_ns for task in self.tasks)
        kernels_ns = max(0.0, self.call_ns - delays_ns)
        total_ns = sum(task.dur_ns for task in self.tasks) or 1.0
        return tuple(msgspec.structs.replace(task, dur_ns=kernels_ns * (task.dur_ns / total_ns)) for task in self.tasks)


def predict(chains: Sequence[Chain], empty_ns: float, hardware: HardwareModel, engine: Engine | None = None) -> float:
    """Predict the time between two stamps with these chains concurrent, in ns.

    `empty_ns` is the time between two stamps with nothing between them. A stamp takes that less one gap.
    """
    gap_ns = hardware.graph.chain_ns
    stamp_ns = max(0.0, empty_ns - gap_ns)
    stamp = Task(name="stamp", dur_ns=stamp_ns)
    tasks, ends = [stamp], []
    for queue, chain in enumerate(chains):
        first, *rest = chain.alone(gap_ns) * chain.calls
        tasks.append(msgspec.structs.replace(first, queue=queue, deps=(0,) if queue else ()))
        tasks += [msgspec.structs.replace(task, queue=queue, deps=()) for task in rest]
        ends.append(len(tasks) - 1)
    last = msgspec.structs.replace(stamp, deps=tuple(ends[1:]))
    timeline = (engine or FastEngine()).run(Plan(tasks=(*tasks, last)), hardware)
    return timeline.makespan_ns - stamp_ns


@dataclass(frozen=True)
class Compared:
    """Chains side by side: how many times longer the longest of them takes than alone, measured and predicted."""

    name: str
    streams: int
    equal: bool
    """True if all chains are of one kind of call."""
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted / measured - 1."""
        return self.predicted / self.measured - 1.0


def compare(experiment: ConcurrentChains, hardware: HardwareModel, engine: Engine | None = None) -> list[Compared]:
    """Predict every run of an experiment from its chains alone."""
    engine = engine or FastEngine()
    fits, known = Fits(hardware), {call.name: call for call in experiment.calls}
    found, products = [], experiment.name == SMALL_PRODUCTS
    for run in experiment.runs:
        of_run = [known[name] for name in run.chains]
        chains = [
            Chain(tuple(task_of(fits, kernel, products) for kernel in call.kernels), call.call_ns, calls)
            for call, calls in zip(of_run, run.calls, strict=True)
        ]
        alone_ns = max(chain.calls * chain.call_ns for chain in chains)
        predicted_ns = predict(chains, experiment.empty_ns, hardware, engine) - experiment.empty_ns
        equal = len(set(run.chains)) == 1
        found.append(
            Compared(
                name=run.chains[0] if equal else "different ones",
                streams=len(chains),
                equal=equal,
                measured=(run.together_ns - experiment.empty_ns) / alone_ns,
                predicted=predicted_ns / alone_ns,
            )
        )
    return found


def judge(experiment: ConcurrentChains, hardware: HardwareModel, engine: Engine | None = None) -> Rule:
    """Return what an experiment says: whether the predictions of all its runs agree, and the factors."""
    compared = compare(experiment, hardware, engine)
    equal = [each for each in compared if each.equal]
    medians = [
        f"{statistics.median(each.error for each in equal if each.streams == streams):+.1%} on {streams}"
        for streams in sorted({each.streams for each in equal})
    ]
    medians += [f"{each.error:+.1%} for {each.streams} different ones" for each in compared if not each.equal]
    fast, slow = (sum(sign * each.error > TOLERANCE for each in compared) for sign in (-1, 1))
    worst = max(compared, key=lambda each: abs(each.error))
    meaning = f"All are within {TOLERANCE:.0%}: nothing is missing"
    if fast or slow:
        meaning = (
            f"{fast} of {len(compared)} come out more than {TOLERANCE:.0%} too fast, {slow} too slow; no rule covers it"
        )
    numbers: dict[str, float] = {}
    for each in compared:
        label = f"{each.name}, {each.streams} streams"
        numbers |= {f"{label}: measured": each.measured, f"{label}: predicted": each.predicted}
    return Rule(
        name=experiment.name,
        rule="chains side by side lose what sharing SMs and the starts of others cost, and nothing else",
        holds=not fast and not slow,
        found=f"predicted over measured, medians by streams: {', '.join(medians)}; {worst.error:+.1%} for "
        f"{worst.name} on {worst.streams}. {meaning}",
        numbers=numbers,
    )


def task_of(fits: Fits, kernel: Kernel, product: bool = False) -> Task:
    """Return the task of a profiled kernel that is of no trace; `product` if it is of a matrix product."""
    fit = fits.of(kernel)
    return Task(
        name=kernel.name,
        kind=kernel.kind,
        dur_ns=float(kernel.dur_ns),
        extra_ns=fit.extra_ns,
        demand=fit.demand,
        blocks=fit.blocks,
        blocks_per_sm=fit.resident,
        footprint=fit.footprint,
        matrix=fit.matrix,
        product=fit.matrix and product,
    )
