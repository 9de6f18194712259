"""Fused ops: the same results, only where fusion is possible."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from gpusim.formats.trace import Trace
from gpusim.gpu.replay.execute import Runner, make_initial, results_of
from gpusim.gpu.replay.fusion import SGD, SUM, Call, Chain, chains_of, fused
from gpusim.trace.store import load_trace
from tests.support.chains import chosen_by_name, with_chains

CPU = torch.device("cpu")
CONVOLUTION, NORM = "aten.convolution.default", "aten.cudnn_batch_norm.default"


def by_place(*arguments: list[Any]) -> list[Call]:
    """Make calls without arguments by name."""
    return [(each, {}) for each in arguments]


@pytest.mark.parametrize("name", ["fused", "fused_channels_last", "joined"])
def test_step_with_convolutions_and_relus_as_one_gives_the_same_outputs(name: str) -> None:
    """Each convolution of SqueezeNet does the work of the ReLU behind it, with the same output."""
    trace = with_chains(load_trace("squeezenet1_1-infer-b1"))
    chosen = chosen_by_name(trace, name)
    assert sum(map(bool, chosen)) == 26
    results = []
    for variants in ([], chosen, chosen):
        runner = Runner(trace, CPU)
        state = make_initial(trace, CPU, seed=0)
        runner.bind(state.tensors)
        runner.choose(variants)
        assert len(runner.covered) == sum(map(bool, variants))
        runner.run_in_order()
        runner.drop_temporaries()
        runner.run_in_order()  # constants kept from the first run serve the second
        results.append(results_of(trace, runner.tensors))
    assert results[0].keys() == results[1].keys()
    for index, expected in results[0].items():
        assert torch.allclose(results[1][index], expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(results[1][index], results[2][index])


def test_batch_norm_of_inference_goes_into_the_weights() -> None:
    torch.manual_seed(0)
    image, weight = torch.randn(2, 3, 9, 9), torch.randn(4, 3, 3, 3)
    shift, scale, mean, variance = torch.randn(4), torch.randn(4), torch.randn(4), torch.rand(4) + 0.5
    for bias in (None, torch.randn(4)):
        norm = torch.nn.functional.batch_norm(
            torch.conv2d(image, weight, bias, padding=1), mean, variance, scale, shift, eps=1e-3
        )
        calls = by_place(
            [image, weight, bias, [1, 1], [1, 1], [1, 1], False, [0, 0], 1],
            [None, scale, shift, mean, variance, False, 0.1, 1e-3],
            [None],
        )
        for channels_last in (False, True):
            function = fused((CONVOLUTION, NORM, "aten.relu_.default"), "fused")
            *rest, [found] = function(calls, channels_last, {})
            assert torch.allclose(found, torch.relu(norm), atol=1e-5)
            assert [len(parts) for parts in rest] == [1, 4]
    norm_input = torch.conv2d(image, weight)
    calls = by_place([norm_input, scale, shift, mean, variance, False, 0.1, 1e-3], [None])
    *_, [found] = fused((NORM, "aten.relu.default"), "joined")(calls, False, {})
    expected = torch.nn.functional.batch_norm(norm_input, mean, variance, scale, shift, eps=1e-3)
    assert torch.allclose(found, torch.relu(expected), atol=1e-5)


@pytest.mark.parametrize("last", ["aten.relu_.default", "aten.threshold_backward.default"])
def test_sums_are_joined_with_what_a_relu_does(last: str) -> None:
    one, other, result = torch.tensor([1.0, -3.0, 2.0]), torch.tensor([1.0, 1.0, -5.0]), torch.tensor([0.0, 1.0, 2.0])
    *_, [found] = fused(("aten.add.Tensor", last), "joined")(by_place([one, other], [None, result, 0]), False, {})
    expected = [2.0, 0.0, 0.0] if "relu" in last else [0.0, -2.0, -3.0]
    assert found.tolist() == expected


def test_not_a_number_stays_one() -> None:
    """torch's ReLU passes NaN on: a diverging step must be visible."""
    broken = torch.tensor([float("nan")])
    *_, [found] = fused(("aten.add.Tensor", "aten.relu.default"), "joined")(
        by_place([broken, broken], [None]), False, {}
    )
    assert found.isnan().all()


def test_sums_one_after_the_other_are_one() -> None:
    """The partial sum is the absent argument, before or after the addends."""
    one, two, three, four = (torch.full((2, 3), float(2**place)) for place in range(4))
    function = fused((SUM, SUM, SUM), "joined")
    *rest, [found] = function(by_place([one, two], [None, three], [four, None]), False, {})
    assert found.eq(15.0).all()
    assert rest == [[None], [None]]


def test_sgd_with_momentum_is_one_step_of_torch() -> None:
    """Momenta and parameters change in place as with the three ops."""
    torch.manual_seed(0)
    parameters, gradients, momenta = ([torch.randn(4), torch.randn(2, 3)] for _ in range(3))
    expected_momenta = [0.9 * m + g for m, g in zip(momenta, gradients, strict=True)]
    expected = [p - 0.01 * m for p, m in zip(parameters, expected_momenta, strict=True)]
    calls: list[Call] = [
        ([momenta, 0.9], {}),
        ([momenta, gradients], {}),
        ([parameters, momenta], {"alpha": -0.01}),
    ]
    assert fused(SGD, "fused")(calls, False, {}) == [[], [], []]
    for found, wanted in zip([*momenta, *parameters], [*expected_momenta, *expected], strict=True):
        assert torch.allclose(found, wanted)


def test_unknown_chain_is_refused() -> None:
    with pytest.raises(ValueError, match="no composition 'fused'"):
        fused(("aten.mm.default", "aten.relu.default"), "fused")


CASES = {
    "squeezenet1_1-infer-b1": {("fused", 1): 26, ("fused_channels_last", 1): 26, ("joined", 1): 26},
    "googlenet-infer-b1": {("fused", 2): 57, ("fused_channels_last", 2): 57, ("joined", 1): 57},
    "resnet50-train-b8": {("joined", 1): 39, ("fused_sgd", 2): 3},  # 31 sums, and the batch norms that are long enough
    "googlenet-train-b8": {
        ("joined", 1): 3,
        ("fused_sgd", 2): 3,
        ("joined_sums", 1): 1,
        ("joined_sums", 2): 7,
        ("joined_sums", 3): 2,
    },
    "googlenet-train-b32-bf16": {("fused_sgd", 2): 3},
}


@pytest.mark.parametrize("name", CASES)
def test_chains_are_found_where_they_can_be_run(name: str) -> None:
    """In inference every convolution with the ReLU behind it. In training no convolution, since batch norm is not
    constant there; but gradient sums and the optimizer's three ops. In bf16 only those: kernels made here do not mix
    types.
    """
    trace = load_trace(name)
    counted: dict[tuple[str, int], int] = {}
    for ways in chains_of(trace).values():
        for way, chain in ways.items():
            key = (way, len(chain.covers))
            counted[key] = counted.get(key, 0) + 1
    assert counted == CASES[name]


def changed(trace: Trace, index: int, **fields: Any) -> Trace:
    ops = list(trace.ops)
    ops[index] = msgspec.structs.replace(ops[index], **fields)
    return msgspec.structs.replace(trace, ops=tuple(ops))


def test_result_that_somebody_else_reads_is_computed() -> None:
    """If another op read the convolution's own result, it could not be left out."""
    trace = load_trace("squeezenet1_1-infer-b1")
    first = min(chains_of(trace))
    result = trace.ops[first].outputs[0]
    assert isinstance(chains_of(trace)[first]["fused"], Chain)
    # A view made in between would see memory that is never written.
    between = msgspec.structs.replace(trace.ops[first + 1], name="look", reads=(result,), outputs=(), writes=())
    ops = (*trace.ops[: first + 1], between, *trace.ops[first + 1 :])
    assert first not in chains_of(msgspec.structs.replace(trace, ops=ops))


def test_batch_norm_that_the_step_changes_is_not_kept_as_a_factor() -> None:
    """Batch norm as in inference within a training step: the optimizer changes its weight."""
    trace = load_trace("googlenet-infer-b1")
    norm = next(index for index, op in enumerate(trace.ops) if op.target == NORM)
    assert chains_of(trace)[norm].keys() == {"joined"}
    last = len(trace.ops) - 1
    for kept in trace.ops[norm].reads[1:]:
        made = changed(trace, last, writes=(*trace.ops[last].writes, kept))
        assert norm not in chains_of(made)
        assert norm - 1 not in chains_of(made)


def test_weights_that_the_step_changes_are_not_folded() -> None:
    trace = load_trace("squeezenet1_1-infer-b1")
    first = min(chains_of(trace))
    weight = trace.ops[first].reads[1]
    last = len(trace.ops) - 1
    made = changed(trace, last, writes=(*trace.ops[last].writes, weight))
    assert "fused" not in chains_of(made).get(first, {})
