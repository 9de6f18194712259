"""`gpusim capture`: from a model to a trace, with the checks that make it worth believing."""

from __future__ import annotations

import copy
import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from gpusim.defaults import DEFAULT_SEED
from gpusim.errors import CaptureError
from gpusim.formats.trace import (
    SCHEMA,
    Dtype,
    Frontend,
    Gpu,
    GroundTruth,
    MemoryFormat,
    Mode,
    Model,
    Provenance,
    Timing,
    Trace,
)
from gpusim.gpu.capture.calls import JointGraph, OwnResults
from gpusim.gpu.capture.eager import paced, time_eager
from gpusim.gpu.capture.joint_graph import joint_graph
from gpusim.gpu.capture.models import ModelStep, load_step
from gpusim.gpu.capture.record import Recorded, record
from gpusim.gpu.capture.user_step import UserStep, set_rng_state
from gpusim.gpu.capture.variants import with_variants
from gpusim.gpu.capture.workspaces import op_workspaces
from gpusim.gpu.device import explain_out_of_memory, gpu_facts, precision, require_gpu, set_precision
from gpusim.gpu.inductor.step import inductor_step, with_values
from gpusim.gpu.inductor.styles import DEFAULT_STYLE, settings_of
from gpusim.gpu.inductor.versions import require_supported
from gpusim.gpu.isolate import alone
from gpusim.gpu.profiling import Profile, host_times, profile_ops
from gpusim.gpu.replay.allowlist import check_operators
from gpusim.gpu.replay.compare import NOT_FINITE, TIMES_AS_FAR, TOLERANCE, Results, errors, errors_by_role
from gpusim.gpu.replay.cudagraph import GraphRecorder
from gpusim.gpu.replay.execute import InitialState, Runner, make_initial, results_of
from gpusim.gpu.replay.rounding import rounding_noise
from gpusim.gpu.replay.timing import time_typical
from gpusim.plan.schedule import Schedule
from gpusim.plan.sync import program_order_releases
from gpusim.trace.check import check_trace
from gpusim.trace.dependencies import dependencies
from gpusim.version import code_version

#: Largest ||rebuilt - model's own|| of a result over its scale (`gpusim.gpu.replay.compare`). The rebuilt step calls
#: the same operators on the same data; what differs is the order of atomic additions, and the rounding that grows from
#: it through the layers.
CHECK_TOLERANCE: dict[Dtype, float] = {"fp32": 1e-3, "tf32": 2e-2, "bf16": 1e-1}


#: Largest error of one gradient or state of Inductor's kernels, without TF32. Their sums are rounded otherwise than the
#: operators', and a deep network multiplies that: 0.021 was measured for the first gradient of ResNet-50 (training,
#: batch 8, H200). What a wrong kernel leaves is as wrong as it is large.
FUSED_TOLERANCE = 0.1


Say = Callable[[str], None]
"""Is told what capture does now."""


@dataclass(frozen=True)
class CaptureOptions:
    """What `gpusim capture` is asked for."""

    spec: str
    mode: Mode
    batch: int
    dtype: Dtype = "tf32"
    memory_format: MemoryFormat = "contiguous"
    frontend: Frontend = "aten"
    style: str = DEFAULT_STYLE
    """How the front end `inductor` compiles."""
    seed: int = DEFAULT_SEED
    variants: bool = False
    """Whether other kernels of the operators that have some are measured, too."""
    command: str = ""


@dataclass(frozen=True)
class Captured:
    """A trace, what checking it gave, and the profiler's view of one iteration."""

    trace: Trace
    loss_error: float
    gradient_error: float
    profile: Profile


@dataclass(frozen=True)
class Rebuilt:
    """A step as a trace without times, and how far its results are from the model's own."""

    trace: Trace
    recorded: Recorded
    loss_error: float
    gradient_error: float


@explain_out_of_memory
def capture(options: CaptureOptions, say: Say = lambda _: None) -> Captured:
    """Capture one step on the current GPU. Raises `CaptureError` where a check fails, `GpuError` without a GPU."""
    device = require_gpu()
    check_frontend(options)
    set_precision(options.dtype)
    say("building the model")
    step = build_step(options, device)
    say("recording its operators")
    return capture_recorded(step, joint_graph(step), options, device, say)


def check_frontend(options: CaptureOptions) -> None:
    """Raise `CaptureError` before any work where this torch has no such front end."""
    if options.frontend == "inductor":
        require_supported()
        settings_of(options.style)
        if options.variants:
            raise CaptureError("variants are measured with the front end 'aten' only; leave one of the two out")
    elif options.style != DEFAULT_STYLE:
        raise CaptureError(f"style '{options.style}' is one of the front end 'inductor'")


def capture_recorded(
    step: ModelStep | UserStep, graph: JointGraph, options: CaptureOptions, device: torch.device, say: Say
) -> Captured:
    """Check a recorded step, then time and profile it on the GPU."""
    say("checking the rebuilt step against the model")
    rebuilt = rebuild(step, graph, options, device)
    trace, initial = rebuilt.trace, rebuilt.recorded.initial
    say("timing the eager step")
    eager = time_eager(step)
    runner = Runner(trace, device, trust_code=True)
    state = InitialState.copy_of(initial)
    runner.bind(state.tensors)
    releases = program_order_releases(trace)
    say("timing the host's calls")
    issue_ns = host_times(runner, state, releases)
    host_ns = paced(trace, issue_ns, eager.pace)
    n = len(trace.ops)
    gpu = gpu_facts(GraphRecorder(runner, dependencies(trace)).record(Schedule.in_recorded_order(n), warm=True).replay)
    state.restore()
    workspaces = op_workspaces(runner, state, releases)
    say("profiling its kernels")
    profile = profile_ops(runner, state, releases, sum(issue_ns))  # issued one by one again, not at the eager pace
    loss_error, gradient_error = rebuilt.loss_error, rebuilt.gradient_error
    del runner, state, rebuilt, graph, initial
    say("timing the sequential CUDA graph, rebuilt from the trace")
    graph_time = alone(time_sequential, trace, options.seed)
    truth = GroundTruth(
        eager=eager.wall, graph=graph_time, attributed_frac=profile.attributed_frac, unattributed=profile.unattributed
    )
    ops = tuple(
        msgspec.structs.replace(op, host_ns=host, kernels=kernels, workspace_bytes=workspace)
        for op, host, kernels, workspace in zip(trace.ops, host_ns, profile.kernels, workspaces, strict=True)
    )
    provenance = msgspec.structs.replace(trace.provenance, gpu=gpu)
    trace = msgspec.structs.replace(trace, provenance=provenance, ops=ops, ground_truth=truth)
    if options.variants:
        trace = with_variants(trace, options.seed, say)
    check_trace(trace, options.spec)
    return Captured(trace, loss_error, gradient_error, profile)


def rebuild(
    step: ModelStep | UserStep, graph: JointGraph, options: CaptureOptions, device: torch.device, own: bool = False
) -> Rebuilt:
    """The step from its recorded calls alone, checked against the model's own. Raises `CaptureError`.

    `own` is for a step that only this process runs, with operators of any kind.
    """
    _seed(graph, options.seed)
    recorded = record(graph, own)
    trace = bare_trace(replace(options, frontend="aten"), step, recorded, graph.fixed, own)
    loss_error, gradient_error = check_against_model(trace, step, graph, recorded, options, device, own)
    if options.frontend == "inductor":
        calls = Rebuilt(trace, recorded, loss_error, gradient_error)
        recorded = inductor_step(graph, recorded, options.mode == "train", options.style)
        trace = bare_trace(options, step, recorded, graph.fixed, own)
        loss_error, gradient_error = check_against_calls(calls, trace, recorded, graph, options, device)
    return Rebuilt(trace, recorded, loss_error, gradient_error)


def time_sequential(trace: Trace, seed: int) -> Timing:
    """Time of the sequential CUDA graph of a trace, rebuilt from the trace alone, as replay will do it.

    Call it in a process of its own: where in memory a graph's tensors lie changes its time by several percent at
    batch 1, and the model's own tensors would move them.
    """
    device = require_gpu()
    set_precision(trace.model.dtype)
    runner = Runner(trace, device, trust_code=True)
    runner.bind(make_initial(trace, device, seed).tensors)
    recorder = GraphRecorder(runner, dependencies(trace))
    n = len(trace.ops)
    alone = Schedule.in_recorded_order(n)
    recorder.record(alone, warm=True)
    return time_typical({"graph": lambda: recorder.record(alone)})["graph"]


def build_step(options: CaptureOptions, device: torch.device) -> ModelStep:
    """The model of the options, on the device."""
    return load_step(
        options.spec,
        mode=options.mode,
        batch=options.batch,
        dtype=options.dtype,
        memory_format=options.memory_format,
        device=device,
        seed=options.seed,
    )


def bare_trace(
    options: CaptureOptions,
    step: ModelStep | UserStep,
    recorded: Recorded,
    fixed: Sequence[str] = (),
    own: bool = False,
) -> Trace:
    """The trace before anything has been timed; its operators are all on the allow-list, but for an `own` step."""
    trace = Trace(
        schema=SCHEMA,
        provenance=Provenance(
            gpu=Gpu(
                name="", driver="", cuda="", torch=str(torch.__version__), cudnn="", sm_clock_mhz=0, mem_clock_mhz=0
            ),
            date=datetime.date.today().isoformat(),
            command=options.command,
            gpusim=code_version(),
        ),
        model=Model(
            spec=options.spec,
            network=step.network,
            mode=options.mode,
            batch=options.batch,
            dtype=options.dtype,
            memory_format=options.memory_format,
            frontend=options.frontend,
            optimizer=step.optimizer_name,
            fixed=tuple(fixed),
        ),
        storages=tuple(recorded.storages),
        tensors=tuple(recorded.tensors),
        ops=tuple(recorded.ops),
        sources=tuple(recorded.sources),
    )
    if not own:
        check_operators(trace, options.spec)
    return trace


def check_against_model(
    trace: Trace,
    step: ModelStep | UserStep,
    graph: JointGraph,
    recorded: Recorded,
    options: CaptureOptions,
    device: torch.device,
    own_step: bool = False,
) -> tuple[float, float]:
    """Run the trace's ops on the model's own tensors and compare with the model's own step.

    Returns the largest errors of an output (the loss, in training) and of a gradient, over their scales
    (`gpusim.gpu.replay.compare`). Raises `CaptureError` over `CHECK_TOLERANCE`, and where the trace does not end in the
    state that recording ended in.
    """
    runner = Runner(trace, device, own_step)
    state = InitialState.copy_of(recorded.initial)
    runner.bind(state.tensors)
    releases = program_order_releases(trace)
    noise = rounding_noise(runner, state, releases, options.seed)
    _seed(graph, options.seed)
    runner.run_in_order(releases)
    # An output may be an input handed on, which `results_of` leaves out.
    rebuilt: dict[int, Any] = {i: runner.tensors[i] for i in recorded.final} | results_of(trace, runner.tensors)
    own = graph.own
    if own is None:
        assert isinstance(step, ModelStep)
        _seed(graph, options.seed)
        own = _own_step(step)
    outputs, gradients = own.outputs, own.gradients
    loss_error = _worst(trace, recorded.outputs, outputs, rebuilt, noise, "output")
    gradient_error = _worst(trace, recorded.gradients, gradients, rebuilt, noise, "gradient")
    limit = CHECK_TOLERANCE[trace.model.dtype]
    for index, error in errors(trace, rebuilt, recorded.final, noise, limit).items():
        if not error <= limit:
            problem = f"leaves {_name(trace, index)} {_in_words(error)} away from the recorded step"
            raise CaptureError(f"the rebuilt step {problem} (limit {limit:g})")
    states = {i: own.states[t.name] for i, t in enumerate(trace.tensors) if t.init and t.name in own.states}
    _worst(trace, list(states), list(states.values()), rebuilt | _held(runner, states), noise, "state")
    return loss_error, gradient_error


def check_against_calls(
    calls: Rebuilt, trace: Trace, fused: Recorded, graph: JointGraph, options: CaptureOptions, device: torch.device
) -> tuple[float, float]:
    """Run a step of fused kernels and compare all that it makes with the same step as ATen calls.

    Both run without TF32, and each result may be `FUSED_TOLERANCE` off. With TF32, all results of one role together may
    be `TIMES_AS_FAR` as far from that as the ATen calls are. Returns and raises as `check_against_model`.
    """
    dtype: Dtype = "fp32" if options.dtype == "tf32" else options.dtype
    exact = fused.final
    with precision(dtype):
        if options.dtype == "tf32":
            final, _ = _end_of(calls.trace, calls.recorded, graph, options, device)
            exact = with_values(fused, replace(calls.recorded, final=final)).final
        fused_results, noise = _end_of(trace, fused, graph, options, device, shaken=True)
    apart: dict[int, float] = {}
    for limit, outputs in ((CHECK_TOLERANCE[dtype], True), (max(FUSED_TOLERANCE, CHECK_TOLERANCE[dtype]), False)):
        for index, error in errors(trace, fused_results, exact, noise, limit).items():
            if (index in fused.outputs) == outputs:
                apart[index] = error
                _refuse_error(_name(trace, index), error, limit)
    if options.dtype == "tf32":
        fused_results, _ = _end_of(trace, fused, graph, options, device)
        captured = errors_by_role(trace, fused.final, exact)
        for role, error in errors_by_role(trace, fused_results, exact).items():
            least = CHECK_TOLERANCE["tf32"] if role == "output" else TOLERANCE["tf32"]
            _refuse_error(f"the results of role '{role}'", error, max(least, TIMES_AS_FAR * captured[role]))
    results = (max((apart[index] for index in indices), default=0.0) for indices in (fused.outputs, fused.gradients))
    return next(results), next(results)


def _end_of(
    trace: Trace,
    begun: Recorded,
    graph: JointGraph,
    options: CaptureOptions,
    device: torch.device,
    shaken: bool = False,
) -> tuple[Results, dict[int, float]]:
    """What a step leaves, by tensor id, and by how much rounding moves it where it was `shaken`."""
    runner = Runner(trace, device, own=True)
    state = InitialState.copy_of(begun.initial)
    runner.bind(state.tensors)
    releases = program_order_releases(trace)
    noise = rounding_noise(runner, state, releases, options.seed) if shaken else {}
    _seed(graph, options.seed)
    runner.run_in_order(releases)
    return _held(runner, begun.final), noise


def _refuse_error(result: str, error: float, limit: float) -> None:
    if not error <= limit:
        problem = f"leave {result} {_in_words(error)} away from the recorded step (limit {limit:.2g})"
        raise CaptureError(f"Inductor's kernels {problem}")


def _held(runner: Runner, indices: Iterable[int]) -> Results:
    """Tensors that a runner holds."""
    held = {index: runner.tensors[index] for index in indices}
    return {index: tensor for index, tensor in held.items() if tensor is not None}


def _own_step(step: ModelStep) -> OwnResults:
    """Outputs (the loss, in training) and gradients of a copy of the model, computed by the model itself."""
    module = copy.deepcopy(step.module)
    if step.loss is None:
        with torch.no_grad():
            output = module(*step.inputs)
        leaves = torch.utils._pytree.tree_leaves(output)
        return OwnResults([t for t in leaves if isinstance(t, torch.Tensor)], [])
    loss = step.loss(module(*step.inputs), step.target)
    loss.backward()
    return OwnResults([loss.detach()], [p.grad for p in module.parameters() if p.grad is not None])


def _worst(
    trace: Trace,
    indices: Sequence[int],
    wanted: Sequence[torch.Tensor],
    rebuilt: Results,
    noise: Mapping[int, float],
    noun: str,
) -> float:
    """The largest error of these results. Raises `CaptureError` where it is over the limit, naming the result."""
    if len(indices) != len(wanted):
        raise CaptureError(f"the rebuilt step has {len(indices)} {noun}s, the model's own {len(wanted)}")
    if not indices:
        return 0.0
    limit = CHECK_TOLERANCE[trace.model.dtype]
    apart = errors(trace, rebuilt, dict(zip(indices, wanted, strict=True)), noise, limit)
    worst = max(apart, key=lambda index: apart[index])
    if not apart[worst] <= limit:
        raise CaptureError(
            f"the rebuilt step's {noun}s differ from the model's own by {_in_words(apart[worst])} (limit {limit:g}), "
            f"most in {_name(trace, worst)}"
        )
    return apart[worst]


def _in_words(error: float) -> str:
    return f"{error:.2g}" if error < NOT_FINITE else "more than can be told (not finite, or not zero as it must be)"


def _name(trace: Trace, index: int) -> str:
    """A tensor as people may find it: by its own name, or the op that makes it and that op's layer."""
    if trace.tensors[index].name:
        return f"'{trace.tensors[index].name}'"
    makers = [op for op in trace.ops if index in op.outputs]
    maker = f" of op '{makers[0].name}', layer '{makers[0].layer}'" if makers else ""
    return f"'tensor {index}'{maker}"


def _seed(graph: JointGraph, seed: int) -> None:
    """Begin with the random numbers that the model's own step began with."""
    if graph.own is not None and graph.own.rng is not None:
        set_rng_state(graph.own.rng)
    else:
        torch.manual_seed(seed)
