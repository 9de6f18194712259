"""Plans on the engines: the same times from both, overlap, shared links, and an explanation that adds up."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from gpusim.formats.hardware import load_hardware
from gpusim.formats.topology import load_topology
from gpusim.layerwise.compute import Roofline, TraceTimes
from gpusim.layerwise.configs import Config, layer_configs
from gpusim.layerwise.costs import Problem
from gpusim.layerwise.explore import Parallel, explore_plans, explore_problem
from gpusim.layerwise.fixed_plans import FIXED_PLANS, data_parallel, one_weird_trick
from gpusim.layerwise.from_trace import layers_of
from gpusim.layerwise.lowering import COMPUTE, SYNC, lower_plan
from gpusim.layerwise.makespan import simulate_plan
from gpusim.layerwise.packing import Packing, packing
from gpusim.layerwise.pieces import pieces
from gpusim.layerwise.roles import roles_of
from gpusim.layerwise.shares import whole
from gpusim.step import Step, load
from tests.support.layer_networks import chain, small_cnn, tables

NETWORKS = tables()


@cache
def step(name: str) -> Step:
    return load(name)


def of_trace(name: str, gpus: int) -> Problem:
    captured = step(name)
    graph = layers_of(captured.trace)
    times = TraceTimes(captured.graph, graph)
    return Problem(graph.for_gpus(gpus), gpus, load_topology("h200"), times, captured.graph.hardware)


def of_network(name: str, gpus: int, topology: str = "h200", batch: int = 32) -> Problem:
    links = load_topology(topology)
    hardware = load_hardware(links.hardware)
    graph = (
        NETWORKS.NETWORKS[name](batch)
        if name in NETWORKS.NETWORKS
        else {"small": small_cnn, "chain": chain}[name](batch)
    )
    return Problem(graph.for_gpus(gpus), gpus, links, Roofline(hardware), hardware)


@pytest.mark.parametrize("plan", sorted(FIXED_PLANS))
@pytest.mark.parametrize("gpus", [2, 4])
def test_both_engines_take_the_same_time_task_by_task(plan: str, gpus: int) -> None:
    problem = of_trace("resnet50-train-b8", gpus)
    choice = FIXED_PLANS[plan](problem.graph, gpus)
    fast, reference = (simulate_plan(problem, choice, engine).timeline for engine in ("fast", "reference"))
    assert fast.start_ns == reference.start_ns
    assert fast.end_ns == reference.end_ns


def test_halos_on_gpus_that_differ_take_the_same_time_on_both_engines() -> None:
    problem = of_network("small", 8, batch=2)
    choice = tuple(
        max((c for c in layer_configs(layer, 8) if c.n <= 2), key=lambda c: (c.parts, c.h * c.w))
        for layer in problem.graph.layers
    )
    assert len(roles_of(problem, choice)[0]) > 2
    fast, reference = (simulate_plan(problem, choice, engine).timeline for engine in ("fast", "reference"))
    assert fast.end_ns == reference.end_ns


def test_one_gpu_takes_what_the_sequential_graph_takes() -> None:
    problem = of_trace("resnet50-train-b8", 1)
    found = simulate_plan(problem, data_parallel(problem.graph, 1))
    graph = step("resnet50-train-b8").graph
    expected = sum(task.dur_ns + task.extra_ns + graph.chain_ns for tasks in graph.tasks for task in tasks)
    assert found.timeline.makespan_ns == pytest.approx(expected, rel=0.002)


@pytest.mark.parametrize(("name", "gpus"), [("alexnet", 4), ("small", 4), ("small", 1)])
def test_the_parts_of_a_step_add_up_to_it(name: str, gpus: int) -> None:
    """None is negative: on one GPU kernels end 3 ns before the sum of their times, since ends are whole ns."""
    problem = of_network(name, gpus)
    for plan in FIXED_PLANS.values():
        span = simulate_plan(problem, plan(problem.graph, gpus)).makespan
        assert min(span.compute_ns, span.slowed_ns, span.transfer_ns, span.sync_ns, span.gaps_ns) >= 0
        parts = span.compute_ns + span.slowed_ns + span.transfer_ns + span.sync_ns + span.gaps_ns
        assert parts == pytest.approx(span.step_ns, abs=len(problem.graph) * 10)


def test_gradients_are_summed_beside_the_backward_pass() -> None:
    """Some of AlexNet's sums run concurrently with kernels, which take longer then: they share SMs."""
    problem = of_network("alexnet", 4)
    found = simulate_plan(problem, data_parallel(problem.graph, 4))
    assert found.makespan.hidden_ns > 0
    assert found.makespan.slowed_ns > 0
    lowered, timeline = found.lowered, found.timeline
    sums = [
        i for i, purpose in enumerate(lowered.purposes) if purpose == "sync" and lowered.plan.tasks[i].queue == SYNC
    ]
    last_backward = max(timeline.end_ns[i] for i, purpose in enumerate(lowered.purposes) if purpose == "backward")
    assert min(timeline.start_ns[i] for i in sums) < last_backward


def test_gradients_of_an_output_with_three_users_are_added_twice() -> None:
    """Each sum reads two gradients and writes one. Captured layers have these kernels already."""
    problem = of_network("small", 2, batch=4)
    users = problem.graph.consumers()
    lowered = lower_plan(problem, data_parallel(problem.graph, 2))
    sums = {
        layer: task.dram_bytes
        for task, layer in zip(lowered.plan.tasks, lowered.layers, strict=True)
        if task.name == "sum of gradients"
    }
    expected = {
        index: 3 * (len(users[index]) - 1) * layer.output_bytes // 2
        for index, layer in enumerate(problem.graph.layers)
        if len(users[index]) > 1
    }
    assert sorted(len(each) for each in users if len(each) > 1) == [2, 3]
    assert sums == expected
    captured = of_trace("googlenet-train-b8", 2)
    tasks = lower_plan(captured, data_parallel(captured.graph, 2)).plan.tasks
    assert all(task.name != "sum of gradients" for task in tasks)


def test_captured_gradients_of_weights_are_told_from_those_of_the_input() -> None:
    """ResNet-50's last layer: one product for the input, one for the weights with a sum for the bias, as captured."""
    captured = step("resnet50-train-b8")
    graph = layers_of(captured.trace)
    times = TraceTimes(captured.graph, graph)
    index, layer = next((i, layer) for i, layer in enumerate(graph.layers) if layer.kind == "linear")
    first, late = times.backward_tasks(index, layer, whole(layer))
    assert [*first, *late] == times.tasks(index, layer, whole(layer), backward=True)
    assert any("at::native::reduce_kernel" in task.name for task in late)
    assert not any("at::native::reduce_kernel" in task.name for task in first)
    assert first


def test_two_collectives_at_a_time_share_a_link() -> None:
    """Two buckets that are ready at once take as long together as in sequence, not half."""
    problem = of_network("chain", 2)
    lowered = lower_plan(problem, data_parallel(problem.graph, 2))
    links = [task for task in lowered.plan.tasks if task.device >= len(lowered.roles)]
    assert links
    bandwidth = problem.hardware.memory.dram_bytes_per_ns
    assert all(task.dram_bytes == pytest.approx(task.dur_ns * bandwidth) for task in links)
    assert all(not task.blocks for task in links)


def test_a_collective_keeps_whole_sms_for_itself() -> None:
    problem = of_network("chain", 2)
    lowered = lower_plan(problem, data_parallel(problem.graph, 2))
    kernels = [
        task
        for task, purpose in zip(lowered.plan.tasks, lowered.purposes, strict=True)
        if purpose == "sync" and task.device < len(lowered.roles)
    ]
    assert {(task.blocks, task.blocks_per_sm) for task in kernels} == {(24, 1)}


def test_every_gpu_waits_for_all_that_take_part() -> None:
    """A redistribution depends on the last kernel of each kind of GPU."""
    problem = of_network("small", 4, batch=1)
    choice = tuple(max(layer_configs(layer, 4), key=lambda c: (c.h, c.parts)) for layer in problem.graph.layers)
    lowered = lower_plan(problem, choice)
    assert len(lowered.roles) > 1
    first = next(i for i, purpose in enumerate(lowered.purposes) if purpose == "transfer")
    devices = {lowered.plan.tasks[dep].device for dep in lowered.plan.tasks[first].deps}
    assert set(range(len(lowered.roles))) <= devices


def test_equal_gpus_are_simulated_once() -> None:
    problem = of_network("alexnet", 64)
    roles, all_of_them = roles_of(problem, data_parallel(problem.graph, 64))
    assert ([role.count for role in roles], all_of_them) == ([64], True)


def test_a_gpu_without_a_part_only_waits() -> None:
    problem = of_network("alexnet", 4)
    choice = tuple(
        Config() if layer.kind == "linear" else config
        for layer, config in zip(problem.graph.layers, one_weird_trick(problem.graph, 4), strict=True)
    )
    roles, _ = roles_of(problem, choice)
    assert [role.count for role in roles] == [1, 3]
    lowered = lower_plan(problem, choice)
    linear = {i for i, layer in enumerate(problem.graph.layers) if layer.kind == "linear"}
    busy = {
        task.device
        for i, task in enumerate(lowered.plan.tasks)
        if lowered.layers[i] in linear
        and task.queue == COMPUTE
        and lowered.purposes[i] in ("forward", "backward")
        and task.device < 2
    }
    assert busy == {0}


@pytest.fixture(scope="module")
def alexnet() -> Parallel:
    return explore_problem(of_network("alexnet", 4))


def test_the_layer_wise_plan_is_no_slower_than_any_other(alexnet: Parallel) -> None:
    assert alexnet.best.step_ns == min(plan.step_ns for plan in alexnet.plans)
    assert alexnet.best.additive_ns >= alexnet.searched.cost_ns


def test_alexnet_splits_its_fully_connected_layers_by_channels(alexnet: Parallel) -> None:
    """Figure 2 of the paper: the weights of fully connected layers are not worth their sums."""
    config = {row.name: row.config for row in alexnet.rows()}
    assert all(config[f"conv{number}"] == Config(n=4) for number in range(1, 6))
    assert all(config[name].c > 1 and config[name].replicas == 1 for name in ("fc1", "fc2"))


def test_rows_of_a_plan_add_up_to_its_sum_of_costs(alexnet: Parallel) -> None:
    for plan in alexnet.plans:
        total = sum(row.cost.total_ns + row.transfer_ns for row in alexnet.rows(plan.name))
        assert total == pytest.approx(plan.additive_ns)


def test_by_the_sum_of_costs_the_plan_is_the_searched_one() -> None:
    found = explore_problem(of_network("vgg16", 4), objective="additive")
    assert found.best.choice == found.searched.choice


def test_a_thousand_gpus_are_simulated_by_kinds() -> None:
    found = explore_problem(of_network("chain", 1024))
    assert found.best.roles <= 8
    assert found.communication == "links"


def test_inference_has_no_backward_pass_and_no_sums() -> None:
    captured = step("vgg16-infer-b1")
    found = explore_plans(captured, 4, load_topology("h200"))
    assert {plan.sync_bytes for plan in found.plans} == {0}
    assert found.plan("data").transfer_ns == 0


def test_a_step_without_optimizer_ends_with_its_sums() -> None:
    """The gradient of the first layer is summed last, and nothing follows: the step waits for a sum, not a transfer."""
    hardware = load_hardware("h200")
    graph = chain(2).for_gpus(4)
    found = Problem(graph, 4, load_topology("h200"), Roofline(hardware, optimizer=False), hardware)
    choice = data_parallel(graph, 4)
    lowered = lower_plan(found, choice)
    assert "optimizer" not in lowered.purposes
    span = simulate_plan(found, choice).makespan
    assert (span.transfer_ns, span.sync_ns > 0) == (0, True)
    parts = span.compute_ns + span.slowed_ns + span.transfer_ns + span.sync_ns + span.gaps_ns
    assert parts == pytest.approx(span.step_ns)


def test_pieces_are_packed_as_a_rank_packs_them() -> None:
    """From channels to samples on 2 GPUs, of 8 samples of 16 x 16 maps of 16 channels in single precision.

    Forward: 4 samples of a GPU's channels are in one piece, and half of the channels of its samples are not: its own
    and the received ones are copied. Back: the half for the other GPU is copied, and both are added to zeros.
    """
    graph = chain(4).for_gpus(2)
    ours, theirs = Config(c=2), Config(n=2)
    edge = pieces(graph.layers[0], ours, graph.layers[1], 0, theirs, 2, 0)
    forward, back = packing(edge, graph.layers[0], (8, 8, 16, 16), 4)
    piece = 4 * 8 * 16 * 16 * 4
    assert forward == Packing((), (2 * piece, 2 * piece))
    assert back == Packing((2 * piece,), (2 * piece, 3 * piece, 3 * piece))
    whole = pieces(graph.layers[0], Config(), graph.layers[1], 0, theirs, 2, 1)
    assert packing(whole, graph.layers[0], (0, 0, 0, 0), 4) == (Packing(), Packing()), "it receives what it needs"
    problem = of_network("chain", 2)
    choice = tuple(
        ours if layer.name == "conv0" else config
        for layer, config in zip(problem.graph.layers, data_parallel(problem.graph, 2), strict=True)
    )
    lowered = lower_plan(problem, choice)
    pairs = zip(lowered.purposes, lowered.layers, strict=True)
    assert Counter(pairs)["copy", 1] == 2 + 1 + 3 + 1, "forward, back, and into a bucket of gradients"
