"""Functions of the dashboard's pages beyond the public API: bundled files, uploads, stoppable work, quick what-ifs.

A page is updated at every move of a slider and must not wait for an engine to load, so each function imports its
dependencies when it is called.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from gpusim.analysis.side_by_side import Concurrency as Concurrency
from gpusim.api.resolve import launch_mode
from gpusim.defaults import DEFAULT_ENGINE, DEFAULT_LAUNCH, DEFAULT_SEED
from gpusim.errors import GpusimError
from gpusim.formats.hardware import HardwareModel, bundled_hardware, default_hardware, load_hardware
from gpusim.formats.trace import Trace
from gpusim.io.file_limits import MAX_STREAMS as MAX_STREAMS
from gpusim.step import Step
from gpusim.trace.op_names import op_label
from gpusim.trace.store import bundled_traces, other_batches, parse_trace, read_manifest

if TYPE_CHECKING:
    from gpusim.analysis.as_imported import AsImported as AsImported
    from gpusim.analysis.critical_path import CriticalPath
    from gpusim.analysis.explain import Explained
    from gpusim.analysis.simulation import Simulated
    from gpusim.engine.base import Timeline
    from gpusim.formats.results import ResultCase
    from gpusim.formats.results import Results as Results
    from gpusim.memplan.evaluate import Outcome
    from gpusim.plan.schedule import Schedule
    from gpusim.policies.registry import RegisteredPolicy
    from gpusim.search.background import Exploration as Exploration
    from gpusim.search.explored import Row as Row
    from gpusim.validation.statistics import Fidelity

#: Results files with times of fused kernels: they have other ways to run a step as baselines.
FUSED_RESULTS: Final = "compile*.json"

Sensitivities = tuple[tuple[str, float, float, float], ...]


def bundled_trace(name: str) -> tuple[str, Trace]:
    """Return the SHA-256 of a bundled trace's file, and the trace."""
    data = bundled_traces()[name].read_bytes()
    return hashlib.sha256(data).hexdigest(), parse_trace(data, name)


def bundled_topologies() -> list[str]:
    """Return the names of the bundled topologies of several GPUs."""
    from gpusim.formats.topology import bundled_topologies as run

    return list(run())


def category_bytes(outcome: Outcome) -> dict[str, int]:
    """Return the bytes at the peak of a memory plan, by category."""
    from gpusim.memplan.compare import category_bytes as run

    return run(outcome)


def manifest() -> list[dict[str, Any]]:
    """Return the manifest's entry of each bundled trace; see `scripts/make_manifest.py`."""
    return read_manifest()


def uploaded_trace(data: bytes, name: str) -> Trace:
    """Read an uploaded trace in a separate process. Raises `TraceError`."""
    from gpusim.importers.upload import parse_upload

    return parse_upload(data, name)


def hardware_model(name: str) -> HardwareModel:
    """Load a bundled hardware model by name. Raises `UnknownNameError`."""
    return load_hardware(name)


def home_hardware(trace: Trace) -> str:
    """Return the name of the bundled model of a trace's GPU, or of the library's default."""
    model = default_hardware(trace.provenance.gpu.name)
    return next(name for name in bundled_hardware() if hardware_model(name) == model)


def batches(trace: Trace) -> dict[int, str]:
    """Return the names, by batch, of the bundled traces that differ from a trace only in the batch."""
    model, gpu = trace.model, trace.provenance.gpu.name
    alike = (model.network, model.mode, model.dtype, gpu)
    near = [  # a trace takes 50 ms to read
        entry["name"]
        for entry in read_manifest()
        if (entry["network"], entry["mode"], entry["dtype"], entry["gpu"]) == alike and entry["batch"] != model.batch
    ]
    known = bundled_traces()
    return other_batches(trace, {name: bundled_trace(name)[1] for name in near if name in known})


def registered_policies() -> Mapping[str, RegisteredPolicy]:
    """Return the registered policies by name."""
    from gpusim.policies.registry import POLICIES

    return POLICIES


def check_partitions(step: Step, text: str, streams: int) -> None:
    """Raise `OptionError` for splits of the SMs that are impossible on the step's GPU."""
    from gpusim.search.variants import parse_splits

    parse_splits(text, streams, step.hardware.limits.sms)


def explore_in_background(
    step: Step,
    *,
    streams: int,
    budget_s: float,
    evaluations: int | None = None,
    seed: int = DEFAULT_SEED,
    policies: Collection[str] | None = None,
    partitions: str = "",
) -> Exploration:
    """Start an exploration in a separate process."""
    from gpusim.search.background import Exploration as Exploration
    from gpusim.search.explored import Row as Row
    from gpusim.search.variants import parse_splits

    splits = parse_splits(partitions, streams, step.hardware.limits.sms) if partitions else ()
    return Exploration(
        step.graph,
        streams=streams,
        budget_s=budget_s,
        evaluations=evaluations,
        seed=seed,
        policies=policies,
        splits=splits,
    ).start()


def changed(
    step: Step,
    schedule: str | Schedule,
    *,
    streams: int,
    launch: str = DEFAULT_LAUNCH,
    sms: int | None = None,
    bandwidth: float = 1.0,
    launch_cost: float = 1.0,
    contention: float = 1.0,
    queues: int | None = None,
    op: int | None = None,
    op_speed: float = 1.0,
) -> Simulated:
    """Simulate a step with other hardware or a faster op, as in `gpusim.whatif`, without its baseline.

    `schedule` is a policy, whose schedule is made again, or a schedule of the step, which is kept; its variants count
    as captured, so that a change applies to them. Raises `OptionError`, `UnknownNameError`.
    """
    from gpusim.analysis.simulation import simulate
    from gpusim.analysis.whatif import Change, changed_graph, policy_schedule

    speeds = {} if op is None or op_speed == 1.0 else {op: op_speed}
    change = Change(sms, bandwidth, launch_cost, contention, queues, speeds)
    with step.naming():
        graph = step.graph
        if not isinstance(schedule, str):
            graph = graph.choosing(schedule.variants)
            schedule = replace(schedule, variants=())
        graph = changed_graph(graph, change)
        if isinstance(schedule, str):
            schedule = policy_schedule(graph, schedule, streams)
        return simulate(graph, schedule, launch_mode(launch))


def sensitivities(simulated: Simulated) -> Sensitivities:
    """Return the predicted time as each parameter goes from half to twice its value: name, low, high, now."""
    from gpusim.analysis.whatif import sensitivities as run

    return run(simulated)


def longest_ops(step: Step, count: int) -> list[tuple[int, str, float]]:
    """Return the ops with the longest time alone: index, label (layer and operator), time in ns."""
    from gpusim.analysis.whatif import longest

    graph = step.graph
    return [
        (op, op_label(graph.trace.ops[op]), sum(task.dur_ns for task in graph.tasks[op]))
        for op in longest(graph, count)
    ]


def op_labels(trace: Trace) -> list[str]:
    """Return the label of each op: its layer and operator."""
    return [op_label(op) for op in trace.ops]


def path_of(timeline: Timeline, hardware: HardwareModel) -> CriticalPath:
    """Return the critical path of a timeline."""
    from gpusim.analysis.critical_path import critical_path

    return critical_path(timeline, hardware)


def explained(step: Step, schedule: Schedule, timeline: Timeline) -> Explained:
    """Explain a schedule from its existing timeline."""
    from gpusim.analysis.explain import explain

    graph = step.graph.choosing(schedule.variants)
    return explain(graph, timeline, graph.hardware)


def is_large(step: Step) -> bool:
    """Return True for a step so large that the reference engine, which records most, keeps a page waiting."""
    from gpusim.plan.graph import COMPILED_FROM_OPS

    return len(step.graph) >= COMPILED_FROM_OPS


def concurrency(step: Step, schedule: Schedule) -> Concurrency:
    """Return the modules that a schedule runs concurrently in one CUDA graph."""
    from gpusim.analysis.side_by_side import side_by_side
    from gpusim.engine.base import engine_by_name
    from gpusim.plan.lower import lower

    graph = step.graph.choosing(schedule.variants)
    plan = lower(step.graph, schedule, memory=False)
    return side_by_side(graph, engine_by_name(DEFAULT_ENGINE).run(plan, graph.hardware))


def as_imported(step: Step) -> AsImported:
    """Return the report on a profile without data dependencies. Raises `OptionError` for a captured step."""
    from gpusim.analysis.as_imported import as_imported as run

    with step.naming():
        return run(step.graph)


def observed_schedule(step: Step) -> Schedule:
    """Return the observed streams and order of an imported step. Raises `OptionError` for a captured one."""
    from gpusim.analysis.as_imported import observed_schedule as make

    return make(step.graph)


def searchable(trace: Trace) -> bool:
    """Return True if the dependencies of a trace are those of its program, so that schedules can be searched."""
    source = trace.provenance.imported_from
    if source is None:
        return True
    from gpusim.analysis.as_imported import searchable as ask

    return ask(trace)


def results(pattern: str = "*.json") -> dict[str, Results]:
    """Return the bundled results of replays, by file name; empty if there are none."""
    from gpusim.formats.results import read_all_results
    from gpusim.io.resources import resource_dir

    try:
        folder = resource_dir("validate/results")
    except GpusimError:
        return {}
    return read_all_results(folder, pattern)


def counted_replays(cases: Sequence[ResultCase]) -> list[ResultCase]:
    """Return the cases that `fidelity` counts: on several streams, with outputs within the tolerance."""
    from gpusim.validation.statistics import counted_replays as run

    return run(cases)


def fidelity(cases: Sequence[ResultCase]) -> Fidelity | None:
    """Return the errors of predicted schedules on several streams against measurements; None if there are none."""
    from gpusim.validation.statistics import fidelity as run

    return run(cases)


def gpu_model(gpu: str) -> HardwareModel | None:
    """Return the bundled model of a GPU by the driver's name for it, or None."""
    from gpusim.formats.hardware import hardware_for_gpu

    return hardware_for_gpu(gpu)
