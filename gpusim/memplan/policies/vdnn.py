"""vDNN: each layer's input is offloaded to the host during that layer, and prefetched one layer ahead.

Source: Rhu et al., "vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural Network Design"
(MICRO, 2016), and two independent reimplementations that agree (none by the authors is public). The rules:

1. *What moves.* `all`: the input of every layer but activations and losses; `conv`: the inputs of convolutions. The
   input of the last layer that is neither never moves.
2. *Forward.* The copy out of a layer's input runs beside the layer. At its end the ops and the copies wait for each
   other, and the input is let go.
3. *Backward.* Beside the backward part of layer i, the nearest input of a layer below that is on the host comes back;
   the search for it ends at the next convolution below. Both are waited for at the end of layer i.
4. *Algorithms.* Memory-optimal (`m`): convolutions without a workspace. Performance-optimal (`p`): the fastest.
5. *Dynamic.* Configurations are tried in order until one fits: nothing moves, `conv`, `all`.

Filled in: vDNN sees a chain of layers. In a graph, an input moves with the last layer that reads it, as the paper says
of fork and join; gradients are not moved. A trace has the algorithms that cuDNN's heuristics chose, which stand for
`p`, and the workspaces of these alone. `m` is missing: it needs the workspaces of variants, and rule 5 goes without the
configurations that differ in it (research/2026-11-28-memory-planner.md). The input of the first layer is part of the
step and stays: vDNN lets it go, as the host has it. Gradients of activations have memory of
their own: vDNN writes them over the gradients behind. Memory is let go at the layer's end, so a layer takes as long as
the longer of computation and copy.
"""

from __future__ import annotations

from gpusim.errors import PlanError
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.policies.base import Setting, offload_plan
from gpusim.memplan.policies.keep_all import keep_all
from gpusim.units import format_bytes


def vdnn_all(setting: Setting) -> MemoryPlan:
    """Move the inputs of all layers except activations and losses."""
    return _plan(setting, conv_only=False)


def vdnn_conv(setting: Setting) -> MemoryPlan:
    """Move the inputs of convolutions."""
    return _plan(setting, conv_only=True)


def vdnn_dyn(setting: Setting) -> MemoryPlan:
    """Return the first of keep-all, `conv` and `all` whose simulated peak keeps the budget. Raises `PlanError`."""
    budget = setting.graph.hardware.memory.dram_bytes if setting.budget_bytes is None else setting.budget_bytes
    least = 0
    for policy in (keep_all, vdnn_conv, vdnn_all):
        plan = policy(setting)
        least = setting.peak_bytes(plan)
        if least <= budget:
            return plan
    raise PlanError(
        f"vdnn_dyn: no configuration keeps {format_bytes(budget)}; moving all inputs takes {format_bytes(least)}"
    )


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
