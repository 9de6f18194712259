"""Fill README.md's table of predicted against measured from validate/results: python scripts/make_readme_table.py.

With --check nothing is written, and the exit status is 1 where README.md is out of date.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from gpusim.defaults import SEARCH
from gpusim.formats.results import ResultCase, Results, first_of_each_step, newest_results, read_results
from gpusim.io.files import write_bytes
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.policies.registry import POLICIES
from gpusim.report.pages import with_section
from gpusim.validation.again import replayed_schedules
from gpusim.validation.recipe import FASTEST_KERNELS
from gpusim.validation.replayed import SUFFIX, ReplayedSchedule, read_replayed

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
#: Recipes whose newest results the table shows; the first one wins for a step in two.
SHOWN = ("search_again", "search_inference", "search_training", "search_training_32", "search_training_large")


def recommended(cases: Iterable[ResultCase]) -> list[ResultCase]:
    """Return the recommended schedule of each step, or its fastest policy where a recipe has no search."""
    by_trace: dict[str, list[ResultCase]] = {}
    for case in cases:
        by_trace.setdefault(case.trace, []).append(case)
    return [
        next((c for c in group if c.policy == SEARCH), None) or min(group, key=lambda c: c.predicted_ns)
        for group in by_trace.values()
    ]


def section(runs: Sequence[tuple[str, Results]], origins: Mapping[str, str]) -> str:
    """Return the text between the markers: the table, and how it was measured.

    `runs` are results by file name; `origins` maps a trace to the policy whose schedule equals its searched one.
    """
    pairs = [
        (case, _fastest_kernels(results.cases, case)) for _, results in runs for case in recommended(results.cases)
    ]
    alone = [f"`{case.trace}`" for case, _ in pairs if case.streams == 1]
    lines = [
        "Times in us, all measured on an NVIDIA H200. *Kernels* is the gain of the fastest kernels on one stream over",
        "the captured kernels. *Streams* is the further gain of the schedule. *From* says whether the schedule came",
        "from the search or is the schedule of a policy. *Error* is the error of its predicted time, by the hardware",
        "model of the run.",
        "",
        "| step | eager | one CUDA graph | fastest kernels, one stream | streams in the graph (number) | kernels "
        "| streams | over eager | error | from | outputs |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|---|---|",
        *(_row(case, kernels, origins.get(case.trace, SEARCH)) for case, kernels in pairs if case.streams > 1),
        "",
        f"For {' and '.join(alone)}, these runs predicted no schedule on several streams",
        "to be faster, and measured none.",
        "",
        "Sources; `gpusim validate validate/RECIPE.toml -o validate/results` measures them again on the GPU:",
        "",
        *(f"- [{source.removesuffix('.json')}](validate/results/{source})." for source, _ in runs),
    ]
    return "\n".join(lines)


def policy_schedules(path: Path) -> dict[str, str]:
    """Return trace -> policy, where a results file's searched schedule equals that of a policy op for op.

    That is one replayed in the same run, or one that a policy plans today on the kernels of the searched schedule and
    as many streams. Policies that take seconds a call do not plan anew.
    """
    schedules = read_replayed(path.with_name(path.stem + SUFFIX))
    policy_of: dict[str, str] = {}
    for mine in schedules:
        for other in schedules:
            same = (other.trace, other.order, other.stream_of) == (mine.trace, mine.order, mine.stream_of)
            if mine.policy == SEARCH and other.policy in POLICIES and same and _kernels(mine) == _kernels(other):
                policy_of.setdefault(mine.trace, other.policy)
    for case, graph, searched in replayed_schedules(path):
        if case.policy == SEARCH and case.streams > 1 and case.trace not in policy_of:
            alike = planned_alike(dataclasses.replace(graph.choosing(searched.variants), variants=()), searched)
            if alike:
                policy_of[case.trace] = alike[0]
    return policy_of


def planned_alike(graph: OpGraph, schedule: Schedule) -> list[str]:
    """Return the policies that give ops this launch order and these streams; `graph` has the schedule's kernels."""
    counts = (schedule.stream_count,)
    made = (
        (name, make(graph, n)) for name, make in POLICIES.items() if not make.slow for n in make.stream_counts(counts)
    )
    return [name for name, each in made if (each.order, each.streams) == (schedule.order, schedule.streams)]


def _kernels(schedule: ReplayedSchedule) -> list[tuple[int, int]]:
    """Return the ops that run a variant, with the variant's number."""
    return [(op, variant) for op, variant in enumerate(schedule.variants) if variant]


def _fastest_kernels(cases: Iterable[ResultCase], searched: ResultCase) -> ResultCase | None:
    """Return the step's schedule with the fastest kernels in recorded order on one stream, where it was replayed."""
    return next((case for case in cases if case.trace == searched.trace and case.policy == FASTEST_KERNELS), None)


def _row(case: ResultCase, kernels: ResultCase | None, origin: str) -> str:
    alone_ns = case.sequential_ns if kernels is None else kernels.measured_ns
    cells = (
        f"`{case.trace}`",
        f"{case.eager_ns / 1e3:.0f}",
        f"{case.sequential_ns / 1e3:.0f}",
        "" if kernels is None else f"{kernels.measured_ns / 1e3:.0f}",
        f"{case.measured_ns / 1e3:.0f} ({case.streams})",
        "" if kernels is None else f"{case.sequential_ns / alone_ns:.2f}x",
        "" if kernels is None else f"**{alone_ns / case.measured_ns:.2f}x**",
        f"{case.eager_ns / case.measured_ns:.2f}x",
        f"{case.error:+.1%}",
        origin,
        case.outputs,
    )
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check README.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether README.md is up to date")
    options = parser.parse_args(arguments)
    paths = [newest_results(ROOT / "validate" / "results", recipe) for recipe in SHOWN]
    readme = ROOT / "README.md"
    old = readme.read_text(encoding="utf-8")
    runs = first_of_each_step([read_results(path) for path in paths])
    shown = list(zip((path.name for path in paths), runs, strict=True))
    origins = {trace: policy for path in reversed(paths) for trace, policy in policy_schedules(path).items()}
    new = with_section(old, "README.md", BEGIN, END, section(shown, origins))
    if options.check:
        if new != old:
            print("README.md does not show the newest results: run python scripts/make_readme_table.py")
        return int(new != old)
    write_bytes(readme, new.encode())
    print(f"README.md shows {', '.join(path.name for path in paths)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
