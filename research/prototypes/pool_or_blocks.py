"""Errors of replayed schedules predicted block by block and with one pool of SMs, by kind and by step.

python research/prototypes/pool_or_blocks.py validate/results/kinds_h200_20261123.json ...
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from set_uncertainty import kind_of

from gpusim.engine.fast import FastEngine
from gpusim.plan.lower import lower
from gpusim.policies.ios import one_pool
from gpusim.validation.again import replayed_schedules

#: Measured time, and times predicted block by block and by the pool, in ns.
Times = tuple[int, int, int]


def line(name: str, times: Sequence[Times]) -> str:
    """Return the statistics of both models."""
    cells = []
    for model in (1, 2):
        errors = [each[model] / each[0] - 1 for each in times]
        sizes = sorted(map(abs, errors))
        loss = min(times, key=lambda each: each[model])[0] / min(each[0] for each in times) - 1
        p95 = sizes[int(0.95 * len(sizes))]
        cells.append(
            f"{statistics.median(sizes):.1%}, {p95:.1%}, {sizes[-1]:.1%}, {statistics.fmean(errors):+.1%}, {loss:.1%}"
        )
    return f"{name:36} {len(times):4}: {' | '.join(cells)}"


def main() -> None:
    """Print a line for all, for each kind and for each step: median, 95 % within, largest, bias, regret."""
    engine = FastEngine()
    groups: dict[str, dict[str, list[Times]]] = defaultdict(lambda: defaultdict(list))
    for file in map(Path, sys.argv[1:]):
        for case, graph, schedule in replayed_schedules(file):
            if case.streams < 2 or case.fitted or schedule.has_variants or schedule.partitions:
                continue
            plan = lower(graph, schedule)
            times = (
                case.measured_ns,
                engine.run(plan, graph.hardware).makespan_ns,
                engine.run(plan, one_pool(graph.hardware)).makespan_ns,
            )
            of = "other" if graph.less_known else "convolutional"
            groups[of]["all"].append(times)
            groups[of][f"kind {kind_of(case.network)}"].append(times)
            groups[of][case.trace].append(times)
    print("median, 95 % within, largest, bias, regret: by blocks | by the pool")
    for of, lists in groups.items():
        for name, times_of in sorted(lists.items()):
            print(f"{of:14}{line(name, times_of)}")


if __name__ == "__main__":
    main()
