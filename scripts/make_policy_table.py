"""Fill docs/policies.md's tables of predicted times from the simulator: python scripts/make_policy_table.py.

Every bundled trace, every policy, the stream counts that `gpusim explore` tries; policies marked slow only with the
counts in `SLOW_COUNTS`, which still take most of the time: about ten minutes on two cores with --jobs 2. --trace NAME
does one trace and prints it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from gpusim.engine.reference import ReferenceEngine
from gpusim.files import write_bytes
from gpusim.hardware.model import load_hardware
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.policies.registry import POLICIES
from gpusim.search.bounds import bounds
from gpusim.search.explore import DEFAULT_STREAMS, stream_counts
from gpusim.trace.store import bundled_traces, load_trace

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "policies.md"
BEGIN, END = "<!-- predicted:begin -->", "<!-- predicted:end -->"
HARDWARE = "h200"
SEQUENTIAL = "sequential"
SLOW_COUNTS = (4, 8)


class Row(NamedTuple):
    """What is predicted of one step: for each policy the least makespan and the streams that gave it."""

    trace: str
    best: dict[str, tuple[int, int]]
    bound_ns: int

    @property
    def sequential_ns(self) -> int:
        return self.best[SEQUENTIAL][0]


def predict(trace: str) -> Row:
    """Simulate each policy at each of its stream counts."""
    graph = OpGraph.build(load_trace(trace), load_hardware(HARDWARE))
    engine = ReferenceEngine()
    best: dict[str, tuple[int, int]] = {}
    for policy in POLICIES.values():
        counts = policy.stream_counts(SLOW_COUNTS if policy.slow else stream_counts(DEFAULT_STREAMS))
        times = []
        for count in counts:
            made = policy(graph, count)
            plan = lower(graph, made.order, made.streams)
            times.append((engine.run(plan, graph.hardware, record=False).makespan_ns, count))
        best[policy.name] = min(times)
    return Row(trace, best, bounds(graph).largest[0])


def time_line(row: Row) -> str:
    """The line of the table of makespans, in us."""
    cells = [f"{ns / 1e3:.0f}" if name == SEQUENTIAL else f"{ns / 1e3:.0f} ({s})" for name, (ns, s) in row.best.items()]
    return f"| `{row.trace}` | {' | '.join(cells)} | {row.bound_ns / 1e3:.0f} |"


def speedup_line(row: Row) -> str:
    """The line of the table of speed-ups over the sequential graph; the best in bold."""
    fastest = min(ns for ns, _ in row.best.values())
    cells = []
    for name, (ns, _) in row.best.items():
        if name != SEQUENTIAL:
            text = f"{row.sequential_ns / ns:.2f}"
            cells.append(f"**{text}**" if ns == fastest and ns < row.sequential_ns else text)
    return f"| `{row.trace}` | {' | '.join(cells)} | {row.sequential_ns / row.bound_ns:.2f} |"


def section(rows: Sequence[Row]) -> str:
    """The text between the markers."""
    names = list(rows[0].best)
    others = [name for name in names if name != SEQUENTIAL]
    counts = ", ".join(map(str, stream_counts(DEFAULT_STREAMS)))
    slow = " and ".join(map(str, SLOW_COUNTS))
    return "\n".join(
        [
            f"**Predicted** by the simulator with `hwmodels/{HARDWARE}.json`; nothing here has been measured. Makespan "
            f"in us with the best of {counts} streams (of {slow} for policies marked slow), and that count. The last "
            "column is the largest lower bound.",
            "",
            f"| step | {' | '.join(f'`{name}`' for name in names)} | bound |",
            f"|---|{'--:|' * (len(names) + 1)}",
            *map(time_line, rows),
            "",
            "Predicted speed-up over the sequential graph of the same kernels:",
            "",
            f"| step | {' | '.join(f'`{name}`' for name in others)} | bound |",
            f"|---|{'--:|' * (len(others) + 1)}",
            *map(speedup_line, rows),
        ]
    )


def filled(page: str, text: str) -> str:
    """The page with `text` between the markers. Exits where the markers are missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{PAGE.name}: no section between {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write docs/policies.md, or print one trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", help="only this bundled trace; nothing is written")
    parser.add_argument("--jobs", type=int, default=1, help="processes; one step each at a time")
    options = parser.parse_args(arguments)
    if options.trace:
        print(section([predict(options.trace)]))
        return 0
    rows = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for row in pool.map(predict, bundled_traces()):
            print(speedup_line(row), flush=True)
            rows.append(row)
    write_bytes(PAGE, filled(PAGE.read_text(encoding="utf-8"), section(rows)).encode())
    print(f"{PAGE.name} shows {len(rows)} steps")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
