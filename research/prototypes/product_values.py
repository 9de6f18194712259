"""Errors of stored schedules by the share of its time that a product loses beside others (`graph.product_frac`).

    PYTHONPATH=.:scripts python research/prototypes/product_values.py validate/results/kinds_h200_20261123.json ...

Networks that no constant was fitted on, several streams, captured kernels. Prints the mean over steps of the mean
error, the median, the error of 95 %, the largest, and the bias: for each set, kind of network, class of steps, mode,
and step, and for all sets but the last, by which the value was chosen.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from set_uncertainty import kind_of

from gpusim.engine.fast import FastEngine
from gpusim.plan.lower import lower
from gpusim.validation.again import replayed_schedules

VALUES = (0.0, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5)


def mean_of_steps(steps: list[str], sizes: Any) -> float:
    """Return the mean over steps of the mean size of their errors."""
    return float(np.mean([sizes[[each == step for each in steps]].mean() for step in set(steps)]))


def main() -> None:
    """Print a row for each group of schedules, then the value that the sets before the last choose."""
    engine = FastEngine()
    groups: dict[str, list[tuple[str, list[float]]]] = defaultdict(list)
    earlier: list[tuple[str, list[float]]] = []
    files = list(map(Path, sys.argv[1:]))
    for file in files:
        for case, graph, schedule in replayed_schedules(file):
            if case.streams < 2 or case.fitted or schedule.has_variants or schedule.partitions:
                continue
            if not case.outputs_equal:
                continue
            plan, errors = lower(graph, schedule, memory=False), []
            for value in VALUES:
                costs = msgspec.structs.replace(graph.hardware.graph, product_frac=value)
                hardware = msgspec.structs.replace(graph.hardware, graph=costs)
                errors.append(engine.run(plan, hardware).makespan_ns / case.measured_ns - 1.0)
            row = (case.trace, errors)
            kind = "other kinds" if graph.less_known else "mostly convolutional"
            set_name = file.stem.split("_h200")[0]
            for name in (set_name, kind_of(case.network), kind, f"{kind}, {case.mode}", f"{kind}: {case.trace}"):
                groups[name].append(row)
            if file != files[-1]:
                earlier.append(row)
    print("| | schedules |", " | ".join(f"{value:.1%}" for value in VALUES), "|")
    for name, rows in [*groups.items(), ("all sets but the last", earlier)]:
        steps, errors_of = [step for step, _ in rows], np.array([errors for _, errors in rows])
        cells = [
            f"{mean_of_steps(steps, np.abs(each)):.2%}: {np.median(np.abs(each)):.1%}, "
            f"{np.quantile(np.abs(each), 0.95):.1%}, {np.abs(each).max():.1%}, {each.mean():+.1%}"
            for each in errors_of.T
        ]
        print(f"| {name} | {len(rows)} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
