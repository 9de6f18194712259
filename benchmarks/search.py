"""Progress of the search: a table and a figure in research/2026-11-23-search.md.

    python benchmarks/search.py [--evaluations 60000] [-o PAGE] [--figure docs/images/search_progress.png]

Each search ends after a number of evaluations, so its result does not depend on the clock or on other load; seconds are
those of this run. The figure needs matplotlib, which is not a dependency of gpusim.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from page import fill

from gpusim.formats.hardware import load_hardware
from gpusim.plan.graph import OpGraph
from gpusim.search.budget import LISTS_SHARE
from gpusim.search.explore import explore
from gpusim.trace.store import load_trace

TRACES = (
    "squeezenet1_1-infer-b1",
    "googlenet-infer-b1",
    "inception_v3-infer-b1",
    "googlenet-train-b8",
    "inception_v3-train-b8",
    "resnet50-train-b8",
    "densenet121-train-b8",
)
HARDWARE = "h200"
SEEDS = (0, 1, 2)
#: Numbers of evaluations in the table.
MARKS = (1_000, 3_000, 6_000, 10_000, 30_000, 60_000)


@dataclass(frozen=True)
class Progress:
    """One search of one step."""

    policy_ns: int
    """Makespan of the best policy, before the search, in ns."""
    sequential_ns: int
    bound_ns: int
    points: tuple[tuple[float, float, int], ...]
    """Evaluations, seconds of search, best makespan in ns of policies and search."""
    evaluations: int
    seconds: float

    def at(self, evaluations: float) -> int:
        """Return the best makespan after that number of evaluations, in ns."""
        return min((best for spent, _, best in self.points if spent <= evaluations), default=self.policy_ns)


def run(name: str, seed: int, evaluations: int) -> Progress:
    """Search one step with one seed."""
    points: list[tuple[float, float, int]] = []
    begin = [0.0]

    def report(stage: str, share: float, best_ns: int) -> None:
        if stage == "search":
            begin[0] = begin[0] or time.perf_counter()
            if share >= LISTS_SHARE:  # the list scheduler's own estimates before, which differ from the engine's
                points.append((share * evaluations, time.perf_counter() - begin[0], best_ns))

    explored = explore(
        OpGraph.build(load_trace(name), load_hardware(HARDWARE)),
        budget_s=3600.0,
        seed=seed,
        evaluations=evaluations,
        report=report,
    )
    policy_ns = min(row.makespan_ns for row in explored.rows if row.policy != "search")
    searched_ns = min(row.makespan_ns for row in explored.rows)
    last = (float(explored.evaluations), time.perf_counter() - begin[0], searched_ns)
    best, kept = policy_ns, []
    for spent, seconds, best_ns in [*points, last]:
        best = min(best, best_ns or best)
        kept.append((spent, seconds, best))
    return Progress(
        policy_ns, explored.sequential_ns, explored.bounds.largest[0], tuple(kept), explored.evaluations, last[1]
    )


def line(name: str, runs: list[Progress], marks: list[int]) -> str:
    """Return a row of the table: makespans over the best policy's, medians over seeds."""
    first = runs[0]
    cells = [f"`{name}`", f"{first.policy_ns / 1e3:,.0f}"]
    for mark in marks:
        cells.append(f"{1 - statistics.median(each.at(mark) for each in runs) / first.policy_ns:.1%}")
    last = [each.at(each.evaluations) for each in runs]
    cells.append(f"{(max(last) - min(last)) / first.policy_ns:.1%}")
    cells.append(f"{statistics.median(last) / first.bound_ns:.2f}")
    cells.append(f"{statistics.median(each.seconds for each in runs):.0f} s")
    return f"| {' | '.join(cells)} |"


def draw(runs_of: dict[str, list[Progress]], target: Path) -> None:
    """Draw time over the bound against evaluations, one line per step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), constrained_layout=True)
    for name, (first, *_) in runs_of.items():
        spent = [0.0, *(evaluations for evaluations, _, _ in first.points)]
        best = [first.policy_ns, *(best for _, _, best in first.points)]
        axes.step(spent, [makespan / first.bound_ns for makespan in best], where="post", label=name)
    axes.set(xlabel="schedules tried", ylabel="best makespan / largest bound", xlim=(0, None))
    axes.set_title("What the search finds, by schedules tried (seed 0)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(target, dpi=150)


def main() -> None:
    """Measure, write, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluations", type=int, default=MARKS[-1], help="schedules that each search tries")
    parser.add_argument("--trace", action="append", help="only these bundled traces")
    parser.add_argument("-o", dest="output", type=Path, help="the page whose part is replaced; without it, print")
    parser.add_argument("--figure", type=Path, help="write the figure here")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    marks = [mark for mark in MARKS if mark <= options.evaluations]
    runs_of: dict[str, list[Progress]] = {}
    rows = []
    for name in options.trace or TRACES:
        runs_of[name] = [run(name, seed, options.evaluations) for seed in SEEDS]
        rows.append(line(name, runs_of[name], marks))
        print(rows[-1], flush=True)
    heads = " | ".join(f"{mark:,}" for mark in marks)
    lines = [
        f"Time saved over the best policy, predicted on `{HARDWARE}`, after so many schedules tried: medians of "
        f"{len(SEEDS)} seeds. *Spread* is the distance between seeds at the end. Seconds are those of this run on "
        f"{len(os.sched_getaffinity(0))} cores with other work: load {load:.1f}, then {os.getloadavg()[0]:.1f}.",
        "",
        f"| step | best policy, us | {heads} | spread | best / bound | time |",
        f"|---|{'--:|' * (len(marks) + 4)}",
        *rows,
    ]
    if options.figure is not None:
        draw(runs_of, options.figure)
    text = "\n".join(lines)
    if options.output is None:
        print(text)
        return
    fill(options.output, "progress", text)


if __name__ == "__main__":
    main()
