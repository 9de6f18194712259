"""vDNN: each layer's input is offloaded to the host during that layer, and prefetched one layer ahead.

Source: Rhu et al., "vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural Network Design"
(MICRO, 2016), and two independent reimplementations that agree (none by the authors is public). The rules:

1. *What moves.* `all`: the input of every layer but activations and losses; `conv`: the inputs of convolutions. The
   input of the last layer that is neither never moves.
2. *Forward.* The copy out of a layer's input runs beside the layer. At its end the ops and the copies wait for each
   other, and the input is let go.
3. *Backward.* Beside the backward part of layer i, the nearest input of a layer below that is on the host comes back;
   the search for it ends at the next convolution below. Both are waited for at the end of layer i.
4. *Algorithms.* Memory-optimal (`m`): each convolution by the algorithm of least workspace, the fastest of these.
   Performance-optimal (`p`): the fastest.
5. *Dynamic.* Where `all` with `m` does not fit, nothing does. Else the first of these that fits: nothing moves with
   `p`, `conv` with `p`, `all` with `p`, `conv` and `all` with algorithms downgraded convolution by convolution, `conv`
   with `m`, `all` with `m`. Downgrading takes the fastest algorithm that leaves the step within the budget while it
   runs, else that of least workspace.

Filled in: vDNN sees a chain of layers. In a graph, an input moves with the last layer that reads it, as the paper says
of fork and join; gradients are not moved. The algorithms that cuDNN's heuristics chose at capture stand for `p`. Others
are the variants of `gpusim capture --variants`, with their workspaces; without them there is no `m`, and rule 5 goes
without the configurations that need it. The input of the first layer is part of the step and stays: vDNN lets it go, as
the host has it. Gradients of activations have memory of their own: vDNN writes them over the gradients behind. Memory
is let go at the layer's end, so a layer takes as long as the longer of computation and copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from gpusim.errors import PlanError
from gpusim.memplan.checks import CAPTURE_VARIANTS
from gpusim.memplan.layers import kind_of
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.policies.base import Setting, offload_plan
from gpusim.memplan.policies.keep_all import keep_all
from gpusim.memplan.program import program_of
from gpusim.plan.allocator import rounded
from gpusim.plan.ranking import variant_ns
from gpusim.units import format_bytes, format_bytes_up


def vdnn_all(setting: Setting) -> MemoryPlan:
    """Move the inputs of all layers except activations and losses."""
    return _plan(setting, conv_only=False)


def vdnn_conv(setting: Setting) -> MemoryPlan:
    """Move the inputs of convolutions."""
    return _plan(setting, conv_only=True)


def vdnn_all_m(setting: Setting) -> MemoryPlan:
    """`vdnn_all` with memory-optimal algorithms. Raises `PlanError` without convolutions or workspaces of variants."""
    return replace(vdnn_all(setting), variants=_memory_optimal(_known_choices(setting)))


def vdnn_conv_m(setting: Setting) -> MemoryPlan:
    """`vdnn_conv` with memory-optimal algorithms. Raises `PlanError` without convolutions or workspaces of variants."""
    return replace(vdnn_conv(setting), variants=_memory_optimal(_known_choices(setting)))


def vdnn_dyn(setting: Setting) -> MemoryPlan:
    """Return the first configuration whose simulated peak keeps the budget. Raises `PlanError`."""
    budget = setting.graph.hardware.memory.dram_bytes if setting.budget_bytes is None else setting.budget_bytes
    least = 0
    for plan in _configurations(setting, budget):
        least = setting.peak_bytes(plan)
        if least <= budget:
            return plan
    raise PlanError(
        f"vdnn_dyn: no configuration keeps {format_bytes(budget)}; moving all inputs takes {format_bytes_up(least)}"
    )


def _configurations(setting: Setting, budget_bytes: int) -> Iterator[MemoryPlan]:
    """Yield the configurations of rule 5 in order; where the last one does not fit, that one alone."""
    of_op = _choices(setting)
    moving = [policy(setting) for policy in (vdnn_conv, vdnn_all)]
    least = replace(moving[-1], variants=_memory_optimal(of_op))
    if not any(of_op):
        yield from (keep_all(setting), *moving)
        return
    if setting.peak_bytes(least) <= budget_bytes:
        yield from (keep_all(setting), *moving)
        yield from (replace(plan, variants=_downgraded(setting, plan, of_op, budget_bytes)) for plan in moving)
        yield replace(moving[0], variants=least.variants)
    yield least


class _Algorithm(NamedTuple):
    """One way to run a convolution. The least one is that of least workspace, the fastest of these."""

    workspace_bytes: int
    dur_ns: float
    variant: int
    """Number of the op's variant; 0: as captured."""


def _choices(setting: Setting) -> list[list[_Algorithm]]:
    """Return the algorithms of known workspace of each op; none for an op without such variants."""
    graph = setting.graph
    of_op: list[list[_Algorithm]] = []
    for index, op in enumerate(graph.trace.ops):
        variants = [
            _Algorithm(variant.workspace_bytes, variant_ns(graph, index, number), number)
            for number, variant in enumerate(op.variants, 1)
            if variant.workspace_bytes is not None and not variant.covers
        ]
        captured = _Algorithm(op.workspace_bytes, variant_ns(graph, index, 0), 0)
        of_op.append([captured, *variants] if variants and kind_of(op.target) == "conv" else [])
    return of_op


def _known_choices(setting: Setting) -> list[list[_Algorithm]]:
    of_op = _choices(setting)
    if not any(kind_of(op.target) == "conv" for op in setting.graph.trace.ops):
        raise PlanError("the step has no convolution, whose algorithms could be chosen")
    if not any(of_op):
        raise PlanError(f"no convolution has a variant whose workspace is known; {CAPTURE_VARIANTS}")
    return of_op


def _memory_optimal(of_op: list[list[_Algorithm]]) -> tuple[int, ...]:
    """Return the variant of least workspace of each convolution; empty if all are as captured."""
    return _numbers([min(algorithms).variant if algorithms else 0 for algorithms in of_op])


def _downgraded(
    setting: Setting, plan: MemoryPlan, of_op: list[list[_Algorithm]], budget_bytes: int
) -> tuple[int, ...]:
    """Return the variants of rule 5 for a plan of the captured algorithms; empty if all stay as captured."""
    program = program_of(setting.storages, plan)
    chosen = [0] * len(of_op)
    for instruction, level in zip(program, setting.levels_bytes(program), strict=True):
        algorithms = of_op[instruction.op] if instruction.kind == "run" else []
        if not algorithms or level <= budget_bytes:
            continue
        others_bytes = level - rounded(algorithms[0].workspace_bytes)
        fitting = [each for each in algorithms if others_bytes + rounded(each.workspace_bytes) <= budget_bytes]
        best = min(fitting, key=lambda each: each.dur_ns) if fitting else min(algorithms)
        chosen[instruction.op] = best.variant
    return _numbers(chosen)


def _numbers(variants: list[int]) -> tuple[int, ...]:
    return tuple(variants) if any(variants) else ()


def _plan(setting: Setting, conv_only: bool) -> MemoryPlan:
    storages, layers = setting.storages, setting.layers
    eligible = [n for n, layer in enumerate(layers.layers) if layer.kind not in ("activation", "loss")]
    last_kept = set(layers.inputs(eligible[-1])) if eligible else set()
    saved = set(storages.saved)
    mover: dict[int, int] = {}  # storage -> the last layer that reads it
    for number in eligible:
        if conv_only and layers.layers[number].kind != "conv":
            continue
        for storage in layers.inputs(number):
            if storage in saved and storage not in last_kept:
                mover[storage] = number
    return offload_plan(setting, prefetch_ops(setting, mover), synchronous=setting.synchronous is not False)


def prefetch_ops(setting: Setting, mover: dict[int, int]) -> dict[int, int]:
    """Return, for each moved storage, the op before which it comes back, in the order of rule 3."""
    storages, layers = setting.storages, setting.layers
    moved_with: dict[int, list[int]] = {}
    for storage, number in mover.items():
        moved_with.setdefault(number, []).append(storage)
    first_use = {storage: storages.first_backward_use(storage) for storage in mover}
    backs: dict[int, int] = {}
    for number in layers.backward_order:
        start = layers.layers[number].backward[0]
        for below in range(number - 1, -1, -1):
            waiting = [s for s in moved_with.get(below, ()) if s not in backs]
            if waiting:
                backs.update({s: min(start, first_use[s]) for s in waiting})
                break
            if layers.layers[below].kind == "conv":
                break
    for storage in mover:  # a storage that no layer prefetched comes back when needed
        backs.setdefault(storage, first_use[storage])
    return dict(sorted(backs.items(), key=lambda item: (item[1], -mover[item[0]])))
