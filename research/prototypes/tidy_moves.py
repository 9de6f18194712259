"""A tidy pass at the end of a search: moves only that bring together on one stream what waits for each other.

    python research/prototypes/tidy_moves.py OUT.json EVALUATIONS SEEDS SHARE,SHARE TRACE...
    python research/prototypes/tidy_moves.py OUT.json

The last share of the evaluations takes an op, or a few ops of its stream, to the stream of an op that it waits for, or
the awaited ones to its stream; what counts as better stays as it is. Writes for each share, step and seed what
`searched_events.py` writes, and prints for each share the mean lead over the best policy, as schedules are compared.
The second only prints what OUT.json has.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from searched_events import Rows, compared, document, traces, write

import gpusim
from gpusim.search.explore import explore
from gpusim.search.moves import Candidates, Current, Moves
from gpusim.search.neighbourhood import _Search

#: Numbers of ops that move together.
TOGETHER = (1, 2, 3, 8)
TIDYING: dict[str, Any] = {"share": 0.0, "now": False}
usual_draw, usual_step = Moves.draw, _Search.step


def joins(moves: Moves, current: Current, count: int) -> Candidates:
    """Return `count` copies in which ops moved to the stream of an op that they wait for, or that waits for them."""
    candidates = Candidates.copies(current, count)
    pairs = [(before, op) for op, preds in moves.graph.work_preds.items() for before in preds]
    edges = np.array(pairs, np.int64).reshape(-1, 2)
    crossing = edges[current.streams[edges[:, 0]] != current.streams[edges[:, 1]]]
    by_key = moves.work[np.argsort(current.keys[moves.work], kind="stable")]
    places = np.empty(len(moves.graph), np.int64)
    places[by_key] = np.arange(len(by_key))
    for row, draws in enumerate(moves.random.random((count, 3)).tolist()):
        if len(crossing):
            before, after = crossing[int(draws[0] * len(crossing))]
            moved, to = (after, before) if draws[1] < 0.5 else (before, after)
            ahead = by_key[places[moved] :: 1 if moved == after else -1]
            stretch = ahead[current.streams[ahead] == current.streams[moved]]
            candidates.streams[row, stretch[: TOGETHER[int(draws[2] * len(TOGETHER))]]] = current.streams[to]
    return candidates


def draw(moves: Moves, current: Current, count: int) -> Candidates:
    """`Moves.draw` with a tidy pass."""
    return joins(moves, current, count) if TIDYING["now"] else usual_draw(moves, current, count)


def step(search: _Search, share: float) -> None:
    """`_Search.step` with a tidy pass."""
    TIDYING["now"] = share >= 1.0 - TIDYING["share"]
    usual_step(search, share)


def line(share: str, rows: Rows) -> str:
    """Return the mean lead over the best policy, as schedules are compared, and the mean of events."""
    lead = statistics.fmean(compared(row["policy"]) / compared(row["search"]) - 1 for row in rows.values())
    events = statistics.fmean(row["search"]["events"] for row in rows.values())
    return f"share {share}: {lead:.2%} ahead, {events:.1f} events, {len(rows)} searches"


def main() -> None:
    """Explore all steps with each share, or print what OUT.json has."""
    path = Path(sys.argv[1])
    if len(sys.argv) == 2:
        for share, rows in json.loads(path.read_text()).items():
            print(line(share, rows))
        return
    evaluations, seeds, shares, *names = sys.argv[2:]
    Moves.draw, _Search.step = draw, step  # type: ignore[method-assign]
    found: dict[str, Rows] = {}
    for share in shares.split(","):
        TIDYING["share"] = float(share)
        found[share] = {}
        for trace in traces(names):
            graph = replace(gpusim.load(trace).graph, variants=())
            for seed in range(int(seeds)):
                explored = explore(graph, budget_s=1e6, evaluations=int(evaluations), seed=seed)
                found[share][f"{trace}, seed {seed}"] = document(explored)
        write(path, found)
        print(line(share, found[share]), flush=True)


if __name__ == "__main__":
    main()
