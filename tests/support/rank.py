"""Program of tests of plans on each rank: `python -m tests.support.rank WHAT...`; a file is a captured step."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist

from gpusim.defaults import DEFAULT_BATCH_NORM
from gpusim.formats.hardware import load_hardware
from gpusim.formats.topology import load_topology
from gpusim.gpu.layerwise.__main__ import join, leave
from gpusim.gpu.layerwise.batch import Data, make_data
from gpusim.gpu.layerwise.check import compare_plan
from gpusim.gpu.layerwise.layer_times import layer_documents, time_layers
from gpusim.gpu.layerwise.one_device import run_on_one_device
from gpusim.gpu.layerwise.rank import Rank
from gpusim.gpu.layerwise.sharing import groups_of
from gpusim.gpu.layerwise.transport import Distributed
from gpusim.layerwise.compute import Roofline
from gpusim.layerwise.configs import REPLICATED, Config, layer_configs
from gpusim.layerwise.costs import Problem
from gpusim.layerwise.fixed_plans import FIXED_PLANS, Choice
from gpusim.layerwise.from_trace import layers_of
from gpusim.layerwise.layers import LayerGraph
from gpusim.layerwise.network_builder import NetworkBuilder
from gpusim.step import load
from tests.support.layer_networks import small_cnn, tables

CPU = torch.device("cpu")
#: So small that sums of gradients run beside the backward pass.
BUCKET_BYTES = 2048


class KeptGroups:
    """`dist.new_group` that keeps its groups for later plans.

    Each has threads and sockets until its process ends, and hundreds of them slow down all exchanges.
    """

    def __init__(self) -> None:
        self._new_group = dist.new_group
        self._made: dict[tuple[tuple[int, ...], int], Any] = {}
        self._asked: Counter[tuple[int, ...]] = Counter()

    def next_plan(self) -> None:
        """Give a plan its groups from the first on; two groups of the same ranks in a plan stay two."""
        self._asked.clear()

    def __call__(self, ranks: list[int], **options: Any) -> Any:
        key = tuple(ranks), self._asked[tuple(ranks)]
        self._asked[tuple(ranks)] += 1
        if key not in self._made:
            self._made[key] = self._new_group(ranks, **options)
        return self._made[key]


def networks(gpus: int) -> list[LayerGraph]:
    """Return convolutions, pools, BatchNorm, a concatenation, a sum; and an encoder with attention and LayerNorm."""
    encoder = tables().encoder(1, blocks=1, width=16, heads=8, positions=10)
    return [small_cnn(2).for_gpus(gpus), encoder.for_gpus(gpus)]


def plans(graph: LayerGraph, gpus: int) -> list[Choice]:
    """Return the fixed plans, one that ends on every GPU, and plans that have every configuration of every layer."""
    return [
        *(plan(graph, gpus) for plan in FIXED_PLANS.values()),
        (*FIXED_PLANS["owt"](graph, gpus)[:-2], REPLICATED, REPLICATED),
        *plans_of_all_splits(graph, gpus),
    ]


def plans_of_all_splits(graph: LayerGraph, gpus: int) -> list[Choice]:
    """Return plans that have every configuration of every layer."""
    options = [[*layer_configs(layer, gpus), REPLICATED] for layer in graph.layers]
    shuffled = random.Random(gpus)
    for some in options:
        shuffled.shuffle(some)
    turns = [cycle(some) for some in options]
    rounds = max(len(some) for some in options)
    return [tuple(next(turn) for turn in turns) for _ in range(rounds)]


def check() -> dict[str, object]:
    gpus = dist.get_world_size()
    return checked([(graph, plans(graph, gpus)) for graph in networks(gpus)])


def captured(file: str) -> dict[str, object]:
    """Check a captured step, without the fixed plans: other plans have their splits of each layer."""
    gpus = dist.get_world_size()
    graph = layers_of(load(file).trace).for_gpus(gpus)
    return checked([(graph, plans_of_all_splits(graph, gpus))])


def checked(tested: list[tuple[LayerGraph, list[Choice]]]) -> dict[str, object]:
    """Compare plans of networks with one device."""
    gpus, unequal, worst, count = dist.get_world_size(), [], 0.0, 0
    assert isinstance(dist.new_group, KeptGroups)
    seen: set[tuple[str, str, str]] = set()
    possible: set[tuple[str, str, str]] = set()
    for graph, some in tested:
        for number, choice in enumerate(some):
            dist.new_group.next_plan()
            compared = compare_plan(graph, choice, gpus, device=CPU, seed=number, bucket_bytes=BUCKET_BYTES)
            difference = torch.tensor(
                [max(compared.gradient_difference, compared.loss_difference)], dtype=torch.float64
            )
            dist.all_reduce(difference, op=dist.ReduceOp.MAX)
            worst, count = max(worst, float(difference)), count + 1
            if float(difference) > 1e-9:
                unequal.append([graph.name, number, compared.gradient])
            seen |= {(graph.name, x.name, str(c)) for x, c in zip(graph.layers, choice, strict=True)}
        possible |= {(graph.name, x.name, str(c)) for x in graph.layers for c in (*layer_configs(x, gpus), REPLICATED)}
    return {
        "plans": count,
        "splits": len(seen),
        "possible_splits": len(possible),
        "unequal": unequal,
        "worst": worst,
    }


def local() -> dict[str, bool]:
    """Run one convolution with BatchNorm: by samples as two batches, by height as one."""
    net = NetworkBuilder("one", 2)
    at = net.convolution((3, 8, 8), 4, 3, padding=1, norm=True, relu=True)
    net.loss(net.linear(net.flatten(at), 4))
    graph = net.graph().for_gpus(2)
    return {
        "samples": _as_two_batches(graph, net.graph()),
        "height": _as_one_batch(graph),
        "bias_before_norm": _equal_in_single_precision(),
    }


def _equal_in_single_precision() -> bool:
    """Compare a network with biases before BatchNorm: their gradients are zero but for rounding."""
    net = NetworkBuilder("biased", 2)
    at = net.convolution((3, 8, 8), 4, 3, padding=1, bias=True, norm=True, relu=True)
    net.loss(net.linear(net.flatten(at), 4))
    graph = net.graph().for_gpus(2)
    choice = tuple(Config(w=2) if layer.kind == "convolution" else Config(n=2) for layer in graph.layers)
    return all(compare_plan(graph, choice, 2, device=CPU, dtype=torch.float32, seed=seed).equal for seed in range(4))


def _run(graph: LayerGraph, choice: Choice, data: Data) -> Rank:
    transport = Distributed(groups_of(graph, choice, 2, "local"))
    rank = Rank(graph, choice, 2, transport, device=CPU, dtype=torch.float64, batch_norm="local")
    rank.step(data)
    return rank


def _as_two_batches(graph: LayerGraph, half: LayerGraph) -> bool:
    data = make_data(graph, 0, torch.float64, CPU)
    rank = _run(graph, tuple(Config(n=2) for _ in graph.layers), data)
    parts = []
    for first in (0, 2):
        part = Data(data.inputs[first : first + 2], data.targets[first : first + 2])
        parts.append(run_on_one_device(half, part, dtype=torch.float64, seed=0, device=CPU)[1])
    return all(torch.allclose(g, (parts[0][name] + parts[1][name]) / 2) for name, g in rank.gradients().items())


def _as_one_batch(graph: LayerGraph) -> bool:
    data = make_data(graph, 0, torch.float64, CPU)
    choice = tuple(Config(h=2) if layer.kind == "convolution" else Config(n=2) for layer in graph.layers)
    rank = _run(graph, choice, data)
    expected = run_on_one_device(graph, data, dtype=torch.float64, seed=0, device=CPU)[1]
    return all(torch.allclose(g, expected[name]) for name, g in rank.gradients().items())


def layers() -> dict[str, object]:
    """Time layers by samples on two ranks, and one convolution on rank 0 alone."""
    graph = small_cnn(1).for_gpus(2)
    choice = tuple(Config() if layer.name == "one" else Config(n=2) for layer in graph.layers)
    hardware = load_hardware("h200")
    problem = Problem(graph, 2, load_topology("h200"), Roofline(hardware), hardware)
    rank = Rank(graph, choice, 2, Distributed(groups_of(graph, choice, 2, DEFAULT_BATCH_NORM)), device=CPU)
    times_ns = time_layers(rank, make_data(graph, 0, torch.float32, CPU), 2, 3)
    return {"layers": layer_documents(problem, choice, times_ns)}


def main() -> int:
    jobs = sys.argv[1:]
    torch.set_num_threads(1)
    join()
    dist.new_group = KeptGroups()
    if jobs == ["fail"]:
        if dist.get_rank() == 1:
            sys.stderr.write("it was me\n")
            return 3
        dist.barrier()  # waits for the missing rank
    known = {"check": check, "local": local, "layers": layers}
    answers = {job: known[job]() if job in known else captured(job) for job in jobs}
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(answers))
    return 0


if __name__ == "__main__":
    leave(main())
