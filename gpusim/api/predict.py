"""The functions of `import gpusim` that need no GPU.

Each takes a `Step`, or what `load` takes: a bundled name, a trace file, a `Trace`. Errors name Python's arguments;
the command line translates them into its options.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpusim.api.resolve import (
    AnyStep,
    Progress,
    check_seed,
    check_streams,
    checked_plan,
    count,
    ignore,
    launch_mode,
    resolve_plan,
    resolve_schedule,
)
from gpusim.arguments import check_budget, file_path, instance, memory_bytes, text, whole
from gpusim.defaults import (
    BATCH_NORMS,
    DEFAULT_BATCH_NORM,
    DEFAULT_BUDGET_S,
    DEFAULT_ENGINE,
    DEFAULT_LAUNCH,
    DEFAULT_POLICY,
    DEFAULT_SEED,
    DEFAULT_STREAMS,
    RECOMMENDED,
)
from gpusim.errors import OptionError, UnknownNameError
from gpusim.formats.hardware import bundled_hardware
from gpusim.step import as_step
from gpusim.trace.store import bundled_traces
from gpusim.units import counted, format_bytes

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
    from gpusim.search.explored import Explored, Row

OBJECTIVES = ("simulated", "additive")


def list_traces() -> list[str]:
    """Return the names of the bundled traces, for `load`."""
    return list(bundled_traces())


def list_hardware() -> list[str]:
    """Return the names of the bundled hardware models, for `load(..., hw=NAME)`."""
    return list(bundled_hardware())


def list_policies() -> list[str]:
    """Return the policies, for `simulate`, `explain`, `whatif` and `replay`; `recommended` explores first."""
    from gpusim.policies.registry import POLICIES

    return [*POLICIES, RECOMMENDED]


def list_memory_policies() -> list[str]:
    """Return the names of the memory policies, for `memory`."""
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
    """Search the fastest schedule of a step and tell whether it is worth it.

    Every policy is simulated, then schedules are searched for about `budget_s` seconds, or for `evaluations`
    simulations, in whole batches: with that limit, the same seed gives the same schedule on every machine. `streams`
    is the maximum number of streams. `memory_limit` is in bytes, or text such as `"8GiB"`. `partitions` also searches
    schedules with SM partitions: `"auto"`, or splits such as `"64+68,96+36"`. `policies` names the only ones to run.
    Raises `OptionError` for an argument out of its range, for an imported step without data dependencies, and where no
    schedule keeps the memory limit: the error names the memory plan that does.
    """
    from gpusim.analysis.as_imported import check_searchable
    from gpusim.search.by_name import check_policy
    from gpusim.search.explore import explore as run
    from gpusim.search.variants import parse_splits

    step = as_step(step)
    check_searchable(step.trace)
    streams, seed = check_streams(streams), check_seed(seed)
    check_budget(budget_s)
    evaluations = count("evaluations", evaluations)
    limit_bytes = memory_bytes(memory_limit)
    if limit_bytes is not None and not step.trace.tensors:
        problem = f"'{step.name}' has no tensors, so its memory is unknown"
        raise OptionError(problem, argument="memory_limit", value=memory_limit)
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
            memory_limit_bytes=limit_bytes,
            on_row=on_row or ignore,
            report=progress or ignore,
        )


def simulate(
    step: AnyStep,
    schedule: str | Path | Schedule | MemoryPlan = DEFAULT_POLICY,
    *,
    streams: int = DEFAULT_STREAMS,
    launch: str = DEFAULT_LAUNCH,
    engine: str = DEFAULT_ENGINE,
    progress: Progress | None = None,
) -> Simulated:
    """Predict one schedule of a step, and the sequential CUDA graph of the same kernels.

    `schedule` is a policy's name (`list_policies()`), a `Schedule`, a `MemoryPlan`, or a file of either; `streams` is
    for policies.
    `launch` is `"graph"` for one CUDA graph or `"stream"` for launches from the host. `engine` is `"fast"` or
    `"reference"`: both give the same times, and the reference records more. Raises `ScheduleError` for a schedule that
    is illegal or of another step, `UnknownNameError`, `OptionError`.
    """
    from gpusim.analysis.simulation import simulate as run
    from gpusim.analysis.simulation import simulate_plan
    from gpusim.engine.base import engine_by_name
    from gpusim.engine.compiled.warm import COMPILING, needs_compiling

    step = as_step(step)
    mode, runs = launch_mode(launch), engine_by_name(text("engine", engine, "the name of an engine"))
    plan = resolve_plan(step, schedule)
    if plan is not None and mode != DEFAULT_LAUNCH:
        raise OptionError("a schedule with memory actions runs in one CUDA graph", argument="launch", value=launch)
    if plan is None:
        chosen = resolve_schedule(step, schedule, streams, progress)
    if progress is not None and engine == "fast" and needs_compiling():
        progress(COMPILING, 0.0, 0)
    with step.naming():
        if plan is not None:
            return simulate_plan(step.graph, plan, runs)
        return run(step.graph, chosen, mode, runs)


def explain(
    step: AnyStep,
    schedule: str | Path | Schedule | MemoryPlan = DEFAULT_POLICY,
    *,
    streams: int = DEFAULT_STREAMS,
    launch: str = DEFAULT_LAUNCH,
    progress: Progress | None = None,
) -> Explained:
    """Explain why a schedule is not faster: each ns between its critical path and its makespan has one cause.

    Arguments and errors are those of `simulate`. Raises `OptionError` for a schedule with memory actions.
    """
    from gpusim.analysis.explain import explain as run

    if resolve_plan(step, schedule) is not None:
        problem = "a schedule with memory actions cannot be explained: its ideal has other tasks"
        raise OptionError(problem, argument="schedule", value=schedule)
    simulated = simulate(step, schedule, streams=streams, launch=launch, progress=progress)
    graph = simulated.ran
    return run(graph, simulated.timeline, graph.hardware)


def limits(step: AnyStep, *, streams: int = DEFAULT_STREAMS, progress: Progress | None = None) -> Limits:
    """Return the parallelism of a step, and its loss to each limit: dependencies, gaps, SMs, bandwidth and others.

    Covers each phase and the whole step. Raises `OptionError` for a number of streams out of range.
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

    Without `policies`, all of them run (`list_memory_policies()`), with the front of time against memory.
    `memory_limit` is the budget of policies that take one, `pinned_limit` the limit on pinned host memory; both are in
    bytes, or text such as `"8GiB"`. `synchronous` makes published policies wait for copies after each layer, or by
    events (False). A policy that cannot keep the limit has a row with the reason. Raises `OptionError`, also for a
    limit that no plan keeps, with the smallest possible one and the deciding tensor; `UnknownNameError`, `TraceError`.
    """
    from gpusim.engine.compiled.warm import COMPILING, needs_compiling
    from gpusim.memplan.compare import compare_policies

    step = as_step(step)
    if policies is not None and not _names(policies):
        raise OptionError("a list of memory policies' names", argument="policies", value=policies)
    if synchronous not in (None, True, False):
        raise OptionError("True, False or None", argument="synchronous", value=synchronous)
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


def _names(value: object) -> bool:
    """Whether a value is a collection of text, and no text itself."""
    return isinstance(value, Collection) and not isinstance(value, str) and all(isinstance(each, str) for each in value)


def load_memory_plan(step: AnyStep, path: str | Path) -> MemoryPlan:
    """Read and check the memory plan in a file. Raises `ScheduleError`, also for a plan of another step."""
    from gpusim.memplan.plan import read_memory_plan

    step = as_step(step)
    return checked_plan(step, read_memory_plan(file_path("path", path), step.trace), str(path))


def parallel(
    step: AnyStep,
    *,
    gpus: int,
    topology: str | Path | Topology | None = None,
    plans: Sequence[str | Path] = (),
    batch_norm: str = DEFAULT_BATCH_NORM,
    memory_limit: int | str | None = None,
    by: str = "simulated",
    progress: Progress | None = None,
) -> Parallel:
    """Split a step over several GPUs, layer by layer; the step's batch is that of one GPU.

    The layer-wise plan is compared with data parallelism, model parallelism and "one weird trick". `topology` is a
    bundled name, a file or a `Topology`; it defaults to that of the step's GPU. `plans` are further plans to compare:
    files of gpusim or of autoparallel, named after the files. `batch_norm` is `"local"` (statistics of each part of the
    batch) or `"synchronised"`. `memory_limit` is per GPU, in bytes or text such as `"80GiB"`. `by` is the objective of
    the layer-wise plan, `"simulated"` or `"additive"`. Raises `TopologyError` for too many GPUs or a missing link,
    `ParallelPlanError`, and `OptionError`.
    """
    from gpusim.formats.topology import Topology, default_topology, load_topology
    from gpusim.io.file_limits import MAX_PLAN_GPUS
    from gpusim.layerwise.explore import explore_plans
    from gpusim.layerwise.plans import plan_readers

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
    if isinstance(plans, str) or not isinstance(plans, Collection):
        raise OptionError("a list of paths of files", argument="plans", value=plans)
    given = plan_readers([file_path("plans", plan) for plan in plans], count)
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
    """Write one of the plans of `parallel` as a file (`.json`, `.json.gz`). Raises `OutputError`, `OptionError`."""
    from gpusim.formats.parallel_plan import write_plan
    from gpusim.layerwise.explore import Parallel

    instance("plans", plans, Parallel, "give what gpusim.parallel returns")
    write_plan(file_path("path", path), plans.document(name))


def write_perfetto(simulated: Simulated, path: str | Path) -> None:
    """Write a simulated timeline as a file for ui.perfetto.dev (`.json`, `.json.gz`).

    Raises `OutputError`, and `OptionError` for anything but a `Simulated`.
    """
    from gpusim.analysis.simulation import Simulated
    from gpusim.report.perfetto import run_from_timeline
    from gpusim.report.perfetto import write_perfetto as write

    instance("simulated", simulated, Simulated, "give what gpusim.simulate returns")
    title = f"simulated: {simulated.policy}, {counted(simulated.streams, 'stream')}"
    write(
        file_path("path", path),
        [run_from_timeline(simulated.recorded, simulated.ran.trace, title, simulated.graph.hardware)],
    )


def _are_splits(splits: object) -> bool:
    from gpusim.formats.schedule import Partition

    return isinstance(splits, Sequence) and all(
        isinstance(split, list | tuple) and all(isinstance(part, Partition) for part in split) for split in splits
    )
