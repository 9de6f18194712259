"""Variant times anchored to measured CUDA graphs, as the times of the captured kernels are.

Variants are timed call by call, but a kernel's time depends on its context: cache contents and the kernels before it.
The effect differs by kind: in graphs of Inception-v3 and SqueezeNet on an H200, convolutions with their ReLU took 0.94
to 1.02 of the isolated time, fused elementwise kernels 1.00 to 1.27 (research/2026-11-23-variants.md). So the step is
run on one stream with the variants of each name, in turns with the captured kernels, and the times of those variants
are scaled by one factor to match that graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from gpusim.defaults import DEFAULT_SEED
from gpusim.engine.fast import FastEngine
from gpusim.formats.hardware import HardwareModel, hardware_for_gpu
from gpusim.formats.trace import Trace, Variant
from gpusim.gpu.isolate import alone
from gpusim.gpu.replay.replay import trial_ns
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.ranking import ranked_variants
from gpusim.plan.schedule import Schedule

#: Standard deviations of the factors around 1, and between recordings of one graph. Where variants are a small part of
#: the step, the graph says more about recordings than about variants, and the factor, a posterior mean of normal
#: distributions, stays near 1.
SPREAD, RECORDING_FRAC = 0.2, 0.01
#: Limit of a factor; a larger deviation is not an effect of context, and one factor does not explain it.
MOST_FACTOR: Final = 1.5


def anchored_variants(trace: Trace, seed: int = DEFAULT_SEED, say: Callable[[str], None] = lambda _: None) -> Trace:
    """Scale the times of variants by a factor for each name, fitted to measured graphs.

    Measures on the current GPU, in a process of its own. A trace of a GPU without hardware model stays as it is. Raises
    `GpuError` without a GPU.
    """
    hardware = hardware_for_gpu(trace.provenance.gpu.name)
    if hardware is None:
        return trace
    graph = OpGraph.build(trace, hardware)
    names = sorted({variant.name for op in trace.ops for variant in op.variants})
    fastest = {name: ranked_variants(graph, 0.0, name) for name in names}
    chosen = {name: variants for name, variants in fastest.items() if any(variants)}
    if not chosen:
        return trace
    schedules = [Schedule.in_recorded_order(len(graph), variants) for variants in ((), *chosen.values())]
    say(f"measuring the step with the variants {', '.join(chosen)}")
    captured_ns, *times_ns = alone(_measure, trace, schedules, hardware, seed)
    factors = {
        name: anchor_factor(graph, variants, captured_ns, took_ns)
        for (name, variants), took_ns in zip(chosen.items(), times_ns, strict=True)
    }
    say(
        "variants take "
        + ", ".join(f"{factor:.2f} ({name})" for name, factor in factors.items())
        + " of their time alone"
    )
    return with_times(trace, factors)


def anchor_factor(graph: OpGraph, variants: Sequence[int], captured_ns: int, varied_graph_ns: int) -> float:
    """Return the factor for the times of variants from the measured graphs of the captured kernels and of `variants`.

    Both graphs are measured in turns, on one stream in recorded order; a slowdown or speed-up of the machine that the
    captured kernels share cancels out.
    """
    engine = FastEngine()
    predicted_ns, with_variants_ns = (
        engine.run(lower(graph, Schedule.in_recorded_order(len(graph), chosen)), graph.hardware).makespan_ns
        for chosen in ((), variants)
    )
    chosen_tasks = graph.choosing(variants).tasks
    varied_ns = sum(
        task.dur_ns for tasks, number in zip(chosen_tasks, variants, strict=True) if number for task in tasks
    )
    missing_ns = varied_graph_ns * predicted_ns / captured_ns - with_variants_ns
    unsure_ns = with_variants_ns * RECORDING_FRAC / SPREAD
    factor = 1.0 + missing_ns * varied_ns / (varied_ns**2 + unsure_ns**2)
    return min(MOST_FACTOR, max(1.0 / MOST_FACTOR, factor))


def with_times(trace: Trace, factors: Mapping[str, float]) -> Trace:
    """Multiply the times of variants by the factor of their name."""
    ops = (
        msgspec.structs.replace(
            op, variants=tuple(scaled(variant, factors.get(variant.name, 1.0)) for variant in op.variants)
        )
        for op in trace.ops
    )
    return msgspec.structs.replace(trace, ops=tuple(ops))


def scaled(variant: Variant, factor: float) -> Variant:
    """Multiply the times of one variant."""
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
    return trial_ns(OpGraph.build(trace, hardware), schedules, seed=seed)
