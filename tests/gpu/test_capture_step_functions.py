"""Step functions of the user's own: recorded as they are, or refused with the line of the user's code."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812  (torch's own habit)

from gpusim.gpu.capture.in_memory import function_step
from gpusim.gpu.replay.execute import InitialState, Runner
from gpusim.trace.dependencies import dependencies
from tests.support.networks import CPU
from tests.support.user_steps import (
    Trainer,
    batch,
    captured,
    net,
    ops_of,
    refused,
    states_after,
)


def test_step_function_is_recorded_as_it_is_with_its_model_and_optimizer_found() -> None:
    trainer = Trainer(dropout=0.5)
    found = captured(function_step(trainer.step, batch(), CPU))
    assert [op.phase for op in found.trace.ops][-1] == "optimizer"
    assert {op.phase for op in found.trace.ops} == {"forward", "backward", "optimizer"}
    assert found.trace.model.optimizer == "SGD"
    assert found.trace.model.network == "step"
    names = {t.name for t in found.trace.tensors if t.init is not None}
    assert names >= {"first.weight", "norm.running_mean", "momentum_buffer.second.weight", "input.0", "input.1"}
    assert {op.layer for op in found.trace.ops if op.phase == "backward"} >= {"first", "norm", "second"}
    assert len(found.recorded.outputs) == 1


def test_step_function_accumulates_gradients_over_parts_of_a_batch() -> None:
    trainer = Trainer()
    own = copy.deepcopy(trainer)
    found = captured(function_step(trainer.accumulate, batch(), CPU))
    for _ in range(4):
        own.accumulate(*batch())
    after = states_after(found, 3)
    for name, parameter in own.model.named_parameters():
        torch.testing.assert_close(after[name], parameter)
    assert len(ops_of(found.trace, "addmm")) == 4 - 2  # the second layer has no bias


def test_gradients_that_nobody_clears_are_added_to_as_in_the_users_loop() -> None:
    model = net()
    x, y = batch()

    def step() -> None:
        F.cross_entropy(model(x), y).backward()

    trace = captured(function_step(step, (), CPU)).trace
    added = {t.name for t in trace.tensors if t.init is not None and t.name.startswith("grad.")}
    assert added == {f"grad.{name}" for name, _ in model.named_parameters()}
    assert all(parameter.grad is None for parameter in model.parameters())


def line_of(function: Callable[..., Any], text: str) -> str:
    lines, first = inspect.getsourcelines(function)
    return f"{__file__}:{first + next(i for i, line in enumerate(lines) if text in line)}: "


def steps_that_cannot_be_captured() -> dict[str, tuple[Callable[..., Any], str]]:
    model, (x, _) = net(), batch()
    calls = {"made": 0}

    def item() -> Any:
        value = model(x).sum()
        return value.item()  # here

    def condition() -> Any:
        out = model(x)
        if out.sum() > 0:  # here
            return out * 2
        return out

    def to_numpy() -> Any:
        return model(x).detach().numpy()  # here

    def to_list() -> Any:
        return model(x).detach().tolist()  # here

    def split_at_data() -> Any:
        out = model(x)
        return out.tensor_split(out[0].argsort()[:2])[0].sum()  # here

    def shape_from_data() -> Any:
        out = model(x)
        return out[out > 0]  # here

    def shape_from_changing_data() -> Any:
        model.zero_grad()
        out = model(x)
        out[out > 0].sum().backward()  # here
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad)  # type: ignore[arg-type]

    def sparse() -> Any:
        table = torch.ones(4, 2, requires_grad=True)
        loss = F.embedding(torch.tensor([1, 3]), table, sparse=True).sum()
        return torch.autograd.grad(loss, table)  # here

    def python_state() -> Any:
        calls["made"] += 1
        out = model(x)
        if calls["made"] % 2:
            out = out * 2  # here
        return out.relu()

    return {
        "item": (item, "reads the elements of a tensor (item(), or a condition)"),
        "condition": (condition, "reads the elements of a tensor (item(), or a condition)"),
        "to_numpy": (to_numpy, "reads the elements of a tensor (numpy())"),
        "to_list": (to_list, "reads the elements of a tensor (tolist())"),
        "split_at_data": (split_at_data, "reads the elements of a tensor (places of tensor_split())"),
        "shape_from_data": (shape_from_data, "depends on data"),
        "shape_from_changing_data": (shape_from_changing_data, "depends on data"),
        "sparse": (sparse, "makes a tensor of layout sparse_coo"),
        "python_state": (python_state, "the step is not the same each time"),
    }


@pytest.mark.parametrize("case", steps_that_cannot_be_captured())
def test_step_that_cannot_be_captured_is_refused_with_the_line_of_the_users_code(case: str) -> None:
    function, complaint = steps_that_cannot_be_captured()[case]
    text = refused(function_step(function, (), CPU))
    assert text.startswith(line_of(function, "# here")), text
    assert complaint in text


def test_step_without_operators_is_refused() -> None:
    assert refused(function_step(lambda x: x, batch()[0], CPU)) == "the step of 'lambda' calls no operator on cpu"


def test_squeeze_in_place_may_give_back_an_earlier_tensor() -> None:
    """Found with `torch.func.vmap` of a linear layer, which squeezes what it has just unsqueezed."""
    weight = torch.randn(6, 1)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x @ weight
        y.unsqueeze(2).squeeze_(2).mul_(2.0)
        return y + 1.0

    x, _ = batch()
    found = captured(function_step(step, x, CPU), mode="infer")
    runner = Runner(found.trace, CPU)
    runner.bind(InitialState.copy_of(found.recorded.initial).tensors)
    runner.run_in_order()
    (result,) = (index for index, tensor in enumerate(found.trace.tensors) if tensor.role == "output")
    torch.testing.assert_close(runner.tensors[result], step(x))
    (squeezed,) = ops_of(found.trace, "squeeze_")
    (scaled,) = ops_of(found.trace, "mul_")
    assert squeezed in dependencies(found.trace)[scaled]


def test_error_of_the_users_own_code_is_one_line_with_its_place() -> None:
    model = net()

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    text = refused(function_step(step, torch.randn(2, 3), CPU))
    assert re.search(r"user_steps.py:\d+: the step of 'step' fails: RuntimeError: mat1 and mat2", text), text


def test_operator_that_replay_does_not_run_is_refused_with_its_line() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.qr(x)[0]  # here

    text = refused(function_step(step, torch.randn(3, 3), CPU))
    assert text.startswith(line_of(step, "# here")), text
    assert "aten.linalg_qr.default" in text
    assert "allow-list" in text


def test_number_that_the_host_changes_from_step_to_step_is_named_as_fixed() -> None:
    model, x = net(), batch()[0]
    rate = {"now": 1.0}

    def step() -> torch.Tensor:
        rate["now"] *= 0.5
        return model(x) * rate["now"]  # here

    (fixed,) = captured(function_step(step, (), CPU)).trace.model.fixed
    assert fixed == f"{line_of(step, '# here')}numbers of aten.mul.Tensor"


def test_constants_may_be_read() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        scale = torch.tensor(2.0) * 3
        return x * scale if scale.item() > 1 else x

    trace = captured(function_step(step, torch.randn(3), CPU), "infer").trace
    assert len(ops_of(trace, "mul")) >= 1
