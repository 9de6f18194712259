"""Comparison of memory policies for one step: memory, time, and the Pareto front."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from gpusim.arguments import file_path
from gpusim.errors import PlanError
from gpusim.memplan.batches import largest_batch
from gpusim.memplan.evaluate import MemoryEvaluator, Outcome
from gpusim.memplan.lower_bound import LowerBound
from gpusim.memplan.pinned import within_pinned
from gpusim.memplan.plan import MemoryPlan, write_memory_plan
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.policies.least_time import LeastTime
from gpusim.memplan.policies.registry import MEMORY_POLICIES, memory_policy_by_name
from gpusim.memplan.shortfall import shortfall
from gpusim.memplan.snapshot import write_snapshot
from gpusim.memplan.storages import CATEGORIES, Storages
from gpusim.notebook import ShortRepr, html_table, short_name, short_repr
from gpusim.plan.graph import OpGraph
from gpusim.units import format_bytes, format_bytes_up, format_ns

KEEP_ALL, LEAST_TIME = "keep_all", "least_time"
#: Budgets of our own policy for the front, as fractions between the least peak of any policy and keeping all. The first
#: shows that the least peak need not cost what a policy pays that moves all.
FRONT_SHARES = (0.0, 0.1, 0.25, 0.4, 0.55, 0.7, 0.85)
#: Peaks for which lower bounds are given, as shares of that of keeping all.
BOUND_SHARES = tuple(share / 20 for share in range(5, 21))


@dataclass(frozen=True, repr=False)
class PolicyRow(ShortRepr):
    """One policy's plan, or the reason for none."""

    policy: str
    source: str
    outcome: Outcome | None
    problem: str = ""
    budget_bytes: int = 0
    """Budget that the plan was made for; 0 for none."""
    kept_for_pinned: int = 0
    """Number of storages that stay on the GPU because pinned memory has no room."""


@dataclass(frozen=True, repr=False)
class MemoryComparison:
    """Every memory policy of a step on one GPU."""

    graph: OpGraph
    storages: Storages
    rows: tuple[PolicyRow, ...]
    """Rows in the order of the registry."""
    more: tuple[PolicyRow, ...] = ()
    """Our own policy at other budgets, for the front."""
    budget_bytes: int | None = None
    pinned_bytes: int | None = None
    shortfall: str = ""
    """Reason why no plan keeps the budget; empty where one does."""

    @property
    def capacity_bytes(self) -> int:
        """Memory of the GPU, in bytes."""
        return self.graph.hardware.memory.dram_bytes

    @cached_property
    def keep_all(self) -> Outcome:
        """Outcome of the step that keeps all."""
        outcome = self.row(KEEP_ALL).outcome
        assert outcome is not None
        return outcome

    def row(self, policy: str) -> PolicyRow:
        """Return the row of a policy. Raises `UnknownNameError` for an unknown one."""
        for each in self.rows:
            if each.policy == policy:
                return each
        memory_policy_by_name(policy)
        raise PlanError(f"memory policy '{policy}' was not asked for")

    @property
    def without_plan(self) -> dict[str, list[str]]:
        """Names of the policies without a plan, by the reason."""
        policies: dict[str, list[str]] = {}
        for row in self.rows:
            if row.outcome is None:
                policies.setdefault(row.problem.removeprefix(f"{row.policy}: "), []).append(row.policy)
        return policies

    def plan(self, policy: str = LEAST_TIME) -> MemoryPlan:
        """Return the plan of a policy, with its predictions. Raises `PlanError` as `save` does."""
        return self._chosen(policy).plan

    def save(self, path: str | Path, policy: str | None = None) -> None:
        """Write the plan of a policy, by default the fastest that fits, as JSON.

        Raises `OutputError`, and `PlanError` for a policy without a plan or with one that exceeds the budget.
        """
        write_memory_plan(self._chosen(policy).plan, self.graph.trace, file_path("path", path))

    def save_snapshot(self, path: str | Path, policy: str | None = None) -> None:
        """Write a plan's memory over time as a snapshot for PyTorch's memory viewer. Raises as `save` does."""
        outcome = self._chosen(policy)
        storages = MemoryEvaluator(self.graph, storages=self.storages).choosing(outcome.plan).storages
        write_snapshot(storages, outcome, file_path("path", path))

    def _chosen(self, policy: str | None) -> Outcome:
        """Return the outcome of a policy, if it keeps the budget, or of the fastest plan that fits."""
        if policy is None and self.best is None:
            raise PlanError("no plan fits")
        row = self.best if policy is None else self.row(policy)
        assert row is not None
        if row.outcome is None:
            raise PlanError(row.problem)
        if self.budget_bytes is not None and not self.fits(row.outcome):
            needed, budget = format_bytes_up(row.outcome.peak_bytes), format_bytes(self.budget_bytes)
            raise PlanError(f"{row.policy}: its plan takes {needed}, more than the budget of {budget}")
        return row.outcome

    @property
    def workspaces_known(self) -> bool:
        """Whether the trace has the workspaces of its ops; otherwise peaks leave them out."""
        return any(self.storages.workspace_bytes)

    @property
    def limit_bytes(self) -> int:
        """The budget, or without one the GPU's memory, in bytes."""
        return self.capacity_bytes if self.budget_bytes is None else self.budget_bytes

    def needed_bytes(self, outcome: Outcome) -> int:
        """Return what a plan needs of the limit: a budget is for what is allocated, a GPU holds what is reserved."""
        peak_bytes = outcome.peak_bytes
        return peak_bytes if self.budget_bytes is not None else max(peak_bytes, outcome.use.reserved_bytes)

    def fits(self, outcome: Outcome) -> bool:
        """Whether a plan keeps the budget, or without a budget, the GPU's memory."""
        return self.needed_bytes(outcome) <= self.limit_bytes

    @cached_property
    def lower_bound(self) -> LowerBound:
        """Lower bounds on the time of any plan of the captured kernels, by peak memory."""
        return LowerBound(MemoryEvaluator(self.graph))

    def bound_ns(self, outcome: Outcome) -> int | None:
        """Return the least time of any plan of this peak on one stream, in ns; None for several streams, another order
        of ops or variants, for which the bound may not hold.
        """
        holds = self.lower_bound.holds_for(outcome.plan)
        return self.lower_bound.step_ns(outcome.peak_bytes) if holds else None

    @cached_property
    def bounds(self) -> tuple[tuple[int, int | None], ...]:
        """Peaks up to that of keeping all, in bytes, each with the least time in ns of any plan of the captured kernels
        on one stream; None where no such plan has that peak.
        """
        most = self.keep_all.peak_bytes
        peaks = [round(share * most) for share in BOUND_SHARES]
        return tuple((peak, self.lower_bound.step_ns(peak)) for peak in peaks)

    @cached_property
    def best(self) -> PolicyRow | None:
        """The fastest plan that fits."""
        fitting = [row for row in (*self.rows, *self.more) if row.outcome is not None and self.fits(row.outcome)]
        return min(fitting, key=lambda row: (_outcome(row).step_ns, _outcome(row).peak_bytes), default=None)

    @cached_property
    def front(self) -> tuple[PolicyRow, ...]:
        """Plans that no other beats in both peak and time, by ascending peak."""
        planned = [row for row in (*self.rows, *self.more) if row.outcome is not None]
        front: list[PolicyRow] = []
        fastest = 1 << 62
        for row in sorted(planned, key=lambda row: (_outcome(row).peak_bytes, _outcome(row).step_ns)):
            if _outcome(row).step_ns < fastest:
                fastest = _outcome(row).step_ns
                front.append(row)
        return tuple(front)

    def largest_batch(self, outcome: Outcome) -> int:
        """Estimate the largest batch with which a plan of this kind fits the GPU or the budget; 0 where none does."""
        allocated = outcome.use.peak.allocated_bytes / max(self.needed_bytes(outcome), 1)
        return largest_batch(self.storages, outcome, int(self.limit_bytes * allocated))

    def peak_text(self, outcome: Outcome) -> str:
        """Describe the place of a peak: op, layer and phase."""
        peak = outcome.use.peak
        if peak.op < 0:
            return "between two ops"
        op = self.graph.trace.ops[peak.op]
        return f"op '{op.name}'" + (f" of layer '{op.layer}'" if op.layer else "") + f", {op.phase}"

    def __repr__(self) -> str:
        best = "none fits" if self.best is None else f"{self.best.policy} {format_ns(_outcome(self.best).step_ns)}"
        where = f"{short_name(self.graph.trace.name)} on {short_name(self.graph.hardware.label)}"
        return short_repr("MemoryComparison", f"{where}: {len(self.rows)} policies, {best}")

    def _repr_html_(self) -> str:
        rows = [
            (row.policy, "-", "-", row.problem)
            if row.outcome is None
            else (row.policy, format_bytes(row.outcome.peak_bytes), format_ns(row.outcome.step_ns), "")
            for row in self.rows
        ]
        return html_table(f"Memory of {self.graph.trace.name}", ("policy", "peak", "step", ""), rows)


def _outcome(row: PolicyRow) -> Outcome:
    assert row.outcome is not None
    return row.outcome


def compare_policies(
    graph: OpGraph,
    *,
    policies: Collection[str] | None = None,
    budget_bytes: int | None = None,
    pinned_bytes: int | None = None,
    synchronous: bool | None = None,
    report: Callable[[str, float, int], None] = lambda *_: None,
) -> MemoryComparison:
    """Plan and predict memory policies of a step: the named ones, or all with the front.

    `synchronous` overrides how published policies wait for copies. Raises `UnknownNameError` for an unknown policy, and
    `PlanError` for a trace without tensors, or one that cannot run as recorded.
    """
    trace = graph.trace
    if not trace.tensors:
        raise PlanError(f"'{trace.name}' has no tensors: memory can be planned for captured steps only")
    names = list(MEMORY_POLICIES) if policies is None else [KEEP_ALL, *policies]
    chosen = [memory_policy_by_name(name) for name in dict.fromkeys(names)]
    evaluator = MemoryEvaluator(graph)
    setting = Setting(graph, evaluator.storages, budget_bytes, pinned_bytes, synchronous)
    planner = LeastTime(setting, evaluator)
    steps = len(chosen) + (len(FRONT_SHARES) if policies is None else 0)
    rows: list[PolicyRow] = []
    for number, policy in enumerate(chosen):
        report(policy.name, number / steps, 0)
        rows.append(_row(evaluator, setting, policy.name, planner))
        if policy.name == KEEP_ALL and rows[-1].outcome is None:  # a file may have results that no op makes
            raise PlanError(f"the step cannot run as recorded: {rows[-1].problem.removeprefix('memory plan: ')}")
    more = []
    if policies is None:
        for number, budget in enumerate(_front_budgets(rows)):
            report("front", (len(chosen) + number) / steps, 0)
            more.append(_row(evaluator, replace(setting, budget_bytes=budget), LEAST_TIME, planner, quick=True))
    comparison = MemoryComparison(graph, evaluator.storages, tuple(rows), tuple(more), budget_bytes, pinned_bytes)
    if budget_bytes is None or comparison.best is not None or planner.smallest.peak_bytes <= budget_bytes:
        return comparison
    reached = [(row.outcome.use, row.outcome.plan) for row in rows if row.outcome is not None]
    use, plan = min(
        [(planner.smallest_use, planner.smallest.plan), *reached], key=lambda each: each[0].peak.allocated_bytes
    )
    storages = evaluator.choosing(plan).storages
    return replace(comparison, shortfall=shortfall(storages, use, plan.order, budget_bytes, pinned_bytes=pinned_bytes))


def _row(
    evaluator: MemoryEvaluator, setting: Setting, name: str, planner: LeastTime, *, quick: bool = False
) -> PolicyRow:
    policy = MEMORY_POLICIES[name]
    budget = (setting.budget_bytes or 0) if policy.takes_budget else 0
    try:
        plan = planner.plan_for(setting.budget_bytes, quick=quick) if name == LEAST_TIME else policy(setting)
        plan, kept = within_pinned(setting.storages, plan, setting.pinned_bytes)
        outcome = evaluator.evaluate(plan)
    except PlanError as cause:
        return PolicyRow(name, policy.source, None, str(cause), budget)
    made_by = f"gpusim, {evaluator.graph.hardware.label}"
    plan = plan.made(name, made_by, outcome.step_ns, outcome.peak_bytes, evaluator.trace_hash)
    return PolicyRow(name, policy.source, replace(outcome, plan=plan), "", budget, kept)


def _front_budgets(rows: Sequence[PolicyRow]) -> list[int]:
    """Return budgets between the least peak of any policy and that of keeping all, both with the captured kernels."""
    outcomes = {row.policy: row.outcome for row in rows if row.outcome is not None}
    peaks = {name: each.peak_bytes for name, each in outcomes.items() if not each.plan.has_variants}
    low, high = min(peaks.values()), peaks[KEEP_ALL]
    return sorted({round(low + share * (high - low)) for share in FRONT_SHARES}) if low < high else []


def category_bytes(outcome: Outcome) -> dict[str, int]:
    """Return the bytes at the peak by category, in the order of `CATEGORIES`, without empty ones."""
    by_category = outcome.use.peak.by_category
    return {category: by_category[category] for category in CATEGORIES if by_category.get(category)}
