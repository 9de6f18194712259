"""Pointwise functions and operators on samples, under every split: against torch's own module and one device."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch.nn import functional

from gpusim.errors import OptionError
from gpusim.gpu.layerwise.batch import make_data
from gpusim.gpu.layerwise.one_device import run_on_one_device
from gpusim.gpu.layerwise.operations import parameters_of
from gpusim.gpu.layerwise.rank import Rank
from gpusim.gpu.layerwise.transport import Alone
from gpusim.layerwise import op_rules as rules
from gpusim.layerwise.configs import Config
from gpusim.layerwise.from_trace import layers_of
from tests.support import pointwise_models
from tests.support.captured import captured

CPU = torch.device("cpu")
#: Tagged as pointwise by torch, but with another meaning or result under the same name.
AMBIGUOUS = {"max", "min", "equal", "frexp"}


def test_the_rule_knows_all_pointwise_operators_of_torch() -> None:
    """By torch's own tags. Backward operators, and those of special functions and lists, have no rule."""
    tagged = set()
    for whole in torch._C._dispatch_get_all_op_names():
        library, _, operator = whole.partition("::")
        name, _, overload = operator.partition(".")
        if library == "aten" and not name.startswith(("_foreach", "special_", "__")) and "backward" not in name:
            function = getattr(getattr(torch.ops.aten, name, None), overload or "default", None)
            if function is not None and torch.Tag.pointwise in function.tags:
                tagged.add(name.rstrip("_"))
    assert len(tagged) > 100
    assert tagged - AMBIGUOUS <= rules.POINTWISE
    assert not AMBIGUOUS & rules.POINTWISE


@pytest.mark.parametrize("name", pointwise_models.NETWORKS)
def test_a_network_runs_as_torchs_module(name: str) -> None:
    """Loss and gradients in double precision, with the same weights."""
    graph = layers_of(captured(pointwise_models, name))
    assert not graph.notes
    data = make_data(graph, 3, torch.float64, CPU)
    loss, gradients = run_on_one_device(graph, data, dtype=torch.float64, seed=5, device=CPU)
    model = getattr(pointwise_models, name)(2)[0].double()
    parameters = {}
    for index, layer in enumerate(graph.layers):
        generator = torch.Generator().manual_seed(5 * 100_003 + index)
        for number, named in enumerate(parameters_of(layer, generator, torch.float64)):
            for own, value in named.items():
                parameter = model.get_parameter(f"{layer.path}.{own}")
                parameter.data = value.clone()
                parameters[f"{layer.name}/{number}/{own}"] = parameter
    shaped = {"by_sample": data.inputs.squeeze(3).transpose(1, 2), "pairs": data.inputs.flatten(1)}
    inputs = shaped.get(name, data.inputs)
    found = model(inputs)
    pair = name == "pairs"
    whole = pointwise_models.loss_of_pairs(found) if pair else functional.cross_entropy(found, data.targets)
    whole.backward()  # type: ignore[no-untyped-call]
    assert float(loss) == pytest.approx(float(whole.detach()), rel=1e-12)
    assert set(gradients) == set(parameters)
    assert len(parameters) == len(list(model.parameters()))
    for own, gradient in gradients.items():
        wanted = parameters[own].grad
        assert wanted is not None
        assert torch.allclose(gradient, wanted, rtol=1e-9, atol=1e-14), own


def test_a_mean_that_layers_need_is_no_loss() -> None:
    graph = layers_of(captured(pointwise_models, "centred"))
    (mean,) = (layer for layer in graph.layers if layer.name.startswith("mean"))
    assert (mean.kind, mean.splits) == ("other", "")
    assert [layer.kind for layer in graph.layers].count("loss") == 1


def test_arguments_that_torch_refuses_are_one_line() -> None:
    trace = captured(pointwise_models, "pointwise")
    place = next(index for index, op in enumerate(trace.ops) if op.target == "aten.clamp.default")
    ops = list(trace.ops)
    ops[place] = msgspec.structs.replace(ops[place], args=(ops[place].args[0], "wide", 10**30))
    graph = layers_of(msgspec.structs.replace(trace, ops=tuple(ops)))
    data = make_data(graph, 0, torch.float64, CPU)
    with pytest.raises(OptionError, match=r"layer 'two' cannot be run: its clamp failed: .*any schema") as caught:
        run_on_one_device(graph, data, dtype=torch.float64, seed=5, device=CPU)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("frozen", "layer 'one' cannot be run: its weights are not trained"),
        ("transposed", "cannot be run: its classes are not the channels"),
        ("over_samples", "cannot be run"),
    ],
)
def test_a_step_with_other_gradients_or_classes_is_refused(name: str, line: str) -> None:
    graph = layers_of(captured(pointwise_models, name, 4))
    data = make_data(graph, 0, torch.float64, CPU)
    with pytest.raises(OptionError, match=line):
        Rank(graph, tuple(Config() for _ in graph.layers), 1, Alone(0), device=CPU).step(data)


def test_weights_that_are_not_trained_have_no_gradients_to_sum() -> None:
    one, *_ = layers_of(captured(pointwise_models, "frozen")).layers
    assert (one.weight_elements, one.frozen_elements) == (0, 6 * 8 + 8)
    graph = layers_of(captured(pointwise_models, "frozen"))
    (last,) = (layer for layer in graph.layers if layer.name == "last")
    assert (last.weight_elements, last.frozen_elements) == (8 * 4 + 4, 0)


def test_a_softmax_over_samples_is_not_split_by_samples() -> None:
    (softmax,) = (
        layer for layer in layers_of(captured(pointwise_models, "over_samples")).layers if "softmax" in layer.name
    )
    assert (softmax.kind, softmax.splits) == ("other", "")
