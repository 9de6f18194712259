"""Weights that several layers use, captured: against torch's own module on one device, and ranks against one device."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from gpusim.errors import OptionError
from gpusim.formats.hardware import load_hardware
from gpusim.formats.topology import load_topology
from gpusim.gpu.layerwise.batch import make_data
from gpusim.gpu.layerwise.laid_out import check_layer
from gpusim.gpu.layerwise.one_device import run_on_one_device
from gpusim.gpu.layerwise.operations import parameters_of
from gpusim.gpu.layerwise.tied import generator_of
from gpusim.layerwise.communication import members, sync_ns
from gpusim.layerwise.compute import Roofline
from gpusim.layerwise.configs import Config
from gpusim.layerwise.costs import Problem, plan_bytes
from gpusim.layerwise.fixed_plans import data_parallel
from gpusim.layerwise.from_trace import layers_of
from gpusim.layerwise.lowering import lower_plan
from gpusim.layerwise.makespan import simulate_plan
from gpusim.layerwise.tied import tied_parameters
from tests.support import kind_models
from tests.support.captured import captured

CPU = torch.device("cpu")
SEED = 5


@pytest.mark.parametrize("name", kind_models.TIED)
def test_shared_weights_have_the_gradient_of_all_their_uses_as_in_torch(name: str) -> None:
    graph = layers_of(captured(kind_models, name))
    data = make_data(graph, 3, torch.float64, CPU)
    loss, gradients = run_on_one_device(graph, data, dtype=torch.float64, seed=SEED, device=CPU)
    model, like = getattr(kind_models, name)(2)
    own, of = dict(model.double().named_parameters()), {}
    for index, layer in enumerate(graph.layers):
        for number, named in enumerate(parameters_of(layer, generator_of(index, SEED), torch.float64)):
            apart = {k: v for k, v in named.items() if (number, k) not in {(tie.op, tie.name) for tie in layer.tied}}
            for key, value in apart.items():
                of[f"{layer.name}/{number}/{key}"] = parameter = own.pop(f"{layer.path}.{key}")
                parameter.data = value.reshape(parameter.shape).clone()
    assert not own
    found = model(data.inputs.reshape(like.shape).to(like.dtype if like.dtype == torch.long else torch.float64))
    whole = functional.cross_entropy(found, data.targets)
    whole.backward()  # type: ignore[no-untyped-call]
    assert float(loss) == pytest.approx(float(whole.detach()), rel=1e-12)
    for key, parameter in of.items():
        assert parameter.grad is not None
        assert torch.allclose(gradients[key].reshape(parameter.shape), parameter.grad, rtol=1e-9, atol=1e-14), key


def test_layers_with_shared_weights_keep_them_whole_and_count_them_once() -> None:
    """By hand: a table of 12 x 8; a convolution of 4 x 4 x 3 x 3 and 4, and a product of 4 x 4 and 4."""
    table, thrice = (layers_of(captured(kind_models, name)) for name in kind_models.TIED)
    of = {layer.name: layer for layer in table.layers}
    assert (of["table"].splits, of["last"].splits, of["between"].splits) == ("nh", "nh", "nch")
    assert (of["table"].tied_elements, of["table"].weight_elements, of["last"].weight_elements) == (96, 96, 0)
    assert [(each.name, each.elements, len(each.uses)) for each in tied_parameters(thrice)] == [
        ("weight", 16, 2),
        ("bias", 4, 2),
        ("weight", 144, 3),
        ("bias", 4, 3),
    ]


def test_shared_weights_of_which_there_are_two_of_a_name_are_refused() -> None:
    """A convolution and its BatchNorm, called twice."""
    layer = next(layer for layer in layers_of(captured(kind_models, "called_with_norm")).layers if layer.obstacle)
    with pytest.raises(OptionError, match=r"layer 'body.0 \(2\)' cannot be run: it uses the weights of layer 'body.0'"):
        check_layer(layer, CPU)


def test_their_gradient_is_one_sum_over_all_gpus_on_both_engines() -> None:
    """Also for a table that is on one GPU alone."""
    graph, hardware, topology = (
        layers_of(captured(kind_models, "tied_table")).for_gpus(4),
        load_hardware("h200"),
        load_topology("h200"),
    )
    problem = Problem(graph, 4, topology, Roofline(hardware), hardware)
    names = [layer.name for layer in graph.layers]
    by_samples = data_parallel(graph, 4)
    on_one = tuple(Config() if name == "table" else each for name, each in zip(names, by_samples, strict=True))
    for choice in (by_samples, on_one):
        lowered = lower_plan(problem, choice)
        sums_ns = [
            task.dur_ns
            for task, purpose, layer in zip(lowered.plan.tasks, lowered.purposes, lowered.layers, strict=True)
            if purpose == "sync" and task.device >= len(lowered.roles) and names[layer] == "table"
        ]
        wanted = pytest.approx(sync_ns(topology, 12 * 8 * 4, members(range(4), 8)))
        assert sums_ns == [wanted] * len(lowered.roles)
        ends = [simulate_plan(problem, choice, engine).timeline.end_ns for engine in ("fast", "reference")]
        assert ends[0] == ends[1]
    between = next(layer for layer in graph.layers if layer.name == "between")
    assert plan_bytes(problem, by_samples)[1] == 2 * 3 * (12 * 8 * 4 + between.weight_bytes)
