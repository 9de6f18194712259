"""Replay's comparison must be able to fail: outputs that ignore the input are detected, and made sensitive."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpusim.formats.measurement import outputs_in_words
from gpusim.formats.trace import Mode
from gpusim.gpu.replay.compare import compare
from gpusim.gpu.replay.execute import InitialState, Runner, make_initial, results_of
from gpusim.gpu.replay.sensitivity import make_sensitive
from gpusim.plan.sync import plan_sync
from gpusim.trace.dependencies import dependencies
from tests.support.networks import CPU, on_cpu

Made = tuple[Runner, InitialState, tuple[tuple[int, ...], ...]]


def made(name: str, mode: Mode = "infer") -> Made:
    """Return a runner of the network's trace on generated values, and its storage releases."""
    trace = on_cpu(name, mode).trace
    runner = Runner(trace, CPU)
    state = make_initial(trace, CPU, seed=0)
    runner.bind(state.tensors)
    works = [0] * len(trace.ops)
    return runner, state, plan_sync(trace, dependencies(trace), range(len(works)), works).releases


def results(runner: Runner, state: InitialState) -> dict[int, torch.Tensor]:
    state.restore()
    runner.run_in_order()
    return results_of(runner.trace, runner.tensors)


def error_of_a_wrong_op(runner: Runner, state: InitialState, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the error of results where the third convolution gives zeros."""
    right = results(runner, state)
    op = [number for number, each in enumerate(runner.trace.ops) if "convolution" in each.target][2]
    functions = list(runner.functions)
    function: Callable[..., Any] = functions[op]
    functions[op] = lambda *args, **kwargs: torch.zeros_like(function(*args, **kwargs))
    with monkeypatch.context() as patch:
        patch.setattr(runner, "functions", functions)
        return compare(runner.trace, results(runner, state), right).worst_error


def test_wrong_op_shows_once_the_weights_let_a_signal_through(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, state, releases = made("faint")
    assert error_of_a_wrong_op(runner, state, monkeypatch) < 1e-6
    assert make_sensitive(runner, state, releases, seed=0)
    assert error_of_a_wrong_op(runner, state, monkeypatch) > 1e-3


def test_small_weights_are_as_large_as_he_initialisation_and_nothing_else_changes() -> None:
    """By hand: convolutions of 4 channels and 3 x 3 have 36 inputs, root(2 / 36) = 0.236; 0.001 before."""
    runner, state, releases = made("faint")
    before = {index: tensor.clone() for index, tensor in state.tensors.items()}
    make_sensitive(runner, state, releases, seed=0)
    for index, tensor in state.tensors.items():
        assert torch.equal(tensor, state.pristine[index])
        if runner.trace.tensors[index].name.startswith("body"):
            assert tensor.square().mean().sqrt().item() == pytest.approx(math.sqrt(2 / 36))
        elif "weight" not in runner.trace.tensors[index].name:
            assert torch.equal(tensor, before[index])


@pytest.mark.parametrize(("name", "mode"), [("branches", "infer"), ("attention", "infer"), ("faint", "train")])
def test_steps_whose_results_show_what_was_computed_are_left_alone(name: str, mode: Mode) -> None:
    """Gradients depend on every op, so training steps are not changed."""
    runner, state, releases = made(name, mode)
    before = {index: tensor.clone() for index, tensor in state.tensors.items()}
    assert make_sensitive(runner, state, releases, seed=0)
    assert all(torch.equal(tensor, before[index]) for index, tensor in state.tensors.items())


def test_weights_of_zeros_are_drawn_so_that_outputs_depend_on_the_input() -> None:
    runner, state, releases = made("mute")
    assert make_sensitive(runner, state, releases, seed=0)
    (head,) = [index for index, tensor in enumerate(runner.trace.tensors) if tensor.name == "head.weight"]
    assert state.tensors[head].square().mean().sqrt().item() == pytest.approx(math.sqrt(2 / 8), rel=0.5)
    assert torch.equal(state.tensors[head], state.pristine[head])


def test_output_that_depends_on_no_input_is_said_to() -> None:
    runner, state, releases = made("deaf")
    assert not make_sensitive(runner, state, releases, seed=0)


def test_words_for_how_outputs_compare() -> None:
    assert outputs_in_words(equal=True, bit_equal=True, sensitive=True) == "bit-equal"
    assert outputs_in_words(equal=True, bit_equal=False, sensitive=True) == "equal"
    assert outputs_in_words(equal=True, bit_equal=True, sensitive=False) == "equal for any input"
    assert outputs_in_words(equal=False, bit_equal=False, sensitive=False) == "DIFFERENT"
