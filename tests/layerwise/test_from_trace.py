"""Layer graphs of captured steps."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

import msgspec
import pytest

from gpusim.errors import TraceError
from gpusim.formats.trace import ImportedFrom, Op, Tensor, Trace
from gpusim.layerwise.frames import Frame, image, of_input, permuted, viewed
from gpusim.layerwise.from_trace import layers_of
from gpusim.layerwise.layer_rules import rule_of
from gpusim.layerwise.layers import BATCH
from gpusim.trace.store import bundled_traces, load_trace
from gpusim.units import clause
from tests.support.layer_networks import ROOT, tables
from tests.support.memory_steps import chain_step

NETWORKS = tables()


#: Some of its layers have no rule, those that join keys of earlier positions to new ones: every GPU computes them.
WITHOUT_RULES = ("decoder_small-infer-b1-bf16",)


@pytest.mark.parametrize("name", bundled_traces())
def test_every_bundled_trace_has_a_rule_for_each_layer_and_a_layer_for_each_op(name: str) -> None:
    trace = load_trace(name)
    graph = layers_of(trace)
    if name.endswith("-inductor"):  # a fused kernel belongs to several layers: every GPU computes it
        [note] = graph.notes
        assert clause(len(graph), "layer", "has no rule and is", "have no rule and are") + " computed by" in note
        assert not any(layer.splits for layer in graph.layers)
    elif name in WITHOUT_RULES:
        [note] = graph.notes
        assert "have no rule and are computed by every GPU" in note
        assert sum(not layer.splits for layer in graph.layers) < len(graph) / 4
    else:
        assert not graph.notes
        assert all(layer.splits for layer in graph.layers)
    owners = Counter(op for layer in graph.layers for op in (*layer.forward, *layer.backward))
    assert max(owners.values()) == 1
    with_kernels = {i for i, op in enumerate(trace.ops) if op.kernels and op.phase != "optimizer"}
    assert with_kernels <= set(owners)


@pytest.mark.parametrize(
    ("trace", "table"), [("resnet50-train-b8", "resnet50"), ("densenet121-train-b8", "densenet121")]
)
def test_a_traces_layers_are_those_of_the_hand_made_table(trace: str, table: str) -> None:
    """Weights, arithmetic and the shapes of convolutions; a table's BatchNorm is part of the convolution before it."""
    captured, made = layers_of(load_trace(trace)), NETWORKS.NETWORKS[table](8)
    assert sum(each.weight_elements for each in captured.layers) == sum(each.weight_elements for each in made.layers)
    for kind in ("convolution", "linear"):
        ours, theirs = ([x for x in g.layers if x.kind == kind] for g in (captured, made))
        assert Counter(x.output for x in ours) == Counter(x.output for x in theirs)
        assert sum(x.flops for x in ours) == sum(x.flops for x in theirs)


@pytest.mark.parametrize(
    "name", ["googlenet-train-b8", "inception_v3-train-b8", "resnet50-train-b8", "densenet121-train-b8"]
)
def test_every_layer_of_a_convolutional_network_can_be_executed(name: str) -> None:
    """Auxiliary heads too, whose losses are scaled by 0.3."""
    graph = layers_of(load_trace(name))
    assert [layer.name for layer in graph.layers if not layer.ops] == []
    scales = [op.options["factor"] for layer in graph.layers for op in layer.ops if op.kind == "scale"]
    assert scales == [0.3] * (sum(layer.kind == "loss" for layer in graph.layers) - 1)


def test_the_kernels_of_a_layer_are_those_of_its_module() -> None:
    trace = load_trace("resnet50-train-b8")
    for layer in layers_of(trace).layers:
        paths = {trace.ops[op].layer for op in layer.forward if trace.ops[op].layer}
        back = {trace.ops[op].layer for op in layer.backward if trace.ops[op].layer}
        assert back <= paths | {layer.path}, layer.name


def test_a_layer_used_three_times_is_three_layers() -> None:
    """Each block of a ResNet calls one ReLU module three times: after two convolutions, and after the sum."""
    trace = load_trace("resnet50-train-b8")
    graph = layers_of(trace)
    used = [x for x in graph.layers if any(trace.ops[op].layer == "layer1.0.relu" for op in x.forward)]
    assert [x.name for x in used] == ["layer1.0.conv1", "layer1.0.conv2", "layer1.0"]
    assert [sum(trace.ops[op].layer == "layer1.0.relu" for op in x.backward) for x in used] == [1, 1, 1]


def test_concatenations_of_all_layers_before_take_the_last_one() -> None:
    graph = layers_of(load_trace("densenet121-train-b8"))
    assert max(len(layer.inputs) for layer in graph.layers) == 2


def test_inputs_of_the_first_layer_are_the_batch_and_have_no_gradient() -> None:
    first = layers_of(load_trace("resnet50-train-b8")).layers[0]
    assert [edge.source for edge in first.inputs] == [BATCH]
    assert not first.input_gradient
    assert first.inputs[0].extents == (8, 3, 224, 224)


def test_attention_is_split_by_samples_heads_and_queries() -> None:
    file = ROOT / "validate" / "traces" / "kinds" / "transformer_large-train-b4.json.gz"
    graph = layers_of(load_trace(str(file)))
    found = [layer for layer in graph.layers if layer.kind == "attention"]
    assert len(found) == 12
    assert {(layer.splits, layer.channel_unit, layer.output) for layer in found} == {("nch", 64, (4, 768, 192, 1))}
    assert [need.rule for need in found[0].inputs[1].needs] == ["same", "same", "all", "same"]
    assert {layer.splits for layer in graph.layers if layer.kind == "layer_norm"} == {"nh"}


def test_a_layer_type_without_a_rule_is_computed_by_every_gpu_and_said() -> None:
    file = ROOT / "validate" / "traces" / "kinds" / "graphs_small-train-b4.json.gz"
    graph = layers_of(load_trace(str(file)))
    without = [layer for layer in graph.layers if not layer.splits]
    assert without
    assert f"{len(without)} layers have no rule and are computed by every GPU" in graph.notes[0]


def small_trace(*shapes: tuple[int, ...]) -> Trace:
    """Make a trace that has only activations of these shapes."""
    tensors = [
        Tensor(shape=shape, stride=(1,) * len(shape), dtype="float32", storage=number, role="activation")
        for number, shape in enumerate(shapes)
    ]
    return msgspec.structs.replace(load_trace("vgg16-infer-b1"), ops=(), tensors=tuple(tensors))


@pytest.mark.parametrize(
    ("target", "arguments", "frames", "kind"),
    [
        ("mm", (0, 1), {0: "nc", 1: "nc"}, "other"),  # rows of all samples, weighted: softmax(x @ x.T) @ x
        ("mm", (0, 1), {0: "nc"}, "by_sample"),  # by a constant
        ("addmm", (1, 0, 1), {0: "nc", 1: "nc"}, "other"),
        ("bmm", (2, 2), {2: "nhc"}, "by_sample"),  # a product for each sample
        ("convolution", (3, 3), {3: "nchw"}, "other"),  # filters made of samples
    ],
)
def test_a_product_with_all_samples_is_not_split_by_samples(
    target: str, arguments: tuple[int, ...], frames: dict[int, str], kind: str
) -> None:
    trace = small_trace((8, 8), (8, 8), (8, 8, 8), (8, 8, 8, 8))
    args = tuple({"tensor": tensor} for tensor in arguments)
    args += (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1) if target == "convolution" else ()
    op = Op(name=target, target=f"aten.{target}.default", args=args, outputs=(arguments[0],))
    inputs = [(tensor, Frame(tuple(((letter, 8),) for letter in letters))) for tensor, letters in frames.items()]
    if target == "convolution":
        inputs *= 2
    rule = rule_of(trace, op, target, inputs, trace.tensors[arguments[0]].shape, 8)
    assert (rule.kind, rule.splits) == (kind, "n" if kind == "by_sample" else "")


def test_positions_times_frequencies_have_features() -> None:
    """U-Net's first layer: 2 positions of shape (2, 1) times 32 constants."""
    layer = layers_of(load_trace("unet_small-infer-b2")).layers[0]
    assert (layer.kind, layer.output, layer.splits) == ("mul", (2, 32, 1, 1), "nc")
    assert [need.rule for need in layer.inputs[0].needs] == ["same", "all", "same", "same"]


def test_an_imported_step_has_no_layers_and_says_why() -> None:
    trace = load_trace("vgg16-infer-b1")
    source = ImportedFrom(
        format="kineto",
        writer="",
        files=("p.json",),
        step="",
        device=0,
        dependency_quality="data",
        observed_ns=1,
        busy_ns=1,
        concurrent_ns=0,
    )
    provenance = msgspec.structs.replace(trace.provenance, imported_from=source)
    with pytest.raises(TraceError, match=r"^t\.json: .*imported .kineto. and has no tensors"):
        layers_of(msgspec.structs.replace(trace, provenance=provenance), "t.json")


@pytest.mark.parametrize(("number", "value"), [(8, 10**8), (3, [2**63, 1]), (4, [2**31, 1])])
def test_numbers_that_no_convolution_has_are_refused_with_file_and_place(number: int, value: Any) -> None:
    """More groups than channels, and strides and padding beyond any tensor."""
    trace = load_trace("squeezenet1_1-infer-b1")
    place = next(index for index, op in enumerate(trace.ops) if op.target.startswith("aten.convolution"))
    ops = list(trace.ops)
    args = list(ops[place].args)
    args[number] = value
    ops[place] = msgspec.structs.replace(ops[place], args=tuple(args))
    with pytest.raises(TraceError, match=rf"^t\.json: \$\.ops\[{place}\]: .* arguments of another operator"):
        layers_of(msgspec.structs.replace(trace, ops=tuple(ops)), "t.json")


def test_a_step_of_backward_ops_alone_has_no_layers_and_the_message_names_the_file() -> None:
    trace = chain_step(1)
    ops = tuple(op for op in trace.ops if op.phase == "backward")
    with pytest.raises(TraceError, match=r"^t\.json: .*has no layers"):
        layers_of(msgspec.structs.replace(trace, ops=ops), "t.json")


@pytest.mark.parametrize("args", [(), ({"tensor": 0},), ({"tensor": 0}, 1.5)])
def test_a_convolution_without_a_weight_is_refused_with_file_and_place(args: tuple[Any, ...]) -> None:
    trace = load_trace("squeezenet1_1-infer-b1")
    place = next(index for index, op in enumerate(trace.ops) if op.target.startswith("aten.convolution"))
    ops = list(trace.ops)
    ops[place] = msgspec.structs.replace(ops[place], args=args)
    with pytest.raises(TraceError, match=rf"^t\.json: \$\.ops\[{place}\]: .* arguments of another operator"):
        layers_of(msgspec.structs.replace(trace, ops=tuple(ops)), "t.json")


def test_frames_follow_views_and_transposes() -> None:
    """(4 x 192, 768) as 12 heads of 64, heads before positions."""
    rows = Frame(((("n", 4), ("h", 192)), (("c", 768),)))
    heads = viewed(rows, (4, 192, 12, 64))
    assert heads == Frame(((("n", 4),), (("h", 192),), (("c", 12),), (("c", 64),)))
    assert permuted(heads, (0, 2, 1, 3)).extents == rows.extents == (4, 768, 192, 1)
    assert viewed(image((8, 16, 2, 2)), (8, 64)) == Frame(((("n", 8),), (("c", 16), ("h", 2), ("w", 2))))
    assert viewed(image((8, 16, 2, 2)), (16, 32)) is not None
    assert viewed(image((8, 9, 2, 2)), (12, 24)) is None, "a dimension would cut through the channels"
    assert of_input((8, 3, 224, 224), 8, integers=False) == image((8, 3, 224, 224))
    assert of_input((5, 3), 8, integers=False) is None
    assert prod(viewed(image((1, 16, 1, 1)), (1, 16)).extents) == 16  # type: ignore[union-attr]
