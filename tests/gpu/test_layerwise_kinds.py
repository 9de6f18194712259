"""Each kind of layer that plans run, captured: against torch's own module on one device, and ranks against one device.

A kind of layer that is not split is named, with a reason where nothing runs it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod

import msgspec
import pytest
import torch
from torch.nn import functional

from gpusim.errors import OptionError, TraceError
from gpusim.formats.trace import Trace
from gpusim.gpu.layerwise.batch import Data, make_data
from gpusim.gpu.layerwise.dropout import dropped
from gpusim.gpu.layerwise.laid_out import check_layer
from gpusim.gpu.layerwise.one_device import run_on_one_device
from gpusim.gpu.layerwise.operations import parameters_of
from gpusim.layerwise.from_trace import layers_of
from gpusim.layerwise.layers import LayerGraph
from gpusim.layerwise.rule import parameters_of as parameters_at
from tests.support import kind_models
from tests.support.captured import captured
from tests.support.kind_models import RANDOM, SPLITS

CPU = torch.device("cpu")
SEED = 5


def set_parameters(model: torch.nn.Module, trace: Trace, graph: LayerGraph) -> dict[str, torch.Tensor]:
    """Give the module the values of the graph's parameters; returns its parameters by the graph's names."""
    own = dict(model.named_parameters())
    places = {}
    for index, layer in enumerate(graph.layers):
        read = [trace.tensors[w] for op in layer.forward for t in trace.ops[op].reads for w in parameters_at(trace, t)]
        left = {each.name: prod(each.shape) for each in read}
        generator = torch.Generator().manual_seed(SEED * 100_003 + index)
        for number, named in enumerate(parameters_of(layer, generator, torch.float64)):
            for key, value in named.items():
                name = key if key in own else next(n for n, size in left.items() if n.endswith(key))
                assert left.pop(name) == value.numel()
                own[name].data = value.reshape(own[name].shape).clone()
                places[f"{layer.name}/{number}/{key}"] = own[name]
    assert len(places) == len(own)
    return places


def inputs_of(like: torch.Tensor, data: Data) -> torch.Tensor:
    """Return the batch in the shape with which a network was captured."""
    if not like.is_floating_point():
        return data.inputs.reshape(like.shape).long()
    if like.ndim == 4:
        return data.inputs
    if like.ndim == 5:  # depth and width are one dimension
        n, c, depth, height, width = like.shape
        return data.inputs.reshape(n, c, height, depth, width).transpose(2, 3)
    sequence = data.inputs.squeeze(3)
    return sequence if sequence.shape[1:] == like.shape[1:] else sequence.transpose(1, 2)


@pytest.mark.parametrize("name", SPLITS)
def test_a_kind_of_layer_runs_as_torchs_module(name: str) -> None:
    """Loss and all gradients in double precision, with the same weights."""
    trace = captured(kind_models, name)
    graph = layers_of(trace)
    assert not graph.notes
    data = make_data(graph, 3, torch.float64, CPU)
    loss, gradients = run_on_one_device(graph, data, dtype=torch.float64, seed=SEED, device=CPU)
    model, like = getattr(kind_models, name)(2)
    parameters = set_parameters(model.double(), trace, graph)
    found = model(inputs_of(like, data))
    whole = found.square().mean() if found.ndim == 4 else functional.cross_entropy(found, data.targets)
    whole.backward()  # type: ignore[no-untyped-call]
    assert float(loss) == pytest.approx(float(whole.detach()), rel=1e-12)
    for own, gradient in gradients.items():
        wanted = parameters[own].grad
        assert wanted is not None
        assert torch.allclose(gradient.reshape(wanted.shape), wanted, rtol=1e-9, atol=1e-14), own


@pytest.mark.parametrize(("name", "splits"), (SPLITS | RANDOM).items())
def test_a_kind_of_layer_is_split_as_its_rule_says(name: str, splits: str) -> None:
    of_layer = [
        layer for layer in layers_of(captured(kind_models, name)).layers if layer.path.startswith(("layer", "table"))
    ]
    first = (
        of_layer[0] if name not in RANDOM else next(x for x in of_layer if any(op.kind == "dropout" for op in x.ops))
    )
    assert first.splits == splits


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("bags_of_other_lengths", "layer 'table' cannot be run: its bags do not have as many rows for each sample"),
        (
            "taken_twice",
            "layer 'first' cannot be run: it takes a tensor with a gradient of its own, or once with",
        ),
        ("norm_of_positions", "layer 'layer' cannot be run: nothing runs its native_batch_norm"),
        ("some_samples", "layer 'layer' cannot be run: its relu takes some of the samples"),
        ("cut_weight", "layer 'layer' cannot be run: it takes a parameter without its gradient"),
        ("own_gradient", "layer 'next' cannot be run: it takes a tensor with a gradient of its own"),
    ],
)
def test_a_kind_of_layer_that_nothing_runs_is_named_with_its_reason(name: str, line: str) -> None:
    (layer, *_) = [layer for layer in layers_of(captured(kind_models, name)).layers if not layer.ops]
    with pytest.raises(OptionError, match=re.escape(line)):
        check_layer(layer, CPU)


def test_a_stride_of_zero_is_refused_with_its_place() -> None:
    trace = captured(kind_models, "transposed")
    place = next(index for index, op in enumerate(trace.ops) if op.target.startswith("aten.convolution") and op.args[6])
    args = list(trace.ops[place].args)
    args[3] = [0, 0]
    ops = list(trace.ops)
    ops[place] = msgspec.structs.replace(trace.ops[place], args=tuple(args))
    with pytest.raises(TraceError, match=rf"\$.ops\[{place}\]: aten.convolution.default has arguments of another"):
        layers_of(msgspec.structs.replace(trace, ops=tuple(ops)))


def test_a_dropout_that_drops_everything_gives_zeros() -> None:
    """With a mask and without: zero over a share kept of zero is no number."""
    graph = layers_of(captured(kind_models, "dropped_in_place"))
    op = next(op for layer in graph.layers for op in layer.ops if op.kind == "dropout")
    op = replace(op, options={**op.options, "p": 1.0})
    value = torch.ones(2, 8, 3, 3)
    for mask in (torch.zeros(2, 8, 3, 3), None):
        assert torch.equal(dropped(op, value, mask), torch.zeros(2, 8, 3, 3))
