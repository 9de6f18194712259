"""`gpusim capture --variants`: kernels and times of each op's alternative algorithms.

Every distinct call (operator, arguments, shapes, kernels) runs under each available setting of torch, in one profiler
session with the call as captured; so do operator fusions (`gpusim.gpu.replay.fusion`). Operators that already have
variants (fusions: of that name) are skipped. A variant is dropped if it launches the same kernels as an earlier one, or
is neither faster nor smaller than the captured kernels. Slower kernels that leave room for their neighbours stay, and
so do those of the smallest workspace.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Final

import msgspec
import torch
from torch.profiler import record_function

from gpusim.defaults import DEFAULT_SEED
from gpusim.errors import PlanError, ReplayError
from gpusim.formats.hardware import HardwareModel, hardware_for_gpu
from gpusim.formats.trace import Kernel, Op, Trace, Variant, VariantSettings
from gpusim.gpu.capture.variant_anchor import anchored_variants, scaled
from gpusim.gpu.capture.workspaces import workspace_of
from gpusim.gpu.device import require_gpu, set_precision
from gpusim.gpu.isolate import alone
from gpusim.gpu.profiling import RANGE, attribute, exported_events, profiled
from gpusim.gpu.replay.execute import Runner, make_initial
from gpusim.gpu.replay.fusion import Chain, chains_of
from gpusim.gpu.replay.variants import in_autotuned_thread, settings_for
from gpusim.rules.occupancy import kernel_demand
from gpusim.trace.merging import merge_in, mergeable

ITERATIONS = 7
#: Head start of the host in an iteration, in spin cycles per call: a call takes about 10 to 100 us of host time.
SPIN_CYCLES_PER_CALL = 200_000
#: Most variants kept per op, fastest first; that of least workspace may be one more.
MAX_VARIANTS = 4
#: Most fused variants kept per op.
MAX_COVERING = 3
#: Time of cuDNN's autotuner where a user waits, in s: it takes 34 s for all calls of GoogLeNet's training on an H200.
TUNING_S = 15.0
#: Smallest relative difference in time or demand that counts.
TOLERANCE_FRAC = 0.02

#: Settings of merged convolutions.
MERGED: Final = VariantSettings(composition="merged")

Launches = tuple[tuple[Any, ...], ...]
Measured = dict[tuple[int, str], tuple[Kernel, ...]]
"""Kernels by op and settings name; the empty name is the call as captured."""
Workspaces = dict[tuple[int, str], int]
"""Workspace in bytes of calls that fuse nothing, by op and settings name."""
Known = dict[tuple[Any, str], tuple[Kernel, ...] | None]
"""Kernels by group of equal calls and settings name; None: the call does not run so."""


@dataclass(frozen=True)
class _Call:
    """One timed call: the representative of a group of equal ops, under one of the settings; None: as captured."""

    op: int
    name: str
    settings: VariantSettings | None
    covers: tuple[int, ...] = ()


def with_variants(trace: Trace, seed: int = DEFAULT_SEED, say: Callable[[str], None] = lambda _: None) -> Trace:
    """Add variants to a trace, measured on the current GPU in a process of its own. Raises `GpuError` without a GPU.

    The trace may come from any GPU of this kind: the step is rebuilt from it.
    """
    return anchored_variants(with_measured_variants(trace, seed, say), seed, say)


def with_measured_variants(
    trace: Trace, seed: int = DEFAULT_SEED, say: Callable[[str], None] = lambda _: None
) -> Trace:
    """Like `with_variants`, with the times of isolated calls."""
    return _measured_by(trace, lambda autotuned: alone(measure_calls, trace, seed, autotuned), say)


def with_variants_of(
    runner: Runner, say: Callable[[str], None], known: Known | None = None, tuning_s: float = TUNING_S
) -> Trace:
    """Return a runner's trace as `with_measured_variants` does, measured in this process on the runner's own tensors.

    The runner has run the step in order and holds all its tensors, which change. What cuDNN's autotuner chooses stays
    in the thread of autotuned calls, as it does in `call_variant`; it begins with the calls that take longest in the
    step, and ends after `tuning_s`. Equal calls of an earlier step with the same `known` are not measured again.
    """
    known = {} if known is None else known
    keys = {members[0]: key for key, members in _groups(runner.trace).items()}

    def measure(autotuned: bool) -> tuple[Measured, Workspaces]:
        calls = _all_calls(runner.trace, autotuned)
        new = [call for call in calls if (keys[call.op], call.name) not in known]
        if autotuned:
            new = longest_first(runner.trace, new)
            measured, tried = in_autotuned_thread(lambda: _measured_calls(runner, new, tuning_s))
        else:
            measured, tried = _measured_calls(runner, new)
        known.update({(keys[call.op], call.name): measured.get((call.op, call.name)) for call in tried})
        found = {(call.op, call.name): known.get((keys[call.op], call.name)) for call in calls}
        return {call: kernels for call, kernels in found.items() if kernels is not None}, {}

    return _measured_by(runner.trace, measure, say)


def _measured_by(
    trace: Trace, measure: Callable[[bool], tuple[Measured, Workspaces]], say: Callable[[str], None]
) -> Trace:
    """Return the trace with what `measure` gives for calls that cuDNN's autotuner chooses for, and for all others."""
    measured: Measured = {}
    workspaces: Workspaces = {}
    for autotuned, doing in ((False, "profiling other algorithms"), (True, "letting cuDNN time its algorithms")):
        if any(call.name for call in _all_calls(trace, autotuned)):
            say(doing)
            kernels, taken_bytes = measure(autotuned)
            measured |= kernels
            workspaces |= taken_bytes
    if not measured:
        return trace
    new_variants = variants_from(trace, measured, workspaces)
    ops = (
        msgspec.structs.replace(op, variants=op.variants + each)
        for op, each in zip(trace.ops, new_variants, strict=True)
    )
    return msgspec.structs.replace(trace, ops=tuple(ops))


def with_merges(trace: Trace, seed: int = DEFAULT_SEED) -> Trace:
    """Add a variant for each set of convolutions that could be merged (`gpusim.trace.merging`), behind all others.

    All that run are kept: a schedule chooses between them. Times of calls are scaled as the captured ones of the merged
    convolutions are to their own calls, not by a graph. Measures on the current GPU, in a process of its own. Raises
    `GpuError` without a GPU.
    """
    merges = {ops: name for ops, name in mergeable(trace).items() if merge_in(trace, ops) is None}
    if not merges:
        return trace
    measured = alone(measure_merges, trace, seed, merges)
    variants: dict[int, list[Variant]] = {}
    for ops, name in merges.items():
        if (ops[0], name) in measured:
            factor = sum(_total_ns(trace.ops[op].kernels) for op in ops) / max(
                1, sum(_total_ns(measured[op, ""]) for op in ops)
            )
            variant = Variant(name=name, settings=MERGED, kernels=measured[ops[0], name], covers=ops[1:])
            variants.setdefault(ops[0], []).append(scaled(variant, factor))
    return msgspec.structs.replace(
        trace,
        ops=tuple(
            msgspec.structs.replace(op, variants=(*op.variants, *variants.get(index, ())))
            for index, op in enumerate(trace.ops)
        ),
    )


def measure_merges(trace: Trace, seed: int, merges: Mapping[tuple[int, ...], str]) -> Measured:
    """Return the kernels of merged convolutions, as far as they run, and of each convolution as captured.

    Call it in a process of its own, as `measure_calls`.
    """
    runner = _prepared(trace, seed)
    calls = [_Call(op, "", None) for op in sorted({op for ops in merges for op in ops})]
    calls += [_Call(ops[0], name, MERGED, ops[1:]) for ops, name in merges.items()]
    calls = in_turns([call for call in calls if _works(runner, call)])
    return dict(zip(((call.op, call.name) for call in calls), _profile(runner, calls), strict=True))


def measure_calls(trace: Trace, seed: int, autotuned: bool) -> tuple[Measured, Workspaces]:
    """Return kernels and workspaces of the calls left to cuDNN's autotuner, or of all other calls with the captured
    ones among them.

    Call it in a process of its own: torch allows one profiler session per process, and the autotuner's choice would
    stick to every later call with the same arguments.
    """
    runner, calls = _prepared(trace, seed), _all_calls(trace, autotuned)
    measured, _ = _measured_calls(runner, calls)
    ran = [call for call in calls if call.name and not call.covers and (call.op, call.name) in measured]
    return measured, {(call.op, call.name): workspace_of(partial(_run, runner, call)) for call in ran}


def _prepared(trace: Trace, seed: int) -> Runner:
    """Return a runner that has run the step once on the current GPU."""
    device = require_gpu()
    set_precision(trace.model.dtype)
    runner = Runner(trace, device)
    runner.bind(make_initial(trace, device, seed).tensors)
    runner.run_in_order()
    return runner


def _measured_calls(runner: Runner, calls: Sequence[_Call], within_s: float = math.inf) -> tuple[Measured, list[_Call]]:
    """Return the kernels of calls that run, and the calls that were tried before the time was up."""
    end = perf_counter() + within_s
    tried, working = [], []
    for call in calls:
        if perf_counter() >= end:
            break
        tried.append(call)
        if _works(runner, call):
            working.append(call)
    working = in_turns(working)
    return dict(zip(((call.op, call.name) for call in working), _profile(runner, working), strict=True)), tried


def longest_first(trace: Trace, calls: Sequence[_Call]) -> list[_Call]:
    """Order calls by the time that all calls equal to them take in the step, longest first."""
    takes_ns = {
        first: sum(_total_ns(trace.ops[member].kernels) for member in members)
        for first, members in equal_calls(trace).items()
    }
    return sorted(calls, key=lambda call: -takes_ns[call.op])


def in_turns(calls: Sequence[_Call]) -> list[_Call]:
    """Order calls round by round, one per op, with neighbours under different settings.

    Right after another call of the same op, a call would find its arguments in the cache; right after another op under
    the same settings, often the kernel's instructions. In a step it finds neither.
    """
    of_op: dict[int, list[_Call]] = {}
    for call in calls:
        of_op.setdefault(call.op, []).append(call)
    for turn, mine in enumerate(of_op.values()):
        first = turn % len(mine)
        mine[:] = mine[first:] + mine[:first]
    rounds = max(map(len, of_op.values()), default=0)
    return [mine[number] for number in range(rounds) for mine in of_op.values() if number < len(mine)]


def variants_from(trace: Trace, measured: Measured, workspaces: Workspaces) -> list[tuple[Variant, ...]]:
    """Return the new variants of each op, from the measurements of the group representatives."""
    hardware = hardware_for_gpu(trace.provenance.gpu.name)
    result: list[tuple[Variant, ...]] = [()] * len(trace.ops)
    tried = ways_to_try(trace)
    for op, members in equal_calls(trace).items():
        control = measured[(op, "")]
        for covering in (False, True):
            mine = {name: way for name, way in tried[op].items() if bool(way.covers) == covering}
            new_variants = [
                Variant(
                    name=name,
                    settings=way.settings,
                    kernels=measured[(op, name)],
                    covers=way.covers,
                    workspace_bytes=workspaces.get((op, name)),
                )
                for name, way in mine.items()
                if (op, name) in measured
            ]
            ops = trace.ops if covering else ()
            kept = choose_variants(control, new_variants, hardware, ops, trace.ops[op].workspace_bytes)
            for member in members:
                factor = _total_ns(trace.ops[member].kernels) / max(1, _total_ns(control))
                result[member] += tuple(
                    msgspec.structs.replace(scaled(variant, factor), covers=tried[member][variant.name].covers)
                    for variant in kept
                )
    return result


def ways_to_try(trace: Trace) -> dict[int, dict[str, Chain]]:
    """Return the settings and fusions to measure for each op, by name."""
    plain = {op.target for op in trace.ops for variant in op.variants if not variant.covers}
    covering = {(op.target, variant.name) for op in trace.ops for variant in op.variants if variant.covers}
    chains = chains_of(trace)
    ways_of: dict[int, dict[str, Chain]] = {}
    for index, op in enumerate(trace.ops):
        if not op.kernels:
            continue
        ways: dict[str, Chain] = {}
        if op.target not in plain:
            ways |= {name: Chain((), settings) for name, settings in settings_for(op, trace).items()}
        ways |= {name: way for name, way in chains.get(index, {}).items() if (op.target, name) not in covering}
        if ways:
            ways_of[index] = ways
    return ways_of


def equal_calls(trace: Trace) -> dict[int, list[int]]:
    """Group ops with settings to measure: the first of each distinct call -> all ops equal to it."""
    return {members[0]: members for members in _groups(trace).values()}


def _groups(trace: Trace) -> dict[Any, list[int]]:
    """Return the same by a key that equal calls of other steps have, too."""
    groups: dict[Any, list[int]] = {}
    for index, ways in ways_to_try(trace).items():
        behind = dict.fromkeys(covers for way in ways.values() for covers in (way.covers,))
        chains = [[_signature(trace, trace.ops[op]) for op in (index, *covers)] for covers in behind]
        groups.setdefault((tuple(ways), repr(chains)), []).append(index)
    return groups


def _signature(trace: Trace, op: Op) -> Any:
    """Return a key of calls that launch the same kernels: operator, non-tensor arguments, tensor shapes."""
    shapes = [(t.shape, t.stride, t.dtype) for t in (trace.tensors[i] for i in (*op.reads, *op.writes))]
    arguments = [argument for argument in op.args if not (isinstance(argument, dict) and "tensor" in argument)]
    return op.target, repr(arguments), repr(sorted(op.kwargs)), tuple(shapes), launches(op.kernels)


def launches(kernels: Sequence[Kernel]) -> Launches:
    """Describe kernels by name and launch shape, without time."""
    return tuple((k.name, k.kind, k.grid, k.block, k.regs_per_thread, k.smem_bytes) for k in kernels)


def _all_calls(trace: Trace, autotuned: bool) -> list[_Call]:
    """List the calls that `measure_calls` runs, op by op; without the autotuner, also each op as captured."""
    calls = []
    tried = ways_to_try(trace)
    for op in equal_calls(trace):
        calls += [] if autotuned else [_Call(op, "", None)]
        calls += [
            _Call(op, name, way.settings, way.covers)
            for name, way in tried[op].items()
            if way.settings.benchmark == autotuned
        ]
    return calls


def _works(runner: Runner, call: _Call) -> bool:
    """Run a call once as warm-up and record it; a call that refuses its arguments or a CUDA graph is no variant."""
    try:
        _run(runner, call)
        torch.cuda.synchronize()
        _record(runner, call)
    except (ReplayError, RuntimeError):  # RuntimeError: a recording that the refusal invalidated
        if call.settings is None:
            raise
        return False
    return True


def _record(runner: Runner, call: _Call) -> None:
    """Record a call in a graph of its own; `torch.cuda.graph` would collect garbage each time."""
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
    """Return one stream for all recordings, since libraries keep a workspace per stream."""
    return torch.cuda.Stream()


def _run(runner: Runner, call: _Call) -> Any:
    """Run a call and return its results, which the runner does not keep."""
    if call.covers:
        assert call.settings is not None
        return runner.call_chain(sorted((call.op, *call.covers)), call.settings)
    args, kwargs = runner.arguments(call.op)
    return runner.call(call.op, args, kwargs, call.settings)


def _profile(runner: Runner, calls: Sequence[_Call]) -> list[tuple[Kernel, ...]]:
    """Return the kernels of each call: medians over `ITERATIONS` in one session. Raises `CaptureError` for lost
    kernels.
    """
    if not calls:
        return []
    with profiled() as session:
        for iteration in range(ITERATIONS + 1):
            torch.cuda.synchronize()
            for first in range(0, len(calls), 32):  # the spin kernel and the launch queue have limits
                torch.cuda._sleep(SPIN_CYCLES_PER_CALL * min(32, len(calls) - first))
                for number in range(first, min(first + 32, len(calls))):
                    with record_function(f"{RANGE}{iteration}:{number}"):
                        _run(runner, calls[number])
                torch.cuda.synchronize()
    return attribute(exported_events(session), len(calls)).kernels


def choose_variants(
    control: Sequence[Kernel],
    variants: Sequence[Variant],
    hardware: HardwareModel | None,
    ops: Sequence[Op] = (),
    workspace_bytes: int = 0,
) -> tuple[Variant, ...]:
    """Return the variants worth keeping next to the captured kernels (`control`), fastest first.

    Each has other kernels than the captured ones, and is faster or takes less of the GPU: less at its peak, or less
    over time. Without a hardware model the share is unknown, so only faster ones stay. Variants that fuse `ops` are
    compared with the kernels of these ops, too, and each saved launch counts. The variant of least workspace, the
    fastest of these, stays in any case where it takes less than the captured kernels do (`workspace_bytes`).
    """
    seen = {launches(control)}
    others: list[Variant] = []
    kept: list[Variant] = []
    for variant in sorted(variants, key=lambda each: _total_ns(each.kernels)):
        if launches(variant.kernels) in seen or not variant.kernels:
            continue
        seen.add(launches(variant.kernels))
        others.append(variant)
        gap_ns = hardware.graph.chain_ns if hardware is not None and variant.covers else 0.0
        instead = (*control, *(kernel for op in variant.covers for kernel in ops[op].kernels))
        merits, limit = (_merits(kernels, hardware, gap_ns) for kernels in (variant.kernels, instead))
        if any(mine < (1 - TOLERANCE_FRAC) * other for mine, other in zip(merits, limit, strict=True)):
            kept.append(variant)
    kept = kept[: MAX_COVERING if ops else MAX_VARIANTS]
    least = min((each for each in others if each.workspace_bytes is not None), key=_workspace, default=None)
    if least is not None and _workspace(least) < workspace_bytes and least not in kept:
        kept.append(least)
    return tuple(sorted(kept, key=lambda each: _total_ns(each.kernels)))


def _workspace(variant: Variant) -> int:
    assert variant.workspace_bytes is not None
    return variant.workspace_bytes


def _merits(kernels: Sequence[Kernel], hardware: HardwareModel | None, gap_ns: float) -> tuple[float, ...]:
    """Return time with a gap per launch, peak share of the GPU's SMs, and share times time; less is better."""
    total_ns = _total_ns(kernels) + gap_ns * len(kernels)
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
