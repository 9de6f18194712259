"""The functions of `import gpusim` that run on a GPU: capture, replay and calibrate."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpusim.api.resolve import (
    AnyStep,
    Say,
    check_schedule_arguments,
    check_seed,
    check_streams,
    ignore,
    is_policy,
    resolve_plan,
    resolve_schedule,
)
from gpusim.arguments import check_budget, memory_bytes, whole
from gpusim.defaults import DEFAULT_HARDWARE, DEFAULT_SEED, DEFAULT_STREAMS
from gpusim.errors import GpuError, OptionError
from gpusim.formats.hardware import HardwareModel, load_hardware
from gpusim.formats.trace import Dtype, Frontend, Mode
from gpusim.io.file_limits import MAX_NODE_GPUS
from gpusim.memplan.plan import MemoryPlan
from gpusim.step import Step, as_step, load

if TYPE_CHECKING:
    import torch

    from gpusim.formats.measurement import Measurement
    from gpusim.formats.topology import Topology
    from gpusim.gpu.selective_checkpoint import PlanPolicy
    from gpusim.plan.schedule import Schedule

MISSING_TORCH: Final = (
    "no GPU: torch is not installed, and this command runs kernels on a CUDA GPU (pip install 'gpusim[gpu]')"
)
MISSING_TORCH_TO_ESTIMATE: Final = "torch is not installed, and --estimate records the step with it (pip install torch)"


def capture(
    model: torch.nn.Module,
    inputs: Any,
    *,
    targets: Any = (),
    loss: Callable[..., torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    kwargs: Mapping[str, Any] | None = None,
    dtype: Dtype | None = None,
    autocast: torch.dtype | bool | None = None,
    clip_grad_norm: float | None = None,
    clip_grad_value: float | None = None,
    frontend: Frontend = "aten",
    variants: bool = False,
    name: str | None = None,
    seed: int = DEFAULT_SEED,
    hw: str | Path | HardwareModel | None = None,
    say: Say | None = None,
) -> Step:
    """Capture one step of a model on this machine's GPU: inference, or training with `loss` or `optimizer`.

    `inputs` and `targets` are tuples of example tensors. A training step is `loss(model(*inputs, **kwargs), *targets)`,
    its gradients, clipped if requested, and the optimizer's update. Without `loss`, a trained model must return its
    loss. `dtype` is the precision of products: `fp32`, `tf32` (the default for 32-bit parameters) or `bf16`.
    `autocast` is `torch.bfloat16` or True. `frontend="inductor"` captures the fused kernels of torch.compile.
    With `variants`, other kernels of each op are measured as well. Model, optimizer and random state are restored
    afterwards. `hw` is as for `load`.
    Raises `GpuError` without a GPU, and `CaptureError`, with the line of your code, if the step cannot be captured.
    """
    seed = check_seed(seed)
    with needs_torch():
        from gpusim.gpu.capture.in_memory import capture as run
    trace = run(
        model,
        inputs,
        targets=targets,
        loss=loss,
        optimizer=optimizer,
        kwargs=kwargs,
        dtype=dtype,
        autocast=autocast,
        clip_grad_norm=clip_grad_norm,
        clip_grad_value=clip_grad_value,
        frontend=frontend,
        variants=variants,
        name=name,
        seed=seed,
        say=say or ignore,
    )
    return load(trace, hw)


def capture_step(
    function: Callable[..., Any],
    inputs: Any = (),
    *,
    kwargs: Mapping[str, Any] | None = None,
    dtype: Dtype | None = None,
    mode: Mode | None = None,
    frontend: Frontend = "aten",
    variants: bool = False,
    name: str | None = None,
    seed: int = DEFAULT_SEED,
    hw: str | Path | HardwareModel | None = None,
    say: Say | None = None,
) -> Step:
    """Capture your own step function on this machine's GPU: forward, backward and optimizer, in any form.

    `function(*inputs, **kwargs)` is called several times and must make the same calls each time. Modules and optimizers
    are found through closures, globals, objects, classes and arguments; their state is restored. The mode is `train` if
    the function reaches an optimizer or computes gradients. The other arguments and the errors are those of `capture`.
    """
    seed = check_seed(seed)
    with needs_torch():
        from gpusim.gpu.capture.in_memory import capture_step as run
    trace = run(
        function,
        inputs,
        kwargs=kwargs,
        dtype=dtype,
        mode=mode,
        frontend=frontend,
        variants=variants,
        name=name,
        seed=seed,
        say=say or ignore,
    )
    return load(trace, hw)


def replay(
    step: AnyStep,
    schedule: str | Path | Schedule | MemoryPlan,
    *,
    streams: int = DEFAULT_STREAMS,
    seed: int = DEFAULT_SEED,
    trust_code: bool = False,
    check_outputs: bool = True,
    command: str = "",
    say: Say | None = None,
) -> Measurement:
    """Run a schedule on this machine's GPU from its trace alone, compare its outputs and time it.

    The schedule and the sequential CUDA graph are timed in turns, on random inputs. A `MemoryPlan` runs with real
    pinned buffers, copies and recomputation, and is compared with the step that keeps all tensors. `trust_code` allows
    code in the trace to run. Raises `GpuError` without a GPU, `ReplayError` if outputs differ and `check_outputs` is
    set, `TrustError`, `OperatorError`, `ScheduleError`.
    """
    plan = resolve_plan(step, schedule)
    if plan is not None:
        measurement = _replay_memory(as_step(step), plan, check_seed(seed), trust_code, command, say or ignore)
        if check_outputs:
            _require_equal(measurement)
        return measurement
    streams = check_schedule_arguments(schedule, streams)
    seed = check_seed(seed)
    step = as_step(step)
    if is_policy(schedule):  # making a schedule may be slow
        check_gpu(step, trust_code)
    else:
        check_replay(step, trust_code)
    chosen = resolve_schedule(step, schedule, streams)
    with needs_torch():
        from gpusim.gpu.replay.replay import replay as run

    (measurement,) = run(
        step.graph,
        [chosen],
        command=command or "gpusim.replay",
        seed=seed,
        say=say or ignore,
        trust_code=trust_code,
    )
    if check_outputs:
        _require_equal(measurement)
    return measurement


def optimize(
    target: Any,
    example_inputs: Any,
    *,
    loss: Callable[..., torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    streams: int = DEFAULT_STREAMS,
    budget_s: float | None = None,
    memory_limit: int | str | None = None,
    say: Say | None = None,
) -> Any:
    """Return a faster step to call in place of a model or step function, on its own parameters, buffers and optimizer.

    A model is called as before and runs without gradients. With `loss` or `optimizer`, `fast(inputs, targets)` is one
    training step: new gradients, loss, backward, update. `example_inputs` are the arguments of a call. The step is
    captured with ATen's kernels and with Inductor's, schedules on up to `streams` streams are searched for `budget_s`
    seconds, the best few are tried, and the fastest with the results of eager execution is kept. `memory_limit` is in
    bytes, or text such as `"8GiB"`; where no schedule keeps it, a memory plan runs, even if slower. The model,
    function or training step is returned unoptimized, with a warning, where there is no GPU, the step cannot be
    captured or be run within the limit, results differ from eager's, or no schedule is faster.

    Raises `OptionError` for an argument out of range.
    """
    streams, limit = check_streams(streams), memory_bytes(memory_limit)
    if budget_s is not None:
        check_budget(budget_s)
    with needs_torch():
        from gpusim.gpu.optimize.front import optimize as run
    return run(
        target,
        example_inputs,
        loss=loss,
        optimizer=optimizer,
        streams=streams,
        budget_s=budget_s,
        memory_limit_bytes=limit,
        say=say or ignore,
    )


def _replay_memory(step: Step, plan: MemoryPlan, seed: int, trust_code: bool, command: str, say: Say) -> Measurement:
    check_replay(step, trust_code)
    with needs_torch():
        from gpusim.gpu.replay.memory_replay import replay_memory
    (measurement,) = replay_memory(
        step.graph, [plan], command=command or "gpusim.replay", seed=seed, say=say, trust_code=trust_code
    )
    return measurement


def _require_equal(measurement: Measurement) -> None:
    with needs_torch():
        from gpusim.gpu.replay.replay import require_equal
    require_equal(measurement)


def checkpoint_policy(step: AnyStep, plan: MemoryPlan) -> PlanPolicy:
    """Return a memory plan as `policy_fn` for `torch.utils.checkpoint.create_selective_checkpoint_contexts`.

    Its `contexts` is a `context_fn` for `torch.utils.checkpoint.checkpoint` around the whole model, in every step of a
    training loop; as `policy_fn`, make a new one for each forward pass, with `allow_cache_entry_mutation=True` for a
    model with ops in place. What the backward pass needs is saved unless the plan recomputes it; all else runs again.
    The n-th call of an operator is the n-th such op of the trace. Running statistics change twice, as in any checkpoint
    of torch. Needs no GPU; raises `GpuError` without torch, `OptionError` for what is no plan, `PlanError` for one of
    another step or with variants, and while the model runs, for a change in place that the step lacks.
    """
    with needs_torch():
        from gpusim.gpu.selective_checkpoint import policy_fn
    return policy_fn(as_step(step).trace, _memory_plan(plan))


def mark_offloads(nodes: Iterable[Any], step: AnyStep, plan: MemoryPlan) -> int:
    """Mark the nodes of a forward graph whose results a memory plan offloads, for torch's own activation offloading.

    `nodes` are `graph_module.graph.nodes`; sets `meta["should_offload"]` and returns the number of marked nodes. An
    operator that the graph calls more or less often than the step is left out, with a warning. Raises `GpuError`
    without torch, `OptionError` for what is no plan, and `PlanError` for one of another step or with variants.
    """
    with needs_torch():
        from gpusim.gpu.selective_checkpoint import mark_offloads as mark
    return mark(nodes, as_step(step).trace, _memory_plan(plan))


def _memory_plan(plan: object) -> MemoryPlan:
    """Return a memory plan itself. Raises `OptionError` for anything else."""
    if isinstance(plan, MemoryPlan):
        return plan
    raise OptionError(
        f"{type(plan).__name__} is no memory plan: give `gpusim.memory(...).plan(policy)`, or a loaded one"
    )


def calibrate(
    base: str | Path | HardwareModel = DEFAULT_HARDWARE, *, command: str = "", say: Say | None = None
) -> HardwareModel:
    """Measure the hardware model of this machine's GPU; takes minutes.

    `base` has the data-sheet limits, which cannot be measured. Raises `GpuError` without a GPU, or if `base` is a model
    of another GPU.
    """
    model = base if isinstance(base, HardwareModel) else load_hardware(str(base))
    with needs_torch():
        from gpusim.gpu.calibrate.calibrate import calibrate as run
    return run(model, command or "gpusim.calibrate", say or ignore)


def calibrate_links(gpus: int, base: str | Path | HardwareModel = DEFAULT_HARDWARE, *, command: str = "") -> Topology:
    """Measure collectives among `gpus` GPUs of this machine and return a topology for `parallel`; takes minutes.

    Other values are those of the topology of `base`. Raises `OptionError`, and `GpuError` for fewer GPUs.
    """
    from gpusim.formats.topology import default_topology

    count = whole("gpus", gpus, 2, MAX_NODE_GPUS, f"a whole number between 2 and {MAX_NODE_GPUS}")
    model = base if isinstance(base, HardwareModel) else load_hardware(str(base))
    with needs_torch():
        from gpusim.gpu.calibrate.collectives import measure_collectives
    today = datetime.datetime.now(tz=datetime.UTC).date()
    return measure_collectives(count, default_topology(model), f"{command or 'gpusim.calibrate_links'}, {today}")


def check_replay(step: Step, trust_code: bool) -> None:
    """Refuse untrusted code and operators that replay would not run, without torch.

    Raises `TrustError`, `OperatorError`.
    """
    from gpusim.gpu.replay.allowlist import check_operators
    from gpusim.trace.trust import check_trace_code

    check_trace_code(step.trace, step.file, trust_code)
    check_operators(step.trace, step.file)


def check_gpu(step: Step, trust_code: bool) -> None:
    """Refuse a replay before long work, as `check_replay`, or without torch or a GPU. Raises `GpusimError`."""
    check_replay(step, trust_code)
    with needs_torch():
        from gpusim.gpu.device import require_gpu
    require_gpu()


@contextmanager
def needs_torch(message: str = MISSING_TORCH) -> Iterator[None]:
    """Raise `GpuError` with this one-line message if torch is missing."""
    try:
        yield
    except ModuleNotFoundError as cause:
        if cause.name is None or cause.name.partition(".")[0] != "torch":
            raise
        raise GpuError(message) from cause
