"""Networks of the layer-wise tests: the tables of `validate/layerwise`, and small ones."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest

from gpusim.layerwise.layers import LayerGraph
from gpusim.layerwise.network_builder import NetworkBuilder

ROOT = Path(__file__).parents[2]


def tables() -> ModuleType:
    """Load `validate/layerwise/networks.py`, which is not in a package."""
    spec = importlib.util.spec_from_file_location("layer_tables", ROOT / "validate" / "layerwise" / "networks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start(gpus: int, *words: str, program: str = "rank", timeout_s: float = 300) -> str:
    """Run a program of `tests/support` on several ranks."""
    from gpusim.gpu.layerwise.launch import launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        return launch(gpus, f"tests.support.{program}", words, timeout_s=timeout_s)


def small_cnn(batch: int) -> LayerGraph:
    """Make every kind of layer of a convolutional network, on maps that no split divides evenly."""
    net = NetworkBuilder("small_cnn", batch)
    stem = net.convolution((3, 17, 15), 8, 3, stride=2, padding=1, norm=True, relu=True, name="stem")
    pooled = net.pool(stem, 3, stride=2, padding=1, name="max")
    one = net.convolution(pooled, 8, 3, padding=1, bias=True, relu=True, name="one")
    two = net.convolution(pooled, 16, (1, 5), padding=(0, 2), norm=True, name="two")
    three = net.convolution(net.pool(pooled, 3, stride=1, padding=1, average=True, name="mean"), 8, 1, name="three")
    joined = net.concat([one, two, three], "concat")
    added = net.add(
        [joined, net.convolution(joined, 32, 3, padding=1, groups=4, name="grouped")], relu=True, name="add"
    )
    last = net.convolution(added, 16, 3, stride=2, padding=1, name="last")
    rows = net.flatten(last, "flatten")
    hidden = net.linear(rows, 16, relu=True, dropout=0.5, name="fc1")
    net.loss(net.linear(hidden, 8, name="fc2"))
    return net.graph()


def chain(batch: int, *, convolutions: int = 3, width: int = 16) -> LayerGraph:
    """Make convolutions and two fully connected layers in sequence."""
    net = NetworkBuilder("chain", batch)
    at: int | tuple[int, int, int] = (3, 16, 16)
    for number in range(convolutions):
        at = net.convolution(at, width, 3, padding=1, bias=True, relu=True, name=f"conv{number}")
    assert isinstance(at, int)
    at = net.linear(net.flatten(net.pool(at, 2, name="pool"), "flatten"), 32, relu=True, name="fc1")
    net.loss(net.linear(at, 8, name="fc2"))
    return net.graph()
