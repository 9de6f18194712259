"""Layrub: layers reuse a small set of blocks, activations move to the host, gradients take the place of activations.

Source: Liu et al., "Layrub: Layer-centric GPU Memory Reuse and Data Migration in Extreme-scale Deep Learning Systems"
(PPoPP 2018; ACM TACO 15(3), 2018), by its abstract and its released code (a fork of Caffe). The rules:

1. *Layers.* ReLU, dropout, batch norm and scale work in place, losses stay, everything else is a layer that moves.
2. *Inter-layer.* While a layer that moves runs, those of its inputs are copied out that no later layer reads; at its
   end the ops and the copies wait for each other. What batch norm and ReLU need for their backward pass is copied out
   after them, and nothing runs meanwhile. In the backward pass, what a layer needs comes back beside the layer before
   it: one layer ahead.
3. *Intra-layer.* A layer's gradient of its input takes the memory of that input: the gradient of the weights, which
   needs the input, is computed first.
4. *Hybrid.* Both, which is what the released code does.

Filled in: Layrub's rotating blocks come out of the caching allocator, which gives what was let go to the next request.
PyTorch keeps the input of batch norm where Layrub keeps its normalised input, and the result of ReLU where Layrub keeps
a mask; that result is also the next layer's input and moves with it. In PyTorch, pooling's gradient needs its input's
size and cannot take its place: rule 3 holds for convolutions. The released code lets the first layer and the last two
out of rule 2, and waits once more where an input and a result share a block; here only what the loss reads stays, and
no such wait is made.
"""

from __future__ import annotations

from dataclasses import replace

from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.policies.base import Setting, offload_plan
from gpusim.memplan.storages import Storages, size_only

_IN_PLACE = frozenset(("activation", "dropout", "norm"))


def layrub_inter(setting: Setting) -> MemoryPlan:
    """Move inputs of layers, and bring them back one layer ahead."""
    storages, layers = setting.storages, setting.layers
    saved = set(storages.saved)
    last_reader: dict[int, int] = {}
    for number, layer in enumerate(layers.layers):
        if layer.kind != "loss":
            last_reader.update({s: number for s in layers.inputs(number) if s in saved})
    behind = {n: place for place, n in enumerate(layers.backward_order)}
    backs: dict[int, int] = {}
    for storage, number in last_reader.items():
        if number > len(layers.layers) - 2:
            continue  # the backward pass begins with it
        first_use = storages.first_backward_use(storage)
        place = behind.get(layers.number_of.get(storages.working_after[first_use - 1], number), 0)
        start = layers.layers[layers.backward_order[place - 1]].backward[0] if place else first_use
        backs[storage] = min(start, first_use)
    in_place = [s for s in backs if layers.layers[last_reader[s]].kind in _IN_PLACE]
    return offload_plan(setting, backs, synchronous=setting.synchronous is not False, behind=in_place)


def layrub_intra(setting: Setting) -> MemoryPlan:
    """Give the gradient of a convolution's input the memory of that input."""
    return MemoryPlan(order=weights_first(setting.storages))


def layrub(setting: Setting) -> MemoryPlan:
    """Combine both: hybrid."""
    return replace(layrub_inter(setting), order=weights_first(setting.storages))


def weights_first(storages: Storages) -> tuple[int, ...]:
    """Return the recorded order with each convolution's weight gradient before its input gradient, where the first does
    not depend on the second.
    """
    order = list(range(len(storages.trace.ops)))
    for op in range(1, len(order)):
        one, other = storages.trace.ops[op - 1], storages.trace.ops[op]
        pair = size_only(one) is not None and other.target == one.target and other.args[:3] == one.args[:3]
        if pair and op - 1 not in storages.preds[op]:
            order[op - 1], order[op] = op, op - 1
    return tuple(order)
