"""Fill the tables of prediction errors in README.md and docs/accuracy.md: python scripts/make_accuracy_page.py.

The numbers come from validate/results, as predicted in each run. With --check nothing is written, and the exit status
is 1 where a page is out of date.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

from gpusim.defaults import SEARCH
from gpusim.formats.results import ResultCase, first_of_each_step, newest_results, read_all_results, read_results
from gpusim.io.files import write_bytes
from gpusim.quantiles import quantile
from gpusim.report.pages import with_section
from gpusim.validation.recipe import FASTEST_KERNELS, read_recipe
from gpusim.validation.replayed import SUFFIX, read_replayed
from gpusim.validation.statistics import by_step, fidelity

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "validate" / "results"
#: Row name in the tables -> recipes whose newest results have its schedules.
CONVOLUTIONAL = "mostly convolutional networks, blind"
IMAGES = {
    CONVOLUTIONAL: ("blind_convolutional",),
    "such networks, unseen": ("blind_again",),
    "such, unseen by an earlier model": ("blind", "unseen", "unseen_large"),
    "such, model chosen on them": ("fidelity",),
}
SEARCHES = ("search_again", "search_inference", "search_training", "search_training_32", "search_training_large")
SEARCHED = "known convolutional networks, searched"
#: Runs of known networks whose schedules were predicted before they ran, by row name.
KNOWN = {"known networks, all policies": "fair", "near the best of known steps": "neighbours"}
#: Published systems to compare the searched schedules with.
PEERS = ("nimble", "opara", "torchsched", "ios")
#: Runs of other kinds by name, each blind to the rules of its day; later rules were made with it in sight.
OTHER_KINDS = {
    "other kinds, first blind set": "kinds",
    "other kinds, second blind set": "blind_kinds",
    "other kinds, third blind set": "blind_intervals",
    "other kinds, fourth blind set": "blind_last",
    "other kinds, fifth blind set": "blind_next",
    "other kinds, sixth blind set": "blind_products",
    "other kinds, seventh blind set": "blind_turnover",
    "other kinds, eighth blind set": "blind_recommended",
}
COLUMNS = "number|median|95 % within|largest|bias|in the 90 % interval|"
RULE = "|---|--:|--:|--:|--:|--:|--:|"
HEAD = [f"|schedules on several streams|{COLUMNS}", RULE]


def left_out(*recipes: str) -> list[ResultCase]:
    """Return the cases of some recipes, without networks that a constant was fitted on."""
    runs = [read_results(newest_results(RESULTS, recipe)) for recipe in recipes]
    return [case for run in runs for case in run.cases if not case.fitted]


def search_cases() -> list[ResultCase]:
    """Return all cases of the search recipes, from the newest run of each step."""
    runs = first_of_each_step([read_results(newest_results(RESULTS, recipe)) for recipe in SEARCHES])
    return [case for run in runs for case in run.cases]


def searched() -> list[ResultCase]:
    """Return the searched schedules of networks that no constant was fitted on."""
    return [case for case in search_cases() if case.policy == SEARCH and not case.fitted]


def fair() -> list[str]:
    """Return the comparison on equal kernels with equal trials, or nothing before it is measured."""
    if not sorted(RESULTS.glob("fair_h200_[0-9]*[0-9].json")):
        return []
    over_all: dict[str, list[float]] = {"captured": [], "chosen": []}
    over_peers: dict[str, list[float]] = {"captured": [], "chosen": []}
    times: dict[str, list[float]] = {"captured": [], "chosen": []}
    alone: dict[str, list[float]] = {"captured": [], "chosen": []}
    for cases in by_step(read_results(newest_results(RESULTS, "fair")).cases).values():
        has_both = len({case.kernels for case in cases if case.policy == SEARCH}) == len(over_all)
        for kernels, gains in over_all.items():
            of_kernels = {case.policy: case.measured_ns for case in cases if case.kernels == kernels}
            if SEARCH not in of_kernels:  # a trace without other kernels has those that were captured alone
                continue
            one_stream_ns = of_kernels.pop(FASTEST_KERNELS, cases[0].sequential_ns)
            search_ns = of_kernels.pop(SEARCH)
            gains.append(min(of_kernels.values()) / search_ns)
            over_peers[kernels].append(min(of_kernels[policy] for policy in PEERS if policy in of_kernels) / search_ns)
            if has_both:
                times[kernels].append(cases[0].sequential_ns / min(search_ns, *of_kernels.values()))
                alone[kernels].append(cases[0].sequential_ns / one_stream_ns)
    mean = statistics.geometric_mean
    lines = [
        "Every policy and the search on the same kernels, up to four schedules of each tried; geometric means. *One",
        f"stream*, *streams*: gain over captured kernels on one stream, of {len(times['chosen'])} steps. *The four*:",
        "best of Nimble, Opara, torchsched, IOS. The search starts from policies' schedules; none counts as its own.",
        "",
        "|kernels|one stream|streams|search over the best policy: steps, mean (range)"
        "|over the four (steps with 1.05 or more)|",
        "|---|--:|--:|--:|--:|",
    ]
    for kernels, gains in over_all.items():
        one, several, published = mean(alone[kernels]), mean(times[kernels]), over_peers[kernels]
        lines.append(
            f"|{kernels}|{one:.2f}x|{several:.2f}x|{len(gains)}, {mean(gains):.3f} ({min(gains):.3f} to "
            f"{max(gains):.3f})|{mean(published):.3f} ({_several(published)})|"
        )
    return lines


def _several(ratios: Sequence[float]) -> int:
    """Return how many ratios are 1.05 or more."""
    return sum(ratio >= 1.05 for ratio in ratios)


def row(name: str, cases: Sequence[ResultCase]) -> str:
    """Return one row of statistics, without spaces at its bars, so that bars do not count as words."""
    accuracy = fidelity(cases)
    assert accuracy is not None, name
    covered = "" if accuracy.covered is None else f"{accuracy.covered:.0%}"
    return (
        f"|{name}|{accuracy.schedules}|{accuracy.median:.1%}|{accuracy.p95:.1%}|{accuracy.largest:.1%}"
        f"|{accuracy.bias:+.1%}|{covered}|"
    )


def groups() -> list[str]:
    """Return a row for each group of networks and schedules."""
    lines = [row(name, left_out(*recipes)) for name, recipes in IMAGES.items()]
    lines.append(row(SEARCHED, searched()))
    runs = [*KNOWN.items(), *other_kinds()]
    return [*HEAD, *lines, *(row(name, left_out(recipe)) for name, recipe in runs)]


def other_kinds() -> list[tuple[str, str]]:
    """Return name and recipe of each measured run of other kinds."""
    runs = OTHER_KINDS.items()
    return [(name, recipe) for name, recipe in runs if any(RESULTS.glob(f"{recipe}_h200_[0-9]*[0-9].json"))]


def readme() -> str:
    """Return a line for each group of schedules on several streams."""
    of_name = {
        CONVOLUTIONAL: left_out(*IMAGES[CONVOLUTIONAL]),
        SEARCHED: searched(),
        **{name: left_out(recipe) for name, recipe in (*KNOWN.items(), *other_kinds())},
    }
    lines = []
    for name, cases in of_name.items():
        accuracy = fidelity(cases)
        assert accuracy is not None, name
        steps = len(by_step([case for case in cases if case.streams > 1]))
        lines.append(
            f"- {name[0].upper()}{name[1:]}: median error {100 * accuracy.median:.1f} %, "
            f"95 % of {accuracy.schedules} schedules of {steps} steps within {100 * accuracy.p95:.1f} %."
        )
    known = read_results(newest_results(RESULTS, KNOWN["known networks, all policies"])).cases
    fitted = fidelity(case for case in known if case.fitted)
    assert fitted is not None
    return "\n".join(
        [
            *lines,
            "",
            "Networks that a constant was fitted on are left out: of the known networks with all policies, "
            f"{fitted.schedules} schedules,",
            f"{100 * fitted.largest:.1f} % off at most.",
            "Each set was blind to the rules of its day, the last two to those of today, too.",
        ]
    )


def heading(recipe: str) -> str:
    """Name a recipe of other kinds, and how much of it is measured, if not all."""
    planned = len(read_recipe(ROOT / "validate" / f"{recipe}.toml").case)
    measured = len(by_step(left_out(recipe)))
    return f"`{recipe}`{'' if measured == planned else f', {measured} of {planned} steps'}"


def order() -> list[str]:
    """Return the ranking quality of predictions, for the blind runs."""
    lines = [
        "|run|steps|Kendall tau, mean (least)|regret, mean (largest)|",
        "|---|--:|--:|--:|",
    ]
    for name, recipe in ((CONVOLUTIONAL, "blind_convolutional"), *other_kinds()):
        accuracy = fidelity(left_out(recipe))
        assert accuracy is not None
        lines.append(
            f"|{name}|{len(accuracy.tau)}|{statistics.fmean(accuracy.tau):.2f} ({min(accuracy.tau):.2f})"
            f"|{statistics.fmean(accuracy.regret):.1%} ({max(accuracy.regret):.1%})|"
        )
    return lines


def kinds() -> list[str]:
    """Return a row for each step of the runs of other kinds, under the name of its recipe."""
    lines, notes = [f"|step|{COLUMNS}", RULE], []
    for _, recipe in other_kinds():
        cases = left_out(recipe)
        lines.append(f"|**{heading(recipe)}**{'|' * COLUMNS.count('|')}|")
        lines += [row(f"`{name}`", of_step) for name, of_step in by_step(cases).items()]
        wrong = sum(not case.outputs_equal for case in cases)
        if wrong:
            notes += ["", f"Outputs of {wrong} of {len(cases)} replays of `{recipe}` were outside the tolerance."]
    return [*lines, *notes]


def repeats() -> list[str]:
    """Return how far times of the same schedule differ: between recordings, processes and runs; and the clocks."""
    recordings: list[float] = []
    processes: list[float] = []
    days: list[float] = []
    gpus: list[float] = []
    clocks: Counter[int] = Counter()
    times: dict[object, dict[str, list[int]]] = {}
    sequential: dict[object, dict[str, list[int]]] = {}
    for name, results in read_all_results(RESULTS).items():
        file = RESULTS / f"{name}{SUFFIX}"
        if not file.is_file():
            continue
        in_processes = read_recipe(ROOT / "validate" / f"{results.recipe}.toml").processes > 1
        clocks.update(case.sm_clock_mhz for case in results.cases)
        for case, replayed in zip(results.cases, read_replayed(file), strict=True):
            if case.streams > 1 and case.outputs_equal:
                for first, second in combinations(case.processes, 2):
                    known = {each.gpu_id for each in (first, second)} - {""}
                    group = gpus if len(known) == 2 else days if first.date != second.date else processes
                    slower_ns, faster_ns = sorted((first.measured_ns, second.measured_ns), reverse=True)
                    group.append(slower_ns / faster_ns - 1)
                if in_processes and not case.processes:  # the interval is that of their medians
                    processes.append(case.interval_ns[1] / case.interval_ns[0] - 1)
            if case.streams > 1 and case.fastest_ns and case.outputs_equal and len(case.processes) < 2:
                recordings.append(case.slowest_ns / case.fastest_ns - 1)
            step = (case.trace, replayed.trace_hash)
            schedule = replayed.schedule
            key = (*step, schedule.order, schedule.streams, schedule.variants, schedule.partitions)
            if case.streams > 1 and case.outputs_equal:
                times.setdefault(key, {}).setdefault(name, []).append(case.measured_ns)
            sequential.setdefault(step, {}).setdefault(name, []).append(case.sequential_ns)
    rows = {
        "slowest over fastest recording, one process": recordings,
        "equal schedules of two policies, one process": [
            max(each) / min(each) - 1 for of_run in times.values() for each in of_run.values() if len(each) > 1
        ],
        "one schedule, processes of one run": processes,
        "one schedule, processes of two days": days,
        "one schedule, two H200s, on two days": gpus,
        "equal schedules, other runs": _between(times),
        "sequential graphs, other runs": _between(sequential),
    }
    lines = ["|times of one schedule|number|median|95 % within|largest|", "|---|--:|--:|--:|--:|"]
    for name, differences in rows.items():
        ordered = sorted(differences)
        median, p95 = statistics.median(ordered), quantile(ordered, 0.95)
        lines.append(f"|{name}|{len(ordered)}|{median:.1%}|{p95:.1%}|{ordered[-1]:.1%}|")
    found = ", ".join(f"{mhz:,} MHz at {replays:,}" for mhz, replays in clocks.most_common())
    return [*lines, "", f"SM clocks of replays: {found}."]


def _between(times: Mapping[object, Mapping[str, Sequence[int]]]) -> list[float]:
    """Return the slowest over the fastest run of each, less 1, of those that several runs measured."""
    medians = [[statistics.median(each) for each in of_run.values()] for of_run in times.values() if len(of_run) > 1]
    return [max(each) / min(each) - 1 for each in medians]


def sources() -> list[str]:
    """List the results files behind the tables."""
    recipes = [
        *(recipe for names in IMAGES.values() for recipe in names),
        *SEARCHES,
        *(recipe for _, recipe in other_kinds()),
        *KNOWN.values(),
    ]
    names = (newest_results(RESULTS, recipe).stem for recipe in recipes)
    return ["|sources|", "|---|", *(f"|[{name}](../validate/results/{name}.json)|" for name in names)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check both pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the pages are up to date")
    options = parser.parse_args(arguments)
    parts = {
        ROOT / "README.md": {"accuracy": readme(), "peers": "\n".join(fair())},
        ROOT / "docs" / "accuracy.md": {
            "groups": "\n".join(groups()),
            "order": "\n".join(order()),
            "peers": "\n".join(fair()),
            "kinds": "\n".join(kinds()),
            "repeats": "\n".join(repeats()),
            "sources": "\n".join(sources()),
        },
    }
    stale = 0
    for page, sections in parts.items():
        old = new = page.read_text(encoding="utf-8")
        for name, text in sections.items():
            new = with_section(new, page.name, f"<!-- {name}:begin -->", f"<!-- {name}:end -->", f"\n{text}\n")
        if new != old:
            stale += 1
            if options.check:
                print(f"{page.relative_to(ROOT)} is out of date: run python scripts/make_accuracy_page.py")
            else:
                write_bytes(page, new.encode())
                print(page)
    return int(options.check and stale > 0)


if __name__ == "__main__":
    raise SystemExit(main())
