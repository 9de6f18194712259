"""What the time missing from predictions scales with: one candidate at a time, each network predicted by the others.

    python research/prototypes/missing_time.py validate/results/kinds_h200_20261123.json ...

Each candidate delays or lengthens tasks of every schedule by an amount that depends on the simulated timeline. Its
coefficient is fitted to the missing time of all other networks (least squares, not negative; all steps weigh the same).
The last line fits all coefficients together, of any sign.
Columns: coefficient, then for other kinds and for convolutional networks the mean over steps of the mean error, the
median, the error of 95 %, and the bias.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gpusim.engine.fast import FastEngine
from gpusim.formats.hardware import HardwareModel
from gpusim.plan.graph import OpGraph
from gpusim.plan.kernels import op_moved_bytes, tensor_bytes
from gpusim.plan.lower import lower
from gpusim.plan.tasks import Plan
from gpusim.validation.again import replayed_schedules

Array = Any
SM_SHORT_NS, GAP_NS = 4000.0, 300.0
WHOLE_SMEM_BYTES = 190 * 1024


@dataclass(frozen=True)
class Seen:
    """What each task of a simulated schedule meets."""

    alone_ns: Array
    company: Array
    """Share of its time with any other task beside it."""
    beside: Array
    """Tasks that run when it starts."""
    starts: Array
    rate: Array
    """Bytes of tensors a ns of all tasks that run in the gap before it."""
    moved: Array
    across: Array
    product: Array
    """Matrix products, without convolutions."""
    small_product: Array
    short: Array
    whole: Array
    """Kernels whose blocks take an SM's whole shared memory."""
    matrix: Array
    load: Array
    """Bytes of tensors a ns of all other tasks, over its time."""


def seen(graph: OpGraph, plan: Plan, start: Array, end: Array) -> Seen:
    """Return what the tasks meet, by their simulated starts and ends."""
    trace, tasks, sizes = graph.trace, plan.tasks, tensor_bytes(graph.trace)
    total = [sum(kernel.dur_ns for kernel in op.kernels) or 1 for op in trace.ops]
    moved = np.array(
        [op_moved_bytes(sizes, trace.ops[t.op]) * trace.ops[t.op].kernels[t.kernel].dur_ns / total[t.op] for t in tasks]
    )
    lasts = np.maximum(end - start, 1.0)
    events = np.concatenate([start, end])
    order = np.argsort(events, kind="stable")
    times, steps = events[order], np.diff(events[order])

    def running(weight: Array) -> Array:
        return np.cumsum(np.concatenate([weight, -weight])[order])

    def integral(level: Array, at: Array) -> Array:
        return np.interp(at, times, np.concatenate([[0.0], np.cumsum(level[:-1] * steps)]))

    flow = running(moved / lasts)
    several = (running(np.ones(len(tasks))) > 1.5).astype(float)
    by_start, by_end = np.sort(start), np.sort(end)
    convolution = np.array(["conv" in trace.ops[t.op].target for t in tasks])
    blocks = np.array([t.blocks for t in tasks])
    matrix = np.array([bool(t.matrix) for t in tasks])
    product = matrix & ~convolution
    return Seen(
        alone_ns=np.array([t.dur_ns for t in tasks]),
        company=np.clip((integral(several, end) - integral(several, start)) / lasts, 0.0, 1.0),
        beside=np.searchsorted(by_start, start, "right") - np.searchsorted(by_end, start, "right") - 1,
        starts=np.searchsorted(by_start, end, "left") - np.searchsorted(by_start, start, "right"),
        rate=np.maximum(0.0, np.interp(start - GAP_NS, times, flow)),
        moved=moved,
        across=np.array([len(t.deps) > 0 for t in tasks]),
        product=product,
        small_product=product & (blocks < graph.hardware.limits.sms),
        short=np.array([t.dur_ns for t in tasks]) < SM_SHORT_NS,
        whole=np.array([trace.ops[t.op].kernels[t.kernel].smem_bytes > WHOLE_SMEM_BYTES for t in tasks]),
        matrix=matrix,
        load=np.maximum(0.0, (integral(flow, end) - integral(flow, start) - moved) / lasts),
    )


#: Name, what is changed (`extra_ns`, `dur_ns`), and the change of each task in ns.
CANDIDATES: tuple[tuple[str, str, Callable[[Seen], Array]], ...] = (
    ("100 ns a launch", "extra_ns", lambda s: np.full(len(s.alone_ns), 100.0)),
    ("100 ns a launch beside any other", "extra_ns", lambda s: 100.0 * (s.beside > 0)),
    ("100 ns an edge between streams", "extra_ns", lambda s: 100.0 * s.across),
    ("gap, 100 ns at 1,000 bytes a ns beside it", "extra_ns", lambda s: 100.0 * np.minimum(1.0, s.rate / 1000.0)),
    ("100 ns a kernel in company", "dur_ns", lambda s: 100.0 * s.company),
    ("100 ns a start beside it, at most 10", "dur_ns", lambda s: 100.0 * np.minimum(s.starts, 10)),
    ("5 % of time in company", "dur_ns", lambda s: 0.05 * s.alone_ns * s.company),
    ("5 %, kernels below 4 us", "dur_ns", lambda s: 0.05 * s.alone_ns * s.company * s.short),
    ("5 %, kernels from 4 us", "dur_ns", lambda s: 0.05 * s.alone_ns * s.company * ~s.short),
    ("5 %, products", "dur_ns", lambda s: 0.05 * s.alone_ns * s.company * s.product),
    ("5 %, small products", "dur_ns", lambda s: 0.05 * s.alone_ns * s.company * s.small_product),
    ("bytes moved in company, over 40 TB/s", "dur_ns", lambda s: s.moved / 40_000.0 * s.company),
    ("bytes that company moves, over 40 TB/s", "dur_ns", lambda s: s.alone_ns * s.load / 40_000.0),
    ("whole SMs: the same", "dur_ns", lambda s: s.alone_ns * s.load / 40_000.0 * s.whole),
    ("other GEMM-like: the same", "dur_ns", lambda s: s.alone_ns * s.load / 40_000.0 * (s.matrix & ~s.whole)),
    ("whole SMs: 100 ns a start beside it", "dur_ns", lambda s: 100.0 * np.minimum(s.starts, 10) * s.whole),
    ("whole SMs: 5 % in company", "dur_ns", lambda s: 0.05 * s.alone_ns * s.company * s.whole),
    (
        "other products: 100 ns a start beside it",
        "dur_ns",
        lambda s: 100.0 * np.minimum(s.starts, 10) * (s.matrix & ~s.whole),
    ),
    ("other GEMM-like: 5 % in company", "dur_ns", lambda s: 0.05 * s.alone_ns * s.company * (s.matrix & ~s.whole)),
    (
        "no products: 100 ns a start beside it",
        "dur_ns",
        lambda s: 100.0 * np.minimum(s.starts, 10) * ~(s.matrix | s.whole),
    ),
    ("other kernels: 5 % in company", "dur_ns", lambda s: 0.05 * s.alone_ns * s.company * ~(s.matrix | s.whole)),
)
CONSTANTS: tuple[tuple[str, str, str, float], ...] = (
    ("sharing_exponent + 0.1", "contention", "sharing_exponent", 0.1),
    ("matrix_exponent + 0.1", "contention", "matrix_exponent", 0.1),
    ("busy_ns + 200", "graph", "busy_ns", 200.0),
    ("fork_ns + 100", "graph", "fork_ns", 100.0),
    ("front_end_ns + 50", "graph", "front_end_ns", 50.0),
)


def raised(hardware: HardwareModel, section: str, name: str, by: float) -> HardwareModel:
    part = getattr(hardware, section)
    return msgspec.structs.replace(
        hardware, **{section: msgspec.structs.replace(part, **{name: getattr(part, name) + by})}
    )


def features(engine: FastEngine, graph: OpGraph, plan: Plan) -> tuple[int, list[float]]:
    """Return the makespan, and its growth by each candidate."""
    hardware = graph.hardware
    timeline = engine.run(plan, hardware)
    base = timeline.makespan_ns
    met = seen(graph, plan, np.array(timeline.start_ns, float), np.array(timeline.end_ns, float))
    grown = []
    for _, field, change in CANDIDATES:
        tasks = tuple(
            msgspec.structs.replace(task, **{field: getattr(task, field) + float(more)}) if more else task
            for task, more in zip(plan.tasks, change(met), strict=True)
        )
        grown.append(float(engine.run(replace(plan, tasks=tasks), hardware).makespan_ns - base))
    for _, section, name, by in CONSTANTS:
        grown.append(float(engine.run(plan, raised(hardware, section, name, by)).makespan_ns - base))
    return base, grown


def line(name: str, values: tuple[Array, Array, Array], steps: Array, other: Array) -> str:
    """Return the statistics of predictions that were lengthened by `added`, relative to the base."""
    coefficient, added, missing = values
    errors = (1.0 + added) / (1.0 + missing) - 1.0
    cells = [f"{name:44} {coefficient:6.2f}"]
    for which in (other, ~other):
        sizes = np.abs(errors[which])
        mean = np.mean([np.abs(errors[which & (steps == step)]).mean() for step in set(steps[which])])
        cells.append(f"{mean:.2%} {np.median(sizes):.1%} {np.quantile(sizes, 0.95):.1%} {errors[which].mean():+.1%}")
    return " | ".join(cells)


def main() -> None:
    """Print a line for each candidate."""
    engine = FastEngine()
    steps, networks, other, missing, grown = [], [], [], [], []
    for file in map(Path, sys.argv[1:]):
        for case, graph, schedule in replayed_schedules(file):
            lookups = "recommendation" in case.network
            if case.streams < 2 or case.fitted or schedule.has_variants or schedule.partitions or lookups:
                continue
            base, more = features(engine, graph, lower(graph, schedule, memory=False))
            steps.append(case.trace)
            networks.append(case.network.partition("_")[0] if graph.less_known else case.network)
            other.append(graph.less_known)
            missing.append(case.measured_ns / base - 1.0)
            grown.append([each / base for each in more])
    step_of, network_of, is_other = np.array(steps), np.array(networks), np.array(other)
    left, columns = np.array(missing), np.array(grown)
    weights = np.array([1.0 / (step_of == step).sum() for step in step_of])
    print(len(left), "schedules,", len(set(steps)), "steps")
    print(line("nothing", (np.float64(0.0), np.zeros(len(left)), left), step_of, is_other))
    for number, name in enumerate([*(each[0] for each in CANDIDATES), *(each[0] for each in CONSTANTS)]):
        x, added, found = columns[:, number], np.zeros(len(left)), []
        for network in sorted(set(networks)):
            here = network_of == network
            square = (weights * x * x)[~here].sum()
            found.append(max(0.0, (weights * x * left)[~here].sum() / square) if square else 0.0)
            added[here] = found[-1] * x[here]
        print(line(name, (np.mean(found), added, left), step_of, is_other))
    together = np.zeros(len(left))
    for network in sorted(set(networks)):
        here = network_of == network
        root = np.sqrt(weights[~here])
        together[here] = columns[here] @ np.linalg.lstsq(columns[~here] * root[:, None], left[~here] * root)[0]
    print(line("all together", (np.float64(np.nan), together, left), step_of, is_other))


if __name__ == "__main__":
    main()
