"""Results are compared relative to rounding: gradients of zero in theory pass, wrong ones fail.

Convolutions computed in FP64 stand for another order of summation: as right as those in FP32, rounded otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from gpusim.errors import CaptureError
from gpusim.formats.trace import Trace
from gpusim.gpu.capture.rebuild import CHECK_TOLERANCE, check_against_model
from gpusim.gpu.replay.compare import NOISE_FACTOR, TOLERANCE, Comparison, check_same_kernels, compare, errors, scales
from gpusim.gpu.replay.execute import InitialState, Runner, results_of
from gpusim.gpu.replay.rounding import rounding_noise
from gpusim.plan.sync import program_order_releases
from tests.support.helpers import chain_trace
from tests.support.networks import CPU, OnCpu, on_cpu

Result = tuple[torch.Tensor | None, ...]
Damage = Callable[[Result, tuple[Any, ...], Callable[..., Result]], Result]
EXACT = Comparison(bit_equal=True, worst_error=0.0, compared=1)


def in_fp64(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the operator computed in FP64, with results in FP32."""

    def call(*args: Any, **kwargs: Any) -> Any:
        wide = pytree.tree_map_only(torch.Tensor, torch.Tensor.double, (args, kwargs))
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.float, function(*wide[0], **wide[1]))

    return call


def weight_gradients(trace: Trace) -> dict[str, int]:
    """Return layer -> the op that computes the gradients of its weight and bias."""
    return {
        op.layer: index
        for index, op in enumerate(trace.ops)
        if op.target.startswith("aten.convolution_backward") and op.args[10][1]
    }


def replace_functions(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[int, str, Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Let each runner of a capture call the functions that `change` makes from an op's number, target and function."""

    class Changed(Runner):
        def __init__(self, trace: Trace, *args: Any) -> None:
            super().__init__(trace, *args)
            self.functions = [
                change(number, op.target, function)
                for number, (op, function) in enumerate(zip(trace.ops, self.functions, strict=True))
            ]

    monkeypatch.setattr("gpusim.gpu.capture.rebuild.Runner", Changed)


def sum_otherwise(number: int, target: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return in_fp64(function) if target.startswith("aten.convolution_backward") else function


def check(found: OnCpu) -> tuple[float, float]:
    return check_against_model(found.trace, found.step, found.graph, found.recorded, found.options, CPU)


def results(runner: Runner, state: InitialState) -> dict[int, torch.Tensor]:
    state.restore()
    torch.manual_seed(0)
    runner.run_in_order()
    return results_of(runner.trace, runner.tensors)


def norm(tensor: torch.Tensor) -> float:
    return torch.linalg.vector_norm(tensor.double()).item()


# --- What passes ---


def test_zero_gradients_summed_in_another_order_differ_by_as_much_as_they_have() -> None:
    """Such a gradient is pure rounding, so a difference relative to its own value is meaningless."""
    found = on_cpu("heads")
    runner = found.rerun()
    plain = results(runner, InitialState.copy_of(found.recorded.initial))
    runner = found.rerun()
    runner.functions = [
        sum_otherwise(number, op.target, function)
        for number, (op, function) in enumerate(zip(found.trace.ops, runner.functions, strict=True))
    ]
    other = results(runner, InitialState.copy_of(found.recorded.initial))
    apart = {index: norm(other[index] - plain[index]) / norm(plain[index]) for index in found.recorded.gradients}
    biases = {found.trace.ops[op].outputs[-1] for op in weight_gradients(found.trace).values()}
    assert all(apart[index] > 0.1 for index in biases)
    assert all(error < 1e-5 for index, error in apart.items() if index not in biases)


def test_capture_accepts_zero_gradients_that_another_order_of_sums_rounds_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replace_functions(monkeypatch, sum_otherwise)
    loss_error, gradient_error = check(on_cpu("heads"))
    assert loss_error == 0.0
    assert 0.0 < gradient_error < CHECK_TOLERANCE["fp32"]


def test_replay_accepts_zero_gradients_that_another_order_of_sums_rounds_otherwise() -> None:
    found, state, runner, noise = measured()
    wanted = results(runner, state)
    runner.functions = [
        sum_otherwise(number, op.target, function)
        for number, (op, function) in enumerate(zip(found.trace.ops, runner.functions, strict=True))
    ]
    other = results(runner, state)
    assert check_same_kernels(found.trace, other, wanted, EXACT, noise).equal
    assert not check_same_kernels(found.trace, other, wanted, EXACT).equal


def test_rounding_in_zero_gradients_of_the_sequential_run_does_not_loosen_the_tolerance_of_all() -> None:
    found, state, runner, noise = measured()
    wanted = results(runner, state)
    runner.functions = [
        sum_otherwise(number, op.target, function)
        for number, (op, function) in enumerate(zip(found.trace.ops, runner.functions, strict=True))
    ]
    repeated = compare(found.trace, results(runner, state), wanted, noise)
    assert not repeated.bit_equal
    wrong = {index: tensor * 1.01 for index, tensor in wanted.items()}
    outcome = check_same_kernels(found.trace, wrong, wanted, repeated, noise)
    assert outcome.tolerance < 0.01
    assert not outcome.equal


# --- What fails ---


def flipped(result: Result, args: tuple[Any, ...], function: Callable[..., Result]) -> Result:
    return tuple(part if part is None else -part for part in result)


def one_percent_off(result: Result, args: tuple[Any, ...], function: Callable[..., Result]) -> Result:
    return tuple(part if part is None else part * 1.01 for part in result)


def of_one_sample(result: Result, args: tuple[Any, ...], function: Callable[..., Result]) -> Result:
    """Leave out a term of the sum."""
    return function(args[0][:1], args[1][:1], *args[2:])


def bias_not_zero(result: Result, args: tuple[Any, ...], function: Callable[..., Result]) -> Result:
    """Return values as large as an element of the weight's gradient."""
    _, weight, bias = result
    assert weight is not None
    assert bias is not None
    return None, weight, bias + weight.square().mean().sqrt()


def bias_of_one_sample(result: Result, args: tuple[Any, ...], function: Callable[..., Result]) -> Result:
    """Sum the terms of one sample, which do not cancel."""
    return None, result[1], args[0][:1].sum((0, 2, 3))


@pytest.mark.parametrize("layer", ["trunk.0.0", "trunk.1.0", "heads.2.0.0"])
@pytest.mark.parametrize("damage", [flipped, one_percent_off, of_one_sample, bias_not_zero, bias_of_one_sample])
def test_capture_refuses_a_wrong_gradient_of_one_layer(
    damage: Damage, layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = on_cpu("heads")
    wrong = weight_gradients(found.trace)[layer]

    def change(number: int, target: str, function: Callable[..., Any]) -> Callable[..., Any]:
        if number != wrong:
            return sum_otherwise(number, target, function)
        return lambda *args, **kwargs: damage(function(*args, **kwargs), args, function)

    replace_functions(monkeypatch, change)
    with pytest.raises(CaptureError, match=rf"gradients differ .*layer '{layer}'"):
        check(found)


@pytest.mark.parametrize("damage", [flipped, one_percent_off, of_one_sample, bias_not_zero, bias_of_one_sample])
def test_replay_refuses_a_wrong_gradient_of_one_layer(damage: Damage) -> None:
    found, state, runner, noise = measured()
    wanted = results(runner, state)
    wrong = weight_gradients(found.trace)["trunk.1.0"]
    function = runner.functions[wrong]
    runner.functions = list(runner.functions)
    runner.functions[wrong] = lambda *args, **kwargs: damage(function(*args, **kwargs), args, function)
    assert not check_same_kernels(found.trace, results(runner, state), wanted, EXACT, noise).equal


# --- The rule ---


def measured() -> tuple[OnCpu, InitialState, Runner, dict[int, float]]:
    """Return the network with several heads, its state, a runner, and the noise of its results."""
    found = on_cpu("heads")
    runner = Runner(found.trace, CPU)
    state = InitialState.copy_of(found.recorded.initial)
    runner.bind(state.tensors)
    return found, state, runner, rounding_noise(runner, state, program_order_releases(found.trace), 0)


def test_noise_is_rounding_and_for_a_sum_that_cancels_that_of_its_terms() -> None:
    found, state, runner, noise = measured()
    wanted = results(runner, state)
    assert set(noise) == set(wanted)
    layers = weight_gradients(found.trace)
    for op in layers.values():
        *_, weight, bias = found.trace.ops[op].outputs
        assert weight is not None
        assert bias is not None
        assert noise[weight] < 1e-4 * norm(wanted[weight])
        assert noise[bias] > 0.05 * norm(wanted[bias])
        assert noise[bias] < 1e-4 * norm(wanted[weight])


def test_measuring_noise_leaves_the_state_as_it_was_and_repeats() -> None:
    found, state, runner, noise = measured()
    for index, tensor in state.tensors.items():
        assert torch.equal(tensor, found.recorded.initial[index])
    assert noise == rounding_noise(runner, state, program_order_releases(found.trace), 0)


def test_scale_is_the_norm_or_the_noise_and_at_most_all_results_of_the_role() -> None:
    """By hand, limit 1e-3 and 32 times the noise: 32,000 times the noise, up to the norm of the role (5)."""
    trace = chain_trace(4)
    wanted = {0: torch.tensor([3.0]), 1: torch.tensor([4.0]), 2: torch.tensor([0.0]), 3: torch.tensor([0.0])}
    roles = {index: trace.tensors[index].role for index in wanted}
    together = {role: norm(torch.stack([wanted[i] for i in wanted if roles[i] == role])) for role in roles.values()}
    found = scales(trace, wanted, {0: 1e-6, 2: 1e-5, 3: 1.0}, 1e-3)
    factor = NOISE_FACTOR[trace.model.dtype] / 1e-3
    assert found[0] == 3.0
    assert found[1] == 4.0
    assert found[2] == pytest.approx(min(factor * 1e-5, together[roles[2]]))
    assert found[3] == together[roles[3]]
    off = {**wanted, 2: torch.tensor([found[2] * TOLERANCE["fp32"]])}
    assert errors(trace, off, wanted, {2: 1e-5, 3: 1.0}, 1e-3)[2] == pytest.approx(1e-3)
