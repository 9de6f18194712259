"""Fit `gpusim.plan.traffic.RATES`, and write its residuals into docs: python scripts/fit_traffic.py.

Families are fitted to the counters of a training step, or of an inference step if training has none; residuals of both
use the module's current constants. L2: the median of counted over moved bytes, less the bytes of every kernel.
Instructions: least squares of the relative error, no constant below 0. Constants are printed, for the module.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from gpusim.formats.trace import Counters
from gpusim.io.files import write_bytes
from gpusim.plan.traffic import LEAST_L2_BYTES, OTHER, TENSOR, FamilyConstants, Features, estimated, features
from gpusim.trace.store import read_trace

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "research" / "2026-11-23-capture-and-replay.md"
COUNTED = ROOT / "research" / "data" / "counters"
#: Traces to fit, in order; a family is fitted to the first that has it.
FITTED = ("googlenet-train-b8", "googlenet-infer-b1")
BEGIN, END = "<!-- traffic:begin -->", "<!-- traffic:end -->"

Rows = dict[str, list[tuple[Counters, Features]]]


def rows(path: Path) -> Rows:
    """Return counters and features of every counted kernel of a trace, by family."""
    trace = read_trace(path)
    rows_of: Rows = defaultdict(list)
    for op in trace.ops:
        for kernel, known in zip(op.kernels, features(trace, op, op.kernels), strict=True):
            if kernel.counters is not None:
                rows_of[known.family].append((kernel.counters, known))
    return rows_of


def fit(counted: Sequence[tuple[Counters, Features]]) -> FamilyConstants:
    """Return the constants of one family."""
    beyond = [(c.l2_bytes - LEAST_L2_BYTES) / known.moved_bytes for c, known in counted if known.moved_bytes > 10_000]
    l2 = statistics.median(beyond) if beyond else 0.0
    sides = np.array([[known.warps / c.instructions, known.work / c.instructions] for c, known in counted])
    both, *_ = np.linalg.lstsq(sides, np.ones(len(counted)))
    if min(both) < 0:  # least squares with one of them alone
        alone = sides.sum(0) / (sides**2).sum(0)
        keep = int(np.argmin(((sides * alone - 1) ** 2).sum(0)))
        both = np.where(np.arange(2) == keep, alone, 0.0)
    return FamilyConstants(round(l2, 2), round(float(both[0]), 1), round(float(both[1]), 2))


def off(counted: Sequence[tuple[Counters, Features]], field: Callable[[Counters], int]) -> str:
    """Return median and 90th percentile of the factor between estimate and counter, whichever is larger."""
    pairs = [(field(estimated(known)), field(counters)) for counters, known in counted]
    factors = sorted(math.exp(abs(math.log(max(guess, 1) / max(seen, 1)))) for guess, seen in pairs)
    return f"{statistics.median(factors):.2f} / {factors[min(len(factors) - 1, int(0.9 * len(factors)))]:.2f}"


def table(path: Path, families: dict[str, Rows]) -> list[str]:
    """Return the residuals of one trace; `families` are those of the fitted traces."""
    trace, rows_of = read_trace(path), rows(path)
    total = sum(map(len, rows_of.values()))
    lines = [
        f"`research/data/counters/{path.name}` "
        f"({total} kernels, {trace.provenance.counters}, {trace.provenance.date}):",
        "",
        "| family | kernels | constants from here | L2 bytes, median / p90 | instructions | tensor instructions |",
        "|---|--:|---|--:|--:|--:|",
    ]
    for name, counted in sorted(rows_of.items(), key=lambda item: -len(item[1])):
        tensor = off(counted, lambda c: c.tensor_instructions) if name == TENSOR else ""
        l2, instructions = off(counted, lambda c: c.l2_bytes), off(counted, lambda c: c.instructions)
        first = next((f for f in FITTED if name in families[f]), "")
        mine = "yes" if path.name.startswith(first) and name != OTHER else "no"
        lines.append(f"| {name} | {len(counted)} | {mine} | {l2} | {instructions} | {tensor} |")
    everything = [row for counted in rows_of.values() for row in counted]
    l2, instructions = off(everything, lambda c: c.l2_bytes), off(everything, lambda c: c.instructions)
    return [*lines, f"| all | {total} | | {l2} | {instructions} | |", ""]


def main() -> None:
    done: set[str] = set()
    for trace in FITTED:
        for name, counted in rows(COUNTED / f"{trace}.json.gz").items():
            if name not in done:
                print(f"{name}: {fit(counted)} from {len(counted)} kernels of {trace}")
                done.add(name)
    families = {trace: rows(COUNTED / f"{trace}.json.gz") for trace in FITTED}
    text = "\n".join(line for path in sorted(COUNTED.glob("*.json.gz")) for line in table(path, families))
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    write_bytes(PAGE, f"{before}{BEGIN}\n{text.rstrip()}\n{END}{after}".encode())
    print(text)


if __name__ == "__main__":
    main()
