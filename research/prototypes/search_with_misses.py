"""What the search finds for steps that may lose the L2 cache, with and without the rule for misses.

    python research/prototypes/search_with_misses.py [SECONDS]

Prints, for each bundled trace whose misses are predicted, on 2, 4 and 8 streams: the least predicted time of the
policies, that of the search without the rule for misses and with it, and the ratio of their simulations a second. A
search has SECONDS (default 9) after a first one of the same step. The two take turns, so both run on the same machine
at nearly the same time. Needs no GPU.
"""

from __future__ import annotations

import sys
from typing import Any

import gpusim
from gpusim.defaults import SEARCH
from gpusim.plan.graph import OpGraph
from gpusim.search import judging
from gpusim.search.explore import explore
from gpusim.trace.store import bundled_traces

#: Stream counts tried.
STREAMS = (2, 4, 8)
#: Simulations of a search that compiles and fills caches first.
FIRST = 64


class NoMisses:
    """Stands in for `MissTimes`: no schedule loses anything."""

    def __init__(self, *_: Any) -> None:
        pass

    def dur_ns_of(self, _: Any) -> None:
        """Return what a schedule without misses has."""


def searched(graph: OpGraph, streams: int, budget_s: float, misses: type) -> tuple[int, int, int]:
    """Return the least time of policies and of the search, in ns, and the simulations."""
    judging.MissTimes = misses  # type: ignore[misc]
    explore(graph, streams=streams, evaluations=FIRST)
    found = explore(graph, streams=streams, budget_s=budget_s)
    by_search = (row.makespan_ns for row in found.rows if row.policy == SEARCH)
    return min(row.makespan_ns for row in found.rows if row.policy != SEARCH), min(by_search), found.evaluations


def main() -> None:
    """Print the table."""
    budget_s = float(sys.argv[1]) if len(sys.argv) > 1 else 9.0
    seeing = judging.MissTimes
    print("| step | streams | policies | search without | with | simulations |\n|---|--:|--:|--:|--:|--:|")
    for name in bundled_traces():
        if not gpusim.load(name).graph.predicts_misses:
            continue
        for streams in STREAMS:
            policies_ns, before_ns, before = searched(gpusim.load(name).graph, streams, budget_s, NoMisses)
            _, now_ns, now = searched(gpusim.load(name).graph, streams, budget_s, seeing)
            times = " | ".join(f"{ns / 1000:.1f}" for ns in (policies_ns, before_ns, now_ns))
            print(f"| {name} | {streams} | {times} us | {now / before:.2f} |", flush=True)


if __name__ == "__main__":
    main()
