"""Published and measured times: the paper's ordering and its plan of VGG-16, and DistributedDataParallel on H200s."""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Any

import pytest

from gpusim.engine.base import engine_by_name
from gpusim.formats.hardware import load_hardware
from gpusim.formats.topology import load_topology
from gpusim.layerwise.compute import Roofline
from gpusim.layerwise.configs import Config
from gpusim.layerwise.costs import Problem
from gpusim.layerwise.ddp import ddp_step_ns, lower_ddp, parameters_of
from gpusim.layerwise.fixed_plans import FIXED_PLANS
from gpusim.layerwise.search import additive_ns, search
from tests.support.layer_networks import chain, small_cnn, tables

NETWORKS = tables()
#: ms per step of 32 images on one P100: 745, 184 and 157 images per second in figure 7 of Jia et al. 2018.
PAPER_STEP_MS = {"alexnet": 32e3 / 745, "vgg16": 32e3 / 184, "inception_v3": 32e3 / 157}


def paper_problem(name: str, gpus: int) -> Problem:
    hardware, topology = load_hardware("p100"), load_topology("p100")
    graph = NETWORKS.alexnet(32, wide=True) if name == "alexnet" else NETWORKS.NETWORKS[name](32)
    times = Roofline(hardware, "fp32", optimizer=False).scaled_to(graph, PAPER_STEP_MS[name] * 1e6)
    return Problem(graph.for_gpus(gpus), gpus, topology, times, hardware, repeated=False)


@pytest.mark.parametrize("name", sorted(PAPER_STEP_MS))
@pytest.mark.parametrize("gpus", [4, 16])
def test_in_the_papers_setting_the_order_of_its_strategies_is_kept(name: str, gpus: int) -> None:
    problem = paper_problem(name, gpus)
    data, _, owt = additive_ns(problem, [plan(problem.graph, gpus) for plan in FIXED_PLANS.values()])
    layer = search(problem).cost_ns
    assert layer <= owt * (1 + 1e-9) <= data * (1 + 2e-9)


def test_vgg16s_plan_splits_samples_first_and_channels_last() -> None:
    """Table 5 has n=4 for convolutions, c=4 for the first two fully connected layers.

    Its last three convolutions are split by height and width, which its measured times favour and a roofline does not.
    """
    problem = paper_problem("vgg16", 4)
    found = dict(zip((x.name for x in problem.graph.layers), search(problem).choice, strict=True))
    assert {found[f"conv{number}"] for number in range(1, 11)} == {Config(n=4)}
    assert found["fc1"] == found["fc2"] == Config(c=4)
    assert found["fc3"].n == 1


def test_more_gpus_leave_fully_connected_layers_to_fewer_of_them() -> None:
    """Figure 3: the last layers are best on 4 of 16 GPUs."""
    problem = paper_problem("alexnet", 16)
    found = dict(zip((x.name for x in problem.graph.layers), search(problem).choice, strict=True))
    assert found["conv1"].parts == 16
    assert max(found[name].parts for name in ("fc1", "fc2", "fc3")) < 16


#: us on one H200, and with DistributedDataParallel on 4 and 2 (eager forward and backward, TF32, 2026-11-20).
MEASURED_US: dict[tuple[str, int], tuple[float, dict[int, float]]] = {
    ("alexnet", 32): (2239, {4: 3312, 2: 3157}),
    ("alexnet", 128): (5926, {4: 6547, 2: 6416}),
    ("vgg16", 32): (23933, {4: 25374, 2: 25078}),
    ("inception_v3", 32): (32759, {4: 35573, 2: 35374}),
}


def ddp_errors() -> dict[tuple[str, int, int], float]:
    """Relative errors of the simulation; layers share the time of one GPU by a roofline."""
    hardware, topology = load_hardware("h200"), load_topology("h200")
    errors = {}
    for (name, batch), (alone_us, measured) in MEASURED_US.items():
        more = {"auxiliary": True} if name == "inception_v3" else {}
        graph = NETWORKS.NETWORKS[name](batch, **more)
        times = Roofline(hardware).scaled_to(graph, alone_us * 1e3)
        one = Problem(graph, 1, topology, times, hardware)
        for gpus, measured_us in measured.items():
            several = Problem(graph.for_gpus(gpus), gpus, topology, times, hardware)
            errors[name, batch, gpus] = ddp_step_ns(several, one, alone_us * 1e3) / (measured_us * 1e3) - 1
    return errors


def test_ddp_on_two_and_four_h200s_is_simulated_with_nothing_fitted_to_it() -> None:
    """Median within 5 %. AlexNet at 32 images waits for its host, which is not simulated; all others are within 5 %."""
    errors = ddp_errors()
    assert statistics.median(map(abs, errors.values())) < 0.05
    assert all(abs(error) < 0.05 for key, error in errors.items() if key[:2] != ("alexnet", 32))
    assert all(-0.20 < errors["alexnet", 32, gpus] < -0.10 for gpus in (2, 4))  # the docs say so


def test_ddp_copies_each_parameter_twice_and_sums_buckets() -> None:
    """chain: 5 layers of a weight and a bias. 1 MiB is not reached before the end: one bucket."""
    problem = _problem(chain(2), 4)
    lowered = lower_ddp(problem)
    names = [task.name for task in lowered.plan.tasks]
    assert names.count("copy") == 2 * 2 * 5
    assert sum(p == "sync" and t.device == 0 for p, t in zip(lowered.purposes, lowered.plan.tasks, strict=True)) == 1
    assert [parameters_of(layer) for layer in problem.graph.layers if layer.weight_elements] == [2] * 5


def test_ddp_sends_the_buffers_of_batch_norm_before_the_forward_pass() -> None:
    """small_cnn has two of them: joined, sent, and three copies each; on one GPU none of it."""
    lowered = lower_ddp(_problem(small_cnn(2), 2))
    first = next(i for i, task in enumerate(lowered.plan.tasks) if task.name == "stem")
    before = [task.name for task in lowered.plan.tasks[:first]]
    assert before.count("copy") == 1 + 2 * 3
    assert before.count("transfer") == 1
    assert all(task.name != "copy" for task in lower_ddp(_problem(small_cnn(2), 1)).plan.tasks)


def test_ddp_takes_the_same_time_on_both_engines() -> None:
    problem = _problem(small_cnn(2), 4)
    lowered = lower_ddp(problem)
    fast, reference = (engine_by_name(name).run(lowered.plan, problem.hardware) for name in ("fast", "reference"))
    assert fast.end_ns == reference.end_ns


def test_buckets_of_alexnet_begin_with_its_last_layer() -> None:
    """16.4 MB of fc3 fill the first MiB, fc2 and fc1 a bucket each, convolutions the last one."""
    lowered = lower_ddp(_problem(NETWORKS.alexnet(32), 4))
    sums = [
        lowered.plan.tasks[i].dur_ns
        for i, purpose in enumerate(lowered.purposes)
        if purpose == "sync" and lowered.plan.tasks[i].device == 0
    ]
    assert len(sums) == 4
    assert sums[2] == max(sums)
    assert all(later != earlier for earlier, later in pairwise(sums))


def _problem(graph: Any, gpus: int) -> Problem:
    hardware = load_hardware("h200")
    return Problem(graph.for_gpus(gpus), gpus, load_topology("h200"), Roofline(hardware), hardware)
