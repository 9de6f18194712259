"""Layup: for each type of layer the cheaper of recomputation and transfer.

Source: Jiang et al., "Layup: Layer-adaptive and Multi-type Intermediate-oriented Memory Optimization for GPU-based
CNNs" (ACM TACO 16(4), 2019), of which only the abstract was readable. What it says:

1. One optimisation takes very different time for different types of layers, so each type has its own.
2. Intermediate data of several types is reused: workspaces of convolutions and what handles of cuDNN hold.

Everything else here is an interpretation. By rule 1: convolutions and fully connected layers move what they have made,
which the others can be computed from. For each other type of layer, the time to compute its saved results
again, and the time of copies out and back beyond that of the concurrent ops (the layer's own forward and backward
part), are added up over the step, and the type takes the smaller. By rule 2: workspaces share the caching allocator's
memory. Copies are waited for by events. No budget: every type acts.
"""

from __future__ import annotations

from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.policies.base import Setting, layer_ends
from gpusim.memplan.rebuild import grouped_redos
from gpusim.memplan.times import OpTimes, first_needs, place_copies

_SOURCES = frozenset(("conv", "fc", "attention"))


def layup(setting: Setting) -> MemoryPlan:
    """Recompute or move the saved results of each type of layer."""
    storages, layers = setting.storages, setting.layers
    of_kind: dict[str, list[int]] = {}
    all_saved = frozenset(storages.saved)
    for layer in layers.layers[:-1]:
        of_kind.setdefault(layer.kind, []).extend(s for s in storages.makes[layer.op] if s in all_saved)
    layer_ns = {
        s: setting.graph.solo_ns[layer.op] + sum(setting.graph.solo_ns[op] for op in layer.backward)
        for layer in layers.layers
        for s in storages.makes[layer.op]
    }
    again: list[int] = []
    moved: list[int] = []
    for kind, saved in of_kind.items():
        recompute_ns = sum(setting.recompute_ns(s) for s in saved if s in setting.chains)
        copies_ns = sum(
            max(0.0, setting.link.out_ns(storages.bytes[s]) + setting.link.back_ns(storages.bytes[s]) - layer_ns[s])
            for s in saved
        )
        if kind not in _SOURCES and recompute_ns < copies_ns:
            again += [s for s in saved if s in setting.chains]
            moved += [s for s in saved if s not in setting.chains]
        else:
            moved += saved
    redos = grouped_redos(storages, again, setting.times.place, setting.uses)
    if redos is None:  # recomputation needs a result that cannot be recomputed: it moves instead
        moved, redos = [*moved, *again], ()
    times = OpTimes.of(setting.graph, redos=redos)
    needs = first_needs(storages, times, moved, redos)
    offloads = place_copies(storages, times, setting.link, moved, needs)
    return MemoryPlan(offloads=offloads, redos=redos, barriers=layer_ends(setting) if setting.synchronous else ())
