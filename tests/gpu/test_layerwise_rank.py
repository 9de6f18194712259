"""One rank of a plan: pieces of tensors, sums of gradients, and its computation without the other ranks."""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import gpusim
from gpusim.cli.parallel import parallel
from gpusim.defaults import DEFAULT_BATCH_NORM
from gpusim.errors import OptionError
from gpusim.formats.hardware import load_hardware
from gpusim.formats.topology import load_topology
from gpusim.gpu.layerwise.alone import record
from gpusim.gpu.layerwise.batch import make_data
from gpusim.gpu.layerwise.one_device import run_on_one_device
from gpusim.gpu.layerwise.operations import Surroundings, parameters_of, run_layer
from gpusim.gpu.layerwise.rank import Rank
from gpusim.gpu.layerwise.sharing import groups_of, sharing
from gpusim.gpu.layerwise.transport import TIMEOUT, Alone, Distributed, Finish, Groups, Tensors
from gpusim.layerwise.buckets import Bucket, gradient_buckets
from gpusim.layerwise.compute import Roofline
from gpusim.layerwise.configs import REPLICATED, Config, layer_configs
from gpusim.layerwise.costs import Problem
from gpusim.layerwise.fixed_plans import Choice, data_parallel
from gpusim.layerwise.layers import BATCH, LayerGraph
from gpusim.layerwise.lowering import lower_plan
from gpusim.layerwise.network_builder import NetworkBuilder
from gpusim.layerwise.pieces import pieces
from tests.support.layer_networks import chain, small_cnn

CPU = torch.device("cpu")


def test_pieces_of_all_ranks_fit_together() -> None:
    """One rank's sent pieces are another's received ones, in boxes of the same size."""
    graph = small_cnn(1).for_gpus(4)
    random = np.random.default_rng(1)
    for index, user in enumerate(graph.layers):
        for number, edge in enumerate(user.inputs):
            if edge.source == BATCH:
                continue
            source = graph.layers[edge.source]
            for _ in range(4):
                ours = random.choice(layer_configs(source, 4))  # type: ignore[arg-type]
                theirs = random.choice([*layer_configs(user, 4), REPLICATED])  # type: ignore[arg-type]
                ranks = [pieces(source, ours, user, number, theirs, 4, rank) for rank in range(4)]
                for rank, mine in enumerate(ranks):
                    for peer, box in mine.sends:
                        (back,) = [b for p, b in ranks[peer].receives if p == rank]
                        assert [s.stop - s.start for s in box] == [s.stop - s.start for s in back], (index, rank, peer)
                assert sum(len(r.sends) for r in ranks) == sum(len(r.receives) for r in ranks)


def test_a_halo_is_one_row_of_the_neighbour_and_padding_is_outside() -> None:
    graph = chain(2).for_gpus(2)
    found = pieces(graph.layers[0], Config(h=2), graph.layers[1], 0, Config(h=2), 2, 0)
    assert found.shape == (4, 16, 10, 16), "8 rows, one of the neighbour, one of padding; columns are not split"
    assert found.padded == (True, False)
    assert found.receives == ((1, (slice(0, 4), slice(0, 16), slice(9, 10), slice(0, 16))),)
    assert found.sends == ((1, (slice(0, 4), slice(0, 16), slice(7, 8), slice(0, 16))),)
    assert found.interior == (slice(0, 4), slice(0, 16), slice(1, 10), slice(0, 16))


def test_one_rank_by_itself_computes_its_shares_without_the_others() -> None:
    """Shapes are those of the plan, and every parameter has a gradient; values differ."""
    graph = small_cnn(1).for_gpus(4)
    choice = tuple(max(layer_configs(layer, 4), key=lambda c: (c.parts, c.h)) for layer in graph.layers)
    for number in range(4):
        rank = Rank(graph, choice, 4, Alone(number), device=CPU)
        data = make_data(graph, 0, torch.float32, CPU)
        for index, state in enumerate(rank.states):
            rank.forward_layer(index, data)
            assert state.active == (state.output is not None)
            if state.output is not None and state.layer.kind != "loss":
                assert tuple(state.output.shape) == tuple(h - low for low, h in zip(state.low, state.high, strict=True))
        rank.step(data)
        assert all(state.output is None and not state.buffers for state in rank.states), "a step keeps no activations"
        assert len(rank.gradients()) == len(rank.parameters)


class Recorder(Alone):
    """Notes what a rank sums, and when."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.log: list[tuple[str, int]] = []

    def begin_sum(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        self.log.append((f"sum {ranks}", tensor.numel() * tensor.element_size()))


def logged(choice: Choice, graph: LayerGraph, number: int) -> list[tuple[str, int]]:
    """Return sums and layers of the backward pass of one rank of 4, in order."""
    transport = Recorder(number)
    rank = Rank(graph, choice, 4, transport, device=CPU, bucket_bytes=2048)
    backward = rank.backward_layer

    def noted(index: int) -> None:
        backward(index)
        transport.log.append(("backward", index))

    rank.backward_layer = noted  # type: ignore[method-assign]
    rank.step(make_data(graph, 0, torch.float32, CPU))
    return transport.log


def test_gradients_are_summed_during_the_backward_pass_in_the_simulations_buckets() -> None:
    """Buckets of 2 KiB. Each sum follows its last layer; ranks with other layers have the same order."""
    graph = small_cnn(1).for_gpus(4)
    choice = tuple(Config(n=2 if layer.name in ("one", "two") else 4) for layer in graph.layers)
    buckets = gradient_buckets(graph, choice, 2048)
    assert sum(bucket.full for bucket in buckets) > 2
    assert {bucket.config for bucket in buckets} == {Config(n=2), Config(n=4)}
    for number in range(4):
        mine = [bucket for bucket in buckets if number < bucket.config.parts]
        expected: list[tuple[str, int]] = []
        for index in reversed(range(len(graph))):
            expected.append(("backward", index))
            expected += [summed(bucket) for bucket in mine if bucket.full and bucket.layers[-1] == index]
        expected += [summed(bucket) for bucket in mine if not bucket.full]
        assert together(logged(choice, graph, number)) == together(expected)


def together(log: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Join sums in a row: a large gradient is summed in place, the rest of its bucket in one tensor."""
    groups = itertools.groupby(log, key=lambda entry: entry if entry[0] == "backward" else entry[0])
    return [
        entry
        for key, entries in groups
        for entry in (entries if isinstance(key, tuple) else [(key, sum(size for _, size in entries))])
    ]


def summed(bucket: Bucket) -> tuple[str, int]:
    return f"sum {tuple(range(bucket.config.parts))}", bucket.bytes


def test_the_last_sum_is_small_so_that_the_backward_pass_hides_the_others() -> None:
    """What the first layers leave to sum is at most 1 MiB; a network with less than that in all has one bucket."""
    net = NetworkBuilder("wide", 1)
    at = net.convolution((3, 8, 8), 256, 3, padding=1)
    for _ in range(2):
        at = net.convolution(at, 256, 3, padding=1)
    net.loss(net.linear(net.flatten(at), 10))
    graph = net.graph().for_gpus(2)
    buckets = gradient_buckets(graph, data_parallel(graph, 2), 1 << 30)
    assert [bucket.full for bucket in buckets] == [True, False]
    assert buckets[1].layers == (0,)
    small = small_cnn(1).for_gpus(2)
    assert [bucket.full for bucket in gradient_buckets(small, data_parallel(small, 2), 1 << 30)] == [False]


def test_the_simulation_sums_the_same_buckets() -> None:
    graph = small_cnn(1).for_gpus(4)
    hardware = load_hardware("h200")
    problem = Problem(graph, 4, load_topology("h200"), Roofline(hardware), hardware, bucket_bytes=2048)
    choice = data_parallel(graph, 4)
    lowered = lower_plan(problem, choice)
    last = [layer for layer, purpose in zip(lowered.layers, lowered.purposes, strict=True) if purpose == "sync"]
    assert list(dict.fromkeys(last)) == [each.layers[-1] for each in gradient_buckets(graph, choice, 2048)]


def test_gradients_that_fill_a_bucket_are_summed_in_place_and_others_copied() -> None:
    """With buckets of 2 KiB, small_cnn's gradients of more bytes are sums of their own, and nothing copies them."""
    graph = small_cnn(1).for_gpus(2)
    rank = Rank(graph, data_parallel(graph, 2), 2, Recorder(0), device=CPU, bucket_bytes=2048)
    summed_tensors: list[torch.Tensor] = []
    rank.transport.begin_sum = lambda tensor, ranks: summed_tensors.append(tensor)  # type: ignore[method-assign]
    rank.step(make_data(graph, 0, torch.float32, CPU))
    places = {tensor.data_ptr() for tensor in summed_tensors}
    large = [each for each in rank.gradients().values() if each.nbytes >= 2048]
    small = [each for each in rank.gradients().values() if each.nbytes < 2048]
    assert large
    assert small
    assert all(gradient.data_ptr() in places for gradient in large)
    flat = {tensor.untyped_storage().data_ptr() for tensor in summed_tensors}
    assert all(gradient.untyped_storage().data_ptr() in flat for gradient in small), "nothing is copied back"
    copied = sum(tensor.nbytes for tensor in summed_tensors) - sum(gradient.nbytes for gradient in large)
    assert copied == sum(gradient.nbytes for gradient in small)


def test_copies_of_gradients_take_time_in_the_simulation() -> None:
    """A data-parallel step reads and writes each small gradient once more; one that fills a bucket is not copied."""
    graph = small_cnn(1).for_gpus(2)
    hardware = load_hardware("h200")
    for bucket_bytes in (1, 2048, 1 << 30):
        problem = Problem(graph, 2, load_topology("h200"), Roofline(hardware), hardware, bucket_bytes=bucket_bytes)
        lowered = lower_plan(problem, data_parallel(graph, 2))
        copied = sum(
            task.dram_bytes
            for task, purpose in zip(lowered.plan.tasks, lowered.purposes, strict=True)
            if purpose == "copy"
        )
        small = [layer.weight_bytes for layer in graph.layers if 0 < layer.weight_bytes < bucket_bytes]
        assert copied == pytest.approx(2 * sum(small))


class Exchanging(Alone):
    """Notes when gradients of inputs are sent, when they are waited for, and which parameters have gradients then."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.log: list[tuple[str, int]] = []
        self.of: Rank | None = None

    def _noted(self, what: str) -> None:
        assert self.of is not None
        self.log.append((what, len(self.of.gradients())))

    def begin_scatter(self, part: torch.Tensor, whole: torch.Tensor, place: int) -> Finish:
        self._noted("begin")
        return lambda: self._noted("finish")

    def begin_exchange(self, sends: Tensors, receives: Tensors, offsets: Sequence[int]) -> Finish:
        self._noted("begin" if sends or receives else "nothing")
        return lambda: self._noted("finish" if sends or receives else "nothing")


@pytest.mark.parametrize("wide", [Config(c=2), Config()], ids=["scatter", "pieces"])
def test_gradients_of_weights_are_computed_while_that_of_the_input_is_on_its_way(wide: Config) -> None:
    """A fully connected layer by channels, or on one rank, after one by samples: in the simulation, too."""
    net = NetworkBuilder("two", 1)
    net.loss(net.linear(net.linear((8, 1, 1), 8, relu=True, name="first"), 8, relu=True, name="second"))
    graph = net.graph().for_gpus(2)
    first, second, loss = graph.layers
    assert (first.product, second.product, loss.product) == (None, 0, None), "the batch needs no gradient"
    choice = (Config(n=2), wide, wide if wide.parts == 1 else Config(n=2))
    transport = Exchanging(0)
    transport.of = Rank(graph, choice, 2, transport, device=CPU)
    transport.of.step(make_data(graph, 0, torch.float32, CPU))
    assert transport.log[-2:] == [("begin", 0), ("finish", 2)], "weight and bias of the second layer"
    hardware = load_hardware("h200")
    lowered = lower_plan(Problem(graph, 2, load_topology("h200"), Roofline(hardware), hardware), choice)
    purposes = [purpose for purpose, task in zip(lowered.purposes, lowered.plan.tasks, strict=True) if task.device == 0]
    without_copies = [purpose for purpose in purposes if purpose != "copy"]
    assert without_copies[: without_copies.index("sync")][-4:] == ["backward", "transfer", "backward", "backward"]


class Written(TorchDispatchMode):
    """Counts operators, and the elements that they write."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and func.namespace == "aten":
            self.elements[str(func.overloadpacket)] += result.numel()
        return result


def test_a_data_parallel_rank_copies_no_activation_and_no_gradient_of_one() -> None:
    """A residual block with a shortcut of stride 2. Only the gradients of weights are copied."""
    net = NetworkBuilder("residual", 1)
    before = net.convolution((3, 16, 16), 8, 3, padding=1)
    inner = net.convolution(before, 8, 3, stride=2, padding=1)
    net.loss(net.linear(net.flatten(net.add([inner, net.convolution(before, 8, 1, stride=2)], relu=True)), 10))
    graph = net.graph().for_gpus(2)
    rank = Rank(graph, data_parallel(graph, 2), 2, Alone(0), device=CPU)
    with Written() as written:
        rank.step(make_data(graph, 0, torch.float32, CPU))
    assert written.elements["aten.copy_"] == 0
    assert written.elements["aten.clone"] == 0
    assert written.elements["aten.cat"] == sum(parameter.numel() for parameter in rank.parameters)


class Dropping:
    """One rank of two that both compute every layer, a dropout among them; no rank sends anything."""

    def __init__(self, number: int, device: torch.device) -> None:
        net = NetworkBuilder("dropping", 2)
        net.loss(net.linear(net.linear((8, 1, 1), 64, dropout=0.5), 4))
        graph = net.graph().for_gpus(2)
        self.rank = Rank(graph, (REPLICATED,) * 3, 2, Alone(number), device=device)
        self.data = make_data(graph, 0, torch.float32, device)
        self.losses: list[torch.Tensor] = []

    def run(self) -> None:
        self.rank.clear()
        self.losses.append(self.rank.step(self.data))


def test_ranks_that_compute_the_same_dropout_draw_the_same_masks_by_themselves() -> None:
    """In each step other ones, whatever the state of torch's own generator. Other ranks draw their own."""
    ranks = [Dropping(number, CPU) for number in range(2)]
    for number, each in enumerate(ranks):
        torch.manual_seed(number)
        for _ in range(3):
            each.run()
    first, second = ([float(loss) for loss in each.losses] for each in ranks)
    assert first == second
    assert len(set(first)) == 3
    alone = Rank(ranks[0].rank.graph, (Config(n=2),) * 3, 2, Alone(0), device=CPU)
    assert alone.generator is None, "its parts of the mask are on one rank each"


@pytest.mark.gpu
def test_replays_of_ranks_that_compute_the_same_dropout_draw_the_same_masks() -> None:
    """Each replay of a CUDA graph draws other ones. Equal masks give losses that differ by rounding alone."""
    found = []
    for number in range(2):
        torch.manual_seed(number)
        each = Dropping(number, torch.device("cuda"))
        graph = record(each.run, each.rank.generator)
        losses = []
        for _ in range(3):
            graph.replay()
            losses.append(float(each.losses[-1]))
        found.append(losses)
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert min(abs(one - other) for one, other in itertools.combinations(found[0], 2)) > 1e-3


def test_one_device_is_torchs_own_network() -> None:
    """Compares the reference with torch's modules, built from the same weights."""
    graph = chain(4)
    data = make_data(graph, 3, torch.float64, CPU)
    loss, gradients = run_on_one_device(graph, data, dtype=torch.float64, seed=5, device=CPU)
    modules: list[torch.nn.Module] = []
    for index, layer in enumerate(graph.layers):
        named = parameters_of(layer, torch.Generator().manual_seed(5 * 100_003 + index), torch.float64)
        for op, weights in zip(layer.ops, named, strict=True):
            module: torch.nn.Module | None = None
            if op.kind == "convolution":
                module = torch.nn.Conv2d(*op.options["channels"], op.options["kernel"], padding=op.options["padding"])
            elif op.kind == "linear":
                module = torch.nn.Linear(*op.options["channels"])
            elif op.kind in ("pointwise", "pool", "flatten"):
                module = {"pointwise": torch.nn.ReLU(), "pool": torch.nn.MaxPool2d(2), "flatten": torch.nn.Flatten()}[
                    op.kind
                ]
            if module is not None:
                module = module.double()
                module.load_state_dict(weights)
                modules.append(module)
    network = torch.nn.Sequential(*modules)
    expected = torch.nn.functional.cross_entropy(network(data.inputs), data.targets)
    expected.backward()
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-12)
    for ours, theirs in zip(gradients.values(), network.parameters(), strict=True):
        assert theirs.grad is not None
        assert torch.allclose(ours, theirs.grad, rtol=1e-10, atol=1e-14)


def test_statistics_of_a_run_are_by_default_those_of_a_prediction() -> None:
    """One definition: the command, the library, the simulation and a rank."""
    option = next(each for each in parallel.params if each.name == "batch_norm")
    signatures = [inspect.signature(each).parameters["batch_norm"].default for each in (gpusim.parallel, Rank)]
    assert {option.default, Problem.batch_norm, *signatures} == {DEFAULT_BATCH_NORM}


def test_groups_are_those_that_share_weights_or_statistics() -> None:
    graph = small_cnn(2).for_gpus(4)
    layer = graph.layers[0]
    assert sharing(layer, Config(n=2, c=2), 4, "local", 1) == ((1,), (1, 3))
    assert sharing(layer, Config(n=2, h=2), 4, "local", 2) == ((2, 3), (0, 1, 2, 3))
    assert sharing(layer, Config(n=2), 4, "local", 3) == ((), ())
    everyone = frozenset({(0, 1, 2, 3)})
    assert groups_of(graph, data_parallel(graph, 4), 4, "local") == Groups(everyone, everyone)


def test_every_group_of_ranks_has_the_timeout_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise torch gives each a default of its own, of ten minutes or more."""
    made: dict[tuple[int, ...], object] = {}
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "new_group", lambda ranks, timeout=None: made.setdefault(tuple(ranks), timeout))
    Distributed(Groups(frozenset({(0, 1, 2, 3), (0, 1)}), frozenset({(0, 2), (1, 3)})))
    assert made == dict.fromkeys([(0, 1), (0, 2), (1, 3)], TIMEOUT)


def test_a_layer_that_nothing_runs_is_named() -> None:
    graph = chain(1)
    layer = graph.layers[0]
    with pytest.raises(OptionError, match="has no operations to run"):
        run_layer(
            type(layer)(name="odd", kind="other", output=(1, 1, 1, 1), inputs=()),
            [],
            [],
            Surroundings((0, 1), (0, 1), 1),
        )
