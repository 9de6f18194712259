"""`gpusim capture --variants`: the kernels and times of each op's other algorithms.

Every distinct call (operator, arguments, shapes, kernels) is run under each of the settings that torch lets one choose,
in one profiler session, with the call as captured among them. Operators of which an op has variants already are left as
they are. What launches the kernels that are there already is left
out, and so is what is no better in any respect: neither faster nor smaller. Slower kernels that leave room for their
neighbours stay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from gpusim.errors import PlanError, ReplayError
from gpusim.hardware.model import HardwareModel, hardware_for_gpu
from gpusim.hardware.occupancy import kernel_demand
from gpusim.runtime.device import require_gpu, set_precision
from gpusim.runtime.execute import Runner, make_initial
from gpusim.runtime.isolate import alone
from gpusim.runtime.profiling import RANGE, attribute, exported_events
from gpusim.runtime.variants import settings_for
from gpusim.trace.schema import Kernel, Op, Trace, Variant, VariantSettings

ITERATIONS = 7
#: Head start of the host in an iteration, in spin cycles a call: calls take some 10 to 100 us of host time.
SPIN_CYCLES_PER_CALL = 200_000
#: Most variants kept of one op, the fastest ones.
MAX_VARIANTS = 4
#: A smaller difference in time or demand is none.
TOLERANCE_FRAC = 0.02

Launches = tuple[tuple[Any, ...], ...]
Measured = dict[tuple[int, str], tuple[Kernel, ...]]
"""Kernels by op and name of the settings; the empty name stands for the call as captured."""


@dataclass(frozen=True)
class _Call:
    """One call that is timed: an op that stands for all equal ones, under one of the settings; None: as captured."""

    op: int
    name: str
    settings: VariantSettings | None


def with_variants(trace: Trace, seed: int = 0, say: Callable[[str], None] = lambda _: None) -> Trace:
    """The trace with variants, measured on the current GPU in a process of its own. Raises `GpuError` without one.

    It may be any trace that was captured on this kind of GPU: the step is rebuilt from it.
    """
    measured: Measured = {}
    for autotuned, doing in ((False, "profiling other algorithms"), (True, "letting cuDNN time its algorithms")):
        if any(call.settings is not None for call in _all_calls(trace, autotuned)):
            say(doing)
            measured |= alone(measure_calls, trace, seed, autotuned)
    if not measured:
        return trace
    found = variants_from(trace, measured)
    ops = (msgspec.structs.replace(op, variants=op.variants + each) for op, each in zip(trace.ops, found, strict=True))
    return msgspec.structs.replace(trace, ops=tuple(ops))


def measure_calls(trace: Trace, seed: int, autotuned: bool) -> Measured:
    """Kernels of the calls that cuDNN's autotuner is to choose, or of all others, those as captured among them.

    Call it in a process of its own: torch allows one profiler session a process, and the algorithm that the autotuner
    chose would be that of every later call of the same arguments.
    """
    device = require_gpu()
    set_precision(trace.model.dtype)
    runner = Runner(trace, device)
    runner.bind(make_initial(trace, device, seed).tensors)
    runner.run_in_order()
    calls = _all_calls(trace, autotuned)
    # Setting by setting: right behind another call of the same op, a call would find its arguments in the cache.
    names = list(dict.fromkeys(call.name for call in calls))
    calls = sorted((call for call in calls if _works(runner, call)), key=lambda call: names.index(call.name))
    return dict(zip(((call.op, call.name) for call in calls), _profile(runner, calls), strict=True))


def variants_from(trace: Trace, measured: Measured) -> list[tuple[Variant, ...]]:
    """The variants of each op that are new, from what was measured of the ops that stand for others."""
    hardware = hardware_for_gpu(trace.provenance.gpu.name)
    result: list[tuple[Variant, ...]] = [()] * len(trace.ops)
    for op, members in equal_calls(trace).items():
        mine = [
            Variant(name=name, settings=settings, kernels=measured[(op, name)])
            for name, settings in settings_for(trace.ops[op], trace).items()
            if (op, name) in measured
        ]
        control = measured[(op, "")]
        kept = choose_variants(control, mine, hardware)
        for member in members:
            factor = _total_ns(trace.ops[member].kernels) / max(1, _total_ns(control))
            result[member] = tuple(_scaled(variant, factor) for variant in kept)
    return result


def equal_calls(trace: Trace) -> dict[int, list[int]]:
    """Ops that have settings to try: the first of each distinct call, and all that are like it."""
    groups: dict[Any, list[int]] = {}
    known = {op.target for op in trace.ops if op.variants}
    for index, op in enumerate(trace.ops):
        if op.kernels and op.target not in known and settings_for(op, trace):
            groups.setdefault(_signature(trace, op), []).append(index)
    return {members[0]: members for members in groups.values()}


def _signature(trace: Trace, op: Op) -> Any:
    """What makes two calls launch the same kernels: operator, arguments but for which tensors, their shapes."""
    shapes = [(t.shape, t.stride, t.dtype) for t in (trace.tensors[i] for i in (*op.reads, *op.writes))]
    arguments = [argument for argument in op.args if not (isinstance(argument, dict) and "tensor" in argument)]
    return op.target, repr(arguments), repr(sorted(op.kwargs)), tuple(shapes), launches(op.kernels)


def launches(kernels: Sequence[Kernel]) -> Launches:
    """Kernels by name and launch shape, not by time."""
    return tuple((k.name, k.kind, k.grid, k.block, k.regs_per_thread, k.smem_bytes) for k in kernels)


def _all_calls(trace: Trace, autotuned: bool) -> list[_Call]:
    """What `measure_calls` runs, op by op; without the autotuner each op as captured, too."""
    found = []
    for op in equal_calls(trace):
        tried = settings_for(trace.ops[op], trace)
        found += [] if autotuned else [_Call(op, "", None)]
        found += [_Call(op, name, settings) for name, settings in tried.items() if settings.benchmark == autotuned]
    return found


def _works(runner: Runner, call: _Call) -> bool:
    """Run it once, as a warm-up, and record it; what refuses its arguments or a CUDA graph is no variant."""
    try:
        _run(runner, call)
        torch.cuda.synchronize()
        _record(runner, call)
    except (ReplayError, RuntimeError):  # the latter: a recording that the refusal spoilt
        if call.settings is None:
            raise
        return False
    return True


def _record(runner: Runner, call: _Call) -> None:
    """Record it in a graph of its own, which `torch.cuda.graph` would collect all garbage for, each time."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(_recording_stream()):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            _run(runner, call)
        finally:
            graph.capture_end()
    graph.reset()


@functools.cache
def _recording_stream() -> torch.cuda.Stream:
    """One for all recordings: libraries keep a workspace for each stream."""
    return torch.cuda.Stream()


def _run(runner: Runner, call: _Call) -> None:
    args, kwargs = runner.arguments(call.op)
    runner.call(call.op, args, kwargs, call.settings)


def _profile(runner: Runner, calls: Sequence[_Call]) -> list[tuple[Kernel, ...]]:
    """Kernels of each call: medians over `ITERATIONS`, one session. Raises `CaptureError` for lost kernels."""
    if not calls:
        return []
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as session:
        for iteration in range(ITERATIONS + 1):
            torch.cuda.synchronize()
            for first in range(0, len(calls), 32):  # the spin kernel has a limit, and so has the launch queue
                torch.cuda._sleep(SPIN_CYCLES_PER_CALL * min(32, len(calls) - first))
                for number in range(first, min(first + 32, len(calls))):
                    with record_function(f"{RANGE}{iteration}:{number}"):
                        _run(runner, calls[number])
                torch.cuda.synchronize()
    return attribute(exported_events(session), len(calls)).kernels


def choose_variants(
    control: Sequence[Kernel], found: Sequence[Variant], hardware: HardwareModel | None
) -> tuple[Variant, ...]:
    """The variants worth keeping beside the captured kernels (`control`), fastest first.

    Each has kernels of its own, and is faster than the captured ones or takes less of the GPU: less of it at most, or
    less of it over time. Without a hardware model, nobody can tell what they take: faster ones stay.
    """
    seen = {launches(control)}
    kept: list[Variant] = []
    limit = _merits(control, hardware)
    for variant in sorted(found, key=lambda each: _total_ns(each.kernels)):
        if launches(variant.kernels) in seen or not variant.kernels:
            continue
        seen.add(launches(variant.kernels))
        merits = _merits(variant.kernels, hardware)
        if any(mine < (1 - TOLERANCE_FRAC) * other for mine, other in zip(merits, limit, strict=True)):
            kept.append(variant)
    return tuple(kept[:MAX_VARIANTS])


def _merits(kernels: Sequence[Kernel], hardware: HardwareModel | None) -> tuple[float, ...]:
    """Time, largest share of the GPU's SMs at any time, share times time; less is better."""
    total_ns = float(_total_ns(kernels))
    if hardware is None:
        return (total_ns,)
    try:
        shares = [max(kernel_demand(hardware.limits, kernel).resources) for kernel in kernels]
    except PlanError:
        return (total_ns, 1.0, total_ns)
    area = sum(share * kernel.dur_ns for share, kernel in zip(shares, kernels, strict=True))
    return total_ns, max(shares, default=0.0), area


def _total_ns(kernels: Sequence[Kernel]) -> int:
    return sum(kernel.dur_ns for kernel in kernels)


def _scaled(variant: Variant, factor: float) -> Variant:
    """Times in the step: as much longer or shorter as the captured kernels were in the step than beside it."""
    replace = msgspec.structs.replace
    return replace(
        variant,
        kernels=tuple(
            replace(
                kernel,
                dur_ns=max(1, round(kernel.dur_ns * factor)),
                lo_ns=round(kernel.lo_ns * factor),
                hi_ns=round(kernel.hi_ns * factor),
            )
            for kernel in variant.kernels
        ),
    )
