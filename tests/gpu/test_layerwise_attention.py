"""Captured attention under every split: against torch's own module on one device, and against one device on ranks."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from gpusim.formats.trace import Trace
from gpusim.gpu.layerwise import __main__ as layerwise
from gpusim.gpu.layerwise.batch import Data, make_data
from gpusim.gpu.layerwise.one_device import run_on_one_device
from gpusim.gpu.layerwise.operations import parameters_of
from gpusim.layerwise.from_trace import layers_of
from gpusim.layerwise.layers import BATCH, LayerGraph
from gpusim.layerwise.rule import parameters_of as parameters_at
from gpusim.trace.store import write_trace
from tests.support import attention_models
from tests.support.captured import captured

CPU = torch.device("cpu")
SEED = 5
#: Parts of parameters: name, first element, number of elements.
Place = tuple[str, int, int]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Captured steps by name."""
    folder, files = tmp_path_factory.mktemp("attention"), {}
    for name in ("within", "unbind", "dropped"):
        files[name] = folder / f"{name}.json.gz"
        write_trace(captured(attention_models, name), files[name])
    return files


def places_of(trace: Trace, graph: LayerGraph) -> dict[str, Place]:
    """Return the part of the module's parameters that each parameter of the graph is, by the ops that read it."""
    places: dict[str, Place] = {}
    for index, layer in enumerate(graph.layers):
        reads: list[Place] = []
        for op in layer.forward:
            for tensor in trace.ops[op].reads:
                for whole in parameters_at(trace, tensor):
                    view, parameter = trace.tensors[tensor], trace.tensors[whole]
                    reads.append((parameter.name, view.offset - parameter.offset, prod(view.shape)))
        for number, named in enumerate(parameters_of(layer, torch.Generator(), torch.float64)):
            for name, value in named.items():
                place = (name, 0, value.numel())
                if name in ("weight", "bias"):
                    place = next(each for each in reads if each[2] == value.numel())
                    reads.remove(place)
                places[f"{graph.layers[index].name}/{number}/{name}"] = place
    return places


@pytest.mark.parametrize("name", attention_models.NETWORKS)
def test_captured_attention_runs_as_torchs_module(name: str, traces: dict[str, Path]) -> None:
    """Loss and all gradients in double precision, with the same weights; every parameter has its place."""
    trace = captured(attention_models, name)
    graph = layers_of(trace)
    data = make_data(graph, 3, torch.float64, CPU)
    loss, gradients = run_on_one_device(graph, data, dtype=torch.float64, seed=SEED, device=CPU)
    model = getattr(attention_models, name)(2)[0].double()
    parameters = dict(model.named_parameters())
    places = places_of(trace, graph)
    for index, layer in enumerate(graph.layers):
        generator = torch.Generator().manual_seed(SEED * 100_003 + index)
        for number, named in enumerate(parameters_of(layer, generator, torch.float64)):
            for own, value in named.items():
                where, first, size = places[f"{layer.name}/{number}/{own}"]
                parameters[where].data.view(-1)[first : first + size] = value.flatten()
    covered = {name: sum(size for where, _, size in places.values() if where == name) for name in parameters}
    assert covered == {name: parameter.numel() for name, parameter in parameters.items()}
    whole = torchs_loss(model, data)
    whole.backward()  # type: ignore[no-untyped-call]
    assert float(loss) == pytest.approx(float(whole.detach()), rel=1e-12)
    for own, gradient in gradients.items():
        where, first, size = places[own]
        wanted = parameters[where].grad
        assert wanted is not None
        assert torch.allclose(gradient.flatten(), wanted.view(-1)[first : first + size], rtol=1e-9, atol=1e-14), own


def torchs_loss(model: torch.nn.Module, data: Data) -> torch.Tensor:
    """Give torch's module the batch in the shape that it was captured with."""
    if isinstance(model, attention_models.Words):
        scores = model(data.inputs[:, 0, :, 0].long())
        return functional.cross_entropy(scores.transpose(1, 2), data.targets.squeeze(-1))
    is_image = isinstance(model, attention_models.Patches | attention_models.Windows | attention_models.Maps)
    scores = model(data.inputs if is_image else data.inputs.squeeze(3).transpose(1, 2))
    return functional.cross_entropy(scores, data.targets)


def test_queries_keys_and_values_are_parts_of_a_fused_projection(traces: dict[str, Path]) -> None:
    """Keys begin after all queries, by hand: 16 channels each. A part is split by its own heads."""
    graph = layers_of(captured(attention_models, "unbind"))
    (attention,) = (layer for layer in graph.layers if layer.kind == "attention")
    assert [edge.origin for edge in attention.inputs] == [(0, 0, 0, 0), (0, 16, 0, 0), (0, 32, 0, 0)]
    assert {edge.extents for edge in attention.inputs} == {(2, 16, 7, 1)}
    assert {edge.source for edge in attention.inputs} != {BATCH}


@pytest.mark.parametrize(
    ("name", "line"), [("dropped", r"layer 'attention \(\d\)' cannot be run: its attention has dropout")]
)
def test_what_cannot_be_run_is_named_with_its_reason(
    name: str, line: str, traces: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, from the command that runs a plan."""
    assert layerwise.main([str(traces[name]), "--plan", "data", "--ranks", "1"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert re.search(line, said), said
