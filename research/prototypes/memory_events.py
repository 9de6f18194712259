"""Search schedules with memory actions for the note 2026-11-28-evidence: python memory_events.py OUT.json NAME TRACE...

Adds to OUT.json, as version NAME, what `search_memory_actions` finds for each bundled trace within 0.6 and 0.8 of the
step's peak on up to four streams, with seeds 0 to 2 and 60 candidates: predicted time of the step in ns, events that
its ops wait for, peak in bytes. It runs with versions that count no events, too: PYTHONPATH says which gpusim.
`python memory_events.py OUT.json before after` compares two versions.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from gpusim.memplan.evaluate import MemoryEvaluator
from gpusim.memplan.lowering import schedule_of
from gpusim.memplan.policies.base import Setting
from gpusim.plan.sync import StepSync
from gpusim.policies.registry import POLICIES, stream_counts
from gpusim.search.events import compared_ns, events_of
from gpusim.search.memory_actions import search_memory_actions
from gpusim.step import load

SHARES, SEEDS, STREAMS, CANDIDATES = (0.6, 0.8), range(3), 4, 60


def found(name: str) -> dict[str, list[int]]:
    """Return [step_ns, events, peak_bytes] by trace, share and seed."""
    graph = load(name).graph
    keep_all_bytes = Setting(graph, MemoryEvaluator(graph).storages).keep_all_bytes
    made = [POLICIES["critical_path"](graph, count) for count in stream_counts(STREAMS)]
    step = StepSync.of(graph.trace, graph.preds, {})
    rows = {}
    for share in SHARES:
        for seed in SEEDS:
            limit = round(share * keep_all_bytes)
            acting = search_memory_actions(graph, made, limit, STREAMS, budget_s=600, seed=seed, evaluations=CANDIDATES)
            events = events_of(graph, schedule_of(acting.outcome.program), step)
            rows[f"{name} {share} {seed}"] = [acting.outcome.step_ns, events, acting.outcome.peak_bytes]
            print(name, share, seed, *rows[f"{name} {share} {seed}"], flush=True)
    return rows


def compare(before: dict[str, list[int]], after: dict[str, list[int]]) -> None:
    """Print mean events, and how far predicted and compared times change."""
    keys = sorted(before.keys() & after.keys())
    step = [after[key][0] / before[key][0] - 1 for key in keys]
    both = [compared_ns(*after[key][:2]) / compared_ns(*before[key][:2]) - 1 for key in keys]
    events = [statistics.fmean(rows[key][1] for key in keys) for rows in (before, after)]
    print(f"{len(keys)} searches: events {events[0]:.1f} to {events[1]:.1f}; predicted {statistics.fmean(step):+.2%}; "
          f"compared {statistics.fmean(both):+.2%}, {min(both):+.1%} to {max(both):+.1%}; "
          f"better {sum(each < 0 for each in both)}, worse {sum(each > 0 for each in both)}")  # fmt: skip


def main(out: Path, name: str, *rest: str) -> None:
    """Search, or compare."""
    versions = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    if rest and rest[0] in versions and name in versions:
        compare(versions[name], versions[rest[0]])
        return
    for trace in rest:
        versions.setdefault(name, {}).update(found(trace))
        out.write_text(json.dumps(versions, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
