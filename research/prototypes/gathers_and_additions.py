"""What kernels of a graph network lose to each other: python research/prototypes/gathers_and_additions.py.

From the small graph network's profiled schedules in research/data/concurrent_timelines_h200_20261126.json.gz: the time
of each kernel of a group, fitted by least squares as a constant plus a share of its overlap with each group; - is none.
Two equal kernels that share one bandwidth in full would lose 0.5 of the time they overlap.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parents[1] / "data" / "concurrent_timelines_h200_20261126.json.gz"
STEP = "graphs_small-train-b4"
GROUPS = {"index_add": "indexFunc", "gather": "gather", "product": "cutlass", "copy": "Memcpy", "other": ""}


def group_of(name: str) -> str:
    """Return the group of a kernel, by its name."""
    return next(group for group, part in GROUPS.items() if part.lower() in name.lower())


def times_and_overlaps(profile: dict[str, Any]) -> dict[str, list[list[float]]]:
    """Return for each group the time of each kernel in ns, then its overlap with the kernels of each group."""
    rows: dict[str, list[list[float]]] = defaultdict(list)
    for replay in profile["replays"]:
        kernels = [(begin, begin + dur, group_of(profile["names"][name])) for begin, dur, _, name, *_ in replay]
        for number, (begin, end, group) in enumerate(kernels):
            overlaps = dict.fromkeys(GROUPS, 0.0)
            for other, (first, last, company) in enumerate(kernels):
                if other != number:
                    overlaps[company] += max(0, min(end, last) - max(begin, first))
            rows[group].append([end - begin, *overlaps.values()])
    return rows


def main() -> None:
    """Print a row for each schedule and group."""
    (step,) = (each for each in json.loads(gzip.decompress(DATA.read_bytes()))["steps"] if each["trace"] == STEP)
    print(f"| schedule | kernels | ns alone | {' | '.join(GROUPS)} |")
    for schedule in ("real 2", "real 8"):
        rows = times_and_overlaps(step["profiles"][schedule])
        for group in ("index_add", "gather", "product"):
            found = np.array(rows[group])
            design = np.column_stack([np.ones(len(found)), found[:, 1:]])
            alone_ns, *lost = np.linalg.lstsq(design, found[:, 0], rcond=None)[0]
            shares = (f"{x:.2f}" if overlap.any() else "-" for x, overlap in zip(lost, found[:, 1:].T, strict=True))
            print(f"| {schedule} | {group}, {len(found)} | {alone_ns:,.0f} | {' | '.join(shares)} |")


if __name__ == "__main__":
    main()
