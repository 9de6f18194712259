"""Caffe: one buffer of data and one of gradients for each layer's result, kept throughout.

Source: Jia et al., "Caffe: Convolutional Architecture for Fast Feature Embedding" (ACM Multimedia, 2014), and the
synced memory of its released code, as the baseline of Layrub, SuperNeurons and Layup. The rules:

1. Each blob has a buffer of data and one of gradients of the same size. They are allocated on first use and never
   freed.
2. ReLU, dropout, batch norm and scale layers work in place: their result and their gradient share the buffers of
   their input.

Filled in: buffers are freed nowhere in a step and there from its start; here they appear with the first op that writes
them, which gives the same peak. A training step of PyTorch has temporaries that Caffe does not have, such as the
gradient before a ReLU beside the one behind it: by rule 2, those are let go as PyTorch does. Where PyTorch keeps both
the input and the result of batch norm, Caffe keeps one buffer and its own copy of the normalised input, so both count.
Workspaces are those of the captured kernels, while they run: Caffe gives each convolution its own, of at most 8 MiB.
"""

from __future__ import annotations

from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.policies.base import Setting

_IN_PLACE = frozenset(("activation", "dropout", "norm"))


def caffe(setting: Setting) -> MemoryPlan:
    """Keep every activation and its gradient, except gradients that an in-place layer overwrites."""
    storages, layers = setting.storages, setting.layers
    held: set[int] = set()
    overwritten: set[int] = set()
    for layer in layers.layers:
        held.update(storages.makes[layer.op])
        for op in layer.backward:
            held.update(storages.makes[op])
            if layer.kind in _IN_PLACE:
                overwritten |= storages.reads[op] - storages.initial
    gradients = {s for s in overwritten if storages.category[s] == "activation_gradient"}
    return MemoryPlan(held=tuple(sorted(held - gradients - storages.results)))
