"""A step of torch's DistributedDataParallel: data parallelism as its reducer runs it.

It adds to the kernels of one GPU, by its documentation and code (torch/nn/parallel/distributed.py, reducer.cpp):

- gradients are copied into buckets as they become ready, one kernel per parameter, and back at the end;
- a bucket is summed once it is complete: the first has 1 MiB, the others 25 MiB (`bucket_cap_mb`); parameters
  are in reverse order of the forward pass;
- before the forward pass, buffers (BatchNorm's) are sent from rank 0: concatenated, sent, copied one by one.

On one GPU it adds nothing. The host's time is not included: a step whose launches are slower than its kernels takes
longer.
"""

from __future__ import annotations

from typing import Final

from gpusim.engine.base import engine_by_name
from gpusim.layerwise.communication import members, time_ns, wire_share
from gpusim.layerwise.costs import BUCKET_BYTES, Problem
from gpusim.layerwise.fixed_plans import data_parallel
from gpusim.layerwise.layers import NORMS, WITH_WEIGHT, Layer
from gpusim.layerwise.lowering import Lowered, Lowering
from gpusim.layerwise.made_up import copy_kernel
from gpusim.layerwise.operands import own_parameters
from gpusim.layerwise.roles import roles_of
from gpusim.units import MIB

#: The reducer's first bucket (`kDefaultFirstBucketBytes`).
FIRST_BUCKET_BYTES: Final = MIB
#: Buffers of a BatchNorm: running mean, running variance, number of batches.
_BUFFERS: Final = 3


def lower_ddp(problem: Problem, *, broadcast_buffers: bool = True) -> Lowered:
    """Return the tasks of one forward and backward pass under DistributedDataParallel, without optimizer.

    `broadcast_buffers` is its option of that name.
    """
    choice = data_parallel(problem.graph, problem.gpus)
    roles, all_roles = roles_of(problem, choice)
    ddp = _Ddp(problem, choice, roles)
    ddp.broadcast_buffers = broadcast_buffers
    return ddp.run(all_roles)


def ddp_step_ns(problem: Problem, alone: Problem, alone_ns: float) -> float:
    """Predict a step under DistributedDataParallel from the measured time of the same step on one GPU.

    The simulated difference between several GPUs and one (`alone`) is added to the measured time, so that both include
    the cost of eager launches.
    """
    engine = engine_by_name("fast")
    several, one = (engine.run(lower_ddp(each).plan, each.hardware).makespan_ns for each in (problem, alone))
    return alone_ns + several - one


def parameters_of(layer: Layer) -> int:
    """Return the number of parameter tensors of a layer, by its operations."""
    count = 0
    for op in layer.ops:
        count += int(op.kind in WITH_WEIGHT) + int(bool(op.options.get("bias")))
        count += len(op.options.get("parameters", ("weight", "bias"))) if op.kind in NORMS else 0
        count += int(op.kind in ("channel_scale", "channel_bias")) + len(own_parameters(op))
    return count - len(layer.tied)


class _Ddp(Lowering):
    broadcast_buffers: bool

    def before(self) -> None:
        """Broadcast buffers from rank 0."""
        norms = [layer for layer in self.graph.layers if layer.statistics]
        if not self.broadcast_buffers or not norms or self.problem.gpus < 2:
            return
        size = sum(layer.statistics * layer.element_bytes for layer in norms)
        for number in range(len(self.roles)):
            self.launch(number, copy_kernel(size, self.hardware), "forward", -1)
        who = members(range(self.problem.gpus), self.topology.gpus_per_node)
        # A broadcast moves each byte once over each link, like an all-gather of the same size.
        dur_ns = time_ns(self.topology, "all_gather", size, who)
        self.collective(list(range(len(self.roles))), dur_ns, float(size), "transfer", -1)
        for layer in norms:
            for number in range(len(self.roles)):
                buffer = copy_kernel(layer.statistics * layer.element_bytes // 2, self.hardware)
                for _ in range(_BUFFERS):
                    self.launch(number, buffer, "forward", -1)

    def backward(self) -> None:
        """Copy gradients into buckets, all-reduce these during the backward pass, and copy them back."""
        everyone = list(range(len(self.roles)))
        syncs: dict[int, list[int]] = {number: [] for number in everyone}
        held, limit = 0, FIRST_BUCKET_BYTES
        for index in reversed(range(len(self.graph))):
            layer = self.graph.layers[index]
            self.kernels(index, backward=True)
            if not layer.weight_elements:
                continue
            self._copies(index, layer)
            held += layer.weight_bytes
            if held >= limit:
                self._sum_all(held, index, syncs)
                held, limit = 0, BUCKET_BYTES
        if held:
            self._sum_all(held, 0, syncs)
        for number in everyone:
            self.waiting[number] += syncs[number]
        for index, layer in enumerate(self.graph.layers):
            if layer.weight_elements:
                self._copies(index, layer)

    def _sum_all(self, size: int, layer: int, syncs: dict[int, list[int]]) -> None:
        if self.problem.gpus < 2:
            return
        everyone = list(range(len(self.roles)))
        who = members(range(self.problem.gpus), self.topology.gpus_per_node)
        dur_ns = time_ns(self.topology, "all_reduce", size, who)
        wire = size * wire_share("all_reduce", self.problem.gpus)
        waits = {number: [self.last_kernel[number]] for number in everyone}
        for number, tasks in self.collective(everyone, dur_ns, wire, "sync", layer, waits).items():
            syncs[number] += tasks

    def _copies(self, index: int, layer: Layer) -> None:
        """Return one copy kernel per parameter; the weight's has nearly all bytes."""
        if self.problem.gpus < 2:
            return
        for number in range(len(self.roles)):
            for which in range(max(1, parameters_of(layer))):
                size = layer.weight_bytes if which == 0 else 0
                self.launch(number, copy_kernel(size, self.hardware), "backward", index)
