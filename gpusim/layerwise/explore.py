"""The whole exploration: layers, costs, fixed plans, the search, and each plan on an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from gpusim.defaults import DEFAULT_BATCH_NORM, DEFAULT_ENGINE, BatchNorm
from gpusim.formats.parallel_plan import ParallelPlan
from gpusim.formats.topology import Topology, check_collective_sms, check_gpus
from gpusim.layerwise.communication import Basis, basis, members
from gpusim.layerwise.compute import Times, TraceTimes
from gpusim.layerwise.configs import Config
from gpusim.layerwise.costs import LayerCost, Problem, layer_cost, layer_memory, plan_bytes, tables
from gpusim.layerwise.fixed_plans import FIXED_PLANS, SEARCHED, Choice
from gpusim.layerwise.from_trace import layers_of
from gpusim.layerwise.layers import BATCH
from gpusim.layerwise.makespan import Makespan, SimulatedPlan, simulate_plan
from gpusim.layerwise.plans import PlanReader, to_document
from gpusim.layerwise.roles import roles_of
from gpusim.layerwise.search import Searched, additive_ns, search
from gpusim.notebook import ShortRepr, html_table, short_name, short_repr
from gpusim.step import Step
from gpusim.text import short_value
from gpusim.units import counted, format_bytes, format_ns

Objective = Literal["simulated", "additive"]

#: Plans of the search that are simulated: at least, at most, and layers of all of them together, which take the time.
BEST_PLANS: Final = (4, 64)
SIMULATED_LAYERS: Final = 1024
#: Most further plans that combine two of them.
MIXED_PLANS: Final = 12


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One layer in one plan."""

    name: str
    kind: str
    output: tuple[int, int, int, int]
    """Extents for the batch of all GPUs."""
    config: Config
    cost: LayerCost
    transfer_ns: float
    """Bytes of its inputs moved in both directions."""
    memory_bytes: int
    """On GPU 0."""


@dataclass(frozen=True, slots=True, repr=False)
class PlanResult(ShortRepr):
    """A plan with its times."""

    name: str
    """`data`, `model`, `owt`, `layer`, or the name of a given plan."""
    choice: Choice
    additive_ns: float
    """Sum of the costs of layers and edges, without overlap."""
    makespan: Makespan
    """Simulated time on the engine."""
    compute_ns: float
    """Parts of the sum."""
    transfer_ns: float
    sync_ns: float
    transfer_bytes: int
    """Bytes over all links in a step."""
    sync_bytes: int
    memory_bytes: int
    """On GPU 0."""
    error_ns: float
    """Estimated relative error of the computation, from those of its shares."""
    roles: int
    all_roles: bool

    @property
    def step_ns(self) -> float:
        """Simulated time of a step."""
        return self.makespan.step_ns

    @property
    def bytes(self) -> int:
        """Bytes over all links in a step."""
        return self.transfer_bytes + self.sync_bytes


@dataclass(frozen=True, repr=False)
class Parallel:
    """Plans of one step on several GPUs, the layer-wise plan last."""

    problem: Problem
    plans: tuple[PlanResult, ...]
    searched: Searched
    """Result of the search by sum of costs."""
    communication: Basis
    """Source of the times of collectives: the weakest among those that plans use."""
    notes: tuple[str, ...]

    @property
    def best(self) -> PlanResult:
        """The layer-wise plan."""
        return self.plan(SEARCHED)

    def plan(self, name: str) -> PlanResult:
        """Return a plan by its name."""
        return next(plan for plan in self.plans if plan.name == name)

    @property
    def gpus(self) -> int:
        return self.problem.gpus

    @property
    def name(self) -> str:
        return self.problem.graph.name

    def rows(self, name: str = SEARCHED) -> tuple[LayerRow, ...]:
        """Return the layers of a plan with their costs."""
        return layer_rows(self.problem, self.plan(name).choice)

    def document(self, name: str = SEARCHED) -> ParallelPlan:
        """Return a plan as a document."""
        return to_document(self.problem.graph, self.gpus, self.plan(name).choice, name)

    def timeline(self, name: str = SEARCHED, engine: str = DEFAULT_ENGINE) -> SimulatedPlan:
        """Simulate a plan's tasks on an engine."""
        return simulate_plan(self.problem, self.plan(name).choice, engine)

    def __repr__(self) -> str:
        best, data = self.best, self.plan("data")
        text = f"{short_name(self.name)} on {counted(self.gpus, 'GPU')}: {format_ns(best.step_ns)}"
        return short_repr("Parallel", f"{text}, {data.step_ns / best.step_ns:.2f}x over data parallelism")

    def _repr_html_(self) -> str:
        rows = [
            (plan.name, format_ns(plan.step_ns), format_ns(plan.additive_ns), format_bytes(plan.bytes))
            for plan in self.plans
        ]
        return html_table(
            f"{self.name} on {counted(self.gpus, 'GPU')}", ("plan", "step", "sum of costs", "moved"), rows
        )


def explore_plans(
    step: Step,
    gpus: int,
    topology: Topology,
    *,
    topology_file: str = "",
    times: Times | None = None,
    batch_norm: BatchNorm = DEFAULT_BATCH_NORM,
    objective: Objective = "simulated",
    memory_limit_bytes: int | None = None,
    given: Mapping[str, PlanReader] | None = None,
    report: Callable[[str, float], None] = lambda stage, share: None,
) -> Parallel:
    """Compare plans of a captured step, whose batch is that of one GPU.

    `given` has further plans, each a function of the layers of the whole batch. Raises `TopologyError`, `TraceError`,
    `OptionError`.
    """
    check_gpus(topology, gpus, topology_file)
    check_collective_sms(topology, step.graph.hardware, topology_file)
    report("layers", 0.0)
    graph = layers_of(step.trace, step.file)
    problem = Problem(
        graph.for_gpus(gpus), gpus, topology, times or TraceTimes(step.graph, graph), step.graph.hardware, batch_norm
    )
    explored = explore_problem(
        problem, objective=objective, memory_limit_bytes=memory_limit_bytes, given=given, report=report
    )
    if topology.hardware == step.hardware.name:
        return explored
    links, of = short_value(topology.name), short_value(topology.hardware)
    note = f"topology {links} is of {of} GPUs; computation is that of {step.hardware.name}"
    return replace(explored, notes=(*explored.notes, note))


def explore_problem(
    problem: Problem,
    *,
    objective: Objective = "simulated",
    memory_limit_bytes: int | None = None,
    given: Mapping[str, PlanReader] | None = None,
    report: Callable[[str, float], None] = lambda stage, share: None,
) -> Parallel:
    """Compare plans for a given layer graph."""
    fixed = {name: plan(problem.graph, problem.gpus) for name, plan in FIXED_PLANS.items()}
    read = {name: reader(problem.graph) for name, reader in (given or {}).items()}
    fixed |= {name: plan.choice for name, plan in read.items()}
    report("search", 0.1)
    least, most = BEST_PLANS
    count = max(least, min(most, SIMULATED_LAYERS // max(1, len(problem.graph))))
    searched = search(problem, count=count, memory_limit_bytes=memory_limit_bytes)
    known: dict[Choice, Makespan] = {}

    def simulated_ns(choice: Choice) -> float:
        if choice not in known:
            known[choice] = simulate_plan(problem, choice).makespan
        return known[choice].step_ns

    def fits(choice: Choice) -> bool:
        return memory_limit_bytes is None or _memory(problem, choice) <= memory_limit_bytes

    best = searched.choice
    if objective == "simulated":
        others = [*(choice for _, choice in searched.ranked), *fixed.values()]
        candidates = list(dict.fromkeys([searched.choice, *filter(fits, others)]))
        for number, choice in enumerate(candidates):
            report("simulate", 0.3 + 0.4 * number / len(candidates))
            simulated_ns(choice)
        best = min(candidates, key=simulated_ns)
        best = _mixed(best, candidates, simulated_ns, fits)
    report("simulate", 0.8)
    results = []
    for name, choice in [*fixed.items(), (SEARCHED, best)]:
        simulated_ns(choice)
        results.append(_result(problem, name, choice, known[choice]))
    notes = [*problem.graph.notes, *(f"plan {name}: {note}" for name, plan in read.items() for note in plan.notes)]
    if not all(plan.all_roles for plan in results):
        notes.append("GPUs of some plans are of more than eight kinds: those with most to compute are simulated")
    return Parallel(problem, tuple(results), searched, _weakest(problem, best), tuple(notes))


def _mixed(
    best: Choice, others: list[Choice], time_ns: Callable[[Choice], float], fits: Callable[[Choice], bool]
) -> Choice:
    """Return the best plan with stretches of layers taken from other plans, if that is faster."""
    tried = 0
    for other in others:
        for first, last in _stretches(best, other):
            if tried == MIXED_PLANS:
                return best
            changed = (*best[:first], *other[first:last], *best[last:])
            if not fits(changed):
                continue
            tried += 1
            if time_ns(changed) < time_ns(best):
                best = changed
    return best


def _stretches(one: Choice, other: Choice) -> list[tuple[int, int]]:
    """Return where two plans differ, as [first, last)."""
    stretches: list[tuple[int, int]] = []
    for index, (a, b) in enumerate(zip(one, other, strict=True)):
        if a == b:
            continue
        if stretches and stretches[-1][1] == index:
            stretches[-1] = (stretches[-1][0], index + 1)
        else:
            stretches.append((index, index + 1))
    return stretches


def _memory(problem: Problem, choice: Choice) -> int:
    return sum(layer_memory(problem, index, config) for index, config in enumerate(choice))


def _result(problem: Problem, name: str, choice: Choice, makespan: Makespan) -> PlanResult:
    costs = [layer_cost(problem, index, config) for index, config in enumerate(choice)]
    total = additive_ns(problem, [choice])[0]
    compute = sum(cost.compute_ns for cost in costs)
    sync = sum(cost.sync_ns + cost.statistics_ns for cost in costs)
    moved, synced = plan_bytes(problem, choice)
    roles, all_roles = roles_of(problem, choice)
    return PlanResult(
        name,
        choice,
        total,
        makespan,
        compute,
        max(0.0, total - compute - sync),
        sync,
        moved,
        synced,
        _memory(problem, choice),
        sum(cost.error * (cost.forward_ns + cost.backward_ns) for cost in costs),
        len(roles),
        all_roles,
    )


def layer_rows(problem: Problem, choice: Choice) -> tuple[LayerRow, ...]:
    """Return a plan layer by layer, with its costs."""
    edges = tables(problem, [(config,) for config in choice]).edges
    rows = []
    for index, (layer, config) in enumerate(zip(problem.graph.layers, choice, strict=True)):
        sources = {edge.source for edge in layer.inputs if edge.source != BATCH}
        transfer = sum(float(edges[source, index][0, 0]) for source in sources)
        cost, memory = layer_cost(problem, index, config), layer_memory(problem, index, config)
        rows.append(LayerRow(layer.name, layer.kind, layer.output, config, cost, transfer, memory))
    return tuple(rows)


def _weakest(problem: Problem, choice: Choice) -> Basis:
    """Return the weakest source of times among a plan's collectives."""
    order: tuple[Basis, ...] = ("measured", "scaled", "links")
    groups = {config.parts for config in choice if config.parts > 1} | {problem.gpus}
    bases = [
        basis(problem.topology, collective, members(range(count), problem.topology.gpus_per_node))
        for count in groups
        if count > 1
        for collective in ("all_reduce", "all_to_all")
    ]
    return max(bases, key=order.index, default="measured")
