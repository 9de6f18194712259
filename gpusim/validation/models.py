"""Which model chooses best: predictions of replayed schedules by the full model and by simpler ones."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.table import Table

from gpusim.analysis.relaxed import DRAM, FRONT_END, GAPS, SMS, relaxed
from gpusim.engine.fast import FastEngine
from gpusim.formats.results import ResultCase
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.policies.ios import one_pool
from gpusim.report.tables import console
from gpusim.validation.again import replayed_schedules
from gpusim.validation.statistics import MIN_SCHEDULES, by_step, counted_replays, kendall_tau, regret

#: How much slower than the fastest measured schedule of a step one may be to count as near it.
NEAR_FRAC: Final = 0.05


def _as_one_pool(graph: OpGraph) -> OpGraph:
    return graph.with_tasks(one_pool(graph.hardware), graph.tasks)


#: Models by name, from the full one to one in which kernels that run together cost each other nothing.
MODELS: Final[dict[str, Callable[[OpGraph], OpGraph]]] = {
    "blocks": lambda graph: graph,
    "one pool of SMs": _as_one_pool,
    "blocks, no contention": lambda graph: relaxed(graph, (GAPS, FRONT_END, SMS, DRAM)),
    "gaps only": lambda graph: relaxed(graph, (GAPS, FRONT_END)),
}


@dataclass(frozen=True)
class Choice:
    """How a model chooses among the schedules of one step that were measured within `NEAR_FRAC` of the fastest."""

    step: str
    model: str
    schedules: int
    tau: float | None
    """Kendall's tau, as in `gpusim.validation.statistics`; None where no two measured times differ."""
    regret: float
    """Measured time of the schedule predicted best, of all of the step, over the fastest, less 1."""


def predicted_by_models(results: Path, traces: Mapping[str, Path] | None = None) -> dict[str, list[ResultCase]]:
    """Return the replays of a results file that count, on captured kernels, with predictions of each model.

    Raises as `gpusim.validation.again.replayed_schedules`.
    """
    engine = FastEngine()
    cases: dict[str, list[ResultCase]] = {name: [] for name in MODELS}
    graphs: dict[tuple[int, str], OpGraph] = {}
    for case, graph, schedule in replayed_schedules(results, traces):
        if not counted_replays([case]) or schedule.has_variants or schedule.partitions:
            continue
        for name, model in MODELS.items():
            changed = graphs.setdefault((id(graph), name), model(graph))
            predicted_ns = engine.run(lower(changed, schedule, memory=False), changed.hardware).makespan_ns
            cases[name].append(msgspec.structs.replace(case, predicted_ns=predicted_ns))
    return cases


def choices(cases_of: Mapping[str, Sequence[ResultCase]]) -> list[Choice]:
    """Return the choice of each model in each step with at least `MIN_SCHEDULES` schedules near the fastest."""
    rows: list[Choice] = []
    for model, cases in cases_of.items():
        for step, of_step in by_step(cases).items():
            least_ns = min(case.measured_ns for case in of_step)
            near = [case for case in of_step if case.measured_ns <= (1 + NEAR_FRAC) * least_ns]
            if len(near) >= MIN_SCHEDULES:
                rows.append(Choice(step, model, len(near), kendall_tau(near), regret(of_step)))
    return sorted(rows, key=lambda choice: (choice.step, list(cases_of).index(choice.model)))


def print_choices(rows: Sequence[Choice]) -> None:
    """Print tau and regret of each model by step, and their means over all steps."""
    table = Table(title=f"schedules within {NEAR_FRAC:.0%} of the fastest measured one of their step")
    table.add_column("step", no_wrap=True)
    table.add_column("model", no_wrap=True)
    for name in ("n", "tau", "regret"):
        table.add_column(name, justify="right")
    for choice in rows:
        tau = "-" if choice.tau is None else f"{choice.tau:.2f}"
        table.add_row(choice.step, choice.model, str(choice.schedules), tau, f"{choice.regret:.1%}")
    table.add_section()
    for model in dict.fromkeys(choice.model for choice in rows):
        of_model = [choice for choice in rows if choice.model == model]
        taus = [choice.tau for choice in of_model if choice.tau is not None]
        tau = f"{statistics.fmean(taus):.2f}" if taus else "-"
        count = str(sum(choice.schedules for choice in of_model))
        table.add_row("mean of all", model, count, tau, f"{statistics.fmean(c.regret for c in of_model):.1%}")
    console().print(table)


def choices_document(rows: Sequence[Choice]) -> list[dict[str, Any]]:
    """Return the document of `gpusim validate RESULTS.json --again --models --json`."""
    return [
        {
            "step": choice.step,
            "model": choice.model,
            "schedules": choice.schedules,
            "tau": choice.tau,
            "regret": choice.regret,
        }
        for choice in rows
    ]
