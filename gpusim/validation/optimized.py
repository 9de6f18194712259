"""Recipes with baselines or ablations: each case optimized and timed with these, in a process of its own.

Rows are added to the newest results file of the recipe, so that the same command resumes an interrupted run: a case
already measured with this code on this GPU is skipped, and one that lacks baselines or ablations is timed with these
only.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Final

import msgspec

from gpusim.errors import GpusimError, RecipeError
from gpusim.formats.hardware import default_hardware
from gpusim.formats.measurement import OutputCheck
from gpusim.formats.recipe import Case, Recipe
from gpusim.formats.results import SCHEMA, Ablation, ProcessTimes, ResultCase, Results, read_all_results
from gpusim.gpu.isolate import alone
from gpusim.io.files import make_folder
from gpusim.validation.recipe import check_recipe_code
from gpusim.validation.tables import write_results
from gpusim.version import code_version

if TYPE_CHECKING:
    from gpusim.gpu.optimize.measure import Asked, Measured

Say = Callable[[str], None]
OPTIMIZE = "optimize"
#: Time limit of one of a case's `further` baselines that a later run adds, in s, where the run has no limit of its own.
FURTHER_LATER_S: Final = 600.0
#: Least time in which a case leaves a row, in s: about that of the quickest one from warm caches.
LEAST_CASE_S: Final = 30.0


def optimize_cases(
    recipe: Recipe,
    cases: Sequence[Case],
    folder: Path,
    command: str,
    say: Say,
    *,
    trust_code: bool = False,
    within_s: float | None = None,
) -> Results:
    """Measure the cases that the results lack; results are written after each, all `within_s` seconds.

    A case that fails, or that the time ends, is reported and left out; where all fail, the first error is raised.
    Raises `TrustError` for a Python file that is not trusted.
    """
    from gpusim.gpu.optimize.ablations import ablate
    from gpusim.gpu.optimize.measure import measure

    check_recipe_code(recipe, recipe.name, trust_code)
    make_folder(folder, "results")
    errors: list[GpusimError] = []
    begin = perf_counter()
    for number, case in enumerate(cases, 1):
        rows = _rows(recipe, case, folder)
        if _is_done(rows, case, recipe):
            say(f"measured before: {case.trace_name}")
            continue
        left_s = None if within_s is None else within_s - (perf_counter() - begin)
        if left_s is not None and left_s < LEAST_CASE_S:
            say(f"no time is left for {case.trace_name}")
            errors.append(RecipeError(recipe.name, f"has no case that can be measured in {within_s:g} s"))
            continue
        row = next((row for row in rows if _is_whole(row, recipe)), None)
        known = {row.ablation for row in rows if row.ablation is not None}
        asked = asked_of(case, recipe, left_s, row, last=number == len(cases), known=known)
        adding = ", ".join((*asked.peers, *asked.further, *asked.ablations))
        say(f"{'optimizing' if row is None else f'adding {adding} to'} {case.trace_name}")
        try:
            alone(ablate if recipe.ablations else measure, asked, Keeper(case, recipe, folder, command, row))
        except GpusimError as cause:
            errors.append(cause)
            ended = within_s is not None and perf_counter() - begin >= within_s
            say(
                f"no time is left for the rest of {case.trace_name}" if ended else f"failed: {case.trace_name}: {cause}"
            )
        for row in _rows(recipe, case, folder):
            say(f"{row.trace}: {in_words(row)}")
    results = _newest(recipe, folder)
    if results is None:
        raise errors[0] if errors else RecipeError(recipe.name, "has no case to measure")
    return results


@dataclass(frozen=True)
class Keeper:
    """Writer of rows into the newest results of a recipe, from any process."""

    case: Case
    recipe: Recipe
    folder: Path
    command: str
    before: ResultCase | None = None
    """Row of an earlier run, to which baselines or ablations are added."""

    def __call__(self, measured: Measured) -> None:
        """Add a row. Raises `RecipeError` where results, or the row of an earlier run, are of another machine."""
        results = _newest(self.recipe, self.folder)
        if results is not None and results.gpu != measured.gpu.name:
            raise RecipeError(self.recipe.name, f"results in '{self.folder}' are of {results.gpu}; give another folder")
        row = row_of(self.case, measured)
        if self.before is not None and row.ablation is None:
            other, what = _difference(self.before, row), "ablations" if self.recipe.ablations else "baselines"
            if other:
                raise RecipeError(self.recipe.name, f"no {what} are added to {row.trace}: {other}")
            row = self.before if self.recipe.ablations else with_baselines(self.before, measured)
        write_results(_with(results, row, self.recipe, measured, self.command), self.folder)


def asked_of(
    case: Case,
    recipe: Recipe,
    within_s: float | None = None,
    before: ResultCase | None = None,
    *,
    last: bool = False,
    known: Collection[Ablation] = (),
) -> Asked:
    """Return the options of a case's measurement; with the row of an earlier run, those of the baselines it lacks.
    Ablations that are `known` are left out.

    Such a baseline, or one of the last case of a run with a time limit, may take all the time that is left: the rest is
    in the results by then, and what a compiler has tuned is in its own cache.
    """
    from gpusim.gpu.optimize.measure import FURTHER_S, Asked

    beside = {} if before is None else before.baselines
    later_s = FURTHER_LATER_S if within_s is None else max(FURTHER_S, within_s - LEAST_CASE_S)

    assert case.spec is not None
    assert case.mode is not None
    assert case.batch is not None
    return Asked(
        spec=case.spec,
        mode=case.mode,
        batch=case.batch,
        dtype=case.dtype,
        memory_format=case.memory_format,
        peers=tuple(peer for peer in recipe.against if peer not in beside),
        further=tuple(peer for peer in case.against if peer not in recipe.against and peer not in beside),
        streams=recipe.streams,
        budget_s=recipe.budget_s,
        seed=recipe.seed,
        within_s=within_s,
        further_s=later_s if before is not None or (last and within_s is not None) else FURTHER_S,
        ablations=tuple(each for each in recipe.ablations if each not in known),
    )


def row_of(case: Case, measured: Measured) -> ResultCase:
    """Return one row of a results file."""
    time = measured.optimized
    checked = OutputCheck(
        equal=True,
        bit_equal=measured.bit_equal,
        sequential_repeats=True,
        worst_error=measured.worst_error,
        sequential_error=0.0,
        tolerance=0.0,
        compared=1,
    )
    gpu = measured.gpu
    process = ProcessTimes(
        measured_ns=time.median_ns,
        sequential_ns=measured.sequential_ns,
        date=datetime.date.today().isoformat(),
        gpu_id=measured.gpu_id,
        gpusim=code_version(),
    )
    return ResultCase(
        trace=case.trace_name,
        network=case.trace_name.split(f"-{case.mode}-b")[0],
        mode=case.mode or "infer",
        batch=case.batch or 1,
        dtype=case.dtype,
        memory_format=case.memory_format,
        frontend=measured.frontend,
        policy=OPTIMIZE,
        ablation=measured.ablation,
        streams=measured.streams,
        predicted_ns=max(1, measured.predicted_ns),
        predicted_interval_ns=measured.predicted_interval_ns,
        measured_ns=time.median_ns,
        interval_ns=(time.lo_ns, time.hi_ns),
        sequential_ns=measured.sequential_ns,
        sequential_interval_ns=(measured.sequential_ns, measured.sequential_ns),
        predicted_sequential_ns=measured.predicted_sequential_ns,
        eager_ns=measured.peers["eager"].median_ns if "eager" in measured.peers else 0,
        outputs_equal=checked.equal,
        bit_equal=checked.bit_equal,
        outputs_sensitive=measured.sensitive,
        worst_error=checked.worst_error,
        sequential_error=checked.sequential_error,
        fitted=case.fitted,
        worth_it=measured.streams > 1,
        bounds_ns={},
        predicted_peak_bytes=0,
        measured_peak_bytes=measured.peak_bytes,
        sequential_peak_bytes=0,
        events=0,
        sm_clock_mhz=gpu.sm_clock_mhz,
        baselines={name: timing.median_ns for name, timing in measured.peers.items()},
        commit=process.gpusim,
        date=process.date,
        versions={"driver": gpu.driver, "cuda": gpu.cuda, "torch": gpu.torch, "cudnn": gpu.cudnn},
        kernels="chosen" if measured.kernels_chosen else "captured",
        baseline_peak_bytes=measured.peer_bytes,
        deviations=measured.deviations,
        optimize_s=measured.optimize_s,
        optimize_stages_s=measured.stages_s,
        compiled_before=measured.compiled_before,
        processes=(process,),
        fast_launches_ns=measured.fast_launches_ns,
    )


def with_baselines(row: ResultCase, measured: Measured) -> ResultCase:
    """Add the baselines of a later run to a row, with the time of the optimized step in turns with each."""
    return msgspec.structs.replace(
        row,
        baselines=row.baselines | {name: timing.median_ns for name, timing in measured.peers.items()},
        beside_ns=row.beside_ns | dict.fromkeys(measured.peers, measured.optimized.median_ns),
        baseline_peak_bytes=row.baseline_peak_bytes | measured.peer_bytes,
        deviations=row.deviations | {name: far for name, far in measured.deviations.items() if name in measured.peers},
    )


def in_words(row: ResultCase) -> str:
    """Summarize a row in a line."""
    best = min((name for name in row.baselines if name != "eager"), key=row.over, default="")
    against = f", {row.over(best):.2f}x over {best}" if best else ""
    without = "" if row.ablation is None else f"{row.ablation}, "
    return (
        f"{without}{row.measured_ns / 1e3:.0f} us a call on {row.streams} streams, kernels of {row.frontend}{against}"
    )


def _newest(recipe: Recipe, folder: Path) -> Results | None:
    runs = [each for each in read_all_results(folder).values() if each.recipe == recipe.name]
    return max(runs, key=lambda each: each.date, default=None)


def _rows(recipe: Recipe, case: Case, folder: Path) -> list[ResultCase]:
    """Return the rows of a case with the current code."""
    results = _newest(recipe, folder)
    return [] if results is None else [row for row in results.cases if _is_of(row, case)]


def _is_of(row: ResultCase, case: Case) -> bool:
    """Whether a row is of this case and the current code."""
    return (row.trace, row.memory_format, row.commit) == (case.trace_name, case.memory_format, code_version())


def _is_whole(row: ResultCase, recipe: Recipe) -> bool:
    """Whether a row is of the step in full, and its times are final: with baselines, its deviations come last."""
    if recipe.ablations:
        return row.ablation is None
    return set(recipe.against) <= set(row.baselines) and OPTIMIZE in row.deviations


def _difference(before: ResultCase, now: ResultCase) -> str:
    """Return what makes times of two runs of a step unlike, in words; empty if nothing is known to."""
    pairs = {name: (before.versions.get(name, "?"), version) for name, version in now.versions.items()}
    pairs["front end"] = (before.frontend, now.frontend)
    pairs["SM clock in MHz"] = (str(before.sm_clock_mhz), str(now.sm_clock_mhz))
    return "; ".join(f"{name} was {then}, is {today}" for name, (then, today) in pairs.items() if then != today)


def _is_done(rows: Sequence[ResultCase], case: Case, recipe: Recipe) -> bool:
    if recipe.ablations:
        return {None, *recipe.ablations} <= {row.ablation for row in rows}
    return any({*recipe.against, *case.against} <= set(row.baselines) for row in rows)


def _with(results: Results | None, row: ResultCase, recipe: Recipe, measured: Measured, command: str) -> Results:
    if results is None:
        return Results(
            schema=SCHEMA,
            recipe=recipe.name,
            gpu=measured.gpu.name,
            date=row.date,
            command=command,
            hardware=default_hardware(measured.gpu.name).label,
            versions=row.versions,
            gpusim=code_version(),
            cases=(row,),
        )
    earlier = tuple(each for each in results.cases if not _is_replaced(each, row))
    return msgspec.structs.replace(results, cases=(*earlier, row))


def _is_replaced(earlier: ResultCase, row: ResultCase) -> bool:
    """Whether a row takes the place of an earlier one: of its step and ablation, or of its step and other code."""
    if (earlier.trace, earlier.memory_format) != (row.trace, row.memory_format):
        return False
    return earlier.ablation == row.ablation or earlier.commit != row.commit
