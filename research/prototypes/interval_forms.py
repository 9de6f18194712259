"""Forms of the 90 % interval, each fitted without a network, without a kind and on earlier sets alone.

    PYTHONPATH=.:scripts python research/prototypes/interval_forms.py validate/results/kinds_h200_20261123.json ...

All by the rules of today. A form sets the width of steps that are not mostly convolutional; that of the others is
always `scripts/set_uncertainty.py`'s, but for the first row, whose fractions are those of 2026-11-24.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec.structs import replace
from set_uncertainty import COVERED, Case, error_line, fitted, least_frac, read_cases, shares

from gpusim.formats.hardware import Uncertainty
from gpusim.formats.results import newest_results
from gpusim.quantiles import quantile
from gpusim.validation.again import anchored_again, predict_again, replayed_schedules

#: Sets of other kinds, in the order in which they were measured.
LATER = ("kinds", "blind_kinds", "blind_intervals")
#: Fewest steps of a kind for a width of its own, in the form that has one.
OWN = 2
#: By how much further an interval reached on the slow side until 2026-11-29, where a step may lose the L2 cache.
CACHE_FRAC = 0.06
#: Width of one step, by the cases a form is fitted on.
Fit = Callable[[Sequence[Case]], Callable[[Case], Uncertainty]]


@dataclass(frozen=True)
class Widened(Case):
    """A case of a step that may lose the L2 cache, with the interval of such steps until 2026-11-29."""

    def margins(self, uncertainty: Uncertainty) -> tuple[float, float]:
        """Return by which shares of its predicted time it may take less and more."""
        less, more = super().margins(uncertainty)
        return less, (1 + more) * (1 + CACHE_FRAC) - 1


def exposed_steps(files: Iterable[Path]) -> set[str]:
    """Return the steps of results files that may lose the L2 cache."""
    return {case.trace for file in files for case, graph, _ in replayed_schedules(file) if graph.may_lose_cache}


def widened(cases: Sequence[Case], exposed: Collection[str]) -> list[Case]:
    """Return the cases, those of exposed steps widened."""
    return [Widened(**vars(case)) if case.step in exposed else case for case in cases]


def known(cases: Sequence[Case]) -> Uncertainty:
    """Return the fractions of mostly convolutional steps alone."""
    base = Uncertainty(sequential_frac=0.0, schedule_frac=0.0)
    return fitted([case for case in cases if not case.less_known], base)


def before(_: Sequence[Case]) -> Callable[[Case], Uncertainty]:
    """Return the fractions of 2026-11-24."""
    base = Uncertainty(sequential_frac=0.0, schedule_frac=0.031, saving_frac=0.367)
    return lambda case: base


def of_kinds(cases: Sequence[Case]) -> Callable[[Case], Uncertainty]:
    """Return the form of 2026-11-24 fitted anew: all kinds weigh the same, and one more kind counts as outside."""
    base = known(cases)
    others = [case for case in cases if case.less_known]
    steps = {kind: {case.step for case in others if case.kind == kind} for kind in {case.kind for case in others}}
    count = sum(map(len, steps.values()))
    weights = [
        weight * count / len(steps[case.kind]) / len(steps) for weight, case in zip(shares(others), others, strict=True)
    ]
    needed = min(1.0, COVERED * (len(steps) + 1) / len(steps))
    for thousandths in range(1001):
        wider = replace(base, saving_frac=thousandths / 1000)
        inside = sum(weight for weight, case in zip(weights, others, strict=True) if case.within(wider))
        if inside >= needed - 1e-9:
            break
    return lambda case: wider


def one(cases: Sequence[Case], field: str) -> Callable[[Case], Uncertainty]:
    """Return one fraction of the time or of the saving, by steps."""
    base = known(cases)
    others = [case for case in cases if case.less_known]
    wider = replace(base, **{field: least_frac(others, lambda case, f: case.within(replace(base, **{field: f})))})
    return lambda case: wider


def own(cases: Sequence[Case]) -> Callable[[Case], Uncertainty]:
    """Return the 90 % quantile of a kind's absolute errors if it has enough steps, else one width by steps."""
    shared = one(cases, "less_known_frac")(cases[0])
    widths: dict[str, Uncertainty] = {}
    for kind in {case.kind for case in cases}:
        of_kind = [case for case in cases if case.kind == kind and case.less_known]
        if len({case.step for case in of_kind}) >= OWN:
            frac = quantile(sorted(case.error_frac for case in of_kind), COVERED)
            widths[kind] = replace(shared, less_known_frac=frac)
    return lambda case: widths.get(case.kind, shared)


def line(cases: Sequence[Case]) -> Callable[[Case], Uncertainty]:
    """Return the form of `scripts/set_uncertainty.py`."""
    wider = fitted(cases, known(cases))
    return lambda case: wider


#: Fit of each form, and whether steps that may lose the L2 cache are widened.
FORMS: dict[str, tuple[Fit, bool]] = {
    "2026-11-24, as set then": (before, True),
    "2026-11-24, fitted today": (of_kinds, True),
    "share of the saving, by steps": (partial(one, field="saving_frac"), True),
    "share of the saving, by steps, no `cache_frac`": (partial(one, field="saving_frac"), False),
    "share of the time, by steps": (partial(one, field="less_known_frac"), True),
    "share of the time, by steps, no `cache_frac`": (partial(one, field="less_known_frac"), False),
    "own width of a kind with two steps": (own, True),
    "own width of a kind with two steps, no `cache_frac`": (own, False),
    "line of the saving, by steps": (line, True),
    "line of the saving, by steps, no `cache_frac`": (line, False),
}


def share(within: dict[Case, bool], cases: Sequence[Case]) -> float:
    """Return the share of these cases that are within."""
    return sum(within[case] for case in cases) / len(cases)


def left_out(fit: Fit, cases: Sequence[Case], group: Callable[[Case], str]) -> dict[Case, bool]:
    """Return whether each case is within the interval fitted without its group."""
    found: dict[Case, bool] = {}
    for name in {group(case) for case in cases}:
        width = fit([case for case in cases if group(case) != name])
        found |= {case: case.within(width(case)) for case in cases if group(case) == name}
    return found


def least(within: dict[Case, bool], cases: Sequence[Case]) -> str:
    """Return the kind with the smallest share within, and that share."""
    of = {kind: share(within, [c for c in cases if c.kind == kind]) for kind in {case.kind for case in cases}}
    kind = min(sorted(of), key=of.__getitem__)
    return f"{of[kind]:.0%} ({kind})"


def widths(cases: Sequence[Case], width: Callable[[Case], Uncertainty]) -> Iterator[float]:
    """Yield the width of the interval of each case of a less known step, as a share of the predicted time."""
    for case in cases:
        if case.less_known:
            yield sum(case.margins(width(case)))


def is_gain(case: Case, uncertainty: Uncertainty) -> bool:
    """Return whether the interval of the speed-up excludes none."""
    _, more = case.margins(uncertainty)
    return case.predicted_ns * (1 + more) < case.sequential_ns


def near_the_best() -> Iterator[str]:
    """Yield the share within of each step of `neighbours`, which is no part of any fit, by today's hardware model.

    Anchored to the sequential graph of the same run, which was in another state than that of the capture.
    """
    file = newest_results(Path("validate/results"), "neighbours")
    anchored = anchored_again(file)
    held: dict[str, list[bool]] = {}
    for number, case in enumerate(predict_again(file)[1].cases):
        if case.streams > 1 and case.outputs_equal and not case.fitted:
            low, high = anchored.get(number, case).predicted_interval_ns
            held.setdefault(case.trace, []).append(low <= case.measured_ns <= high)
    held["all"] = [each for of_step in held.values() for each in of_step]
    for step, within in held.items():
        yield f"near the best, {step}: {sum(within) / len(within):.0%} of {len(within)} within"


def row(name: str, fit: Fit, of_set: dict[str, list[Case]]) -> str:
    """Return the row of a form."""
    cases = [case for each in of_set.values() for case in each]
    others = [case for set_name in LATER for case in of_set[set_name]]
    network = left_out(fit, cases, lambda case: case.network)
    kind = left_out(fit, cases, lambda case: case.kind)
    ahead: list[str] = []
    for number, later in enumerate(LATER):
        width = fit([case for each, of_one in of_set.items() if each not in LATER[number:] for case in of_one])
        ahead.append(f"{sum(case.within(width(case)) for case in of_set[later]) / len(of_set[later]):.0%}")
    return (
        f"| {name} | {statistics.median(widths(cases, fit(cases))):.1%} | {share(network, cases):.0%} "
        f"| {share(network, others):.0%} | {least(network, cases)} | {least(kind, cases)} | {', '.join(ahead)} |"
    )


def main(*files: str) -> None:
    """Print a table: a row for each form."""
    of_set = {Path(file).name.partition("_h200")[0]: read_cases([Path(file)]) for file in files}
    exposed = exposed_steps(map(Path, files))
    wider_of_set = {name: widened(each, exposed) for name, each in of_set.items()}
    cases = [case for each in wider_of_set.values() for case in each]
    print(f"{len(cases)} schedules, {sum(len(of_set[name]) for name in LATER)} of {', '.join(LATER)}")
    print("| form | median width | all | other kinds | least kind | its kind left out | on earlier sets |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for name, (fit, wide) in FORMS.items():
        print(row(name, fit, wider_of_set if wide else of_set))
    print(f"the form of 2026-11-24, fitted today: {of_kinds(cases)(cases[0]).saving_frac:.1%} of the saving")
    old, new = before(cases)(cases[0]), line(cases)(cases[0])
    for name in LATER:
        print(f"{name}: {share({c: c.within(new) for c in cases}, wider_of_set[name]):.0%} within, fitted on all")
    within = left_out(line, cases, lambda case: case.network)
    for step in sorted({case.step for case in cases}):
        if (held := share(within, of_step := [case for case in cases if case.step == step])) < 0.75:
            print(f"{step}: {held:.0%} of {len(of_step)} within, its network left out")
        best = min((case for case in cases if case.step == step), key=lambda case: case.predicted_ns)
        if (then := is_gain(best, old)) != is_gain(best, new):
            print(
                f"{step}: a gain {'before' if then else 'now'} alone, {best.sequential_ns / best.predicted_ns:.2f}x "
                f"predicted, {best.sequential_ns / best.measured_ns:.2f}x measured"
            )
    print("\n".join(near_the_best()))
    for text, some in (("less known", True), ("mostly convolutional", False)):
        chosen = [case for case in cases if case.less_known == some]
        start, rise = error_line(chosen)
        print(f"{text}: {len(chosen)} schedules of {len({c.step for c in chosen})} steps, {start:.2%} + {rise:.2%}")


if __name__ == "__main__":
    main(*sys.argv[1:])
