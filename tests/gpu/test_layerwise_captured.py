"""Captured layers as the execution of plans runs them, against torch's own module with the same weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
import torch
from torch import nn

from gpusim.errors import OptionError, TraceError
from gpusim.formats.hardware import load_hardware
from gpusim.formats.trace import Trace
from gpusim.gpu.capture.estimate import capture_estimated
from gpusim.gpu.capture.models import AUXILIARY_WEIGHT
from gpusim.gpu.capture.options import CaptureOptions
from gpusim.gpu.layerwise.batch import Data, make_data
from gpusim.gpu.layerwise.one_device import run_on_one_device
from gpusim.gpu.layerwise.operations import parameters_of
from gpusim.gpu.layerwise.rank import Rank
from gpusim.gpu.layerwise.transport import Alone
from gpusim.layerwise.configs import Config
from gpusim.layerwise.from_trace import layers_of
from gpusim.layerwise.layers import LayerGraph

CPU = torch.device("cpu")
MODELS = """
import torch
from torch import nn


class Gated(nn.Module):
    # Squeeze-and-excitation, LayerNorm over channels, a scale for each channel, two auxiliary losses.
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.squeeze, self.excite = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.norm = nn.LayerNorm(8, eps=1e-3)
        self.wide = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.first, self.second, self.last = nn.Linear(32, 5), nn.Linear(8, 5), nn.Linear(8, 5)

    def forward(self, x):
        x = nn.functional.hardswish(self.stem(x))
        gate = self.excite(nn.functional.silu(self.squeeze(x.mean((2, 3), keepdim=True))))
        x = x * torch.sigmoid(gate)
        first = self.first(nn.functional.adaptive_avg_pool2d(x, (2, 2)).flatten(1))
        rows = nn.functional.gelu(self.wide(self.norm(x.permute(0, 2, 3, 1))), approximate="tanh") * self.scale
        x = x + rows.permute(0, 3, 1, 2)
        second = self.second(x.mean((2, 3)))
        return self.last(torch.tanh(x).mean((2, 3))), first, second


class Shuffled(nn.Module):
    # A shuffle of channels, and a half of them.
    def __init__(self):
        super().__init__()
        self.one, self.two, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Linear(4, 5)

    def forward(self, x):
        x = self.one(x)
        n, c, h, w = x.shape
        x = x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
        return self.last(self.two(x)[:, :4].mean((2, 3)))


class Reread(nn.Module):
    # A ReLU of a view of a layer, and the layer itself.
    def __init__(self):
        super().__init__()
        self.one, self.wide, self.last = nn.Conv2d(3, 4, 3), nn.Linear(16, 5), nn.Linear(4, 5)

    def forward(self, x):
        x = self.one(x)
        return self.wide(torch.relu(x.flatten(1))) + self.last(x.mean((2, 3)))


def reread(batch):
    return Reread(), torch.randn(batch, 3, 4, 4)


class Odd(nn.Module):
    # Operators that depend on other samples, and numbers that are none.
    def __init__(self, odd):
        super().__init__()
        self.odd, self.one, self.last = odd, nn.Linear(4, 6), nn.Linear(6, 5)

    def forward(self, x):
        return self.last(self.odd(self.one(x)))


def odd(function):
    return lambda batch: (Odd(function), torch.randn(batch, 4))


by_zero, endless = odd(lambda x: x / 0.0), odd(lambda x: x * float("inf"))
others, stacked = odd(lambda x: (x @ x.t()) @ x), odd(lambda x: x - x.mean(0))


class Accumulated(nn.Module):
    # An operator without a rule.
    def __init__(self):
        super().__init__()
        self.one, self.last = nn.Conv2d(3, 8, 3), nn.Linear(8, 5)

    def forward(self, x):
        return self.last(torch.cummax(self.one(x), 3).values.mean((2, 3)))


def accumulated(batch):
    return Accumulated(), torch.randn(batch, 3, 9, 9)


def gated(batch):
    return Gated(), torch.randn(batch, 3, 9, 9)


def together(output):
    target = torch.zeros(len(output[0]), dtype=torch.int64, device=output[0].device)
    losses = [nn.functional.cross_entropy(each, target) for each in output]
    return losses[0] + 0.3 * (losses[1] + losses[2])


def scaled_together(batch):
    return Gated(), torch.randn(batch, 3, 9, 9), together


def shuffled(batch):
    return Shuffled(), torch.randn(batch, 3, 9, 9)


class Words(nn.Module):
    # A table of words, of which one row may have no gradient.
    def __init__(self, padding):
        super().__init__()
        self.table, self.last = nn.Embedding(9, 4, padding_idx=padding), nn.Linear(12, 5)

    def forward(self, x):
        return self.last(self.table(x).flatten(1))


def words(padding):
    return lambda batch: (Words(padding), torch.randint(0, 9, (batch, 3)))


unpadded, padded_by_0, padded_by_1 = words(None), words(0), words(1)
"""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    file = tmp_path / "models.py"
    file.write_text(MODELS, encoding="utf-8")
    return file


def module_of(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("captured_models", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def captured(file: Path, name: str) -> Trace:
    options = CaptureOptions(spec=f"{file}:{name}", mode="train", batch=2)
    return capture_estimated(options, load_hardware("h200"), lambda _: None)


def torchs_loss(model: nn.Module, data: Data) -> torch.Tensor:
    scores, *auxiliary = model(data.inputs)
    losses = [nn.functional.cross_entropy(each, data.targets) for each in (scores, *auxiliary)]
    return losses[0] + AUXILIARY_WEIGHT * (losses[1] + losses[2])


def with_weights(model: nn.Module, graph: LayerGraph, seed: int) -> dict[str, nn.Parameter]:
    """Give torch's module the weights of the graph; returns its parameters by their names there."""
    found: dict[str, nn.Parameter] = {}
    for index, layer in enumerate(graph.layers):
        generator = torch.Generator().manual_seed(seed * 100_003 + index)
        for number, named in enumerate(parameters_of(layer, generator, torch.float64)):
            for name, value in named.items():
                if layer.ops[number].kind == "channel_scale":
                    parameter = model.get_parameter("scale")
                else:
                    parameter = model.get_parameter(f"{layer.path}.{name}")
                parameter.data = value.clone()
                found[f"{layer.name}/{number}/{name}"] = parameter
    return found


@pytest.mark.parametrize("name", ["gated", "scaled_together"])
def test_a_captured_network_runs_as_torchs_module(models: Path, name: str) -> None:
    """Auxiliary losses are scaled one by one, or their sum is."""
    graph = layers_of(captured(models, name))
    data = make_data(graph, 3, torch.float64, CPU)
    loss, gradients = run_on_one_device(graph, data, dtype=torch.float64, seed=5, device=CPU)
    model = module_of(models).Gated().double()
    parameters = with_weights(model, graph, 5)
    whole = torchs_loss(model, data)
    whole.backward()
    expected = float(whole.detach())
    assert len(parameters) == len(list(model.parameters()))
    assert float(loss) == pytest.approx(expected, rel=1e-12)
    for name, gradient in gradients.items():
        wanted = parameters[name].grad
        assert wanted is not None
        assert torch.allclose(gradient, wanted, rtol=1e-9, atol=1e-14), name


def test_a_view_that_reorders_channels_is_a_layer_of_its_own(models: Path) -> None:
    """Parts of its result are read in place."""
    graph = layers_of(captured(models, "shuffled"))
    (shuffle,) = (layer for layer in graph.layers if layer.name == "transpose")
    assert (shuffle.kind, shuffle.splits, shuffle.output) == ("by_sample", "n", (2, 8, 7, 7))
    data = make_data(graph, 3, torch.float64, CPU)
    loss, _ = run_on_one_device(graph, data, dtype=torch.float64, seed=5, device=CPU)
    model = module_of(models).Shuffled().double()
    with_weights(model, graph, 5)
    wanted = float(nn.functional.cross_entropy(model(data.inputs), data.targets).detach())
    assert float(loss) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("name", ["padded_by_0", "padded_by_1"])
def test_a_tables_padding_has_no_gradient(models: Path, name: str) -> None:
    row = int(name[-1])
    found = []
    for each in ("unpadded", name):
        graph = layers_of(captured(models, each))
        data = make_data(graph, 3, torch.float64, CPU)
        _, gradients = run_on_one_device(graph, data, dtype=torch.float64, seed=5, device=CPU)
        found.append(gradients["table/0/weight"])
        data.inputs.fill_(row)  # so that it is looked up
        _, gradients = run_on_one_device(graph, data, dtype=torch.float64, seed=5, device=CPU)
        assert bool(gradients["table/0/weight"][row].abs().max() > 0) == (each == "unpadded")
    others = [number for number in range(len(found[0])) if number != row]
    assert torch.equal(found[0][others], found[1][others])


def test_a_function_of_a_view_leaves_its_layer_as_it_is(models: Path) -> None:
    """The mean is that of the convolution, not of what the ReLU makes of it."""
    graph = layers_of(captured(models, "reread"))
    data = make_data(graph, 3, torch.float64, CPU)
    loss, _ = run_on_one_device(graph, data, dtype=torch.float64, seed=5, device=CPU)
    model = module_of(models).Reread().double()
    with_weights(model, graph, 5)
    wanted = float(nn.functional.cross_entropy(model(data.inputs), data.targets).detach())
    assert float(loss) == pytest.approx(wanted, rel=1e-12)


def test_one_layer_without_a_rule_is_said_as_one(models: Path) -> None:
    graph = layers_of(captured(models, "accumulated"))
    assert graph.notes == ("1 layer has no rule and is computed by every GPU: 1 x other",)
    with pytest.raises(OptionError, match="cannot be run: nothing runs its cummax"):
        Rank(graph, tuple(Config() for _ in graph.layers), 1, Alone(0), device=CPU)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("by_zero", "nothing runs its div"),
        ("endless", "nothing runs its mul"),
        ("others", "its mm mixes samples"),
        ("stacked", "nothing runs its mean|its mean mixes samples|leaves no known dimensions"),
    ],
)
def test_what_has_another_meaning_for_a_part_of_the_batch_is_refused(models: Path, name: str, reason: str) -> None:
    graph = layers_of(captured(models, name))
    with pytest.raises(OptionError, match=f"cannot be run: .*({reason})"):
        Rank(graph, tuple(Config() for _ in graph.layers), 1, Alone(0), device=CPU)


def test_a_view_with_arguments_of_another_operator_is_refused_with_its_place(models: Path) -> None:
    trace = captured(models, "gated")
    place = next(index for index, op in enumerate(trace.ops) if op.target == "aten.permute.default")
    broken = msgspec.structs.replace(trace.ops[place], args=(*trace.ops[place].args[:1], "x"))
    ops = (*trace.ops[:place], broken, *trace.ops[place + 1 :])
    with pytest.raises(TraceError, match=rf"\$.ops\[{place}\]: aten.permute.default has arguments of another operator"):
        layers_of(msgspec.structs.replace(trace, ops=ops))
