"""Judge `gpusim.plan.estimated_kernels.CONSTANTS` on captured steps, and fit them: python scripts/fit_estimates.py.

Prints the error of each step's summed kernel times by the constants of the module. Then prints constants fitted anew,
and the errors with a step's network left out of that fit. Of several captures of a step the first counts. Traces may be
named: python scripts/fit_estimates.py TRACE...
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gpusim.formats.hardware import load_hardware
from gpusim.formats.trace import Trace
from gpusim.io.packed import files_in
from gpusim.plan.estimated_kernels import CONSTANTS, Constants, OpWork, estimated_ns, work_of
from gpusim.trace.store import bundled_traces, read_trace

ROOT = Path(__file__).resolve().parent.parent
FOLDS = 6
STEPS = 900
#: Start of the search, and the range of each constant.
START = (2000.0, 0.7, 1.0, 0.3, 0.5)
LEAST = (1000.0, 0.01, 0.01, 0.001, 0.0)
MOST = (50_000.0, 1.2, 3.0, 5.0, 1.0)

Row = tuple[OpWork, float, Trace]
Floats = NDArray[np.float64]


def captured_steps() -> list[Path]:
    """Return the trace files of all captured steps: the bundled ones, and those of validate/traces, packed or not."""
    folders = {each.with_suffix("") for each in (ROOT / "validate" / "traces").iterdir()}
    # Beside a trace NAME.json.gz may be other documents on it, NAME.KIND.json.gz.
    stored = {path for folder in folders for path in files_in(folder, ".json.gz") if path.name.count(".") == 2}
    return sorted({*bundled_traces().values(), *stored})


def rows(traces: Sequence[Trace]) -> dict[str, list[Row]]:
    """Return work, measured time and trace of every op with kernels, by family."""
    rows_of: dict[str, list[Row]] = defaultdict(list)
    for trace in traces:
        for op in trace.ops:
            measured_ns = float(sum(kernel.dur_ns for kernel in op.kernels))
            if measured_ns and op.writes:
                work = work_of(trace, op)
                rows_of[work.family].append((work, measured_ns, trace))
    return rows_of


def fit(known: Sequence[Row]) -> Constants:
    """Return the constants of least error, relative to each step's time: a seeded random search from one start."""
    hardware = load_hardware("h200")
    step_ns = {trace.name: sum(k.dur_ns for op in trace.ops for k in op.kernels) for _, _, trace in known}
    works = [work for work, _, _ in known]
    measured = np.array([ns for _, ns, _ in known])
    weight = 1.0 / np.array([step_ns[trace.name] for _, _, trace in known], dtype=float)
    peak = np.array([hardware.rates.of(trace.model.dtype) for _, _, trace in known])
    moved = np.array([float(work.bytes) for work in works])
    flops = np.array([work.flops for work in works])
    waves = np.array([max(1, work.tiles) / hardware.limits.sms for work in works])
    fill = waves / np.ceil(waves)
    small = moved < hardware.memory.l2_bytes / 2

    def error(constants: Floats) -> float:
        fixed, dram, l2, arithmetic, exponent = constants
        moving = moved / (hardware.memory.dram_bytes_per_ns * np.where(small, l2, dram))
        computing = flops / (peak * arithmetic * fill**exponent)
        return float((np.abs(fixed + moving + computing - measured) * weight).sum())

    random = np.random.default_rng(0)
    best = np.array(START)
    least = error(best)
    for step in range(STEPS):
        width = 0.5 * 0.6 ** (step // 200)
        tried = np.clip(best * np.exp(random.normal(size=5) * width), LEAST, MOST)
        if (loss := error(tried)) < least:
            best, least = tried, loss
    return Constants(*(float(f"{value:.3g}") for value in best))


def read_steps(paths: Iterable[Path]) -> list[Trace]:
    """Read the first capture of each step with ATen's kernels on the GPU of the constants."""
    gpu = load_hardware("h200").gpu
    steps: dict[str, Trace] = {}
    for path in paths:
        trace = read_trace(path)
        if trace.provenance.gpu.name == gpu and trace.model.frontend == "aten":
            steps.setdefault(trace.name, trace)
    return list(steps.values())


def errors_of(known: Mapping[str, Sequence[Row]], constants: Mapping[str, Constants]) -> dict[str, float]:
    """Return the error of each step's summed kernel times by one set of constants."""
    hardware = load_hardware("h200")
    estimated: dict[str, float] = defaultdict(float)
    measured: dict[str, float] = defaultdict(float)
    for family, some in known.items():
        for work, ns, trace in some:
            estimated[trace.name] += estimated_ns(work, constants[family], hardware, trace.model.dtype)
            measured[trace.name] += ns
    return {name: estimated[name] / measured[name] - 1.0 for name in measured}


def summary(errors: Mapping[str, float]) -> str:
    """Return one line on the errors of steps."""
    off = sorted(abs(error) for error in errors.values())
    return (
        f"{len(off)} steps: median {statistics.median(off):.0%}, 90 % within {np.quantile(off, 0.9):.0%}, "
        f"largest {off[-1]:.0%}, mean {statistics.mean(errors.values()):+.0%}"
    )


def left_out(known: Mapping[str, Sequence[Row]]) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return the error of each step with its network left out of the fit, and the factors of its ops by family."""
    hardware = load_hardware("h200")
    networks = sorted({trace.model.network for some in known.values() for _, _, trace in some})
    fold = {network: place % FOLDS for place, network in enumerate(networks)}
    estimated: dict[str, float] = defaultdict(float)
    measured: dict[str, float] = defaultdict(float)
    factors: dict[str, list[float]] = defaultdict(list)
    for family, some in known.items():
        for number in range(FOLDS):
            apart = [row for row in some if fold[row[2].model.network] == number]
            others = [row for row in some if fold[row[2].model.network] != number]
            if not apart or not others:
                continue
            constants = fit(others)
            for work, ns, trace in apart:
                guess_ns = estimated_ns(work, constants, hardware, trace.model.dtype)
                estimated[trace.name] += guess_ns
                measured[trace.name] += ns
                factors[family].append(math.exp(abs(math.log(guess_ns / ns))))
    return {name: estimated[name] / measured[name] - 1.0 for name in measured}, factors


def main(paths: Sequence[Path]) -> None:
    """Judge, fit and print."""
    known = rows(read_steps(paths))
    shipped = errors_of(known, CONSTANTS)
    print(f"constants of the module, {summary(shipped)}\n\nfitted anew:")
    for family, some in known.items():
        print(f'    "{family}": Constants{astuple(fit(some))},')
    apart, factors = left_out(known)
    print("\n| family | ops | median factor off | 90 % within |\n|---|--:|--:|--:|")
    for family, some_factors in sorted(factors.items()):
        low, high = np.quantile(some_factors, (0.5, 0.9))
        print(f"| {family} | {len(some_factors)} | {low:.2f} | {high:.2f} |")
    print(f"\nnetwork left out of the fit, {summary(apart)}")
    print("\n| step | constants of the module | left out |\n|---|--:|--:|")
    for name, error in sorted(shipped.items(), key=lambda item: item[1]):
        print(f"| {name} | {error:+.0%} | {apart[name]:+.0%} |" if name in apart else f"| {name} | {error:+.0%} | |")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]] or captured_steps())
