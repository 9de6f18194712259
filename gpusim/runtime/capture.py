"""`gpusim capture`: from a model to a trace, with the checks that make it worth believing."""

from __future__ import annotations

import copy
import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from gpusim.errors import CaptureError
from gpusim.plan.schedule import Schedule
from gpusim.plan.sync import plan_sync
from gpusim.runtime.allowlist import check_operators
from gpusim.runtime.calls import JointGraph, OwnResults
from gpusim.runtime.compare import NOT_FINITE, Results, errors
from gpusim.runtime.cudagraph import GraphRecorder
from gpusim.runtime.device import explain_out_of_memory, gpu_facts, require_gpu, set_precision
from gpusim.runtime.eager import paced, time_eager
from gpusim.runtime.execute import InitialState, Runner, make_initial, results_of
from gpusim.runtime.isolate import alone
from gpusim.runtime.joint import joint_graph
from gpusim.runtime.models import ModelStep, load_step
from gpusim.runtime.profiling import Profile, host_times, profile_ops
from gpusim.runtime.record import Recorded, record
from gpusim.runtime.rounding import rounding_noise
from gpusim.runtime.timing import time_typical
from gpusim.runtime.user_step import UserStep, set_rng_state
from gpusim.runtime.variant_capture import with_variants
from gpusim.trace.check import check_trace
from gpusim.trace.dependencies import dependencies
from gpusim.trace.schema import (
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
from gpusim.version import code_version

#: Largest ||rebuilt - model's own|| of a result over its scale (`gpusim.runtime.compare`). The rebuilt step calls the
#: same operators on the same data; what differs is the order of atomic additions, and the rounding that grows from it
#: through the layers.
CHECK_TOLERANCE: dict[Dtype, float] = {"fp32": 1e-3, "tf32": 2e-2, "bf16": 1e-1}


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
    seed: int = 0
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
    if options.frontend != "aten":
        raise CaptureError(f"front end '{options.frontend}' is not available in this version; use 'aten'")
    set_precision(options.dtype)
    say("building the model")
    step = build_step(options, device)
    say("recording its operators")
    return capture_recorded(step, joint_graph(step), options, device, say)


def capture_recorded(
    step: ModelStep | UserStep, graph: JointGraph, options: CaptureOptions, device: torch.device, say: Say
) -> Captured:
    """Check a recorded step, then time and profile it on the GPU."""
    say("checking the rebuilt step against the model")
    rebuilt = rebuild(step, graph, options, device)
    trace, initial = rebuilt.trace, rebuilt.recorded.initial
    say("timing the eager step")
    eager = time_eager(step)
    runner = Runner(trace, device)
    state = InitialState.copy_of(initial)
    runner.bind(state.tensors)
    releases = program_order_releases(trace)
    say("timing the host's calls")
    issue_ns = host_times(runner, state, releases)
    host_ns = paced(trace, issue_ns, eager.pace)
    n = len(trace.ops)
    gpu = gpu_facts(GraphRecorder(runner, dependencies(trace)).record(Schedule.in_recorded_order(n), warm=True).replay)
    state.restore()
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
        msgspec.structs.replace(op, host_ns=host, kernels=kernels)
        for op, host, kernels in zip(trace.ops, host_ns, profile.kernels, strict=True)
    )
    provenance = msgspec.structs.replace(trace.provenance, gpu=gpu)
    trace = msgspec.structs.replace(trace, provenance=provenance, ops=ops, ground_truth=truth)
    if options.variants:
        trace = with_variants(trace, options.seed, say)
    check_trace(trace, options.spec)
    return Captured(trace, loss_error, gradient_error, profile)


def rebuild(step: ModelStep | UserStep, graph: JointGraph, options: CaptureOptions, device: torch.device) -> Rebuilt:
    """The step from its recorded calls alone, checked against the model's own. Raises `CaptureError`."""
    _seed(graph, options.seed)
    recorded = record(graph)
    trace = bare_trace(options, step, recorded, graph.fixed)
    loss_error, gradient_error = check_against_model(trace, step, graph, recorded, options, device)
    return Rebuilt(trace, recorded, loss_error, gradient_error)


def time_sequential(trace: Trace, seed: int) -> Timing:
    """Time of the sequential CUDA graph of a trace, rebuilt from the trace alone, as replay will do it.

    Call it in a process of its own: where in memory a graph's tensors lie changes its time by several percent at
    batch 1, and the model's own tensors would move them.
    """
    device = require_gpu()
    set_precision(trace.model.dtype)
    runner = Runner(trace, device)
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
    options: CaptureOptions, step: ModelStep | UserStep, recorded: Recorded, fixed: Sequence[str] = ()
) -> Trace:
    """The trace before anything has been timed; its operators are all on the allow-list."""
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
    )
    check_operators(trace, options.spec)
    return trace


def program_order_releases(trace: Trace) -> tuple[tuple[int, ...], ...]:
    """Storages to let go of before each op when everything runs on one stream."""
    n = len(trace.ops)
    return plan_sync(trace, dependencies(trace), range(n), [0] * n).releases


def check_against_model(
    trace: Trace,
    step: ModelStep | UserStep,
    graph: JointGraph,
    recorded: Recorded,
    options: CaptureOptions,
    device: torch.device,
) -> tuple[float, float]:
    """Run the trace's ops on the model's own tensors and compare with the model's own step.

    Returns the largest errors of an output (the loss, in training) and of a gradient, over their scales
    (`gpusim.runtime.compare`). Raises `CaptureError` over `CHECK_TOLERANCE`, and where the trace does not end in the
    state that recording ended in.
    """
    runner = Runner(trace, device)
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
    found: Results,
    noise: Mapping[int, float],
    what: str,
) -> float:
    """The largest error of these results. Raises `CaptureError` where it is over the limit, naming the result."""
    if len(indices) != len(wanted):
        raise CaptureError(f"the rebuilt step has {len(indices)} {what}s, the model's own {len(wanted)}")
    if not indices:
        return 0.0
    limit = CHECK_TOLERANCE[trace.model.dtype]
    apart = errors(trace, found, dict(zip(indices, wanted, strict=True)), noise, limit)
    worst = max(apart, key=lambda index: apart[index])
    if not apart[worst] <= limit:
        raise CaptureError(
            f"the rebuilt step's {what}s differ from the model's own by {_in_words(apart[worst])} (limit {limit:g}), "
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
    made = f" of op '{makers[0].name}', layer '{makers[0].layer}'" if makers else ""
    return f"'tensor {index}'{made}"


def _seed(graph: JointGraph, seed: int) -> None:
    """Begin with the random numbers that the model's own step began with."""
    if graph.own is not None and graph.own.rng is not None:
        set_rng_state(graph.own.rng)
    else:
        torch.manual_seed(seed)
