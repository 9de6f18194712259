"""Errors of stored schedules by the time between two starts of the front end (`graph.front_end_ns`).

    PYTHONPATH=.:scripts python research/prototypes/front_end_values.py validate/results/kinds_h200_20261123.json ...

198 ns was measured on the first two graphs of a process, when launches are fast. Prints for each set, kind of network
and value the median error, that of 95 %, and the bias, of networks that no constant was fitted on.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import msgspec
import numpy as np
from set_uncertainty import kind_of

from gpusim.engine.fast import FastEngine
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.validation.again import replayed_schedules

VALUES_NS = (198.1, 250.0, 300.0, 350.0, 378.0, 420.0)


def main() -> None:
    """Print a row for each set, then for each kind."""
    engine = FastEngine()
    rows: dict[str, list[list[float]]] = defaultdict(list)
    for file in map(Path, sys.argv[1:]):
        for case, graph, schedule in replayed_schedules(file):
            if case.streams < 2 or case.fitted or schedule.has_variants or schedule.partitions:
                continue
            if not case.outputs_equal:
                continue
            errors = []
            for front_end_ns in VALUES_NS:
                costs = msgspec.structs.replace(graph.hardware.graph, front_end_ns=front_end_ns)
                hardware = msgspec.structs.replace(graph.hardware, graph=costs)
                plan = lower(OpGraph.build(graph.trace, hardware), schedule, memory=False)
                errors.append(engine.run(plan, hardware).makespan_ns / case.measured_ns - 1.0)
            for name in (file.stem.split("_h200")[0], kind_of(case.network)):
                rows[name].append(errors)
    print("| | schedules |", " | ".join(f"{value:.0f} ns" for value in VALUES_NS), "|")
    for name, errors_of in rows.items():
        found = np.array(errors_of)
        cells = (
            f"{np.median(np.abs(each)):.1%}, {np.quantile(np.abs(each), 0.95):.1%}, {each.mean():+.1%}"
            for each in found.T
        )
        print(f"| {name} | {len(found)} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
