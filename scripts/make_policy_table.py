"""Write predicted times into research/2026-11-23-policies.md: python scripts/make_policy_table.py.

Covers every bundled trace and every trace of the recipe `fidelity`, every policy, and the stream counts that `gpusim
explore` tries. Takes some minutes, mostly for policies marked slow. --trace NAME prints one trace only.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from gpusim.bounds.bounds import bounds
from gpusim.defaults import DEFAULT_STREAMS
from gpusim.engine.fast import FastEngine
from gpusim.formats.hardware import load_hardware
from gpusim.io.files import write_bytes
from gpusim.io.packed import files_in
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.policies.registry import POLICIES, stream_counts
from gpusim.report.pages import with_section
from gpusim.trace.store import bundled_traces, load_trace, read_manifest, read_trace

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "research" / "2026-11-23-policies.md"
TRACES = ROOT / "validate" / "traces" / "fidelity"
BEGIN, END = "<!-- predicted:begin -->", "<!-- predicted:end -->"
HARDWARE = "h200"
SEQUENTIAL = "sequential"
WARM_UP = "squeezenet1_1-infer-b1"


class Row(NamedTuple):
    """Predictions for one step: the least makespan of each policy, and its number of streams."""

    trace: str
    best: dict[str, tuple[int, int]]
    bound_ns: int
    slow_s: dict[str, tuple[float, float]]
    """CPU seconds of each slow policy: of a call for the most streams, and of the calls for all counts."""

    @property
    def sequential_ns(self) -> int:
        return self.best[SEQUENTIAL][0]


def predict(trace: str) -> Row:
    """Simulate each policy at each of its stream counts."""
    step = load_trace(trace) if trace in bundled_traces() else read_trace(TRACES / f"{trace}.json.gz")
    graph = OpGraph.build(step, load_hardware(HARDWARE))
    engine = FastEngine()
    best: dict[str, tuple[int, int]] = {}
    slow_s: dict[str, tuple[float, float]] = {}
    for policy in POLICIES.values():
        if policy.slow:
            policy(OpGraph.build(load_trace(WARM_UP), load_hardware(HARDWARE)), 2)  # to compile before the timing
        times, seconds = [], []
        for count in policy.stream_counts(stream_counts(DEFAULT_STREAMS)):
            begin = time.process_time()
            schedule = policy(graph, count)
            seconds.append(time.process_time() - begin)
            plan = lower(graph, schedule)
            times.append((engine.run(plan, graph.hardware).makespan_ns, count))
        best[policy.name] = min(times)
        if policy.slow:
            slow_s[policy.name] = (seconds[-1], sum(seconds))
    return Row(trace, best, bounds(graph).largest[0], slow_s)


def names() -> list[str]:
    """Return the names of the bundled traces of ATen's kernels, then the others."""
    others = {path.name.removesuffix(".json.gz") for path in files_in(TRACES, ".json.gz")} - set(bundled_traces())
    bundled = [entry["name"] for entry in read_manifest() if entry["frontend"] == "aten"]
    return [*bundled, *sorted(others)]


def time_line(row: Row) -> str:
    """Return the row of the table of makespans, in us."""
    cells = [f"{ns / 1e3:.0f}" if name == SEQUENTIAL else f"{ns / 1e3:.0f} ({s})" for name, (ns, s) in row.best.items()]
    return f"| `{row.trace}` | {' | '.join(cells)} | {row.bound_ns / 1e3:.0f} |"


def speedup_line(row: Row) -> str:
    """Return the row of speed-ups over the sequential graph, with the best in bold."""
    fastest = min(ns for ns, _ in row.best.values())
    cells = []
    for name, (ns, _) in row.best.items():
        if name != SEQUENTIAL:
            text = f"{row.sequential_ns / ns:.2f}"
            cells.append(f"**{text}**" if ns == fastest and ns < row.sequential_ns else text)
    return f"| `{row.trace}` | {' | '.join(cells)} | {row.sequential_ns / row.bound_ns:.2f} |"


def slow_line(row: Row) -> str:
    """Return the row of the cost of slow policies."""
    cells = [f"{one:.1f} s | {together:.1f} s" for one, together in row.slow_s.values()]
    return f"| `{row.trace}` | {' | '.join(cells)} |"


def section(rows: Sequence[Row]) -> str:
    """Return the text between the markers."""
    policies = list(rows[0].best)
    others = [name for name in policies if name != SEQUENTIAL]
    counts = ", ".join(map(str, stream_counts(DEFAULT_STREAMS)))
    slow = list(rows[0].slow_s)
    return "\n".join(
        [
            f"**Predicted** by the simulator with `hwmodels/{HARDWARE}.json`; nothing here has been measured. Makespan "
            f"in us with the best of {counts} streams, and that count. The last column is the largest lower bound.",
            "",
            f"| step | {' | '.join(f'`{name}`' for name in policies)} | bound |",
            f"|---|{'--:|' * (len(policies) + 1)}",
            *map(time_line, rows),
            "",
            "Predicted speed-up over the sequential graph of the same kernels:",
            "",
            f"| step | {' | '.join(f'`{name}`' for name in others)} | bound |",
            f"|---|{'--:|' * (len(others) + 1)}",
            *map(speedup_line, rows),
            "",
            f"CPU time of policies marked slow: one call for {DEFAULT_STREAMS} streams, the calls for all of {counts}:",
            "",
            f"| step | {' | '.join(f'`{name}` | all counts' for name in slow)} |",
            f"|---|{'--:|' * (2 * len(slow))}",
            *map(slow_line, rows),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Write research/2026-11-23-policies.md, or print one trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", help="only this trace; nothing is written")
    parser.add_argument("--jobs", type=int, default=1, help="processes; one step each at a time")
    options = parser.parse_args(arguments)
    if options.trace:
        print(section([predict(options.trace)]))
        return 0
    rows = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for row in pool.map(predict, names()):
            print(speedup_line(row), flush=True)
            rows.append(row)
    write_bytes(PAGE, with_section(PAGE.read_text(encoding="utf-8"), PAGE.name, BEGIN, END, section(rows)).encode())
    print(f"{PAGE.name} shows {len(rows)} steps")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
