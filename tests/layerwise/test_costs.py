"""Costs of layers and edges, the fixed plans, the search on named networks, and the paper's volumes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from gpusim.errors import OptionError
from gpusim.formats.hardware import load_hardware
from gpusim.formats.topology import load_topology
from gpusim.layerwise.compute import MeasuredTimes, PassTimes, Roofline, share_key
from gpusim.layerwise.configs import Config, layer_configs
from gpusim.layerwise.costs import Problem, layer_cost, layer_memory, plan_bytes, statistics_ns, tables
from gpusim.layerwise.eliminate import cost_of
from gpusim.layerwise.fixed_plans import FIXED_PLANS
from gpusim.layerwise.layers import Layer, LayerGraph
from gpusim.layerwise.made_up import copy_ns
from gpusim.layerwise.search import additive_ns, search
from gpusim.layerwise.shares import Share, busiest_share, shares_of, whole
from tests.layerwise.test_topology import topology
from tests.support.layer_networks import chain, small_cnn
from tests.support.layer_networks import tables as layer_tables

NETWORKS = layer_tables()


@dataclass(frozen=True)
class OneNsAnElement:
    """Times that are easy to add up: 1 ns per element of a share's output forward, and twice that backward."""

    basis = "made up"
    by_shape = True

    def share_ns(self, index: int, layer: Layer, share: Share) -> PassTimes:
        elements = float(np.prod(share.output))
        return PassTimes(elements, 2 * elements)

    def optimizer_ns(self, weights: float) -> float:
        return 0.0


def problem(graph: LayerGraph, gpus: int, **changes: object) -> Problem:
    return Problem(graph.for_gpus(gpus), gpus, topology(), OneNsAnElement(), load_hardware("h200"), **changes)  # type: ignore[arg-type]


def test_a_layers_cost_is_its_largest_share_and_the_sum_of_its_gradients() -> None:
    """conv0 on 4 GPUs by samples: 2 x 16 x 16 x 16 elements on each, and 448 weights of 4 bytes in a ring of 4."""
    found = layer_cost(problem(chain(2), 4, bucket_bytes=1), 0, Config(n=4))
    elements = 2 * 16 * 16 * 16
    assert (found.forward_ns, found.backward_ns) == (elements, 2 * elements)
    assert found.sync_ns == pytest.approx(6 * 100 + 1.5 * 448 * 4)
    assert layer_cost(problem(chain(2), 4), 0, Config(c=4)).sync_ns == 0, "each GPU has weights of its own"


def test_small_gradients_share_what_a_bucket_takes() -> None:
    """1,792 bytes of a bucket of 17,920: a tenth of its time."""
    found = layer_cost(problem(chain(2), 4, bucket_bytes=17_920), 0, Config(n=4))
    assert found.sync_ns == pytest.approx((6 * 100 + 1.5 * 17_920) / 10)


def test_an_edge_costs_the_busiest_gpus_bytes_forward_and_back() -> None:
    """From samples to channels on 2 GPUs, each receives 32 x 4 bytes over its link, after 100 ns; and back."""
    graph = chain(1)
    index = next(i for i, layer in enumerate(graph.layers) if layer.name == "fc2")
    configs = [(Config(),)] * len(graph)
    configs[index - 1], configs[index] = (Config(n=2),), (Config(c=2),)
    found = tables(problem(graph, 2), configs).edges[index - 1, index]
    assert found[0, 0] == pytest.approx(2 * (100 + 32 * 4))


def test_a_whole_layer_is_gathered_and_its_gradient_summed() -> None:
    """All 4 GPUs need the whole of fc1, 8 x 32 x 4 bytes: an all-gather, and a reduce-scatter back, of 3 steps each.

    Channels of several samples are rearranged after the one and before the other.
    """
    graph = chain(1)
    index = next(i for i, layer in enumerate(graph.layers) if layer.name == "fc2")
    configs: list[tuple[Config, ...]] = [(Config(),)] * len(graph)
    configs[index - 1], configs[index] = (Config(n=4), Config(c=4), Config(n=2)), (Config(c=4), Config(c=2))
    made = problem(graph, 4)
    found = tables(made, configs).edges[index - 1, index]
    wire_ns = 3 / 4 * 4 * 32 * 4
    assert found[0, 0] == pytest.approx(2 * (3 * 100 + wire_ns))
    assert found[1, 0] == pytest.approx(2 * (3 * 100 + wire_ns) + 2 * copy_ns(4 * 32 * 4, made.hardware))
    assert found[0, 1] != found[0, 0] != found[2, 0], "pieces are exchanged: not all GPUs have or need a part"


def test_local_statistics_are_shared_by_parts_of_one_image_only() -> None:
    graph = small_cnn(2)
    local, together = problem(graph, 4), problem(graph, 4, batch_norm="synchronised")
    layer = local.graph.layers[0]
    size = 2 * 8 * 4
    assert statistics_ns(local, layer, Config(n=4)) == 0
    assert statistics_ns(local, layer, Config(n=2, h=2)) == pytest.approx(2 * (2 * 100 + size))
    assert statistics_ns(together, layer, Config(n=4)) == pytest.approx(2 * (6 * 100 + 1.5 * size))


def test_the_share_of_the_busiest_gpu_is_the_largest_of_all() -> None:
    graph = small_cnn(1).for_gpus(8)
    for layer in graph.layers:
        for config in layer_configs(layer, 8):
            shares = shares_of(layer, config, range(config.parts))
            busiest = busiest_share(layer, config)
            assert busiest.output == max(share.output for share in shares)
            assert busiest.input_elements >= max(share.input_elements for share in shares)


@pytest.mark.parametrize("name", sorted(NETWORKS.NETWORKS))
def test_named_networks_reduce_to_two_layers_and_are_solved_exactly(name: str) -> None:
    hardware = load_hardware("h200")
    found = NETWORKS.NETWORKS[name](32)
    solved = search(Problem(found.for_gpus(4), 4, load_topology("h200"), Roofline(hardware), hardware))
    assert solved.exact
    assert solved.kernel_layers == 2


def test_the_search_finds_what_all_plans_of_a_small_network_have_as_their_best() -> None:
    hardware = load_hardware("h200")
    found = Problem(chain(2, convolutions=1).for_gpus(2), 2, topology(), Roofline(hardware), hardware)
    costs = tables(found)
    sizes = [len(each) for each in costs.configs]
    best = min(cost_of(costs.nodes, costs.edges, choice) for choice in np.ndindex(*sizes))
    assert search(found).cost_ns == pytest.approx(best)


def test_the_next_best_plans_cost_what_the_ranking_says() -> None:
    hardware = load_hardware("h200")
    found = Problem(chain(2).for_gpus(4), 4, topology(), Roofline(hardware), hardware)
    ranked = search(found, count=5).ranked
    costs = [cost for cost, _ in ranked]
    assert costs == sorted(costs)
    assert additive_ns(found, [choice for _, choice in ranked]) == pytest.approx(costs)


def test_no_plan_is_dearer_than_the_fixed_ones() -> None:
    hardware = load_hardware("h200")
    for gpus in (2, 4, 16):
        found = Problem(NETWORKS.alexnet(32).for_gpus(gpus), gpus, load_topology("h200"), Roofline(hardware), hardware)
        fixed = additive_ns(found, [plan(found.graph, gpus) for plan in FIXED_PLANS.values()])
        assert search(found).cost_ns <= min(fixed)


def test_more_configurations_than_fit_are_said_to_be_left_out() -> None:
    hardware = load_hardware("h200")
    found = Problem(chain(2).for_gpus(256), 256, load_topology("h200"), Roofline(hardware), hardware)
    solved = search(found)
    assert not solved.exact
    assert solved.bound_ns <= solved.cost_ns


def test_a_memory_limit_takes_a_plan_that_fits_and_refuses_the_impossible() -> None:
    hardware = load_hardware("h200")
    found = Problem(NETWORKS.resnet50(32).for_gpus(2), 2, load_topology("h200"), Roofline(hardware), hardware)
    free = search(found)
    used = sum(layer_memory(found, index, config) for index, config in enumerate(free.choice))
    tight = search(found, memory_limit_bytes=used - 1)
    assert sum(layer_memory(found, index, config) for index, config in enumerate(tight.choice)) < used
    assert tight.cost_ns >= free.cost_ns
    with pytest.raises(OptionError, match="no plan fits"):
        search(found, memory_limit_bytes=1000)


def test_a_measured_share_is_taken_as_it_is_and_others_are_scaled_from_it() -> None:
    """A roofline that is twice as fast as the measured share is equally wrong about its neighbour."""
    hardware = load_hardware("h200")
    graph = chain(64).for_gpus(2)
    layer, roof = graph.layers[1], Roofline(hardware)
    half, all_of_it = shares_of(layer, Config(n=2), [0])[0], whole(layer)
    known = roof.share_ns(1, layer, half)
    slow = PassTimes(2 * known.forward_ns, 3 * known.backward_ns)
    times = MeasuredTimes({share_key(layer, half): slow}, {1: [half]}, roof)
    assert times.share_ns(1, layer, half) == slow
    scaled, guess = times.share_ns(1, layer, all_of_it), roof.share_ns(1, layer, all_of_it)
    assert scaled.forward_ns == pytest.approx(2 * guess.forward_ns)
    assert scaled.backward_ns == pytest.approx(3 * guess.backward_ns)
    assert scaled.error > 0


def test_layers_whose_measured_shares_take_no_time_have_no_error() -> None:
    """A layer of views has no kernel."""
    layer = chain(64).for_gpus(4).layers[1]
    shares = [shares_of(layer, config, [0])[0] for config in (Config(n=2), Config(n=4))]
    none = {share_key(layer, share): PassTimes(0.0, 0.0) for share in shares}
    times = MeasuredTimes(none, {1: shares}, Roofline(load_hardware("h200")))
    assert times.share_ns(1, layer, whole(layer)) == PassTimes(0.0, 0.0, 0.0)


#: GiB that data parallelism moves per step at 2, 4, 8 and 16 GPUs: bars of figure 8 of Jia et al. 2018, read off its
#: vector graphic (to less than 0.5 %).
PAPER_DATA_GIB = {
    "alexnet": (1.114, 2.228, 4.456, 8.91),
    "vgg16": (2.06, 4.12, 8.23, 16.5),
    "inception_v3": (0.355, 0.710, 1.42, 2.84),
}


@pytest.mark.parametrize("name", sorted(PAPER_DATA_GIB))
def test_data_parallelism_moves_what_the_papers_figure_shows(name: str) -> None:
    """With a parameter server, every GPU sends its gradients and receives the weights."""
    hardware, links = load_hardware("p100"), load_topology("p100")
    graph = NETWORKS.alexnet(32, wide=True) if name == "alexnet" else NETWORKS.NETWORKS[name](32)
    for gpus, gib in zip((2, 4, 8, 16), PAPER_DATA_GIB[name], strict=True):
        found = Problem(graph.for_gpus(gpus), gpus, links, Roofline(hardware), hardware)
        moved, synced = plan_bytes(found, FIXED_PLANS["data"](found.graph, gpus))
        assert moved == 0
        assert synced / 2**30 == pytest.approx(gib, rel=0.005)
