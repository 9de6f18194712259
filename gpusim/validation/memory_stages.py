"""Memory plans of a recipe in stages: predicted in a file per trace, replayed on another day, in one results file."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

import msgspec

from gpusim.bounds.bounds import bounds
from gpusim.errors import GpusimError, PlanError, RecipeError
from gpusim.formats.measurement import Measurement
from gpusim.formats.memory_plan import MemoryPlanDocument
from gpusim.formats.recipe import Case, Recipe
from gpusim.formats.results import SCHEMA as RESULTS_SCHEMA
from gpusim.formats.results import ResultCase, Results, read_all_results, results_name
from gpusim.formats.trace import Trace
from gpusim.gpu.isolate import alone
from gpusim.io.files import Count, Document, Nanoseconds, make_folder, read_document, write_document
from gpusim.io.packed import is_file
from gpusim.memplan.compare import LEAST_TIME
from gpusim.memplan.evaluate import MemoryEvaluator, Outcome
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.policies.least_time import LeastTime
from gpusim.memplan.policies.registry import MEMORY_POLICIES, RegisteredMemoryPolicy
from gpusim.plan.graph import OpGraph
from gpusim.trace.store import read_trace, trace_sha256
from gpusim.validation.case_work import result_case
from gpusim.validation.chosen import Chosen, hardware_of
from gpusim.validation.memory_again import ReplayedPlan, plans_path, read_replayed_plans, write_replayed_plans
from gpusim.validation.tables import write_results
from gpusim.version import code_version

SCHEMA: Final = "gpusim-memory-predictions/1"
SUFFIX: Final = ".memory.predicted.json.gz"
#: Difference between two measurements of the link that is worth a line, as a share.
OTHER_LINK: Final = 0.04


class PredictedPlan(Document, frozen=True, kw_only=True):
    """A memory plan with its predictions."""

    plan: MemoryPlanDocument
    interval_ns: tuple[Nanoseconds, Nanoseconds]
    exposed_copy_ns: int
    recompute_ns: int
    d2h_bytes: Count
    h2d_bytes: Count
    pinned_bytes: Count
    reserved_bytes: Count
    budget_bytes: Count = 0


class MemoryPredictions(Document, frozen=True, kw_only=True, omit_defaults=False):
    """The memory plans that a recipe replays for one step, predicted before any of them ran."""

    schema: Literal["gpusim-memory-predictions/1"]
    recipe: str
    trace: str
    trace_sha256: str
    code: str
    date: str
    hardware: str
    keep_all_ns: Nanoseconds
    keep_all_peak_bytes: Count
    bounds_ns: dict[str, Nanoseconds]
    plans: tuple[PredictedPlan, ...]


def memory_predictions_path(trace: Path) -> Path:
    """Return the path next to the trace's file: `NAME.memory.predicted.json.gz`."""
    return trace.with_name(trace.name.removesuffix(".gz").removesuffix(".json") + SUFFIX)


def predict_memory(path: Path, recipe: Recipe) -> Path:
    """Predict the recipe's memory plans for a captured trace unless a file has them; returns the file.

    Raises `RecipeError` where existing predictions are of another trace.
    """
    trace, target = read_trace(path), memory_predictions_path(path)
    if is_file(target):
        read_memory_predictions(target, path)
        return target
    hardware = hardware_of(trace)
    evaluator = MemoryEvaluator(OpGraph.build(trace, hardware))
    base = evaluator.evaluate(MemoryPlan())
    made_by = f"gpusim validate, {hardware.label}"
    plans = [_predicted(evaluator, outcome, budget, made_by) for budget, outcome in _outcomes(evaluator, base, recipe)]
    document = MemoryPredictions(
        schema=SCHEMA,
        recipe=recipe.name,
        trace=trace.name,
        trace_sha256=trace_sha256(path),
        code=code_version(),
        date=datetime.date.today().isoformat(),
        hardware=hardware.label,
        keep_all_ns=base.step_ns,
        keep_all_peak_bytes=base.peak_bytes,
        bounds_ns={k.removesuffix("_ns"): v for k, v in bounds(evaluator.graph).document().items()},
        plans=tuple(plans),
    )
    make_folder(target.parent, "predictions")  # the trace may be in a set
    write_document(target, document)
    return target


def _outcomes(evaluator: MemoryEvaluator, base: Outcome, recipe: Recipe) -> Iterator[tuple[int, Outcome]]:
    """Yield each policy's plan, or one plan per budget where the policy takes one.

    With `memory_matched` also our own policy's, with the peak of each of these as its budget.
    """
    setting = Setting(evaluator.graph, evaluator.storages)
    planner = LeastTime(setting, evaluator)
    peaks: dict[int, None] = {}
    for name in recipe.memory_policies:
        for budget, outcome in _of_policy(MEMORY_POLICIES[name], setting, evaluator, base, recipe.memory_budgets):
            peaks[outcome.peak_bytes] = None
            yield budget, outcome
    for peak_bytes in peaks if recipe.memory_matched else ():
        with suppress(PlanError):  # as above
            plan = planner.plan_for(peak_bytes)
            yield peak_bytes, evaluator.evaluate(plan.made(LEAST_TIME))


def _of_policy(
    policy: RegisteredMemoryPolicy, setting: Setting, evaluator: MemoryEvaluator, base: Outcome, shares: Sequence[float]
) -> Iterator[tuple[int, Outcome]]:
    """Yield a policy's plans: one per budget in its reach; else, and where it takes none, its own plan, budget 0."""
    budgets = [round(base.peak_bytes * share) for share in shares] if policy.takes_budget else []
    reached = False
    for budget in budgets:
        try:
            outcome = evaluator.evaluate(policy(replace(setting, budget_bytes=budget)))
        except GpusimError:  # a budget may be below the reach of any plan
            continue
        reached = True
        yield budget, outcome
    if not reached:
        yield 0, evaluator.evaluate(policy(setting))


def _predicted(evaluator: MemoryEvaluator, outcome: Outcome, budget: int, made_by: str) -> PredictedPlan:
    graph = evaluator.graph
    plan = outcome.plan.made(outcome.plan.policy, made_by, outcome.step_ns, outcome.peak_bytes)
    return PredictedPlan(
        plan=plan.to_document(graph.trace),
        interval_ns=plan.interval_ns(graph, outcome.step_ns),
        exposed_copy_ns=outcome.exposed_copy_ns,
        recompute_ns=outcome.recompute_ns,
        d2h_bytes=outcome.d2h_bytes,
        h2d_bytes=outcome.h2d_bytes,
        pinned_bytes=outcome.pinned_bytes,
        reserved_bytes=outcome.use.reserved_bytes,
        budget_bytes=budget,
    )


def read_memory_predictions(path: Path, trace: Path) -> MemoryPredictions:
    """Read the memory predictions of a trace file. Raises `RecipeError`, also where they are of another trace."""
    predictions = read_document(path, MemoryPredictions, SCHEMA, RecipeError)
    if predictions.trace_sha256 != trace_sha256(trace):
        problem = f"predictions of another capture of '{predictions.trace}' than the trace next to them"
        raise RecipeError(str(path), problem, place="$.trace_sha256")
    return predictions


def measure_case(recipe: Recipe, folder: Path, case: Case, path: Path, command: str, trust_code: bool) -> int:
    """Replay the predicted plans of a case that the results in `folder` lack, and return the number of new rows.

    Results are written after each plan; a plan that the host has too little pinned memory for gets no row. Call it in a
    process of its own. Raises `RecipeError` for a trace without
    predictions, and where earlier results are of another GPU.
    """
    from gpusim.gpu.replay.memory_replay import replay_memory

    results = MemoryResults(recipe, folder)
    trace = read_trace(path)
    file = memory_predictions_path(path)
    predictions = read_memory_predictions(file, path)
    missing = results.missing(predictions)

    plans = [MemoryPlan.from_document(each.plan, trace, str(file)) for each in missing]
    new = 0

    def add(number: int, ran: MemoryPlan, measurement: Measurement) -> None:
        nonlocal new
        if ran.offloads == plans[number].offloads:
            results.add(case, trace, predictions, missing[number], measurement, command)
            new += 1

    replay_memory(
        OpGraph.build(trace, hardware_of(trace)),
        plans,
        command=command,
        seed=recipe.seed,
        recordings=recipe.recordings,
        on_plan=add,
        trust_code=trust_code,
    )
    return new


class MemoryResults:
    """Newest results file of a memory recipe in a folder, extended by new rows."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        make_folder(folder, "results")
        self.recipe, self.folder = recipe, folder
        self.results: Results | None = None
        self.rows: list[tuple[ResultCase, ReplayedPlan]] = []
        earlier = {name: each for name, each in read_all_results(folder).items() if each.recipe == recipe.name}
        if earlier:
            name, self.results = max(earlier.items(), key=lambda item: item[1].date)
            plans = {_key(each): each for each in read_replayed_plans(plans_path(folder / f"{name}.json"))}
            # A run that was cut off may have written the plan of a row, and not the row.
            keys = [(row.trace, row.policy, row.memory_budget_bytes, row.predicted_ns) for row in self.results.cases]
            self.rows = [(row, plans[key]) for row, key in zip(self.results.cases, keys, strict=True) if key in plans]

    def missing(self, predictions: MemoryPredictions) -> list[PredictedPlan]:
        """Return the predicted plans of exactly this trace without a row."""
        have = [(plan.trace_sha256, plan.plan) for _, plan in self.rows]
        return [each for each in predictions.plans if (predictions.trace_sha256, each.plan) not in have]

    def add(
        self,
        case: Case,
        trace: Trace,
        predictions: MemoryPredictions,
        predicted: PredictedPlan,
        measurement: Measurement,
        command: str,
    ) -> None:
        """Add a row and write the results. Rows of an earlier capture of this step go.

        Raises `RecipeError` where earlier results are of another GPU.
        """
        gpu = measurement.gpu
        if self.results is not None and self.results.gpu != gpu.name:
            problem = f"results in '{self.folder}' are of {self.results.gpu}, this is {gpu.name}; give another folder"
            raise RecipeError(self.recipe.name, problem)
        today = datetime.date.today().isoformat()
        versions = {"driver": gpu.driver, "cuda": gpu.cuda, "torch": gpu.torch, "cudnn": gpu.cudnn}
        row = msgspec.structs.replace(
            _row(case, trace, predictions, predicted, measurement),
            commit=predictions.code,
            date=today,
            versions=versions,
        )
        replayed = ReplayedPlan(
            trace_sha256=predictions.trace_sha256,
            budget_bytes=predicted.budget_bytes,
            plan=predicted.plan,
            barriers_first=True,
        )
        sha256 = predictions.trace_sha256
        self.rows = [each for each in self.rows if each[0].trace != trace.name or each[1].trace_sha256 == sha256]
        self.rows.append((row, replayed))
        self.results = Results(
            schema=RESULTS_SCHEMA,
            recipe=self.recipe.name,
            gpu=gpu.name,
            date=today if self.results is None else self.results.date,
            command=command,
            hardware=predictions.hardware,
            versions=versions,
            gpusim=code_version(),
            cases=tuple(row for row, _ in self.rows),
        )
        target = self.folder / f"{results_name(self.results)}.json"
        write_replayed_plans([plan for _, plan in self.rows], target)
        write_results(self.results, self.folder)


def _key(replayed: ReplayedPlan) -> tuple[str, str, int, int]:
    """Return what a row has in common with its plan."""
    plan = replayed.plan
    return plan.trace, plan.policy, replayed.budget_bytes, plan.predicted_ns


def _row(
    case: Case, trace: Trace, predictions: MemoryPredictions, predicted: PredictedPlan, measurement: Measurement
) -> ResultCase:
    """Return one row of the results file, with the stored predictions."""
    chosen = Chosen(
        schedules=(),
        peaks=(),
        contenders=(),
        contender_peaks=(),
        worth_it=False,
        bounds_ns=predictions.bounds_ns,
        hardware=predictions.hardware,
        sequential_ns=predictions.keep_all_ns,
        intervals_ns=(),
    )
    held = msgspec.structs.replace(
        measurement,
        predicted_ns=predicted.plan.predicted_ns,
        predicted_interval_ns=predicted.interval_ns,
        predicted_sequential_ns=predictions.keep_all_ns,
    )
    row = result_case(case, trace, chosen, held, predicted.plan.predicted_peak_bytes)
    return msgspec.structs.replace(row, memory_budget_bytes=predicted.budget_bytes)


def measured_or_said(
    recipe: Recipe, folder: Path, cases: Sequence[tuple[Case, Path]], command: str, trust_code: bool
) -> Iterator[str]:
    """Measure the plans of each case that the results lack, and yield a line for each, also for a failed one."""
    for case, path in cases:
        try:
            if not is_file(path):
                raise RecipeError(str(path), "not captured yet: run the stage 'capture' first")
            predictions = read_memory_predictions(memory_predictions_path(path), path)
            missing = len(MemoryResults(recipe, folder).missing(predictions))
            if not missing:
                continue
            new = alone(measure_case, recipe, folder, case, path, command, trust_code)
            yield f"measured {new} memory plans of {path.name}"
            yield from _other_link(MemoryResults(recipe, folder).rows, read_trace(path))
            if new < missing:
                yield f"{missing - new} left out: the host has too little pinned memory for them"
        except GpusimError as cause:
            yield f"failed: {cause}"


def _other_link(rows: Sequence[tuple[ResultCase, ReplayedPlan]], trace: Trace) -> Iterator[str]:
    """Yield a line where the link differed from the capture's: predictions of plans that copy are for the latter."""
    then = None if trace.ground_truth is None else trace.ground_truth.link
    links = [row.link for row, _ in rows if row.trace == trace.name and row.link is not None]
    if then is None or not links:
        return
    now, captured = (each.h2d_bytes_per_ns + each.d2h_bytes_per_ns for each in (links[-1], then))
    if not 1 - OTHER_LINK <= now / captured <= 1 + OTHER_LINK:
        yield (
            f"the link to the host reaches {now / 2:.1f} GB/s a direction, {captured / 2:.1f} when {trace.name} was "
            "captured: capture it again to predict plans that copy"
        )
