"""Several steps of training by a memory plan, in a process whose GPU memory is limited; and the losses of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Final

import msgspec
import torch

from gpusim.defaults import DEFAULT_SEED
from gpusim.errors import GpuError
from gpusim.formats.hardware import default_hardware
from gpusim.formats.trace import Tensor, TensorInit, Trace
from gpusim.gpu.device import explain_out_of_memory, require_gpu, set_precision
from gpusim.gpu.launch_state import make_launches_slow
from gpusim.gpu.replay.allowlist import check_operators
from gpusim.gpu.replay.memory_replay import ProgramRecorder, state_on_gpu
from gpusim.gpu.replay.memory_run import MemoryRunner
from gpusim.memplan.evaluate import MemoryEvaluator
from gpusim.memplan.memory import memory_of
from gpusim.memplan.plan import MemoryPlan, read_memory_plan
from gpusim.plan.graph import OpGraph
from gpusim.trace.store import read_trace
from gpusim.units import format_bytes

#: Number of classes of drawn targets, for a trace without values.
CLASSES: Final = 2

Say = Callable[[str], None]


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """What some steps of training gave and took."""

    policy: str
    losses: tuple[float, ...]
    """After each step, of the same batch."""
    step_ns: int
    """Median of the steps, host time included."""
    predicted_peak_bytes: int
    predicted_reserved_bytes: int
    """By the allocator's rules without expandable segments."""
    peak_bytes: int
    """Most that the process had allocated, and reserved, from its start on: making the step ready included."""
    reserved_bytes: int
    limit_bytes: int
    """What the process could not exceed; 0 for the whole GPU."""
    pinned_bytes: int


@explain_out_of_memory
def train(
    trace_path: Path,
    plan_path: Path | None,
    limit_bytes: int,
    steps: int,
    seed: int = DEFAULT_SEED,
    say: Say = lambda _: None,
) -> Trained:
    """Train the step of a trace by a memory plan, or keeping all, from the trace's own initial state.

    With a limit (not 0), the process cannot reserve more of the GPU's memory than that: torch raises where it would.
    Call it in a process of its own. Raises `GpuError` for a limit beyond the GPU and too little pinned memory, and as
    `replay_memory` does.
    """
    trace = with_values(read_trace(trace_path))
    check_operators(trace, str(trace_path))
    plan = MemoryPlan(policy="keep_all") if plan_path is None else read_memory_plan(plan_path, trace)
    device = require_gpu()
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    if limit_bytes > total_bytes:
        raise GpuError(
            f"a limit of {format_bytes(limit_bytes)} is more than this GPU has ({format_bytes(total_bytes)})"
        )
    if limit_bytes:
        torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes)
    set_precision(trace.model.dtype)
    torch.backends.cudnn.deterministic = True  # two runs are compared bit by bit
    evaluator = MemoryEvaluator(OpGraph.build(trace, default_hardware(trace.provenance.gpu.name)))
    program = evaluator.program(plan)
    use = memory_of(evaluator.choosing(plan).storages, program)
    say("rebuilding the step")
    runner = MemoryRunner(trace, device)
    state, initial_bytes = state_on_gpu(trace, device, seed)
    runner.bind(state.tensors)
    recorder = ProgramRecorder(evaluator, runner, initial_bytes)
    had_bytes = recorder.programs.prepare(program)
    if had_bytes is not None:
        had, wanted = format_bytes(had_bytes), format_bytes(use.pinned_bytes)
        raise GpuError(f"the host has pinned memory for {had}; the plan takes {wanted}")
    say("recording it")
    recorded = recorder.record(program, plan.variants, warm=True)
    state.restore()
    torch.cuda.manual_seed(seed)
    say("training")
    losses, step_ns = losses_of(trace, recorded.replay, recorded.tensors, steps)
    return Trained(
        policy=plan.policy,
        losses=losses,
        step_ns=step_ns,
        predicted_peak_bytes=use.peak.allocated_bytes,
        predicted_reserved_bytes=use.reserved_bytes,
        peak_bytes=torch.cuda.max_memory_allocated(device),
        reserved_bytes=torch.cuda.max_memory_reserved(device),
        limit_bytes=limit_bytes,
        pinned_bytes=use.pinned_bytes,
    )


def with_values(trace: Trace) -> Trace:
    """Return an estimated trace with values to begin from, so that it can run; another one as it is.

    Weights of two or more dimensions are drawn as He et al. (2015) do, other weights and running variances are 1.
    Biases, running means and states of the optimizer are 0. Inputs are normal, targets one of `CLASSES`. Kernel times
    stay estimates.
    """
    if not trace.provenance.estimated:
        return trace
    tensors = tuple(
        tensor if tensor.init is None else msgspec.structs.replace(tensor, init=_init_of(tensor))
        for tensor in trace.tensors
    )
    return msgspec.structs.replace(
        trace, tensors=tensors, provenance=msgspec.structs.replace(trace.provenance, estimated="")
    )


def _init_of(tensor: Tensor) -> TensorInit:
    if tensor.role == "target":
        return TensorInit(kind="integers", a=0.0, b=CLASSES - 1.0)
    if tensor.role == "input":
        return TensorInit(kind="normal", b=1.0)
    if tensor.role == "parameter" and len(tensor.shape) > 1:
        return TensorInit(kind="normal", b=math.sqrt(2.0 / max(1, math.prod(tensor.shape[1:]))))
    one = tensor.role in ("parameter", "buffer") and tensor.name.endswith(("weight", "running_var"))
    return TensorInit(kind="constant", a=float(one))


def losses_of(
    trace: Trace, run: Callable[[], None], tensors: Sequence[torch.Tensor | None], steps: int
) -> tuple[tuple[float, ...], int]:
    """Return the loss after each step, and the median time of a step in ns. `tensors` are where results lie."""
    losses: list[float] = []
    times_ns: list[int] = []
    (loss,) = [index for index, tensor in enumerate(trace.tensors) if tensor.role == "output" and not tensor.shape]
    make_launches_slow()
    for _ in range(steps):
        begin = perf_counter_ns()
        run()
        value = tensors[loss]
        assert value is not None
        losses.append(value.item())  # waits for the step
        times_ns.append(perf_counter_ns() - begin)
    return tuple(losses), sorted(times_ns)[len(times_ns) // 2]
