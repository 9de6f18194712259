"""What today's `explore` says of the steps in README's table: python research/prototypes/readme_steps.py OUT.json.

For each step with a searched schedule, OUT.json gets what `explore` recommends (10 s of search, seed 0), and how far
the searched schedule that README shows is predicted ahead of the best policy planned on its own kernels (policies that
take seconds a call left out). The means are printed. Run it in the repository's root.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from pathlib import Path

from gpusim.defaults import SEARCH
from gpusim.engine.evaluate import Evaluator
from gpusim.formats.results import first_of_each_step, newest_results, read_results
from gpusim.io.file_limits import MAX_STREAMS
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.policies.registry import POLICIES, stream_counts
from gpusim.search.explore import explore
from gpusim.validation.again import replayed_schedules

RESULTS = Path("validate/results")
RUNS = ("search_again", "search_inference", "search_training", "search_training_32", "search_training_large")
BUDGET_S, STREAMS = 10.0, 8


def best_policy(graph: OpGraph, schedule: Schedule) -> tuple[int, str]:
    """Return predicted time in ns and name of the best policy planned on the kernels of a schedule."""
    planned_on = dataclasses.replace(graph.choosing(schedule.variants), variants=())
    evaluator = Evaluator(planned_on)
    counts = (*stream_counts(STREAMS), MAX_STREAMS)
    return min(
        (evaluator.makespan_ns(make(planned_on, count)), name)
        for name, make in POLICIES.items()
        if not make.slow
        for count in make.stream_counts(counts)
    )


def main(out: Path) -> None:
    """Write the rows, and print their means."""
    rows = {}
    paths = [newest_results(RESULTS, run) for run in RUNS]
    wanted = first_of_each_step([read_results(path) for path in paths])
    for path, results in zip(paths, wanted, strict=True):
        traces = {case.trace for case in results.cases}
        for case, graph, schedule in replayed_schedules(path):
            if case.policy != SEARCH or case.trace not in traces:
                continue
            found = explore(graph, streams=STREAMS, budget_s=BUDGET_S, seed=0)
            policy_ns, policy = best_policy(graph, schedule)
            rows[case.trace] = {
                "recommended": found.best.policy,
                "streams": found.best.streams,
                "predicted_speedup": round(found.best.speedup, 3),
                "worth_it": found.verdict.worth_it,
                "readme_streams": case.streams,
                "readme_speedup": round(case.sequential_ns / case.measured_ns, 3),
                "best_policy_on_its_kernels": policy,
                "ahead_of_it": round(policy_ns / Evaluator(graph).makespan_ns(schedule) - 1, 4),
            }
            print(case.trace, rows[case.trace], flush=True)
    out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    several = [row for row in rows.values() if row["readme_streams"] > 1]
    ahead = [1 + row["ahead_of_it"] for row in several]
    agree = sum((row["streams"] > 1) == (row["readme_streams"] > 1) for row in rows.values())
    higher = [row["predicted_speedup"] / row["readme_speedup"] - 1 for row in several]
    print(f"{agree} of {len(rows)} agree on several streams or one; predicted over measured speed-up "
          f"{min(higher):+.1%} to {max(higher):+.1%}, median {statistics.median(higher):+.1%}")  # fmt: skip
    print(f"{len(several)} searched schedules: predicted {statistics.geometric_mean(ahead) - 1:+.2%} ahead of the "
          f"best policy on equal kernels, {min(ahead) - 1:+.2%} to {max(ahead) - 1:+.2%}")  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]))
