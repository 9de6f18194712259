"""How much longer memsets of encoder_12 take in plans with copies, by the copies that have yet to start.

    python research/prototypes/memsets_by_pending.py

Reads `research/data/plan_timelines_h200_20261124.json.gz`: the plans that move 1, 6 and 22 storages and recompute
nothing run the kernels of the step that keeps all, so each memset is compared with its own, from the end of the kernel
before it to the start of the next one. Needs no GPU.
"""

from __future__ import annotations

import gzip
import json
import statistics
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data" / "plan_timelines_h200_20261124.json.gz"
STEP, PLANS = "encoder_12-train-b8", ("only1", "only6", "only22")
COPIES = ("d2h", "h2d")
#: Fewest pending copies of each class.
CLASSES = (0, 1, 2, 3, 6, 12)
#: Until here the host may not have launched all of the graph, in ns.
LAUNCHED_NS = 900_000


def between_ns(events: list[list[Any]], place: int) -> int:
    """Time from the end of the event before to the start of the event after, in ns."""
    (_, _, before_ns, dur_ns, _), after_ns = events[place - 1], events[place + 1][2]
    return int(after_ns - before_ns - dur_ns)


def main() -> None:
    """Print the medians."""
    replays = json.loads(gzip.decompress(DATA.read_bytes()))["replays"]
    of = {plan: replays[f"{STEP} {plan}"]["events"] for plan in (*PLANS, "keep_all")}
    kept = [event for event in of["keep_all"] if event[0] not in COPIES]
    for plan in PLANS:
        copies = [event for event in of[plan] if event[0] in COPIES]
        ops = [event for event in of[plan] if event[0] not in COPIES]
        longer_us: dict[tuple[str, int], list[float]] = {}
        for place, (kind, _, start_ns, dur_ns, _) in enumerate(ops):
            if kind != "memset":
                continue
            since_ns = ops[place - 1][2] + ops[place - 1][3]
            beside = {copy[0] for copy in copies if copy[2] <= start_ns + dur_ns and copy[2] + copy[3] > since_ns}
            pending = sum(copy[2] > start_ns for copy in copies)
            where = "back" if "h2d" in beside else "out" if beside else "none" if start_ns > LAUNCHED_NS else "launch"
            key = where, max(least for least in CLASSES if pending >= least)
            longer_us.setdefault(key, []).append((between_ns(ops, place) - between_ns(kept, place)) / 1e3)
        for (where, least), found in sorted(longer_us.items()):
            median = f"{len(found):3} memsets, {statistics.median(found):+5.1f} us"
            print(f"{plan:6} copies beside: {where:6} at least {least:2} pending: {median}")


if __name__ == "__main__":
    main()
