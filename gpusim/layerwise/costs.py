"""Costs of all configurations as tables: a vector for each layer, a matrix for each edge.

Source: Jia et al. 2018, equation 1: t = sum of t_C + t_S over layers and t_X over edges. Computation `t_C` is that of
the GPU with the largest share. Synchronisation `t_S` sums gradients of replicated weights and statistics of BatchNorm.
A transfer `t_X` goes forward and, in training, backward. Nothing overlaps: only the engines model overlap.

Statistics: with `batch_norm="local"` each part of the batch has its own, as in DistributedDataParallel, and the parts
of one image share theirs; with `"synchronised"` all parts share them, as on one GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Final

import numpy as np

from gpusim.defaults import DEFAULT_BATCH_NORM, BatchNorm
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.topology import Topology
from gpusim.layerwise.communication import Floats, Members, all_to_all_ns, members, sync_bytes, sync_ns, time_ns
from gpusim.layerwise.compute import Times
from gpusim.layerwise.configs import REPLICATED, Config, layer_configs
from gpusim.layerwise.gathers import gathered_along, in_one_piece
from gpusim.layerwise.layers import BATCH, Edge, Layer, LayerGraph
from gpusim.layerwise.made_up import copy_ns
from gpusim.layerwise.regions import Transfer, alike, moved_elements, transfers
from gpusim.layerwise.shares import Share, busiest_share, frozen_elements, weight_elements
from gpusim.notebook import ShortRepr
from gpusim.units import MIB

#: Elements of training memory per weight: the weight, its gradient, its momentum.
WEIGHT_COPIES: Final = 3


#: Default bucket size of DistributedDataParallel (`bucket_cap_mb`).
BUCKET_BYTES: Final = 25 * MIB


@dataclass(frozen=True, repr=False)
class Problem(ShortRepr):
    """Inputs of a plan: layers of the whole batch, GPUs, links, and times."""

    graph: LayerGraph
    """Layers for the batch of all GPUs (`LayerGraph.for_gpus`)."""
    gpus: int
    topology: Topology
    times: Times
    hardware: HardwareModel
    batch_norm: BatchNorm = DEFAULT_BATCH_NORM
    bucket_bytes: int = BUCKET_BYTES
    """Least size of the buckets in which gradients are summed."""
    direct: bool = False
    """Whether GPUs read each other's memory, so that pieces are not packed (`gpusim.gpu.layerwise.direct`)."""
    repeated: bool = True
    """Whether every GPU may compute a layer whole that could be split, as Jia et al. do not."""
    _shares: dict[tuple[int, Config], Share] = field(default_factory=dict, repr=False)
    _costs: dict[tuple[int, Config], LayerCost] = field(default_factory=dict, repr=False)

    @cached_property
    def first_alike(self) -> tuple[int, ...]:
        """For each layer, the first one whose shares have the same times: itself, unless times depend on shapes
        only.
        """
        if not self.times.by_shape:
            return tuple(range(len(self.graph)))
        first: dict[object, int] = {}
        return tuple(first.setdefault(_shape_key(layer), index) for index, layer in enumerate(self.graph.layers))

    @cached_property
    def exchanges(self) -> dict[object, Any]:
        """Cache of the redistributions of inputs (`gpusim.layerwise.lowering`); it lives as long as the problem."""
        return {}

    @property
    def training(self) -> bool:
        """Whether the step has a backward pass."""
        return self.graph.training

    @property
    def on_one_node(self) -> bool:
        """Whether all GPUs are on one node."""
        return self.gpus <= self.topology.gpus_per_node

    def share(self, index: int, config: Config) -> Share:
        """Return the busiest GPU's share of a layer."""
        key = (self.first_alike[index], config)
        if key not in self._shares:
            self._shares[key] = busiest_share(self.graph.layers[index], config)
        return self._shares[key]


def _shape_key(layer: Layer) -> object:
    """Key of all properties of a layer that its costs depend on."""
    inputs = tuple((edge.extents, edge.needs, edge.origin) for edge in layer.inputs)
    sizes = (
        layer.weight_elements,
        layer.tied_elements,
        layer.frozen_elements,
        layer.statistics,
        layer.flops,
        layer.element_bytes,
        len(layer.ops),
    )
    return layer.kind, layer.output, inputs, layer.splits, layer.channel_unit, sizes, layer.input_gradient


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Parts of a layer's cost in ns."""

    forward_ns: float
    backward_ns: float
    optimizer_ns: float
    sync_ns: float
    statistics_ns: float
    error: float

    @property
    def compute_ns(self) -> float:
        return self.forward_ns + self.backward_ns + self.optimizer_ns

    @property
    def total_ns(self) -> float:
        return self.compute_ns + self.sync_ns + self.statistics_ns


@dataclass(frozen=True)
class Tables:
    """All costs: `nodes[i][a]` of layer i in its a-th configuration, `edges[i, j][a, b]` between layers i and j."""

    configs: tuple[tuple[Config, ...], ...]
    nodes: tuple[Floats, ...]
    edges: Mapping[tuple[int, int], Floats]


def tables(problem: Problem, configs: Sequence[Sequence[Config]] | None = None) -> Tables:
    """Return the tables of a problem; `configs` restricts the configurations of each layer."""
    layers = problem.graph.layers
    chosen = tuple(tuple(some) for some in configs or [layer_configs(layer, problem.gpus) for layer in layers])
    nodes = tuple(
        np.array([layer_cost(problem, index, config).total_ns for config in some]) for index, some in enumerate(chosen)
    )
    edges: dict[tuple[int, int], Floats] = {}
    known: dict[object, Transfer] = {}
    for index, layer in enumerate(layers):
        for number, edge in enumerate(layer.inputs):
            if edge.source == BATCH:
                continue
            pair = (edge.source, index)
            table = _edge_matrix(problem, pair, number, chosen[edge.source], chosen[index], known)
            edges[pair] = edges[pair] + table if pair in edges else table
    return Tables(chosen, nodes, edges)


def layer_memories(problem: Problem, costs: Tables) -> list[Floats]:
    """Bytes of each layer on GPU 0, which has a part of everything, in each of its configurations."""
    return [
        np.array([float(layer_memory(problem, index, config)) for config in some])
        for index, some in enumerate(costs.configs)
    ]


def layer_cost(problem: Problem, index: int, config: Config) -> LayerCost:
    """Return the parts of the cost of one layer in one configuration."""
    key = (problem.first_alike[index], config)
    if key not in problem._costs:
        problem._costs[key] = _layer_cost(problem, index, config)
    return problem._costs[key]


def _layer_cost(problem: Problem, index: int, config: Config) -> LayerCost:
    layer, share = problem.graph.layers[index], problem.share(index, config)
    times = problem.times.share_ns(index, layer, share)
    if not problem.training:
        return LayerCost(times.forward_ns, 0.0, 0.0, 0.0, statistics_ns(problem, layer, config), times.error)
    weights = weight_elements(layer, share)
    sync = tied_ns(problem, layer)
    weights_of_bucket = weights - layer.tied_elements
    if weights_of_bucket and not config.replicated and config.replicas > 1:
        size = weights_of_bucket * layer.element_bytes
        bucket = max(size, problem.bucket_bytes)  # small gradients are summed in shared buckets, and share their time
        sync += sync_ns(problem.topology, bucket, weight_members(problem, config)) * size / bucket
    return LayerCost(
        times.forward_ns,
        times.backward_ns,
        problem.times.optimizer_ns(weights),
        sync,
        statistics_ns(problem, layer, config),
        times.error,
    )


def tied_ns(problem: Problem, layer: Layer) -> float:
    """Time to sum the gradients of weights that later layers use, too: over all GPUs, whatever the configuration."""
    if not layer.tied_elements or problem.gpus < 2:
        return 0.0
    everyone = members(range(problem.gpus), problem.topology.gpus_per_node)
    return sync_ns(problem.topology, layer.tied_elements * layer.element_bytes, everyone)


def weight_members(problem: Problem, config: Config) -> Members:
    """Return the GPUs that sum the gradient of one part of the channels."""
    gpus = range(0, config.parts, config.c)
    return members(gpus, problem.topology.gpus_per_node, config.c)


def statistics_members(problem: Problem, config: Config) -> Members:
    """Return the GPUs that share the statistics of one part of the channels."""
    together = config.h * config.w * (config.n if problem.batch_norm == "synchronised" else 1)
    return members(range(0, together * config.c, config.c), problem.topology.gpus_per_node, config.c)


def statistics_ns(problem: Problem, layer: Layer, config: Config) -> float:
    """Time to share BatchNorm's statistics, once in each pass; 0 in inference, where they are constants."""
    if not layer.statistics or config.replicated or not problem.training:
        return 0.0
    size = layer.statistics * layer.element_bytes / config.c
    return 2 * time_ns(problem.topology, "all_reduce", size, statistics_members(problem, config))


def _edge_matrix(
    problem: Problem,
    pair: tuple[int, int],
    number: int,
    source_configs: tuple[Config, ...],
    user_configs: tuple[Config, ...],
    known: dict[object, Transfer],
) -> Floats:
    """Time of the transfers over one edge, forward and in training backward, for each pair of configurations.

    `known` caches transfers of earlier edges: many edges of a network differ only in channels.
    """
    source, user = (problem.graph.layers[index] for index in pair)
    topology, gpus = problem.topology, problem.gpus
    source, user, factor = alike(source, user, number, gpus)
    edge = user.inputs[number]
    key = (source.output, source_configs, user.output, edge.extents, edge.origin, edge.needs, user_configs)
    if key not in known:
        known[key] = transfers(source, source_configs, user, number, user_configs, gpus, topology.gpus_per_node)
    moved, size = known[key], factor * user.element_bytes
    result = np.zeros(moved.busiest.shape)
    passes = np.array([passes_moved(problem, edge, config) for config in user_configs])
    for of in np.unique(moved.gpus):
        chosen = moved.gpus == of
        result[chosen] = exchange_ns(topology, moved.busiest[chosen] * size, moved.busiest_node[chosen] * size, int(of))
    result *= passes
    whole, user = (problem.graph.layers[index] for index in pair)
    of_all = [column for column, config in enumerate(user_configs) if config.computing(gpus) == gpus]
    alike_parts = of_all if problem.on_one_node else []  # else nothing is gathered
    for row, config in enumerate(source_configs):
        for column in alike_parts if config.parts == gpus else ():
            gather = gather_of(problem, whole, config, user, number, user_configs[column])
            if gather is not None:
                one_way = gather.forward_ns, gather.backward_ns
                result[row, column] = sum(ns + gather.copy_ns for ns in one_way[: passes[column]])
    everywhere = [config.replicated for config in source_configs]
    if any(everywhere):
        kinds = {config.replicated: config for config in user_configs}  # nothing else of a configuration counts
        sums_ns = {kind: shared_gradient(problem, whole, edge, REPLICATED, some)[0] for kind, some in kinds.items()}
        result[everywhere] = [sums_ns[config.replicated] for config in user_configs]
    return result


def passes_moved(problem: Problem, edge: Edge, user_config: Config) -> int:
    """Return in how many passes an input moves: a layer that every GPU computes leaves each its part's gradient."""
    return 2 if problem.training and not user_config.replicated and not edge.cut else 1


@dataclass(frozen=True, slots=True)
class Gather:
    """Times in ns to gather a layer on all GPUs, to sum its gradient, and to rearrange it in either pass."""

    forward_ns: float
    backward_ns: float
    copy_ns: float
    """0 if parts are next to each other in memory, or are copied there from that of other GPUs."""


def gather_of(
    problem: Problem, source: Layer, source_config: Config, user: Layer, number: int, user_config: Config
) -> Gather | None:
    """Return the gather that moves an input of `user`, if one does. On several nodes pieces are exchanged."""
    if not problem.on_one_node:
        return None
    place = gathered_along(source, source_config, user, number, user_config, problem.gpus)
    if place is None:
        return None
    size, who = source.output_bytes, members(range(problem.gpus), problem.topology.gpus_per_node)
    copied = 0 if problem.direct or in_one_piece(source, place) else size
    return Gather(
        time_ns(problem.topology, "all_gather", size, who),
        time_ns(problem.topology, "reduce_scatter", size, who),
        copy_ns(copied, problem.hardware) if copied else 0.0,
    )


def shared_gradient(
    problem: Problem, source: Layer, edge: Edge, config: Config, user_config: Config
) -> tuple[float, int]:
    """Time in ns and bytes to sum the gradient of a layer that every GPU computes, with a part on each GPU."""
    if not (problem.training and config.replicated) or user_config.replicated or edge.cut:
        return 0.0, 0
    everyone = members(range(problem.gpus), problem.topology.gpus_per_node)
    return time_ns(problem.topology, "all_reduce", source.output_bytes, everyone), source.output_bytes


def exchange_ns(topology: Topology, busiest_bytes: Floats, node_bytes: Floats, gpus: int) -> Floats:
    """Time of redistributions among the first `gpus` GPUs: an all-to-all with the busiest GPU's size.

    Parts from other nodes arrive over the network at the same time.
    """
    times = np.zeros_like(busiest_bytes)
    of_node = min(gpus, topology.gpus_per_node)
    some = busiest_bytes > 0
    if of_node > 1 and some.any():
        whole_buffer = busiest_bytes[some] * of_node / (of_node - 1)
        times[some] = all_to_all_ns(topology, whole_buffer, of_node)
    far = node_bytes > 0
    if far.any():
        network = topology.links.network
        assert network is not None  # `check_gpus`
        times[far] = np.maximum(times[far], node_bytes[far] / network.bytes_per_ns + network.latency_ns)
    return times


def layer_memory(problem: Problem, index: int, config: Config) -> int:
    """Bytes of one layer on GPU 0: weights, gradients, momenta, tensors stored for the backward pass, copies of inputs.

    A redistribution's result counts in addition to the source's, as far as it exceeds an even part of it.
    """
    layer, share = problem.graph.layers[index], problem.share(index, config)
    weights = weight_elements(layer, share) * (WEIGHT_COPIES if problem.training else 1) + frozen_elements(layer, share)
    kept = layer.kept_elements / config.parts if problem.training else 0.0
    brought = lacking_elements(problem, index, config)
    return round((weights + max(kept, prod(share.output)) + brought) * layer.element_bytes)


def lacking_elements(problem: Problem, index: int, config: Config) -> int:
    """Elements of its inputs that a share needs beyond an even part of them."""
    if config.parts < 2:
        return 0
    whole_input = sum(prod(edge.extents) for edge in problem.graph.layers[index].inputs)
    return max(0, problem.share(index, config).input_elements - whole_input // config.parts)


def plan_bytes(problem: Problem, choice: Sequence[Config]) -> tuple[int, int]:
    """Bytes that a plan moves over all links in a step: transfers in both directions, and synchronisation."""
    moved = synced = 0
    layers = problem.graph.layers
    for layer, config in zip(layers, choice, strict=True):
        for number, edge in enumerate(layer.inputs):
            if edge.source != BATCH:
                source = layers[edge.source]
                elements = moved_elements(source, choice[edge.source], layer, number, config, problem.gpus)
                moved += elements * layer.element_bytes * passes_moved(problem, edge, config)
                summed = shared_gradient(problem, source, edge, choice[edge.source], config)[1]
                moved += sync_bytes(problem.topology, summed, problem.gpus)
        if problem.training and layer.weight_elements and not config.replicated:
            part = (layer.weight_elements - layer.tied_elements) * layer.element_bytes // config.c
            synced += config.c * sync_bytes(problem.topology, part, config.replicas)
        if problem.training:
            synced += sync_bytes(problem.topology, layer.tied_elements * layer.element_bytes, problem.gpus)
    return moved, synced
