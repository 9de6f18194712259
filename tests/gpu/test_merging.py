"""Merged convolutions: the same results, only where convolutions differ in nothing but their filters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from gpusim.formats.trace import Op, Trace, Variant, VariantSettings
from gpusim.gpu.calibrate.stage_times import run_merged
from gpusim.gpu.capture import variants as variant_capture
from gpusim.gpu.capture.variants import with_merges
from gpusim.gpu.optimize.choose import without_kept_factors
from gpusim.gpu.replay.execute import Runner, make_initial, results_of
from gpusim.gpu.replay.fusion import Call, fused
from gpusim.trace.check import check_trace
from gpusim.trace.merging import CONVOLUTION, merge_in, mergeable
from gpusim.trace.store import read_trace
from tests.support.helpers import kernel

CPU = torch.device("cpu")
FOLDER = Path("validate/traces/search_inference")
MERGED = VariantSettings(composition="merged")


def squeezenet() -> Trace:
    return read_trace(FOLDER / "squeezenet1_1-infer-b1.json.gz")


def with_all_merges(trace: Trace) -> Trace:
    """Return the trace with each possible merge as its only variants."""
    variants: dict[int, list[Variant]] = {}
    for (first, *others), name in mergeable(trace).items():
        variant = Variant(name=name, settings=MERGED, kernels=(kernel(1000),), covers=tuple(others))
        variants.setdefault(first, []).append(variant)
    ops = (msgspec.structs.replace(op, variants=tuple(variants.get(i, ()))) for i, op in enumerate(trace.ops))
    made = msgspec.structs.replace(trace, ops=tuple(ops))
    check_trace(made, "merges")
    return made


def changed(trace: Trace, index: int, arguments: dict[int, Any]) -> Trace:
    """Return the trace with other arguments of one op, by place."""
    ops = list(trace.ops)
    args = tuple(arguments.get(place, value) for place, value in enumerate(ops[index].args))
    ops[index] = msgspec.structs.replace(ops[index], args=args)
    return msgspec.structs.replace(trace, ops=tuple(ops))


def test_step_with_merged_convolutions_gives_the_same_outputs() -> None:
    trace = with_all_merges(squeezenet())
    assert sum(len(op.variants) for op in trace.ops) == 8
    results = []
    for variants in ([], [len(op.variants) for op in trace.ops]):
        runner = Runner(trace, CPU)
        runner.bind(make_initial(trace, CPU, seed=0).tensors)
        runner.choose(variants)
        for _ in range(2):  # filters joined in the first run serve the second
            runner.run_in_order()
            found = results_of(trace, runner.tensors)
            runner.drop_temporaries()
        results.append(found)
    assert len(runner.covered) == 8
    for index, expected in results[0].items():
        torch.testing.assert_close(results[1][index], expected, rtol=1e-4, atol=1e-5)


def test_three_of_googlenet_and_each_two_of_them_keep_filters_of_their_own() -> None:
    """Merges 11 with 14, 11 with 20 and all three belong to op 11."""
    trace = with_all_merges(read_trace(FOLDER / "googlenet-infer-b1.json.gz"))
    assert sum(len(op.variants) for op in trace.ops) == 36
    runner = Runner(trace, CPU)
    runner.bind(make_initial(trace, CPU, seed=0).tensors)
    image = trace.ops[11].args[0]["tensor"]
    runner.bind({image: torch.randn(trace.tensors[image].shape)})
    for ops in ((11, 14), (11, 20), (14, 20), (11, 14, 20)):
        runner.run_chain(ops, MERGED)
        for op in ops:
            expected = runner.call(op, *runner.arguments(op))
            torch.testing.assert_close(runner.tensors[trace.ops[op].outputs[0] or 0], expected, rtol=1e-4, atol=1e-5)


def merged_calls(batch: int, biased: tuple[bool, ...], layout: torch.memory_format) -> list[Call]:
    torch.manual_seed(0)
    image = torch.randn(batch, 4, 7, 6).contiguous(memory_format=layout)
    shapes = ((3, 4, 1, 1), (5, 4, 3, 3), (2, 4, 1, 5))
    calls: list[Call] = []
    for shape, bias in zip(shapes, biased, strict=True):
        shift = torch.randn(shape[0]) if bias else None
        padding = [shape[2] // 2, shape[3] // 2]
        calls.append(([image, torch.randn(shape), shift, [2, 1], padding, [1, 1], False, [0, 0], 1], {}))
    return calls


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("biased", [(True, True, True), (False, True, False), (False, False, False)])
def test_filters_are_padded_to_the_largest_on_each_axis(
    batch: int, biased: tuple[bool, ...], layout: torch.memory_format
) -> None:
    calls = merged_calls(batch, biased, layout)
    kept: dict[str, Any] = {}
    found = fused((CONVOLUTION,) * 3, "merged")(calls, False, kept)
    assert kept["merged"][0].shape == (10, 4, 3, 5)
    for (arguments, _), [part] in zip(calls, found, strict=True):
        torch.testing.assert_close(part, torch.ops.aten.convolution.default(*arguments))
        if batch == 1 and layout == torch.contiguous_format:
            assert part.is_contiguous()
            assert part.untyped_storage().data_ptr() == found[0][0].untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("place", "value"),
    [(0, torch.zeros(1, 4, 7, 6)), (1, torch.zeros(5, 4, 3, 3, dtype=torch.float64)), (3, [1, 1]), (5, [2, 2]), (8, 2)],
    ids=["input", "dtype", "stride", "dilation", "groups"],
)
def test_call_that_differs_in_more_than_its_filters_is_refused(place: int, value: Any) -> None:
    """A trace may claim anything; replay names the op."""
    calls = merged_calls(1, (True, True, True), torch.contiguous_format)
    calls[1][0][place] = value
    with pytest.raises(ValueError, match="differ in more than their filters"):
        fused((CONVOLUTION,) * 3, "merged")(calls, False, {})
    with pytest.raises(ValueError, match="no composition 'merged'"):
        fused((CONVOLUTION, "aten.relu.default"), "merged")


def of_type(trace: Trace, index: int, dtype: Any) -> Trace:
    tensors = list(trace.tensors)
    tensors[index] = msgspec.structs.replace(tensors[index], dtype=dtype)
    return msgspec.structs.replace(trace, tensors=tuple(tensors))


@pytest.mark.parametrize(
    "change",
    [
        lambda trace: changed(trace, 7, {3: [2, 2]}),
        lambda trace: changed(trace, 7, {4: [2, 2]}),
        lambda trace: changed(trace, 7, {4: [2, 2], 5: [2, 2]}),
        lambda trace: changed(trace, 7, {8: 2}),
        lambda trace: changed(trace, 7, {6: True}),
        lambda trace: changed(trace, 7, {0: trace.ops[3].args[0]}),
        lambda trace: of_type(trace, trace.ops[7].args[1]["tensor"], "bfloat16"),
    ],
    ids=["stride", "centre", "dilation", "groups", "transposed", "input", "dtype"],
)
def test_what_cannot_be_merged(change: Callable[[Trace], Trace]) -> None:
    """SqueezeNet's ops 5 and 7 are 1 x 1 and 3 x 3 on one input; one behind batch norm would have another input."""
    trace = squeezenet()
    assert mergeable(trace)[5, 7] == "merged_2"
    assert (5, 7) not in mergeable(change(trace))


def test_filters_that_the_step_changes_are_not_merged() -> None:
    """They would be joined in each step; in training the optimizer writes all of them."""
    assert mergeable(read_trace(Path("traces/googlenet-train-b8.json.gz"))) == {}
    trace = squeezenet()
    ops: list[Op] = list(trace.ops)
    ops[-1] = msgspec.structs.replace(ops[-1], writes=(*ops[-1].writes, ops[7].args[1]["tensor"]))
    assert (5, 7) not in mergeable(msgspec.structs.replace(trace, ops=tuple(ops)))


def test_merges_are_added_behind_other_variants_and_scaled_as_their_convolutions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Calls alone take twice as long as captured, so a merge of 10 us counts 5; one that does not run is left out."""
    trace = squeezenet()

    def measured(_: object, step: Trace, _seed: int, merges: dict[tuple[int, ...], str]) -> variant_capture.Measured:
        alone = {
            (op, ""): tuple(msgspec.structs.replace(k, dur_ns=2 * k.dur_ns) for k in step.ops[op].kernels)
            for ops in merges
            for op in ops
        }
        return alone | {(ops[0], name): (kernel(10_000),) for ops, name in merges.items() if ops != (12, 14)}

    monkeypatch.setattr(variant_capture, "alone", measured)
    found = with_merges(trace, 0)
    check_trace(found, "merges")
    assert found.ops[5].variants[:-1] == trace.ops[5].variants
    assert (found.ops[5].variants[-1].covers, found.ops[5].variants[-1].kernels[0].dur_ns) == ((7,), 5000)
    assert merge_in(found, (7, 5)) == (5, len(found.ops[5].variants))
    assert merge_in(found, (12, 14)) is None
    again = with_merges(found, 0)
    assert again.ops[5] == found.ops[5]
    assert all(v.settings != MERGED for op in without_kept_factors(found).ops for v in op.variants)


def test_merged_stage_runs_the_merge_first_and_all_else_of_its_groups() -> None:
    trace = with_all_merges(squeezenet())
    results = []
    for merged in (False, True):
        runner = Runner(trace, CPU)
        runner.bind(make_initial(trace, CPU, seed=0).tensors)
        for op in range(5):
            runner.run(op)
        if merged:
            run_merged(runner, ((7, 8), (5, 6)), 5, 1)
        else:
            for op in range(5, 9):
                runner.run(op)
        results.append([runner.tensors[trace.ops[op].outputs[0] or 0] for op in (5, 6, 7, 8)])
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected)
