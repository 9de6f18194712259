"""Copies of a call's inputs and results as kernels of its graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves as leaves

from gpusim.errors import GpuError
from gpusim.formats.trace import Trace
from gpusim.gpu.optimize import graph_copies
from gpusim.gpu.optimize.callable import OptimizedStep
from gpusim.gpu.optimize.captured import Captured
from gpusim.gpu.optimize.executors import CpuExecutor, Ready
from gpusim.gpu.optimize.graph_copies import BLOCK_BYTES, MOST_TENSORS, GraphCopies
from gpusim.plan.schedule import Schedule
from tests.support import fake_graphs
from tests.support.copying import Copying
from tests.support.fake_graphs import FakeGraph
from tests.support.optimizing import Twins, batches, close, fast, sgd

GPU = "cuda"


class Refusing(CpuExecutor):
    """Executor that fails to make copies."""

    recordings = 2

    def __init__(self, error: Exception) -> None:
        self.error = error

    def prepare_call(
        self, captured: Captured, trace: Trace, schedule: Schedule, results: Sequence[int]
    ) -> Ready | None:
        raise self.error


class Large(Copying):
    """Executor whose schedules take a TiB with their copies."""

    def prepare_call(
        self, captured: Captured, trace: Trace, schedule: Schedule, results: Sequence[int]
    ) -> Ready | None:
        ready: Any = super().prepare_call(captured, trace, schedule, results)
        ready.peak_bytes = 1 << 40
        return ready  # type: ignore[no-any-return]


class Several(nn.Module):
    """Changes an input, and returns tensors, a number and an input."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        y.mul_(2)
        return {"sum": x + y, "number": 3, "both": (x * y, x.T), "same": x}


def test_calls_go_through_the_copies_of_the_schedule() -> None:
    executor = Copying()
    step = fast(Several(), (torch.zeros(3, 2), torch.zeros(3, 2)), executor=executor)
    assert isinstance(step, OptimizedStep)
    for number in range(3):
        x, y = torch.randn(3, 2), torch.randn(3, 2)
        others = x.clone(), y.clone()
        before = [copies.calls for copies in executor.made]
        mine, theirs = step(x, y), Several()(*others)
        assert sum(copies.calls for copies in executor.made) == sum(before) + 1, number
        for one, other in zip(leaves(mine), leaves(theirs), strict=True):
            close(torch.as_tensor(one), torch.as_tensor(other))
        close(y, others[1])


def test_training_goes_through_them_too() -> None:
    executor = Copying()
    twins = Twins(sgd, executor=executor, frontends=("aten",))
    twins.train(batches(3))
    twins.check()
    assert max(copies.calls for copies in executor.made) >= 3


@pytest.mark.parametrize(
    "error",
    [
        torch.cuda.OutOfMemoryError("no memory for another recording"),
        torch.AcceleratorError("no memory for another recording"),
        GpuError("no memory for another recording"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_where_they_fail_torch_makes_the_copies(error: Exception) -> None:
    said: list[str] = []
    step = fast(nn.Linear(2, 3), torch.zeros(4, 2), executor=Refusing(error), say=said.append)
    assert isinstance(step, OptimizedStep)
    assert "torch makes the copies of a call: no memory for another recording" in said
    x = torch.randn(4, 2)
    close(step(x), step.__wrapped__(x))


def test_where_they_take_too_much_memory_torch_makes_them() -> None:
    said: list[str] = []
    executor = Large()
    limit = {"memory_limit_bytes": 1 << 30}
    step = fast(nn.Linear(2, 3), torch.zeros(4, 2), executor=executor, say=said.append, **limit)
    assert isinstance(step, OptimizedStep)
    assert "torch makes the copies of a call: with them in the graph, the step takes 1024 GiB" in said
    x = torch.randn(4, 2)
    close(step(x), step.__wrapped__(x))
    assert sum(copies.calls for copies in executor.made) == 0


@dataclass
class Recorded:
    """A graph with copies, and the memory of its inputs."""

    copies: GraphCopies
    memory: list[torch.Tensor]
    results: list[torch.Tensor]


Work = Callable[[list[torch.Tensor]], list[torch.Tensor]]


@pytest.fixture(params=["cpu", pytest.param(GPU, marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The GPU, and the CPU with a driver of our own."""
    if request.param == "cpu":
        fake_graphs.install(monkeypatch)
    return str(request.param)


def recorded(device: str, given: Sequence[torch.Tensor], work: Work) -> Recorded:
    memory = [tensor.clone() for tensor in given]
    results = work(memory)  # libraries initialize on first use
    copies = GraphCopies(memory, range(len(results)), torch.device(device))
    graph: Any
    if device == "cpu":

        def again() -> None:
            for result, new in zip(results, work(memory), strict=True):
                result.untyped_storage().copy_(new.untyped_storage())

        graph = FakeGraph()
        with graph:
            copies.begin()
            graph.nodes.append(again)
            copies.end(results)
    else:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            copies.begin()
            results = work(memory)
            copies.end(results)
        graph.instantiate()
    copies.bind(graph)
    return Recorded(copies, memory, results)


def doubled(memory: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor + tensor for tensor in memory]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float64])
def test_tensors_of_all_sizes_arrive_and_leave(device: str, kind: torch.dtype) -> None:
    elements = BLOCK_BYTES // torch.empty(0, dtype=kind).element_size()
    sizes = (1, 0, 3, 17, elements - 1, elements, elements + 1, 5 * elements + 7)

    def tensors() -> list[torch.Tensor]:
        return [torch.randint(0, 100, (size,), device=device).to(kind) for size in sizes]

    graph = recorded(device, tensors(), doubled)
    batches = [tensors() for _ in range(3)]
    made = [graph.copies.run(batch) for batch in batches]  # in flight at once
    for batch, results in zip(batches, made, strict=True):
        for tensor, result in zip(batch, results, strict=True):
            assert torch.equal(result, tensor + tensor)


def test_more_tensors_than_one_kernel_takes(device: str) -> None:
    def tensors() -> list[torch.Tensor]:
        return list(torch.randn(2 * MOST_TENSORS + 3, 5, device=device).unbind())

    graph = recorded(device, tensors(), doubled)
    for _ in range(2):
        batch = tensors()
        for tensor, result in zip(batch, graph.copies.run(batch), strict=True):
            assert torch.equal(result, 2 * tensor)


def test_views_at_any_place_and_in_any_layout_arrive(device: str) -> None:
    images = torch.randn(3, 2, 4, 4, device=device).to(memory_format=torch.channels_last)
    memory = [images, torch.randn(6, device=device), torch.zeros(6, dtype=torch.uint8, device=device)]
    graph = recorded(device, memory, doubled)
    flat, odd = torch.randn(30, device=device), torch.arange(40, device=device).to(torch.uint8)
    complex_ones = torch.randn(6, dtype=torch.complex64, device=device)
    zeros = torch._efficientzerotensor(6, device=device)  # torch's gradient of a constant function has no memory
    vectors = (flat[1:7], flat[::5], flat[:1].expand(6), complex_ones.conj().imag, complex_ones.real, zeros)
    for vector in vectors:
        for image in (images, images.contiguous(), torch.randn(1, 2, 4, 4, device=device).expand(3, 2, 4, 4)):
            given = [image, vector, odd[3:9]]
            results = graph.copies.run(given)
            assert all(torch.equal(one, tensor + tensor) for one, tensor in zip(results, given, strict=True))


def test_results_have_memory_of_their_own_in_their_layout(device: str) -> None:
    def work(memory: list[torch.Tensor]) -> list[torch.Tensor]:
        total = memory[0] * 3
        return [total, total.T, total[:, :1].expand(4, 6), total[1:3], total[:, 1:3]]

    graph = recorded(device, [torch.zeros(4, 5, device=device)], work)
    kept = []
    for _ in range(3):
        x = torch.randn(4, 5, device=device)
        results = graph.copies.run([x])
        kept.append((results, [tensor.clone() for tensor in work([x])]))
    graph.copies.replay()  # writes to none of them
    for results, wanted in kept:
        assert all(torch.equal(one, other) for one, other in zip(results, wanted, strict=True))
        assert results[1].stride() == (1, 5)
    places = [tensor.data_ptr() for results, _ in kept for tensor in results]
    assert len(set(places)) == len(places)


def test_a_plain_replay_runs_on_the_memory_of_the_step(device: str) -> None:
    graph = recorded(device, [torch.ones(100, device=device)], doubled)
    (result,) = graph.copies.run([torch.full((100,), 5.0, device=device)])
    graph.memory[0].fill_(7.0)
    graph.copies.replay()
    assert bool((graph.results[0] == 14.0).all())
    assert bool((result == 10.0).all())


def test_two_graphs_of_one_step_have_copies_of_their_own(device: str) -> None:
    one, other = (recorded(device, [torch.zeros(5, device=device)], doubled) for _ in range(2))
    for number in range(3):
        x, y = (torch.full((5,), float(n), device=device) for n in (number, -number))
        (first,), (second,) = one.copies.run([x]), other.copies.run([y])
        assert torch.equal(first, 2 * x)
        assert torch.equal(second, 2 * y)


def test_a_tensor_of_another_device_is_no_part_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """`meta` stands for the GPU, so the tensors here are the host's."""
    fake_graphs.install(monkeypatch)
    memory = [torch.zeros(4)]
    copies = GraphCopies(memory, [0], torch.device("meta"))
    with FakeGraph() as graph:
        copies.begin()
        graph.nodes.append(lambda: memory[0].mul_(2))
        copies.end(memory)
    copies.bind(graph)  # type: ignore[arg-type]
    (result,) = copies.run([torch.ones(4)])
    assert torch.equal(result, torch.full((4,), 2.0))
    assert not any(isinstance(node, graph_copies._Table) for node in graph.nodes)


@pytest.mark.gpu
@pytest.mark.parametrize("streams", [1, 4])
def test_steps_with_dropout_and_branches_call_their_graph_alone(streams: int) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
            self.drop = nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.drop(part(x)) for part in self.parts], 1)

    said: list[str] = []
    model = Branches().to(GPU).train()
    x = torch.ones(32, 64, device=GPU)
    with torch.no_grad():
        step = fast(model, x, executor=None, frontends=("aten",), streams=streams, say=said.append)
        assert isinstance(step, OptimizedStep)
        (variant,) = step._variants.values()
        assert variant is not None
        assert variant.ready.copies is not None, said
        one, other = step(x), step(x)
        assert not torch.equal(one, other)  # each call draws anew
        model.eval()
        y = torch.randn(32, 64, device=GPU)
        close(step(y), model(y))


@pytest.mark.gpu
def test_a_step_without_arguments_has_its_result_copied_by_the_graph() -> None:
    weights = torch.randn(8, 8, device=GPU)

    def step() -> torch.Tensor:
        return torch.cat([weights @ weights, weights.T @ weights]).sum(1)

    said: list[str] = []
    graph_copies._function.cache_clear()  # the kernel is not loaded yet
    fast_step = fast(step, (), executor=None, frontends=("aten",), say=said.append)
    assert isinstance(fast_step, OptimizedStep)
    (variant,) = fast_step._variants.values()
    assert variant is not None
    assert variant.ready.copies is not None, said
    one = fast_step()
    weights.mul_(2)
    close(fast_step(), step())
    close(one * 4, step())
