"""Layers that every GPU computes: those without a rule, and others where that is faster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpusim.formats.hardware import load_hardware
from gpusim.formats.topology import load_topology
from gpusim.layerwise.communication import members, time_ns
from gpusim.layerwise.compute import Roofline
from gpusim.layerwise.configs import REPLICATED, Config
from gpusim.layerwise.costs import Problem, plan_bytes, tables
from gpusim.layerwise.fixed_plans import data_parallel
from gpusim.layerwise.layers import ALL, BATCH, Edge, Layer, LayerGraph
from gpusim.layerwise.lowering import lower_plan
from gpusim.layerwise.made_up import copy_ns
from gpusim.layerwise.makespan import simulate_plan
from gpusim.layerwise.search import search, worth_looking_at
from tests.support.layer_networks import chain, small_cnn

SHAPE = (2, 64, 32, 32)


def graph(kinds: str, training: bool) -> LayerGraph:
    """A chain: `o` has no rule and needs everything, `p` is pointwise."""
    layers = []
    for number, kind in enumerate(kinds):
        edge = Edge(number - 1 if number else BATCH, SHAPE, (ALL,) * 4 if kind == "o" else Edge(0, SHAPE).needs)
        splits = "" if kind == "o" else "nchw"
        layers.append(Layer(name=f"{kind}{number}", kind="relu", output=SHAPE, inputs=(edge,), splits=splits))
    return LayerGraph("chain", SHAPE[0], tuple(layers), training=training)


def problem(kinds: str, *, training: bool = False, gpus: int = 4) -> Problem:
    hardware = load_hardware("h200")
    layers = graph(kinds, training).for_gpus(gpus)
    return Problem(layers, gpus, load_topology("h200"), Roofline(hardware), hardware)


def whole_network() -> Problem:
    hardware = load_hardware("h200")
    return Problem(chain(32).for_gpus(4), 4, load_topology("h200"), Roofline(hardware), hardware)


def test_between_two_of_them_a_small_layer_stays_on_every_gpu() -> None:
    """To split it would save a part of 1.6 us, and bring all parts together again takes 20."""
    assert search(problem("opo")).choice == (REPLICATED, REPLICATED, REPLICATED)


def test_next_to_one_every_gpu_may_compute_a_layer_of_unknown_operations() -> None:
    with_one, _ = worth_looking_at(problem("op"))
    without, _ = worth_looking_at(problem("pp"))
    assert with_one[0] == (REPLICATED,)
    assert REPLICATED in with_one[1]
    assert all(REPLICATED not in configs for configs in without)


def test_every_gpu_may_compute_a_layer_that_draws_no_numbers() -> None:
    """`fc1` has a dropout."""
    graph = small_cnn(2).for_gpus(4)
    given = replace(whole_network(), graph=graph)
    options, _ = worth_looking_at(given)
    may = [layer.name for layer, some in zip(graph.layers, options, strict=True) if REPLICATED in some]
    assert may == [layer.name for layer in graph.layers if layer.name != "fc1"]
    assert all(REPLICATED not in some for some in worth_looking_at(replace(given, repeated=False))[0])


def test_it_gathers_its_input_and_sends_no_gradient_back() -> None:
    """Each GPU has the whole gradient of its input, and keeps that of its part."""
    given = whole_network()
    names = [layer.name for layer in given.graph.layers]
    at = names.index("fc2")
    choice = tuple(
        REPLICATED if number >= at else Config(c=4) if name == "fc1" else Config(n=4)
        for number, name in enumerate(names)
    )
    lowered = lower_plan(given, choice)
    moved = [lowered.layers[i] for i, p in enumerate(lowered.purposes) if p == "transfer"]
    assert moved.count(at) == 2  # kernel and link of the one role, forward
    last = given.graph.layers[at - 1]
    gather_ns = time_ns(given.topology, "all_gather", last.output_bytes, members(range(4), 8))
    once = tables(given, [(c,) for c in choice]).edges[at - 1, at][0, 0]
    assert once == pytest.approx(gather_ns + copy_ns(last.output_bytes, given.hardware))
    direct = tables(replace(given, direct=True), [(c,) for c in choice]).edges[at - 1, at][0, 0]
    assert direct == pytest.approx(gather_ns)


def test_its_result_is_split_for_nothing_and_its_gradient_added_up() -> None:
    """Forward each GPU takes its part of what it has. Backward each has a part of the gradient, and needs all."""
    inference, training = problem("op"), problem("op", training=True)
    choice = data_parallel(training.graph, 4)
    assert choice == (REPLICATED, Config(n=4))
    one_ns = [tables(each, [(c,) for c in choice]).edges[0, 1][0, 0] for each in (inference, training)]
    size = training.graph.layers[0].output_bytes
    summed = time_ns(training.topology, "all_reduce", size, members(range(4), 8))
    assert one_ns == [0.0, pytest.approx(summed)]
    assert plan_bytes(inference, choice) == (0, 0)
    assert plan_bytes(training, choice) == (2 * size * 3, 0)


def test_that_sum_is_a_collective_of_the_backward_pass_on_both_engines() -> None:
    training = problem("op", training=True)
    choice = data_parallel(training.graph, 4)
    lowered = lower_plan(training, choice)
    assert [p for p in lowered.purposes if p == "transfer"] == ["transfer"] * 2  # kernel and link of the one role
    assert lowered.purposes.index("transfer") > lowered.purposes.index("backward")
    ends = [simulate_plan(training, choice, engine).timeline.end_ns for engine in ("fast", "reference")]
    assert ends[0] == ends[1]
