"""Memory plans that a recipe replayed, stored next to its results, and their new predictions. Needs no GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from gpusim.errors import MeasurementError, PlanError
from gpusim.formats.memory_plan import MemoryPlanDocument
from gpusim.formats.results import Results
from gpusim.io.files import Count, Document, read_document, write_document
from gpusim.memplan.evaluate import MemoryEvaluator
from gpusim.memplan.plan import MemoryPlan
from gpusim.plan.graph import OpGraph
from gpusim.trace.store import read_trace, structure_hash
from gpusim.validation.chosen import hardware_of
from gpusim.validation.replayed import wrong_trace

SUFFIX: Final = ".plans.json.gz"
SCHEMA: Final = "gpusim-replayed-memory/1"


class ReplayedPlan(Document, frozen=True, kw_only=True):
    """A replayed memory plan of the trace with this hash."""

    trace_sha256: str
    budget_bytes: Count
    plan: MemoryPlanDocument
    barriers_first: bool = False
    """Order of its instructions, as in `gpusim.memplan.program.program_of`."""


class ReplayedPlans(Document, frozen=True, kw_only=True):
    """All memory plans of a results file, one per case."""

    schema: Literal["gpusim-replayed-memory/1"]
    plans: tuple[ReplayedPlan, ...]


def plans_path(results: Path) -> Path:
    """Return the path of the memory plans of a results file."""
    return results.with_name(results.name.removesuffix(".json") + SUFFIX)


def read_replayed_plans(path: Path) -> tuple[ReplayedPlan, ...]:
    """Read a file of replayed memory plans. Raises `MeasurementError`."""
    return read_document(path, ReplayedPlans, SCHEMA, MeasurementError).plans


def write_replayed_plans(plans: Sequence[ReplayedPlan], results: Path) -> None:
    """Write the memory plans next to a results file. Raises `OutputError`."""
    write_document(plans_path(results), ReplayedPlans(schema=SCHEMA, plans=tuple(plans)))


def memory_again(results: Path, then: Results, files: Mapping[str, Path]) -> Results:
    """Return `then`, a results file of memory plans, with newly predicted times and peaks.

    `files` are traces by name. Raises `MeasurementError` where the stored plans belong to other cases or cannot run, or
    a trace is missing or has changed.
    """
    plans_file = plans_path(results)
    plans = read_replayed_plans(plans_file)
    if len(plans) != len(then.cases):
        raise MeasurementError(str(results), f"has {len(then.cases)} cases, and {len(plans)} memory plans next to it")
    evaluators: dict[str, MemoryEvaluator] = {}
    keep_all_ns: dict[str, int] = {}
    now = []
    for number, (case, replayed) in enumerate(zip(then.cases, plans, strict=True)):
        document = replayed.plan
        if (document.trace, document.policy, document.predicted_ns) != (case.trace, case.policy, case.predicted_ns):
            raise MeasurementError(str(results), f"{case.trace} {case.policy} does not match its memory plan")
        if case.trace not in evaluators:
            if case.trace not in files:
                raise MeasurementError(str(results), f"there is no trace '{case.trace}' next to it or bundled")
            trace = read_trace(files[case.trace])
            if document.trace_hash != structure_hash(trace):
                raise wrong_trace(results, case.trace, files[case.trace])
            evaluators[case.trace] = MemoryEvaluator(OpGraph.build(trace, hardware_of(trace)))
            keep_all_ns[case.trace] = evaluators[case.trace].keep_all_ns
        evaluator = evaluators[case.trace]
        plan = MemoryPlan.from_document(document, evaluator.graph.trace, str(plans_file))
        try:
            outcome = evaluator.evaluate(plan, barriers_first=replayed.barriers_first)
        except PlanError as cause:
            raise MeasurementError(str(plans_file), str(cause), place=f"$.plans[{number}].plan") from cause
        predicted = msgspec.structs.replace(
            case,
            predicted_ns=outcome.step_ns,
            predicted_sequential_ns=keep_all_ns[case.trace],
            predicted_peak_bytes=outcome.peak_bytes,
        )
        now.append(predicted)
    return msgspec.structs.replace(then, cases=tuple(now))
