"""Exchanges through memory that all ranks can read, with ranks as threads: no GPU is needed."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence

import pytest
import torch

from gpusim.formats.hardware import load_hardware
from gpusim.formats.topology import load_topology
from gpusim.gpu.layerwise.batch import make_data
from gpusim.gpu.layerwise.direct import Direct, Space, shared_elements
from gpusim.gpu.layerwise.one_device import run_on_one_device
from gpusim.gpu.layerwise.rank import Rank
from gpusim.gpu.layerwise.transport import Alone
from gpusim.layerwise.buckets import sums_by_reading
from gpusim.layerwise.compute import Roofline
from gpusim.layerwise.configs import Config
from gpusim.layerwise.costs import Problem
from gpusim.layerwise.fixed_plans import Choice
from gpusim.layerwise.layers import LayerGraph
from gpusim.layerwise.lowering import lower_plan
from gpusim.layerwise.network_builder import NetworkBuilder
from tests.support.layer_networks import chain
from tests.support.rank import networks, plans

CPU = torch.device("cpu")


def test_gathers_through_shared_memory_give_each_rank_all_parts_and_sums() -> None:
    """Three ranks as threads, several steps: an odd number of gathers a step, and one rank that is always late."""
    gpus, steps = 3, 4
    meeting = threading.Barrier(gpus)
    memories = [[torch.full((4 * gpus,), torch.nan) for _ in range(gpus)] for _ in range(2)]
    found: dict[int, list[torch.Tensor]] = {rank: [] for rank in range(gpus)}

    def run(rank: int) -> None:
        spaces = [Space(memory, lambda: meeting.wait(timeout=30) and None) for memory in memories]
        transport = Direct(Alone(rank), (spaces[0], spaces[1]))
        for step in range(steps):
            for turn in range(3):
                if rank == 0:
                    time.sleep(0.002)
                whole, part = torch.empty(gpus, 2), torch.empty(1, 2)
                transport.gather(whole, torch.tensor([[10.0 * rank, step + turn]]), 0)
                transport.begin_scatter(part, whole + rank, 0)()
                found[rank] += [whole, part] if turn < 2 else [whole]
            columns = torch.empty(2, 2 * gpus)
            transport.gather(columns, torch.tensor([[1.0, 2.0], [3.0, 4.0]]) + 10 * rank, 1)
            assert columns[0].tolist() == [10 * each + column for each in range(gpus) for column in (1.0, 2.0)]
            assert columns[1].tolist() == [10 * each + column for each in range(gpus) for column in (3.0, 4.0)]
            transport.begin_scatter(sums := torch.empty(2, 2), columns, 1)()
            assert (sums == gpus * columns[:, 2 * rank : 2 * rank + 2]).all()
            transport.finish()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(gpus)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for rank in range(gpus):
        wholes = [each for each in found[rank] if len(each) == gpus]
        parts = [each.flatten() for each in found[rank] if len(each) == 1]
        numbers = [step + turn for step in range(steps) for turn in range(3)]
        for number, whole in zip(numbers, wholes, strict=True):
            assert whole.tolist() == [[10.0 * each, number] for each in range(gpus)]
        sums = [step + turn for step in range(steps) for turn in range(2)]
        for number, part in zip(sums, parts, strict=True):
            assert part.tolist() == [gpus * 10.0 * rank + 3, gpus * number + 3.0]


class Threads(Alone):
    """Sums over ranks that are threads."""

    barriers: dict[tuple[int, ...], threading.Barrier]
    given: dict[tuple[tuple[int, ...], int], torch.Tensor]

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        if len(ranks) < 2:
            return
        self.given[ranks, self.rank] = tensor.clone()
        self.barriers[ranks].wait(timeout=60)
        total = torch.stack([self.given[ranks, rank] for rank in ranks]).sum(dim=0)
        self.barriers[ranks].wait(timeout=60)
        tensor.copy_(total)

    def begin_sum(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        self.all_reduce(tensor, ranks)


class Barriers(defaultdict[tuple[int, ...], threading.Barrier]):
    """A barrier for each group of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def __missing__(self, ranks: tuple[int, ...]) -> threading.Barrier:
        with self.lock:
            if ranks not in self:
                self[ranks] = threading.Barrier(len(ranks))
            return self[ranks]


def run_in_threads(graph: LayerGraph, choice: Choice, gpus: int, steps: int) -> list[Rank]:
    """Run a plan's steps on ranks as threads, and return these."""
    data = make_data(graph, 0, torch.float64, CPU)
    elements = shared_elements(graph, choice, gpus)
    memories = [[torch.full((elements,), torch.nan, dtype=torch.float64) for _ in range(gpus)] for _ in range(2)]
    barriers, given = Barriers(), dict[tuple[tuple[int, ...], int], torch.Tensor]()
    everyone = tuple(range(gpus))
    done: dict[int, Rank] = {}

    def run(number: int) -> None:
        sums = Threads(number)
        sums.barriers, sums.given = barriers, given
        first, second = (Space(memory, lambda: barriers[everyone].wait(timeout=60) and None) for memory in memories)
        transport = Direct(sums, (first, second)) if elements else sums  # as `direct` has it
        kinds = {"device": CPU, "dtype": torch.float64, "batch_norm": "synchronised", "same_dropout": True}
        rank = Rank(graph, choice, gpus, transport, bucket_bytes=2048, **kinds)  # type: ignore[arg-type]
        for _ in range(steps):
            rank.clear()
            rank.step(data)
        done[number] = rank

    threads = [threading.Thread(target=run, args=(number,)) for number in range(gpus)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    return [done[number] for number in range(gpus)]


def test_small_sums_after_the_backward_pass_read_the_gradients_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions by samples: what is left for the last bucket is summed with the memory of exchanges."""
    graph, gpus = chain(2).for_gpus(4), 4
    seen: list[tuple[int, int]] = []
    reading = Direct.sum_by_reading

    def noted(self: Direct, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        seen.append((self.rank, sum(each.numel() for each in tensors)))
        return reading(self, tensors)

    monkeypatch.setattr(Direct, "sum_by_reading", noted)
    choice = tuple(Config(c=4) if layer.kind == "linear" else Config(n=4) for layer in graph.layers)
    ranks = run_in_threads(graph, choice, gpus, steps=1)
    (last,) = (bucket for bucket in ranks[0].buckets if sums_by_reading(bucket, gpus))
    assert sorted(seen) == [(rank, last.bytes // 4) for rank in range(gpus)]
    expected = run_on_one_device(
        graph, make_data(graph, 0, torch.float64, CPU), dtype=torch.float64, seed=0, device=CPU
    )
    for rank in ranks:
        for name, gradient in rank.gradients().items():
            state, parameter = rank.shares()[name]
            wanted = parameter.part(expected[1][name], state.low[1], state.high[1])
            assert torch.allclose(gradient, wanted, rtol=1e-9)
    hardware, topology = load_hardware("h200"), load_topology("h200")
    problem = Problem(graph, gpus, topology, Roofline(hardware), hardware, bucket_bytes=2048, direct=True)
    lowered = lower_plan(problem, choice)
    assert [task.name for task in lowered.plan.tasks].count("sum") == 1


def test_a_bucket_of_layers_that_nothing_uses_is_not_summed() -> None:
    """They have weights without gradients; no other weights share their configuration."""
    net = NetworkBuilder("side", 2)
    at = net.convolution((3, 8, 8), 4, 3, padding=1, relu=True)
    net.convolution(at, 4, 3, padding=1)
    net.loss(net.linear(net.flatten(at), 8))
    graph, gpus = net.graph().for_gpus(2), 2
    choice = (Config(h=2), Config(n=2), Config(n=2), Config(c=2), Config(n=2))
    ranks = run_in_threads(graph, choice, gpus, steps=2)
    assert any(sums_by_reading(bucket, gpus) and bucket.layers == (1,) for bucket in ranks[0].buckets)
    data = make_data(graph, 0, torch.float64, CPU)
    _, expected = run_on_one_device(graph, data, dtype=torch.float64, seed=0, device=CPU)
    name, gradient = next(iter(ranks[0].gradients().items()))
    assert name.startswith(graph.layers[0].name)
    assert torch.allclose(gradient, expected[name])


@pytest.mark.parametrize("which", [0, 1], ids=["small_cnn", "encoder"])
def test_plans_with_shared_memory_compute_what_one_device_does(which: int) -> None:
    """Every split of every layer, on four ranks, two steps each: the second begins where the first left the spaces."""
    gpus = 4
    graph = networks(gpus)[which]
    data = make_data(graph, 0, torch.float64, CPU)
    _, expected = run_on_one_device(graph, data, dtype=torch.float64, seed=0, device=CPU)
    typical = max(float(gradient.abs().max()) for gradient in expected.values())
    for choice in plans(graph, gpus):
        for rank in run_in_threads(graph, choice, gpus, steps=2):
            for name, gradient in rank.gradients().items():
                state, parameter = rank.shares()[name]
                wanted = parameter.part(expected[name], state.low[1], state.high[1])
                assert float((gradient - wanted).abs().max()) <= 1e-9 * typical, (name, [str(c) for c in choice])
