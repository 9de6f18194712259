"""What 90 % intervals hold with and without `cache_frac`, the widening of steps that may lose the L2 cache.

    PYTHONPATH=.:scripts python research/prototypes/without_cache_frac.py validate/results/kinds_h200_20261123.json ...
    PYTHONPATH=. python research/prototypes/without_cache_frac.py

All by the predictions of today. With files: the sets that the widths are fitted on, by set and by kind; then networks
that are no part of the fit, GoogLeNet inference in all stored results, and schedules with other kernels. Without files:
what `explore` recommends for each bundled trace on each GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from gpusim.engine.fast import FastEngine
from gpusim.formats.hardware import HardwareModel, Uncertainty, bundled_hardware, load_hardware
from gpusim.formats.results import ResultCase
from gpusim.plan.anchor import anchored_to
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule
from gpusim.rules.anchor import is_as_captured
from gpusim.search.explore import choose, explore
from gpusim.trace.store import bundled_traces, load_trace
from gpusim.validation.again import replayed_schedules
from gpusim.validation.chosen import hardware_of
from gpusim.validation.replayed import SUFFIX

RESULTS = Path("validate/results")
#: Width on the slow side until 2026-11-29 where a step may lose the L2 cache, by whether the GPU's cache is measured.
CACHE_FRAC = {True: 0.06, False: 0.08}
#: The other widths of `hwmodels/h200.json` until then.
BEFORE = Uncertainty(
    sequential_frac=0.006, schedule_frac=0.031, less_known_frac=0.053, saving_frac=0.07, variants_frac=0.071
)
EXPOSED = "googlenet-infer-b1"
#: Runs whose searched schedules set `variants_frac`, the first of a step counts.
SEARCHES = ("search_again", "search_inference", "search_training", "search_training_32", "search_training_large")
EVALUATIONS = 2000
#: Share within, network left out, below which a step has a row.
LEAST = 0.75

Wide = tuple[Uncertainty, bool]
"""Widths, and True with those of `cache_frac`."""


@dataclass(frozen=True)
class Replayed:
    """A replayed schedule on several streams, with its prediction of today."""

    recipe: str
    step: str
    fitted: bool
    other_kernels: bool
    exposed: bool
    less_known: bool
    measured_ns: int
    predicted_ns: int
    sequential_ns: float
    anchored: Replayed | None = None
    """The same, anchored to the sequential graph of its run where that is not as captured."""

    def late(self, wide: Wide) -> float:
        """Return the late end of the interval, in ns."""
        return self.predicted_ns * (1 + self._margins(wide)[1])

    def within(self, wide: Wide) -> bool:
        """Return whether the measured time lies within the interval."""
        return self.predicted_ns * (1 - self._margins(wide)[0]) <= self.measured_ns <= self.late(wide)

    def _margins(self, wide: Wide) -> tuple[float, float]:
        less, more = wide[0].margins(
            self.predicted_ns, self.sequential_ns, 2, other_kernels=self.other_kernels, less_known=self.less_known
        )
        return less, (1 + more) * (1 + (CACHE_FRAC[True] if wide[1] and self.exposed else 0.0)) - 1


def all_replayed() -> Iterator[Replayed]:
    """Yield all replayed schedules of stored results on several streams, without partitions and wrong outputs."""
    for path in sorted(RESULTS.glob(f"*{SUFFIX}")):
        recipe = path.name.removesuffix(SUFFIX)
        graphs: dict[tuple[str, int], OpGraph] = {}
        for case, graph, schedule in replayed_schedules(path.with_name(f"{recipe}.json")):
            if case.streams < 2 or schedule.partitions or not case.outputs_equal:
                continue
            found = predicted(recipe, case, graph, schedule)
            if graph.trace.ground_truth and not is_as_captured(case.predicted_sequential_ns, case.sequential_ns):
                key = case.trace, case.sequential_ns
                if key not in graphs:
                    trace = anchored_to(graph.trace, case.sequential_ns)
                    graphs[key] = OpGraph.build(trace, hardware_of(trace))
                found = dataclasses.replace(found, anchored=predicted(recipe, case, graphs[key], schedule))
            yield found


def predicted(recipe: str, case: ResultCase, graph: OpGraph, schedule: Schedule) -> Replayed:
    """Return a replayed schedule with its prediction of today."""
    return Replayed(
        recipe,
        case.trace,
        case.fitted,
        schedule.has_variants,
        graph.may_lose_cache,
        graph.less_known,
        case.measured_ns,
        FastEngine().run(lower(graph, schedule), graph.hardware).makespan_ns,
        graph.sequential_ns,
    )


def share(cases: Sequence[Replayed], wide: Wide, anchored: bool = False) -> str:
    """Return the share within, as a percentage."""
    counted = [case.anchored or case if anchored else case for case in cases]
    return f"{sum(case.within(wide) for case in counted) / len(counted):.0%}"


def outside_of_the_fit(cases: Sequence[Replayed], today: Uncertainty, runs: Sequence[str]) -> Iterator[str]:
    """Yield the shares within of runs that are no part of the fit: networks without a fitted constant, and GoogLeNet
    inference; before and now, as captured and anchored to the run.
    """
    yield "| schedules | run | number | bias | before | now | bias, anchored | before | now |"
    yield "|---|---|--:|--:|--:|--:|--:|--:|--:|"
    for googlenet, other_kernels in itertools.product((False, True), (False, True)):
        text = f"`{EXPOSED}`" if googlenet else "no fitted constant"
        text += ", chosen kernels" if other_kernels else ""
        kept = [
            case
            for case in cases
            if case.other_kernels == other_kernels
            and (case.step == EXPOSED if googlenet else not case.fitted and (other_kernels or case.recipe not in runs))
        ]
        for name in (*sorted({case.recipe for case in kept}), "all"):
            of_run = [case for case in kept if name in ("all", case.recipe)]
            cells = []
            for anchored in (False, True):
                counted = [case.anchored or case if anchored else case for case in of_run]
                bias = statistics.mean(case.predicted_ns / case.measured_ns - 1 for case in counted)
                before = share(of_run, (BEFORE, True), anchored)
                cells.append(f"{bias:+.1%} | {before} | {share(of_run, (today, False), anchored)}")
            if not any(case.anchored for case in of_run):
                cells[1] = " | | "
            yield f"| {text} | {name} | {len(of_run)} | {' | '.join(cells)} |"


def with_variants(cases: Sequence[Replayed], today: Uncertainty) -> Iterator[str]:
    """Yield what the searched schedules with variants, the newest of each step, take beyond the other widths."""
    newest: dict[str, Replayed] = {}
    for search in SEARCHES:
        for case in cases:
            if case.other_kernels and case.recipe.startswith(f"{search}_h200"):
                newest.setdefault(case.step, case)
    for text, wide in (("before", (BEFORE, True)), ("now", (today, False))):
        without = replace(wide[0], variants_frac=0.0), wide[1]
        late = sorted((case.measured_ns / case.late(without) - 1 for case in newest.values()), reverse=True)
        held = sum(case.measured_ns <= case.late(wide) for case in newest.values())
        largest = ", ".join(f"{frac:.2%}" for frac in late[:3])
        yield (
            f"variants, {text}: {held} of {len(late)} no later than the interval; most beyond the others: {largest}; "
            f"all but one within from {late[1]:.2%}"
        )


def of_stored(cases: Sequence[Replayed], today: Uncertainty) -> Iterator[str]:
    """Yield the steps whose schedule predicted fastest is a gain by one of the two widths alone."""
    steps = {(case.recipe, case.step, case.other_kernels) for case in cases}
    yield f"{len(steps)} steps of runs, captured and chosen kernels apart"
    for step in sorted(steps):
        of_step = [case for case in cases if (case.recipe, case.step, case.other_kernels) == step]
        best = min(of_step, key=lambda case: case.predicted_ns)
        before, now = (best.late(wide) < best.sequential_ns for wide in ((BEFORE, True), (today, False)))
        if before != now:
            yield (
                f"{step[0]} {step[1]}{', chosen kernels' if step[2] else ''}: a gain {'before' if before else 'now'} "
                f"alone, {best.sequential_ns / best.predicted_ns:.3f}x predicted, "
                f"{best.sequential_ns / best.measured_ns:.3f}x measured"
            )


def is_gain(explored_ns: int, sequential_ns: int, more: float) -> bool:
    """Return whether a schedule stays recommended with this late end."""
    return explored_ns * (1 + more) <= sequential_ns


def recommended() -> Iterator[str]:
    """Yield the recommendations of `explore` that differ, and the intervals that changed by more than rounding."""
    count = 0
    for gpu in sorted(bundled_hardware()):
        hardware = load_hardware(gpu)
        for name in bundled_traces():
            graph = OpGraph.build(load_trace(name), hardware)
            explored = explore(graph, evaluations=EVALUATIONS)
            count += 1
            fastest = choose(list(explored.rows), certain(hardware), explored.sequential_ns, graph.less_known)
            uncertainty = BEFORE if hardware.calibrated else hardware.uncertainty
            before, now = (
                widths.margins(
                    fastest.makespan_ns,
                    explored.sequential_ns,
                    fastest.streams,
                    other_kernels=fastest.schedule.has_variants,
                    less_known=graph.less_known,
                )[1]
                for widths in (uncertainty, hardware.uncertainty)
            )
            exposed = graph.may_lose_cache and fastest.streams > 1
            if exposed:
                before = (1 + before) * (1 + CACHE_FRAC[graph.predicts_misses]) - 1
            gains = [is_gain(fastest.makespan_ns, explored.sequential_ns, more) for more in (before, now)]
            if exposed or gains[0] != gains[1]:
                speedup = explored.sequential_ns / fastest.makespan_ns
                yield (
                    f"{gpu} {name}: {fastest.policy}, {fastest.streams} streams, {speedup:.3f}x, at least "
                    f"{speedup / (1 + before):.3f}x before and {speedup / (1 + now):.3f}x now"
                    f"{': recommended now alone' if gains[1] and not gains[0] else ''}"
                    f"{': recommended before alone' if gains[0] and not gains[1] else ''}"
                )
    yield f"{count} traces on GPUs"


def certain(hardware: HardwareModel) -> HardwareModel:
    """Return the model without intervals."""
    return replace(hardware, uncertainty=Uncertainty(sequential_frac=0.0, schedule_frac=0.0))


def fit(files: Sequence[Path], today: Uncertainty) -> Iterator[str]:
    """Yield tables of the shares within of the sets of the fit: before and now, by set and by kind."""
    from interval_forms import exposed_steps, widened
    from set_uncertainty import Case, fitted, left_out, read_cases

    of_set = {file.name.partition("_h200")[0]: read_cases([file]) for file in files}
    exposed = exposed_steps(files)
    for text, base, sets in (
        ("before", BEFORE, {name: widened(each, exposed) for name, each in of_set.items()}),
        ("now", today, of_set),
    ):
        cases = [case for each in sets.values() for case in each]
        widths = fitted(cases, base)
        yield f"{text}, fitted: {widths}"
        within = {case: case.within(widths) for case in cases}
        columns = [within, *(left_out(cases, base, of) for of in (lambda c: c.network, lambda c: c.kind))]

        def line(name: str, chosen: Sequence[Case], columns: list[dict[Case, bool]] = columns) -> str:
            cells = [f"{sum(column[case] for case in chosen) / len(chosen):.0%}" for column in columns]
            return f"| {name} | {len(chosen)} | {' | '.join(cells)} |"

        yield f"| {text} | schedules | within | its network left out | its kind left out |"
        yield "|---|--:|--:|--:|--:|"
        yield line("all", cases)
        yield from (line(f"`{name}`", each) for name, each in sets.items() if each)
        for kind in sorted({case.kind for case in cases}):
            yield line(kind, [case for case in cases if case.kind == kind])
        for step in sorted({case.step for case in cases} - exposed):
            chosen = [case for case in cases if case.step == step]
            if sum(columns[1][case] for case in chosen) / len(chosen) < LEAST:
                yield line(f"`{step}`", chosen)
        for step in sorted(exposed):
            if chosen := [case for case in cases if case.step == step]:
                yield line(f"`{step}`", chosen)
        yield line("all that may lose the cache", [case for case in cases if case.step in exposed])
        width = statistics.median(sum(case.margins(widths)) for case in cases if case.less_known)
        yield f"{text}: median width of steps that are not mostly convolutional {width:.1%}"


def main(*files: str) -> None:
    """Print what changes."""
    if not files:
        for line in recommended():
            print(line, flush=True)
        return
    today = load_hardware("h200").uncertainty
    print("\n".join(fit([Path(file) for file in files], today)))
    cases = list(all_replayed())
    print("\n".join(outside_of_the_fit(cases, today, [Path(file).stem for file in files])))
    print("\n".join(with_variants(cases, today)))
    print("\n".join(of_stored(cases, today)))


if __name__ == "__main__":
    main(*sys.argv[1:])
