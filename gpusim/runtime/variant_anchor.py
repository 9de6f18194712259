"""What variants take in a step: their times anchored to a measured CUDA graph, as those of the captured kernels are.

Variants are timed call by call, and a kernel takes longer or shorter among others: what lies in the caches, what ran
before. So the step is run once more on one stream with the fastest variant of each op, in turns with the captured
kernels, and all variants are taken to be as much slower or faster than measured as that graph asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from gpusim import __version__
from gpusim.engine.fast import FastEngine
from gpusim.hardware.model import HardwareModel, hardware_for_gpu
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.ranking import ranked_variants
from gpusim.plan.schedule import Schedule, make_schedule
from gpusim.runtime.isolate import alone
from gpusim.runtime.replay import trial_ns
from gpusim.trace.schema import Trace, Variant

#: A step of which variants are a smaller part says nothing about them.
LEAST_SHARE: Final = 0.02
#: What is further off is no difference in context, and nothing that one factor explains.
MOST_FACTOR: Final = 1.5


def anchored_variants(trace: Trace, seed: int = 0, say: Callable[[str], None] = lambda _: None) -> Trace:
    """The trace with the times of all variants multiplied by one factor, so that both graphs are predicted right.

    Measures on the current GPU, in a process of its own. A trace of a GPU that has no hardware model stays as it is.
    Raises `GpuError` without a GPU.
    """
    hardware = hardware_for_gpu(trace.provenance.gpu.name)
    if hardware is None:
        return trace
    graph = OpGraph.build(trace, hardware)
    fastest = ranked_variants(graph, 0.0)
    if not any(fastest):
        return trace
    made_by, order, streams = f"gpusim {__version__}", range(len(graph)), [0] * len(graph)
    schedules = [
        make_schedule(trace, order, streams, policy="sequential", made_by=made_by, variants=variants)
        for variants in ((), fastest)
    ]
    say("measuring the step with the fastest variants")
    captured_ns, fastest_ns = alone(_measure, trace, schedules, hardware, seed)
    factor = anchor_factor(graph, fastest, captured_ns, fastest_ns)
    say(f"variants take {factor:.2f} of what they took call by call")
    return with_times(trace, factor)


def anchor_factor(graph: OpGraph, variants: tuple[int, ...], captured_ns: int, fastest_ns: int) -> float:
    """What to multiply the times of variants by, from the measured graphs of the captured kernels and of `variants`.

    Both on one stream, in recorded order, measured beside each other: whatever makes that machine slower or faster than
    the trace says for the captured kernels is left out. 1 where variants are too small a part of the step to tell.
    """
    engine, order, streams = FastEngine(), range(len(graph)), [0] * len(graph)
    predicted_ns, with_variants_ns = (
        engine.run(lower(graph, order, streams, variants=chosen), graph.hardware).makespan_ns
        for chosen in ((), variants)
    )
    chosen_tasks = graph.choosing(variants).tasks
    varied_ns = sum(
        task.dur_ns for tasks, number in zip(chosen_tasks, variants, strict=True) if number for task in tasks
    )
    if varied_ns < LEAST_SHARE * with_variants_ns:
        return 1.0
    missing_ns = fastest_ns * predicted_ns / captured_ns - with_variants_ns
    return min(MOST_FACTOR, max(1.0 / MOST_FACTOR, 1.0 + missing_ns / varied_ns))


def with_times(trace: Trace, factor: float) -> Trace:
    """The trace with the times of all variants multiplied."""
    ops = (
        msgspec.structs.replace(op, variants=tuple(scaled(variant, factor) for variant in op.variants))
        for op in trace.ops
    )
    return msgspec.structs.replace(trace, ops=tuple(ops))


def scaled(variant: Variant, factor: float) -> Variant:
    """A variant with its times multiplied."""
    kernels = (
        msgspec.structs.replace(
            kernel,
            dur_ns=max(1, round(kernel.dur_ns * factor)),
            lo_ns=round(kernel.lo_ns * factor),
            hi_ns=round(kernel.hi_ns * factor),
        )
        for kernel in variant.kernels
    )
    return msgspec.structs.replace(variant, kernels=tuple(kernels))


def _measure(trace: Trace, schedules: list[Schedule], hardware: HardwareModel, seed: int) -> list[int]:
    return trial_ns(trace, schedules, hardware, seed=seed)
