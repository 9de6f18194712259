"""Printed names of ops are accepted as input: layer, layer and operator, op, number."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from gpusim.analysis.simulation import simulate
from gpusim.analysis.whatif import sensitivities
from gpusim.cli import main
from gpusim.errors import OptionError, UnknownNameError
from gpusim.formats.trace import Trace
from gpusim.plan.schedule import Schedule
from gpusim.trace.op_names import find_one_op, find_ops, full_label, op_label
from gpusim.trace.store import write_trace
from tests.support.helpers import build_graph, make_trace, op, view

Run = Callable[..., tuple[int, str, str]]


def layered() -> Trace:
    """Make two layers; the first has a convolution, its view and its backward pass."""
    steps = [
        replace(op("convolution", "x", dur_ns=9000), target="aten.convolution.default"),
        replace(view("t", "convolution"), target="aten.t.default"),
        replace(op("relu", "convolution", dur_ns=3000), target="aten.relu.default"),
        replace(op("convolution_backward", "relu", dur_ns=5000), target="aten.convolution_backward.default"),
        replace(op("plain", "x", dur_ns=1000), target="aten.add.Tensor"),
    ]
    trace = make_trace(steps)
    layers = ("conv1.conv", "conv1.conv", "conv1.relu", "conv1.conv", "")
    ops = (msgspec.structs.replace(each, layer=layer) for each, layer in zip(trace.ops, layers, strict=True))
    return msgspec.structs.replace(trace, ops=tuple(ops))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "layered.json"
    write_trace(layered(), path)
    return path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gpusim", *map(str, arguments)])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as exited:
            code = int(exited.code or 0)
        return code, *capsys.readouterr()

    return call


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("convolution", (0,)),
        ("3", (3,)),
        ("conv1.conv convolution", (0,)),
        ("conv1.conv  convolution_backward", (3,)),
        ("conv1.conv convolution (convolution)", (0,)),
        ("conv1.relu", (2,)),
        ("conv1.conv", (0, 3)),  # the view launches nothing
        ("plain add", (4,)),
    ],
)
def test_op_is_found_by_every_name_that_is_printed(text: str, found: tuple[int, ...]) -> None:
    assert find_ops(layered(), text) == found


def test_every_label_finds_its_op() -> None:
    trace = layered()
    for index, each in enumerate(trace.ops):
        assert index in find_ops(trace, op_label(each))
        assert find_ops(trace, full_label(each)) == (index,)
        assert find_ops(trace, each.name) == (index,)


def test_name_of_an_op_goes_before_the_same_name_of_a_layer() -> None:
    trace = layered()
    ops = (msgspec.structs.replace(each, layer="relu") for each in trace.ops)
    assert find_ops(msgspec.structs.replace(trace, ops=tuple(ops)), "relu") == (2,)


def test_layer_of_several_ops_is_no_single_op_and_they_are_named() -> None:
    with pytest.raises(OptionError, match=r"'conv1\.conv' names 2 ops: give one of convolution, convolution_backward"):
        find_one_op(layered(), "conv1.conv")
    assert find_one_op(layered(), "conv1.relu") == 2


def test_unknown_op_among_many_names_the_five_nearest_and_how_many_more() -> None:
    trace = make_trace([op(f"convolution_{i}", "x") for i in range(200)])
    with pytest.raises(UnknownNameError) as caught:
        find_ops(trace, "convolution_7x")
    listed = re.search(r"\(there are: (.*) and (\d+) more\)", str(caught.value))
    assert listed is not None
    assert len(listed[1].split(", ")) == 5
    assert int(listed[2]) == 195
    assert "did you mean 'convolution_7" in str(caught.value)


def test_whatif_takes_what_it_prints(trace: Path, run: Run) -> None:
    """A printed row such as `speed of conv1.conv convolution` is a valid name."""
    out = run("whatif", trace)[1]
    printed = re.findall(r"speed of (.*), 0\.5x to 2x:", out)
    assert "conv1.conv convolution (convolution)" in printed
    times = []
    for name in ("conv1.conv convolution (convolution)", "conv1.conv convolution", "convolution", "0"):
        code, text, _ = run("whatif", trace, "--op", name, "2", "--json")
        assert code == 0
        times.append(json.loads(text)["whatif"]["makespan_ns"])
    assert len(set(times)) == 1
    both = json.loads(run("whatif", trace, "--op", "conv1.conv", "2", "--json")[1])
    assert both["whatif"]["makespan_ns"] < times[0], "all ops of the layer"


def test_explain_prints_layers_and_takes_them(trace: Path, run: Run) -> None:
    code, out, _ = run("explain", trace, "--ops", "conv1.conv convolution,conv1.relu")
    assert code == 0
    assert "convolution (conv1.conv)" in out
    assert "relu (conv1.relu)" in out
    found = json.loads(run("explain", trace, "--ops", "convolution,plain", "--json")[1])
    assert (found["first_layer"], found["second_layer"]) in {("conv1.conv", ""), ("", "conv1.conv")}


def test_delays_name_their_layer(run: Run) -> None:
    rows = json.loads(run("explain", "googlenet-infer-b1", "--json")[1])["delays"]
    assert all("layer" in row and "by_layer" in row for row in rows)
    assert any(row["layer"].startswith("inception") for row in rows)


def test_sensitivities_name_layer_operator_and_op() -> None:
    graph = build_graph(layered())
    names = [name for name, *_ in sensitivities(simulate(graph, Schedule.in_recorded_order(len(graph))))]
    assert "speed of conv1.conv convolution (convolution), 0.5x to 2x" in names
