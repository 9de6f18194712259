"""Configurations, partitions, halos, and bytes between configurations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.errors import OptionError
from gpusim.layerwise.configs import (
    REPLICATED,
    Config,
    boxes,
    check_config,
    coordinates,
    interval,
    layer_configs,
    needed,
    same_weights,
    volume,
)
from gpusim.layerwise.layers import BATCH, LayerGraph
from gpusim.layerwise.network_builder import NetworkBuilder
from gpusim.layerwise.regions import moved_elements, transfers
from tests.support.layer_networks import chain, small_cnn


def test_a_convolution_has_as_many_configurations_as_the_paper_counts() -> None:
    """Products of powers of two of at most N: 5, 15, 35, 70 for 2, 4, 8, 16 GPUs; fully connected 3, 6, 10, 15."""
    net = NetworkBuilder("one", 32)
    conv = net.convolution((64, 64, 64), 64, 3, padding=1)
    net.linear(net.flatten(conv), 64)
    graph = net.graph()
    counts = {
        gpus: [len(layer_configs(graph.for_gpus(gpus).layers[at], gpus)) for at in (0, 2)] for gpus in (2, 4, 8, 16)
    }
    assert counts == {2: [5, 3], 4: [15, 6], 8: [35, 10], 16: [70, 15]}


def test_parts_differ_by_one_row_at_most_and_the_first_ones_have_it() -> None:
    low, high = interval(7, 4, np.arange(4))
    assert list(zip(low, high, strict=True)) == [(0, 2), (2, 4), (4, 6), (6, 7)]


def test_channels_run_fastest_then_width_height_samples() -> None:
    parts = coordinates(Config(n=2, c=2, h=2), np.arange(9))
    assert [tuple(row) for row in parts[:4]] == [(0, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 1, 1, 0)]
    assert tuple(parts[4]) == (1, 0, 0, 0)
    assert tuple(parts[8]) == (-1, -1, -1, -1), "nine GPUs, eight parts"


def test_weights_of_one_part_of_the_channels_are_on_every_second_gpu() -> None:
    assert same_weights(Config(n=2, c=2), range(4)) == {0: [0, 2], 1: [1, 3]}


@given(st.integers(1, 2), st.sampled_from([2, 4, 6, 8]), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_parts_of_every_configuration_cover_the_output_once(batch: int, gpus: int, random: object) -> None:
    """Volumes add up to the whole, and no two parts overlap."""
    graph = small_cnn(batch).for_gpus(gpus)
    layer = random.choice(graph.layers)  # type: ignore[attr-defined]
    config = random.choice(layer_configs(layer, gpus))  # type: ignore[attr-defined]
    low, high = boxes(layer.output, config, np.arange(gpus))
    assert volume(low, high).sum() == np.prod(layer.output)
    for one in range(config.parts):
        for other in range(one):
            assert volume(np.maximum(low[one], low[other]), np.minimum(high[one], high[other])) == 0


def test_a_halo_reaches_over_the_edge_of_a_part_and_not_of_the_map() -> None:
    """A 3 x 3 convolution on 16 rows in two halves: rows 0 to 8 and 7 to 15, one of which the other half has."""
    graph = chain(2).for_gpus(2)
    user, config = graph.layers[1], Config(h=2)
    low, high = needed(user, 0, *boxes(user.output, config, np.arange(2)))
    assert (low[:, 2].tolist(), high[:, 2].tolist()) == ([0, 7], [9, 16])
    assert moved_elements(graph.layers[0], config, user, 0, config, 2) == 2 * 4 * 16 * 16, "a row of 16 a sample each"


def test_a_stride_makes_halos_on_one_side_only() -> None:
    """Kernel 3, stride 2, padding 1 on 16 rows: output row r needs rows 2r - 1 to 2r + 1."""
    net = NetworkBuilder("stride", 1)
    first = net.convolution((3, 16, 16), 4, 1)
    net.convolution(first, 4, 3, stride=2, padding=1)
    graph = net.graph()
    low, high = needed(graph.layers[1], 0, *boxes(graph.layers[1].output, Config(h=2), np.arange(2)))
    assert (low[:, 2].tolist(), high[:, 2].tolist()) == ([0, 7], [8, 16])


def test_channels_of_a_fully_connected_layer_need_all_of_its_input() -> None:
    """From samples to channels on two GPUs, each receives the other's half."""
    graph = chain(1).for_gpus(2)
    index = next(i for i, layer in enumerate(graph.layers) if layer.name == "fc2")
    source = graph.layers[graph.layers[index].inputs[0].source]
    moved = moved_elements(source, Config(n=2), graph.layers[index], 0, Config(c=2), 2)
    assert moved == 2 * (1 * 32)


def test_a_concatenation_needs_of_each_input_its_own_channels() -> None:
    """Channels 0-7, 8-23, 24-31 in four parts of 8: only GPU 3 needs the third input, of which it has a quarter."""
    graph = small_cnn(1)
    layer = next(layer for layer in graph.layers if layer.kind == "concat")
    low, high = needed(layer, 2, *boxes(layer.output, Config(c=4), np.arange(4)))
    assert volume(low, high).tolist() == [0, 0, 0, 8 * layer.output[2] * layer.output[3]]


def test_what_every_gpu_computes_is_received_by_none() -> None:
    graph = chain(1).for_gpus(2)
    assert moved_elements(graph.layers[0], REPLICATED, graph.layers[1], 0, Config(h=2), 2) == 0


@given(st.sampled_from([2, 4, 8]), st.sampled_from([2, 4]), st.integers(0, 10_000))
@settings(max_examples=80, deadline=None)
def test_tables_of_transfers_are_those_of_boxes(gpus: int, per_node: int, seed: int) -> None:
    """The product of lengths along each dimension is the volume of the intersection, for each GPU and node."""
    random = np.random.default_rng(seed)
    graph = small_cnn(1).for_gpus(gpus)
    pairs = [(i, n) for i, layer in enumerate(graph.layers) for n, e in enumerate(layer.inputs) if e.source != BATCH]
    index, number = pairs[random.integers(len(pairs))]
    user = graph.layers[index]
    source = graph.layers[user.inputs[number].source]
    ours = layer_configs(source, gpus)[:: random.integers(1, 4)]
    theirs = (*layer_configs(user, gpus)[:: random.integers(1, 4)], REPLICATED)
    moved = transfers(source, ours, user, number, theirs, gpus, per_node)
    row, column = random.integers(len(ours)), random.integers(len(theirs))
    expected = _by_boxes(graph, source, ours[row], index, number, theirs[column], gpus, per_node)
    assert (moved.busiest[row, column], moved.busiest_node[row, column]) == expected


@pytest.mark.parametrize(("ours", "theirs"), [(Config(), Config(n=16)), (Config(n=16), Config())])
def test_a_node_that_sends_to_all_others_is_as_busy_as_one_that_receives_from_them(
    ours: Config, theirs: Config
) -> None:
    """16 samples of 32 features, on GPU 0 and on 4 nodes of 4 GPUs: 12 samples leave or enter node 0."""
    graph = chain(1).for_gpus(16)
    index = next(i for i, layer in enumerate(graph.layers) if layer.name == "fc2")
    source = graph.layers[graph.layers[index].inputs[0].source]
    moved = transfers(source, (ours,), graph.layers[index], 0, (theirs,), 16, 4)
    assert (moved.busiest[0, 0], moved.busiest_node[0, 0]) == (15 * 32, 12 * 32)


def _by_boxes(
    graph: LayerGraph, source: object, own: Config, index: int, number: int, need: Config, gpus: int, per_node: int
) -> tuple[float, float]:
    """Return the same, pair of GPUs by pair of GPUs."""
    user, devices = graph.layers[index], np.arange(gpus)
    own_low, own_high = boxes(source.output, own, devices)  # type: ignore[attr-defined]
    low, high = needed(user, number, *boxes(user.output, need, devices))
    common = np.array(
        [
            [int(volume(np.maximum(low[d], own_low[s]), np.minimum(high[d], own_high[s]))) for s in range(gpus)]
            for d in range(gpus)
        ]
    )
    received = volume(low, high) - np.diag(common)
    sent = common.sum(axis=0) - np.diag(common)
    nodes = devices // per_node
    between = [(nodes == node, nodes != node) for node in np.unique(nodes)]
    across = [common[np.ix_(*pair)].sum() for here, there in between for pair in ((here, there), (there, here))]
    return float(max(received.max(), sent.max())), float(max(across)) if gpus > per_node else 0.0


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Config(n=3), "n=3 does not divide its 8 samples"),
        (Config(c=3), "c=3 does not divide its 16 channels"),
        (Config(h=32), "h=32, of 16 rows"),
        (Config(w=32), "w=32, of 16 columns"),
        (Config(n=2, c=4), "which do not divide 4 GPUs"),
        (Config(n=0), "a degree is 1 or more"),
    ],
)
def test_a_degree_that_does_not_divide_is_refused_with_layer_and_extent(config: Config, words: str) -> None:
    with pytest.raises(OptionError, match=words) as error:
        check_config(chain(2).for_gpus(4).layers[0], config, 4)
    assert "'conv0'" in str(error.value)


def test_a_split_that_a_layer_has_no_rule_for_is_refused() -> None:
    with pytest.raises(OptionError, match="h=2, but a loss layer is split by n"):
        check_config(chain(2).for_gpus(4).layers[-1], Config(h=2), 4)
