"""Errors with and without the candidate for products in company.

    PYTHONPATH=.:scripts python research/prototypes/judge_products.py RESULTS.json

The coefficient is that of research/2026-11-24-small-products.md, fixed before the steps of `blind_next` ran. Prints for
each step, and for all, the median error, that of 95 %, and the bias: by today's rules, and with the candidate.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from missing_time import CANDIDATES, features

from gpusim.engine.fast import FastEngine
from gpusim.plan.lower import lower
from gpusim.quantiles import quantile
from gpusim.validation.again import replayed_schedules

CANDIDATE, COEFFICIENT = "5 %, products", 2.07


def cells(errors: list[float]) -> str:
    """Return median, 95 % and bias."""
    sizes = sorted(map(abs, errors))
    return f"{np.median(sizes):.1%}, {quantile(sizes, 0.95):.1%}, {np.mean(errors):+.1%}"


def main() -> None:
    """Print a row for each step, then for all."""
    number = [name for name, *_ in CANDIDATES].index(CANDIDATE)
    engine = FastEngine()
    errors: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for case, graph, schedule in replayed_schedules(Path(sys.argv[1])):
        if case.streams < 2 or schedule.has_variants or schedule.partitions:
            continue
        base_ns, grown_ns = features(engine, graph, lower(graph, schedule, memory=False))
        with_it_ns = base_ns + COEFFICIENT * grown_ns[number]
        errors[case.trace].append((base_ns / case.measured_ns - 1, with_it_ns / case.measured_ns - 1))
    print("| step | schedules | today: median, 95 %, bias | with the candidate |")
    print("|---|--:|--:|--:|")
    for step, pairs in [*errors.items(), ("all", [pair for each in errors.values() for pair in each])]:
        today, candidate = zip(*pairs, strict=True)
        print(f"| {step} | {len(pairs)} | {cells(list(today))} | {cells(list(candidate))} |")


if __name__ == "__main__":
    main()
