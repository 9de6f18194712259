"""SuperNeurons: liveness, offload of convolutions' results, and cost-aware recomputation of the layers between.

Source: Wang et al., "SuperNeurons: Dynamic GPU Memory Management for Training Deep Neural Networks" (PPoPP, 2018;
arXiv 1801.04380), and its released code. The rules:

1. *Liveness.* Each tensor is let go after its last use.
2. *Tensor pool.* Results of checkpoint layers (convolution, fully connected, join, concat) move to the host as soon as
   they are there, beside the layers that follow, and come back beside the backward part of the checkpoint layer behind.
3. *Cost-aware recomputation.* Results of the other layers (activation, pooling, batch norm, dropout) are let go after
   their use and computed again from the checkpoint before. Let l_peak be the most that any layer needs for its backward
   part. Where the results of a segment take no more than l_peak, it is computed once and kept (speed-centric), else
   again for each layer that needs something of it (memory-centric).
4. *Release.* In the released code rule 2 is a cache: tensors stay until an allocation fails, then the least recently
   used are copied out, and copied back on their next use. These copies are synchronous.

Filled in: a result that a join changes in place is the join's. Rule 2 is as the paper draws it, with copies that ops
wait for where the memory or the tensor is needed. Random ops (dropout) are not run again: what they make stays. The
choice of each convolution's algorithm by the memory left, and the pool's own allocator, are left out: a trace has one
algorithm, and memory is PyTorch's. The released code pins memory for every tensor; here pinned memory is that of what
moves. For rule 4, an allocation fails where the budget would be exceeded; without one, half of what keeping all takes.
"""

from __future__ import annotations

from dataclasses import replace

from gpusim.errors import PlanError
from gpusim.memplan.plan import MemoryPlan, Offload, Redo
from gpusim.memplan.policies.base import Setting, layer_ends
from gpusim.memplan.rebuild import grouped_redos
from gpusim.memplan.storages import Storages
from gpusim.memplan.times import OpTimes, first_needs, place_copies
from gpusim.plan.allocator import rounded
from gpusim.units import format_bytes

_MOVED = frozenset(("conv", "fc", "join", "attention"))
_CHECKPOINTS = _MOVED | {"loss", "other"}


def superneurons(setting: Setting) -> MemoryPlan:
    """Plan by rules 1 to 3, as in the paper."""
    storages, layers = setting.storages, setting.layers
    kinds = {s: layer.kind for layer in layers.layers for s in storages.makes[layer.op]}
    for layer in layers.layers:
        if layer.kind == "join":  # in a ResNet it adds in place, to a result of batch norm
            kinds.update((s, layer.kind) for s in storages.writes[layer.op] if s in kinds)
    saved = [s for s in storages.saved if s in kinds]
    kept = {s for s in saved if kinds[s] in _CHECKPOINTS or s not in setting.chains}
    moved = [s for s in saved if s in kept and kinds[s] in _MOVED]
    redos = cost_aware(setting, [s for s in saved if s not in kept])
    times = OpTimes.of(setting.graph, redos=redos)
    needs = first_needs(storages, times, moved, redos)
    placed = place_copies(storages, times, setting.link, moved, needs)
    number_of, order = layers.number_of, layers.backward_order
    place_of = {number: place for place, number in enumerate(order)}
    offloads: list[Offload] = []
    for each in placed:
        need = needs[each.storage]
        user = place_of.get(number_of.get(storages.working_after[max(need - 1, 0)], -1), 0)
        before = [n for n in order[:user] if layers.layers[n].kind in ("conv", "fc")]
        start = layers.layers[before[-1]].backward[0] if before else need
        back = max(min(start, need), times.place[each.free])
        offloads.append(replace(each, back=back))
    ordered = tuple(sorted(offloads, key=lambda o: (o.back, needs[o.storage])))
    barriers = layer_ends(setting) if setting.synchronous else ()
    return MemoryPlan(offloads=ordered, redos=redos, barriers=barriers)


def cost_aware(setting: Setting, dropped: list[int]) -> tuple[Redo, ...]:
    """Return the recomputation of rule 3, by segments between checkpoint layers."""
    storages = setting.storages
    l_peak = max((sum(storages.bytes[s] for s in storages.touched[op]) for op in _backward(storages)), default=0)
    segments: dict[tuple[int, ...], list[int]] = {}
    for storage in dropped:
        first = setting.chains[storage].ops[0]
        segments.setdefault((_checkpoint_before(setting, first),), []).append(storage)
    recorded = range(len(storages.trace.ops))
    redos: list[Redo] = []
    for segment in segments.values():
        if sum(storages.bytes[s] for s in segment) <= l_peak:
            redos += grouped_redos(storages, segment, recorded, setting.uses) or ()
        else:
            redos += setting.facts.separate_redos.of(segment, dropped)
    return tuple(redos)


def _backward(storages: Storages) -> list[int]:
    return [op for op, node in enumerate(storages.trace.ops) if node.phase == "backward"]


def _checkpoint_before(setting: Setting, op: int) -> int:
    """Return the last checkpoint layer up to an op of the forward pass."""
    layers = setting.layers
    before = (n for n, layer in enumerate(layers.layers) if layer.op <= op and layer.kind in _CHECKPOINTS)
    return max(before, default=-1)


def superneurons_release(setting: Setting) -> MemoryPlan:
    """Plan as in the released code: a cache of tensors, with synchronous copies.

    Raises `PlanError` where the budget is smaller than one op's need; without a budget, that need is the least.
    """
    budget = setting.budget_or_half
    while True:
        cache = _Cache(setting.storages, budget)
        needed, op = cache.run()
        if needed <= budget:
            return MemoryPlan(offloads=tuple(cache.offloads))
        if setting.budget_bytes is not None:
            name = setting.storages.trace.ops[op].name
            problem = f"op '{name}' needs {format_bytes(needed)} at once, the budget is {format_bytes(budget)}"
            raise PlanError(f"superneurons_release: {problem}")
        budget = needed


class _Cache:
    """Tensors on the GPU, least recently used first."""

    def __init__(self, storages: Storages, budget_bytes: int) -> None:
        self.storages = storages
        self.budget_bytes = budget_bytes
        self.size = [rounded(each) for each in storages.bytes]
        self.level = sum(self.size[s] for s in storages.initial)
        self.there: dict[int, None] = {}
        self.out: dict[int, tuple[int, int]] = {}
        self.offloads: list[Offload] = []

    def run(self) -> tuple[int, int]:
        """Follow the step; returns the largest need of one op, and the first op that needs more than the budget."""
        storages = self.storages
        movable = frozenset(range(len(storages))) - storages.initial - storages.results
        most, last = self.level, 0
        for op, touched in enumerate(storages.touched):
            wanted = sorted(touched - storages.initial)
            missing = [s for s in wanted if s not in self.there]
            asked = sum(self.size[s] for s in missing) + rounded(storages.workspace_bytes[op])
            self._evict(asked, movable - touched, last, op)
            most = max(most, self.level + asked)
            if most > self.budget_bytes:
                return most, op
            for storage in missing:
                if storage in self.out:
                    after, free = self.out.pop(storage)
                    self.offloads.append(Offload(storage, after=after, free=free, back=op))
                self.level += self.size[storage]
            for storage in wanted:
                self.there.pop(storage, None)
                self.there[storage] = None
                if storages.users[storage][-1] == op and storage in movable:
                    del self.there[storage]
                    self.level -= self.size[storage]
            last = op
        return most, last

    def _evict(self, asked: int, movable: frozenset[int], last: int, op: int) -> None:
        """Copy out the least recently used tensors before an op, until it has room."""
        for storage in list(self.there):
            if self.level + asked <= self.budget_bytes:
                return
            if storage in movable:
                self.out[storage] = (last, op)
                del self.there[storage]
                self.level -= self.size[storage]
