"""What the search of `explore` finds, with the events that its schedules need.

    python research/prototypes/searched_events.py OUT.json NAME EVALUATIONS SEED TRACE...
    python research/prototypes/searched_events.py OUT.json BEFORE AFTER

The first adds to OUT.json, under NAME, a row per trace and seed: predicted time and events of the best policy, of the
best searched schedule and of the recommended one, as `explore` compares them. The steps are searched on their captured
kernels. Rows that OUT.json has are left out. A trace is a bundled name, a file, or a folder or zip file of traces. Run
it in two versions of gpusim with two names. The second compares the two names: steps on which the search sees what it
is judged by, and steps that lose L2 misses, which it does not see.
"""

from __future__ import annotations

import json
import statistics
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpusim
from gpusim.defaults import SEARCH, SEARCHED
from gpusim.search.explore import explore
from gpusim.search.explored import Explored, Row

Rows = dict[str, dict[str, Any]]


def traces(names: list[str]) -> Iterator[str]:
    """Yield bundled names and files."""
    for name in names:
        path = Path(name)
        if path.suffix == ".zip":
            inside = zipfile.ZipFile(path).namelist()
        elif path.is_dir():
            inside = sorted(each.name for each in path.iterdir())
        else:
            yield name
            continue
        yield from (str(path.with_suffix("") / each) for each in inside if ".predicted." not in each)


def found(row: Row) -> dict[str, Any]:
    """Return what is compared of a row."""
    return {"policy": row.policy, "streams": row.streams, "predicted_ns": row.makespan_ns, "events": row.events}


def document(explored: Explored) -> dict[str, Any]:
    """Return the best rows of an exploration."""
    planned = [row for row in explored.rows if row.policy not in SEARCHED]
    return {
        "misses": bool(explored.graph.predicts_misses),
        "sequential_ns": explored.sequential_ns,
        "policy": found(min(planned, key=lambda row: row.compared_ns)),
        "search": found(explored.best_of(SEARCH)),
        "recommended": found(explored.best),
        "evaluations": explored.evaluations,
    }


def write(path: Path, rows: dict[str, Rows]) -> None:
    """Write the rows, one a line."""
    parts = [
        f"{json.dumps(name)}: {{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(row)}" for key, row in mine.items())
        for name, mine in rows.items()
    ]
    path.write_text("{\n" + "\n},\n".join(parts) + "\n}\n}\n")


def compared(row: dict[str, Any]) -> float:
    """Return what a stored row is compared by."""
    from gpusim.search.events import compared_ns  # the version before has no such module

    return compared_ns(float(row["predicted_ns"]), float(row["events"]))


def table(before: Rows, after: Rows) -> None:
    """Print how searched schedules differ, of steps with several streams."""
    both = [key for key in before if key in after and before[key]["search"]["streams"] > 1]
    for title, misses in (("all seen", False), ("misses not seen", True)):
        pairs = [(before[key], after[key]) for key in both if after[key]["misses"] == misses]
        change = [compared(b["search"]) / compared(a["search"]) - 1 for a, b in pairs]
        predicted = [b["search"]["predicted_ns"] / a["search"]["predicted_ns"] - 1 for a, b in pairs]
        events = [[row["search"]["events"] for row in side] for side in zip(*pairs, strict=True)]
        lead = [
            [compared(row["policy"]) / compared(row["search"]) - 1 for row in side] for side in zip(*pairs, strict=True)
        ]
        fewer = sum(one > other for one, other in zip(*events, strict=True))
        more = sum(one < other for one, other in zip(*events, strict=True))
        others = sum(a["recommended"] != b["recommended"] for a, b in pairs)
        print(
            f"{title}: {len(pairs)} searches; events {statistics.fmean(events[0]):.1f} -> "
            f"{statistics.fmean(events[1]):.1f}, fewer in {fewer}, more in {more}; predicted "
            f"{statistics.fmean(predicted):+.2%}; compared {statistics.fmean(change):+.2%}, median "
            f"{statistics.median(change):+.2%}, {min(change):+.1%} to {max(change):+.1%}, better in "
            f"{sum(each < 0 for each in change)}, worse in {sum(each > 0 for each in change)}; ahead of the best "
            f"policy {statistics.fmean(lead[0]):.2%} -> {statistics.fmean(lead[1]):.2%}; "
            f"recommendation differs in {others}"
        )


def main() -> None:
    """Explore the steps one after the other and write the file after each, or print the table."""
    path = Path(sys.argv[1])
    rows: dict[str, Rows] = json.loads(path.read_text()) if path.exists() else {}
    if len(sys.argv) == 4:
        table(rows[sys.argv[2]], rows[sys.argv[3]])
        return
    name, evaluations, seed, *names = sys.argv[2:]
    mine = rows.setdefault(name, {})
    for trace in traces(names):
        key = f"{trace}, seed {seed}"
        if key not in mine:
            graph = replace(gpusim.load(trace).graph, variants=())
            mine[key] = document(explore(graph, budget_s=1e6, evaluations=int(evaluations), seed=int(seed)))
            write(path, rows)
            print(name, key, mine[key], flush=True)


if __name__ == "__main__":
    main()
