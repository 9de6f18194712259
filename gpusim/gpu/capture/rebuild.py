"""Rebuild of a step from its recorded calls alone, and its error against the model's own results."""

from __future__ import annotations

import copy
import datetime
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from gpusim.errors import CaptureError
from gpusim.formats.trace import SCHEMA, Dtype, Gpu, Model, Provenance, Trace
from gpusim.gpu.capture.calls import JointGraph, OwnResults
from gpusim.gpu.capture.models import ModelStep
from gpusim.gpu.capture.options import CaptureOptions
from gpusim.gpu.capture.record import Recorded, record
from gpusim.gpu.capture.user_step import UserStep, set_rng_state
from gpusim.gpu.device import precision
from gpusim.gpu.inductor.step import inductor_step, with_values
from gpusim.gpu.replay.allowlist import check_operators
from gpusim.gpu.replay.compare import NO_NOISE, NOT_FINITE, TIMES_AS_FAR, TOLERANCE, Results, errors, errors_by_role
from gpusim.gpu.replay.execute import InitialState, Runner, results_of
from gpusim.gpu.replay.rounding import rounding_noise
from gpusim.plan.sync import program_order_releases
from gpusim.version import code_version

#: Largest ||rebuilt - model's own|| of a result over its scale (`gpusim.gpu.replay.compare`). The rebuilt step calls
#: the same operators on the same data. Only the order of atomic additions differs, and the rounding that grows from it
#: through the layers.
CHECK_TOLERANCE: dict[Dtype, float] = {"fp32": 1e-3, "tf32": 2e-2, "bf16": 1e-1}

#: Largest error of one gradient or state from Inductor's kernels, without TF32. Their sums are rounded in another order
#: than the operators', and a deep network amplifies that: 0.021 was measured for the first gradient of ResNet-50
#: (training, batch 8, H200). A wrong kernel leaves errors as large as its results.
FUSED_TOLERANCE = 0.1


@dataclass(frozen=True)
class Rebuilt:
    """A step as a trace without times, with its error against the model's own results."""

    trace: Trace
    recorded: Recorded
    loss_error: float
    gradient_error: float


def rebuild(
    step: ModelStep | UserStep, graph: JointGraph, options: CaptureOptions, device: torch.device, own: bool = False
) -> Rebuilt:
    """Rebuild the step from its recorded calls and check it against the model. Raises `CaptureError`.

    `own` is for a step that only this process runs, with operators of any kind.
    """
    if not graph.calls:
        raise CaptureError(f"the step of '{step.network}' calls no operator on {device}")
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


def bare_trace(
    options: CaptureOptions,
    step: ModelStep | UserStep,
    recorded: Recorded,
    fixed: Sequence[str] = (),
    own: bool = False,
) -> Trace:
    """Return the trace without times; unless `own`, all its operators are on the allow-list."""
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
    (`gpusim.gpu.replay.compare`). Raises `CaptureError` over `CHECK_TOLERANCE`, or where the trace's final state
    differs from the recorded one. For an `own_step`, rounding is measured only where errors need it: that takes four
    runs more.
    """
    runner = Runner(trace, device, own_step)
    state = InitialState.copy_of(recorded.initial)
    runner.bind(state.tensors)
    if own_step:
        with suppress(CaptureError):
            return _checked(runner, trace, step, graph, recorded, options, NO_NOISE)
        runner.drop_temporaries()
        state.restore()
    noise = rounding_noise(runner, state, program_order_releases(trace), options.seed)
    return _checked(runner, trace, step, graph, recorded, options, noise)


def _checked(
    runner: Runner,
    trace: Trace,
    step: ModelStep | UserStep,
    graph: JointGraph,
    recorded: Recorded,
    options: CaptureOptions,
    noise: Mapping[int, float],
) -> tuple[float, float]:
    """Run the trace's ops from the initial state and compare, as `check_against_model`."""
    releases = program_order_releases(trace)
    _seed(graph, options.seed)
    runner.run_in_order(releases)
    # An output may be an input passed through, which `results_of` leaves out.
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
    """Run a step of fused kernels and compare all its results with the same step as ATen calls.

    Both run without TF32, and each result may differ by `FUSED_TOLERANCE`. With TF32, all results of one role together
    may differ by `TIMES_AS_FAR` times the error of the ATen calls. Returns and raises as `check_against_model`.
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
    """Return the results of a step by tensor id, and, where `shaken`, how far rounding moves each."""
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
    """Return the tensors that a runner holds."""
    held = {index: runner.tensors[index] for index in indices}
    return {index: tensor for index, tensor in held.items() if tensor is not None}


def _own_step(step: ModelStep) -> OwnResults:
    """Compute outputs (the loss, in training) and gradients on a copy of the model, with the model's own code."""
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
    """Return the largest error of these results. Raises `CaptureError`, with the result's name, over the limit."""
    if len(indices) != len(wanted):
        raise CaptureError(f"the rebuilt step has {len(indices)} {noun}s, the model's own {len(wanted)}")
    if not indices:
        return 0.0
    limit = CHECK_TOLERANCE[trace.model.dtype]
    apart = errors(trace, rebuilt, dict(zip(indices, wanted, strict=True)), noise, limit)
    worst = max(apart, key=lambda index: apart[index])
    if not apart[worst] <= limit:
        if any(tensor.isnan().any() for tensor in wanted):
            raise CaptureError(f"{noun}s of the step are NaN on these inputs, so nothing can be compared with them")
        raise CaptureError(
            f"the rebuilt step's {noun}s differ from the model's own by {_in_words(apart[worst])} (limit {limit:g}), "
            f"most in {_name(trace, worst)}"
        )
    return apart[worst]


def _in_words(error: float) -> str:
    return f"{error:.2g}" if error < NOT_FINITE else "more than any limit (not finite, or not zero where it must be)"


def _name(trace: Trace, index: int) -> str:
    """Describe a tensor by its own name, or by the op that makes it and the op's layer."""
    if trace.tensors[index].name:
        return f"'{trace.tensors[index].name}'"
    makers = [op for op in trace.ops if index in op.outputs]
    maker = f" of op '{makers[0].name}', layer '{makers[0].layer}'" if makers else ""
    return f"'tensor {index}'{maker}"


def _seed(graph: JointGraph, seed: int) -> None:
    """Restore the random number state at the start of the model's own step."""
    if graph.own is not None and graph.own.rng is not None:
        set_rng_state(graph.own.rng)
    else:
        torch.manual_seed(seed)
