"""The functions of `import gpusim` that need no GPU.

Each takes a `Step`, or what `load` takes: a bundled name, a trace file, a `Trace`. Errors name Python's arguments;
the command line translates them into its options.

Who calls them: the command line calls these, `gpusim.on_gpu` and `gpusim.for_commands`, and nothing beneath them (an
import contract in `pyproject.toml`). The dashboard explores, simulates and finds limits with them
(`tests/repo/test_front_door.py` lists what else it reaches). A sweep's worker evaluates thousands of schedules of one
step, and takes the shortest way that `explore` takes, too: `gpusim.engine.evaluate`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpusim.arguments import file_path, memory_bytes, real, text, whole
from gpusim.defaults import (
    DEFAULT_BUDGET_S,
    DEFAULT_ENGINE,
    DEFAULT_LAUNCH,
    DEFAULT_POLICY,
    DEFAULT_SEED,
    DEFAULT_STREAMS,
    LAUNCH_MODES,
    MAX_BUDGET_S,
    MAX_EVALUATIONS,
    RECOMMENDED,
)
from gpusim.errors import OptionError, UnknownNameError
from gpusim.formats.hardware import bundled_hardware
from gpusim.formats.trace import Trace
from gpusim.io.file_limits import MAX_INTEGER
from gpusim.notebook import html_table, short_name, short_repr
from gpusim.plan.schedule import check_streams as check_streams
from gpusim.step import Step, as_step
from gpusim.trace.store import bundled_traces
from gpusim.units import format_bytes, format_ns

if TYPE_CHECKING:
    from gpusim.analysis.explain import Explained
    from gpusim.analysis.limits import Limits
    from gpusim.analysis.simulation import Simulated
    from gpusim.formats.schedule import Partition
    from gpusim.formats.topology import Topology
    from gpusim.layerwise.explore import Parallel
    from gpusim.memplan.compare import MemoryComparison
    from gpusim.memplan.plan import MemoryPlan
    from gpusim.plan.schedule import Schedule
    from gpusim.plan.tasks import LaunchMode
    from gpusim.search.explore import Explored, Row

AnyStep = Step | Trace | str | Path
Progress = Callable[[str, float, int], None]
"""Called with what is being done, the share that is done, and the best time so far in ns (0: none yet)."""
BATCH_NORMS = ("local", "synchronised")
OBJECTIVES = ("simulated", "additive")
Say = Callable[[str], None]
"""Called with each stage of work on a GPU."""


def list_traces() -> list[str]:
    """Names of the bundled traces, for `load`."""
    return list(bundled_traces())


def list_hardware() -> list[str]:
    """Names of the bundled hardware models, for `load(..., hw=NAME)`."""
    return list(bundled_hardware())


def list_policies() -> list[str]:
    """Names of the policies, for `simulate`, `explain`, `whatif` and `replay`; `recommended` explores first."""
    from gpusim.policies.registry import POLICIES

    return [*POLICIES, RECOMMENDED]


def list_memory_policies() -> list[str]:
    """Names of the memory policies, for `memory`."""
    from gpusim.memplan.policies.registry import MEMORY_POLICIES

    return list(MEMORY_POLICIES)


def explore(
    step: AnyStep,
    *,
    streams: int = DEFAULT_STREAMS,
    budget_s: float = DEFAULT_BUDGET_S,
    evaluations: int | None = None,
    seed: int = DEFAULT_SEED,
    memory_limit: int | str | None = None,
    partitions: str | Sequence[tuple[Partition, ...]] | None = None,
    policies: Collection[str] | None = None,
    on_row: Callable[[Row], None] | None = None,
    progress: Progress | None = None,
) -> Explored:
    """Look for the fastest schedule of a step and say whether it is worth it.

    Every policy is simulated, then schedules are searched for about `budget_s` seconds, or until `evaluations`
    schedules were tried: with a number, the same seed finds the same schedule on every machine. `streams` is the most
    that a schedule may use. `memory_limit` is in bytes, or text such as `"8GiB"`. `partitions` also searches schedules
    on partitions of the SMs: `"auto"`, or splits such as `"64+68,96+36"`. `policies` names the only ones to run.
    Raises `OptionError` for an argument out of its range, where no schedule keeps the memory limit, and for an imported
    step without data dependencies.
    """
    from gpusim.analysis.as_imported import check_searchable
    from gpusim.search.by_name import check_policy
    from gpusim.search.explore import explore as run
    from gpusim.search.variants import parse_splits

    step = as_step(step)
    check_searchable(step.trace)
    streams, seed = check_streams(streams), check_seed(seed)
    problem = f"the search takes between 0 and {MAX_BUDGET_S:.0f} seconds"
    if not 0 < real("budget_s", budget_s, problem) <= MAX_BUDGET_S:
        raise OptionError(problem, argument="budget_s", value=budget_s)
    evaluations = _count("evaluations", evaluations)
    if policies is not None and (isinstance(policies, str) or not isinstance(policies, Collection)):
        raise OptionError("a list of policies' names", argument="policies", value=policies)
    for policy in policies or ():
        check_policy(text("policies", policy, "a list of policies' names"))
    if isinstance(partitions, str):
        partitions = parse_splits(partitions, streams, step.hardware.limits.sms)
    elif partitions is not None and not _are_splits(partitions):
        problem = "'auto', text such as '64+68', or a list of tuples of Partition"
        raise OptionError(problem, argument="partitions", value=partitions)
    with step.naming():
        return run(
            step.graph,
            streams=streams,
            budget_s=budget_s,
            seed=seed,
            evaluations=evaluations,
            policies=policies,
            splits=partitions or (),
            memory_limit_bytes=memory_bytes(memory_limit),
            on_row=on_row or ignore,
            report=progress or ignore,
        )


def simulate(
    step: AnyStep,
    schedule: str | Path | Schedule = DEFAULT_POLICY,
    *,
    streams: int = DEFAULT_STREAMS,
    launch: str = DEFAULT_LAUNCH,
    engine: str = DEFAULT_ENGINE,
    progress: Progress | None = None,
) -> Simulated:
    """Predict one schedule of a step, beside the sequential CUDA graph of the same kernels.

    `schedule` is a policy's name (`list_policies()`), a `Schedule` or a schedule file; `streams` is for policies.
    `launch` is `"graph"` for one CUDA graph or `"stream"` for launches from the host. `engine` is `"fast"` or
    `"reference"`: both give the same times, and the reference records more. Raises `ScheduleError` for a schedule that
    is illegal or of another step, `UnknownNameError`, `OptionError`.
    """
    from gpusim.analysis.simulation import simulate as run
    from gpusim.engine.base import engine_by_name
    from gpusim.engine.compiled.warm import COMPILING, needs_compiling

    step = as_step(step)
    mode, runs = launch_mode(launch), engine_by_name(text("engine", engine, "the name of an engine"))
    chosen = resolve_schedule(step, schedule, streams, progress)
    if progress is not None and engine == "fast" and needs_compiling():
        progress(COMPILING, 0.0, 0)
    with step.naming():
        return run(step.graph, chosen, mode, runs)


def explain(
    step: AnyStep,
    schedule: str | Path | Schedule = DEFAULT_POLICY,
    *,
    streams: int = DEFAULT_STREAMS,
    launch: str = DEFAULT_LAUNCH,
    progress: Progress | None = None,
) -> Explained:
    """Say why a schedule is not faster: each ns between its critical path and its makespan has one cause.

    Arguments and errors are those of `simulate`.
    """
    from gpusim.analysis.explain import explain as run

    simulated = simulate(step, schedule, streams=streams, launch=launch, progress=progress)
    graph = simulated.ran
    return run(graph, simulated.timeline, graph.hardware)


def limits(step: AnyStep, *, streams: int = DEFAULT_STREAMS, progress: Progress | None = None) -> Limits:
    """How parallel a step is, and how much of that each limit costs: dependencies, gaps, SMs, bandwidth and others.

    For each phase and for the whole step. Raises `OptionError` for a number of streams out of its range.
    """
    from gpusim.analysis.limits import limits as run

    step = as_step(step)
    streams = check_streams(streams)
    with step.naming():
        return run(step.graph, streams=streams, report=progress or ignore)


def memory(
    step: AnyStep,
    *,
    memory_limit: int | str | None = None,
    policies: Collection[str] | None = None,
    pinned_limit: int | str | None = None,
    synchronous: bool | None = None,
    progress: Progress | None = None,
) -> MemoryComparison:
    """Compare memory policies of a training step: peak memory, step time, copies, recomputation.

    Without `policies` all of them (`list_memory_policies()`), and the front of time against memory. `memory_limit` is
    the byte budget for policies that take one, `pinned_limit` the most pinned host memory; both are in bytes, or text
    such as `"8GiB"`. `synchronous` makes published policies wait for copies after each layer, or by events (False).
    A policy that cannot keep the limit has a row that says why. Raises `OptionError`, also for a limit that no plan
    keeps, with the smallest that one does and the tensor that decides it; `UnknownNameError`, `TraceError`.
    """
    from gpusim.engine.compiled.warm import COMPILING, needs_compiling
    from gpusim.memplan.compare import compare_policies

    step = as_step(step)
    if policies is not None and (isinstance(policies, str) or not isinstance(policies, Collection)):
        raise OptionError("a list of memory policies' names", argument="policies", value=policies)
    budget = memory_bytes(memory_limit)
    pinned = memory_bytes(pinned_limit, "pinned_limit", least=0)
    if progress is not None and needs_compiling():
        progress(COMPILING, 0.0, 0)
    with step.naming():
        comparison = compare_policies(
            step.graph,
            policies=policies,
            budget_bytes=budget,
            pinned_bytes=pinned,
            synchronous=synchronous,
            report=progress or ignore,
        )
    if budget is not None and comparison.shortfall:
        raise OptionError(comparison.shortfall, argument="memory_limit", value=format_bytes(budget))
    return comparison


def load_memory_plan(step: AnyStep, path: str | Path) -> MemoryPlan:
    """The memory plan in a file, once it is known to run. Raises `ScheduleError`, also for a plan of another step."""
    from gpusim.errors import PlanError, ScheduleError
    from gpusim.memplan.checks import check_memory_plan, check_program
    from gpusim.memplan.plan import read_memory_plan
    from gpusim.memplan.program import program_of
    from gpusim.memplan.storages import Storages

    step = as_step(step)
    plan = read_memory_plan(file_path("path", path), step.trace)
    storages = Storages.of(step.trace)
    try:
        check_program(storages, program_of(storages, check_memory_plan(storages, plan)))
    except PlanError as cause:
        raise ScheduleError(str(path), str(cause)) from cause
    return plan


@dataclass(frozen=True, repr=False)
class WhatIf:
    """A schedule on the GPU as it is, and on a changed one."""

    baseline: Simulated
    changed: Simulated

    @property
    def speedup(self) -> float:
        """Baseline over changed makespan: above 1 where the change helps."""
        return self.baseline.makespan_ns / self.changed.makespan_ns if self.changed.makespan_ns else 1.0

    def sensitivities(self) -> tuple[tuple[str, float, float, float], ...]:
        """How the changed makespan moves as each parameter goes from half to twice its value: name, low, high, now.

        Times in ns; the schedule stays as it is.
        """
        from gpusim.analysis.whatif import sensitivities

        return sensitivities(self.changed)

    def __repr__(self) -> str:
        before, after = format_ns(self.baseline.makespan_ns), format_ns(self.changed.makespan_ns)
        where = short_name(self.changed.graph.hardware.label)
        return short_repr("WhatIf", f"{short_name(self.changed.graph.trace.name)}: {before} -> {after} on {where}")

    def _repr_html_(self) -> str:
        rows = [
            (name, run.graph.hardware.label, format_ns(run.makespan_ns), f"{run.speedup:.2f}x")
            for name, run in (("baseline", self.baseline), ("changed", self.changed))
        ]
        title = f"What if: {self.changed.graph.trace.name}, {self.changed.policy}"
        return html_table(title, ("", "hardware", "time", "over sequential"), rows)


def whatif(
    step: AnyStep,
    schedule: str | Path | Schedule = DEFAULT_POLICY,
    *,
    streams: int = DEFAULT_STREAMS,
    launch: str = DEFAULT_LAUNCH,
    sms: int | None = None,
    bandwidth: float = 1.0,
    launch_cost: float = 1.0,
    contention: float = 1.0,
    queues: int | None = None,
    ops: Mapping[str, float] | Iterable[tuple[str, float]] = (),
) -> WhatIf:
    """Ask what a step would take with other SMs, bandwidth, launch costs, hardware queues, or faster ops.

    `bandwidth`, `launch_cost` and `contention` are factors on today's value. `ops` has for each op name, layer or
    `"LAYER OPERATOR"` how many times as fast it becomes. `launch` is that of the changed step; the baseline is one CUDA
    graph. A policy's schedule is made again for the changed GPU. Raises `OptionError`, `UnknownNameError`.
    """
    from gpusim.analysis.simulation import simulate as run
    from gpusim.analysis.whatif import Change, changed_graph, policy_schedule
    from gpusim.trace.op_names import find_ops

    step = as_step(step)
    mode = launch_mode(launch)
    speeds = {op: speed for name, speed in _speeds(ops) for op in find_ops(step.trace, name)}
    change = Change(
        sms=_count("sms", sms),
        bandwidth=real("bandwidth", bandwidth, "a factor above 0"),
        launch_cost=real("launch_cost", launch_cost, "a factor of 0 or more"),
        contention=real("contention", contention, "a factor of 0 or more"),
        queues=_count("queues", queues),
        op_speed=speeds,
    )
    baseline = simulate(step, schedule, streams=streams)
    with step.naming():
        changed = changed_graph(baseline.ran, change)
        again = replace(baseline.schedule, variants=())
        if is_policy(schedule) and schedule != RECOMMENDED:
            again = policy_schedule(changed, str(schedule), streams)
        return WhatIf(baseline, run(changed, again, mode))


def parallel(
    step: AnyStep,
    *,
    gpus: int,
    topology: str | Path | Topology | None = None,
    plans: Sequence[str | Path] = (),
    batch_norm: str = "local",
    memory_limit: int | str | None = None,
    by: str = "simulated",
    progress: Progress | None = None,
) -> Parallel:
    """Split a step over several GPUs layer by layer; the step's batch is that of one GPU.

    Beside the layer-wise plan there are data parallelism, model parallelism and "one weird trick". `topology` is a
    bundled name, a file or a `Topology`; by default that of the step's GPU. `plans` are further plans to compare: files
    of gpusim or of autoparallel. `batch_norm` is `"local"` (statistics of each part of the batch) or `"synchronised"`.
    `memory_limit` is for each GPU, in bytes or text such as `"80GiB"`. `by` is `"simulated"` or `"additive"`: what the
    layer-wise plan is chosen by. Raises `TopologyError` for more GPUs than there are or a link that is missing,
    `ParallelPlanError`, and `OptionError`.
    """
    from gpusim.formats.topology import Topology, default_topology, load_topology
    from gpusim.io.file_limits import MAX_PLAN_GPUS
    from gpusim.layerwise.explore import explore_plans
    from gpusim.layerwise.plans import plan_reader

    step = as_step(step)
    count = whole("gpus", gpus, 1, MAX_PLAN_GPUS, f"a whole number between 1 and {MAX_PLAN_GPUS}")
    for argument, value, known in (("batch_norm", batch_norm, BATCH_NORMS), ("by", by, OBJECTIVES)):
        if value not in known:
            raise UnknownNameError(argument.replace("_", " "), str(value), known)
    source = ""
    if topology is None:
        links = default_topology(step.hardware)
    elif isinstance(topology, Topology):
        links = topology
    else:
        source = str(file_path("topology", topology))
        links = load_topology(source)
    given = {path.stem: plan_reader(path, count) for path in (file_path("plans", each) for each in plans)}
    with step.naming():
        return explore_plans(
            step,
            count,
            links,
            topology_file=source,
            batch_norm="synchronised" if batch_norm == "synchronised" else "local",
            objective="additive" if by == "additive" else "simulated",
            memory_limit_bytes=memory_bytes(memory_limit),
            given=given,
            report=lambda stage, share: (progress or ignore)(stage, share, 0),
        )


def write_parallel_plan(plans: Parallel, path: str | Path, name: str = "layer") -> None:
    """Write one of the plans of `parallel` as a file (`.json`, `.json.gz`). Raises `OutputError`."""
    from gpusim.formats.parallel_plan import write_plan

    write_plan(file_path("path", path), plans.document(name))


def write_perfetto(simulated: Simulated, path: str | Path) -> None:
    """Write a simulated timeline as a file for ui.perfetto.dev (`.json`, `.json.gz`). Raises `OutputError`."""
    from gpusim.report.perfetto import run_from_timeline
    from gpusim.report.perfetto import write_perfetto as write

    title = f"simulated: {simulated.policy}, {simulated.streams} streams"
    write(
        file_path("path", path),
        [run_from_timeline(simulated.recorded, simulated.ran.trace, title, simulated.graph.hardware)],
    )


def launch_mode(launch: str) -> LaunchMode:
    """The launch mode of that name. Raises `UnknownNameError`."""
    if launch not in LAUNCH_MODES:
        raise UnknownNameError("launch mode", str(launch), LAUNCH_MODES)
    return "stream" if launch == "stream" else "graph"


def check_seed(seed: object) -> int:
    """The seed. Raises `OptionError` for one out of its range."""
    return whole("seed", seed, 0, MAX_INTEGER, f"a whole number between 0 and {MAX_INTEGER}")


def check_schedule_arguments(schedule: object, streams: object) -> int:
    """Refuse an unknown policy or a number of streams out of its range before long work; gives that number."""
    from gpusim.search.by_name import check_policy

    count = check_streams(streams)
    if is_policy(schedule):
        check_policy(str(schedule))
    return count


def is_policy(schedule: object) -> bool:
    """Whether `schedule` names a policy: any text that is no file of a schedule."""
    from gpusim.policies.registry import POLICIES

    if not isinstance(schedule, str):
        return False
    known = schedule == RECOMMENDED or schedule in POLICIES
    return known or not (schedule.endswith((".json", ".json.gz")) or os.path.isfile(schedule))


def _count(argument: str, value: object) -> int | None:
    if value is None:
        return None
    return whole(argument, value, 1, MAX_EVALUATIONS, f"a whole number from 1 to {MAX_EVALUATIONS:,}")


def _are_splits(splits: object) -> bool:
    from gpusim.formats.schedule import Partition

    return isinstance(splits, Sequence) and all(
        isinstance(split, list | tuple) and all(isinstance(each, Partition) for each in split) for split in splits
    )


def _speeds(ops: object) -> list[tuple[str, float]]:
    """Names of ops with their factors. Raises `OptionError` for anything else."""
    problem = "names of ops, each with a factor above 0"
    pairs = ops.items() if isinstance(ops, Mapping) else ops
    if isinstance(pairs, str) or not isinstance(pairs, Iterable):
        raise OptionError(problem, argument="ops", value=ops)
    speeds: list[tuple[str, float]] = []
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise OptionError(problem, argument="ops", value=pair)
        speeds.append((text("ops", pair[0], problem), real("ops", pair[1], problem)))
    return speeds


def ignore(*_: object) -> None:
    """Nobody wants to know."""


def resolve_schedule(
    step: AnyStep, schedule: str | Path | Schedule, streams: int = DEFAULT_STREAMS, progress: Progress | None = None
) -> Schedule:
    """The schedule that a policy's name, a file or a `Schedule` stands for, known to be legal for the step.

    Raises `ScheduleError`, `UnknownNameError`, and `OptionError` for the number of streams.
    """
    from gpusim.plan.schedule import Schedule as ScheduleValue
    from gpusim.plan.schedule import read_schedule
    from gpusim.search.by_name import schedule_of

    step = as_step(step)
    streams = check_schedule_arguments(schedule, streams)
    if is_policy(schedule):
        return schedule_of(step.graph, str(schedule), streams, progress or ignore)
    if isinstance(schedule, str | Path):
        return read_schedule(Path(schedule), step.graph)
    if not isinstance(schedule, ScheduleValue):
        raise OptionError(f"{type(schedule).__name__} is no schedule: give a policy's name, a file or a Schedule")
    return schedule.check(step.graph)
