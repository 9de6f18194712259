"""Errors of stored schedules whose sequential graph took another time than at capture, as predicted and anchored anew.

    python research/prototypes/anchored_anew.py validate/results/neighbours_h200_20261124.json ...

Anchored anew: the gap between kernels is that of the sequential time of the same run (`gpusim.plan.anchor`), not of the
capture's. A row per step; `within` is the share of measured times in the 90 % interval of that prediction.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from pathlib import Path

import msgspec

from gpusim.engine.fast import FastEngine
from gpusim.formats.trace import Trace
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.validation.again import replayed_schedules

#: Least difference of a sequential graph to its capture, as a fraction of the capture.
LEAST = 0.02


def anchored_to(trace: Trace, sequential_ns: int) -> Trace:
    """Return the trace as if its sequential graph had taken `sequential_ns` at capture."""
    assert trace.ground_truth is not None
    timing = msgspec.structs.replace(trace.ground_truth.graph, median_ns=sequential_ns)
    truth = msgspec.structs.replace(trace.ground_truth, graph=timing)
    return msgspec.structs.replace(trace, ground_truth=truth)


def main() -> None:
    """Print a row for each step that differs."""
    engine = FastEngine()
    for name in sys.argv[1:]:
        graphs: dict[tuple[str, int], OpGraph] = {}
        rows: dict[str, list[tuple[float, float, bool, bool]]] = defaultdict(list)
        differs: dict[str, float] = {}
        for case, graph, schedule in replayed_schedules(Path(name)):
            assert graph.trace.ground_truth is not None
            step = case.trace
            differs[step] = case.sequential_ns / graph.trace.ground_truth.graph.median_ns - 1
            if abs(differs[step]) < LEAST or case.streams < 2:
                continue
            key = (step, case.sequential_ns)
            if key not in graphs:
                graphs[key] = OpGraph.build(anchored_to(graph.trace, case.sequential_ns), graph.hardware)
            predictions = []
            for each in (graph, graphs[key]):
                predicted_ns = engine.run(lower(each, schedule), each.hardware).makespan_ns
                low, high = each.interval_ns(predicted_ns, schedule.stream_count, schedule.has_variants)
                predictions.append((predicted_ns / case.measured_ns - 1, low <= case.measured_ns <= high))
            (then, held), (anew, held_anew) = predictions
            rows[step].append((then, anew, held, held_anew))
        for step, of_step in rows.items():
            texts = []
            for error, held in ((0, 2), (1, 3)):
                errors = [row[error] for row in of_step]
                median = statistics.median(map(abs, errors))
                within = statistics.fmean(row[held] for row in of_step)
                texts.append(f"median {median:.1%}, bias {statistics.fmean(errors):+.1%}, within {within:.0%}")
            print(f"{Path(name).stem} {step} {differs[step]:+.1%}, {len(of_step)}: {texts[0]}; anew {texts[1]}")


if __name__ == "__main__":
    main()
