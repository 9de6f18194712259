"""How fast the best of a few trials is, by the schedules that may be tried (no arguments).

The schedules tried in the fair comparison stand for what `explore` finds; `contenders` chooses those to try. Before:
policies and the search on captured kernels, and the search on chosen ones. Now: policies on chosen kernels, too. Alone:
the search or the policies, on chosen kernels. Regret: the time of the fastest tried over that of the fastest of all.
"""

from __future__ import annotations

import statistics
from types import SimpleNamespace

from errors_of_trials import tried_steps

from gpusim.defaults import SEARCH, VARIANTS
from gpusim.plan.schedule import Schedule
from gpusim.search.budget import POLICIES_WITH_VARIANTS
from gpusim.search.explored import Row
from gpusim.search.trial import contenders

COUNTS = (2, 4, 6, 8, 12)


def _group(schedule: Schedule) -> str:
    """Return the name that `explore` would give to the schedule's row."""
    if not schedule.has_variants:
        return schedule.policy
    return VARIANTS if schedule.policy == SEARCH else POLICIES_WITH_VARIANTS


def main() -> None:
    losses: dict[tuple[str, int], list[float]] = {}
    for graph, tried_here in tried_steps():
        if not any(schedule.has_variants for schedule, *_ in tried_here):
            continue
        rows, times_ns = [], {}
        for schedule, time_ns, events, _ in tried_here:
            streams = schedule.stream_count
            rows.append(Row(_group(schedule), streams, schedule.predicted_ns, 1.0, 0, schedule, events=events))
            times_ns[id(rows[-1])] = time_ns
        fastest_ns = min(times_ns.values())
        before = [row for row in rows if row.policy != POLICIES_WITH_VARIANTS]
        search = [row for row in rows if row.policy == VARIANTS]
        policies = [row for row in rows if row.policy == POLICIES_WITH_VARIANTS]
        sources = {"before": before, "now": rows, "search alone": search, "policies alone": policies}
        for name, of_source in sources.items():
            for count in COUNTS:
                tried = contenders(SimpleNamespace(allowed=of_source), count)
                loss = min(times_ns[id(row)] for row in tried) / fastest_ns - 1
                losses.setdefault((name, count), []).append(loss)
        captured_ns = min(row.compared_ns for row in before if row.policy != VARIANTS and row.policy != SEARCH)
        best_ns = min(row.compared_ns for row in rows)
        fastest = min(rows, key=lambda row: times_ns[id(row)])
        print(f"policies on captured kernels {captured_ns / best_ns - 1:.1%}", end=", ")
        print(f"the fastest {fastest.compared_ns / best_ns - 1:.1%} slower than the best by prediction")
        print(graph.trace.name, {name: f"{losses[name, 8][-1]:.2%}" for name in sources})
    for (name, count), each in losses.items():
        print(f"{name}, {count} trials: mean {statistics.mean(each):.2%}, largest {max(each):.2%}, {len(each)} steps")


if __name__ == "__main__":
    main()
