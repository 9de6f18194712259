"""Updates of many parameters split into parts, so that early gradients are used early."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own habit)

from gpusim.gpu.capture.calls import Call, Value
from gpusim.gpu.optimize import lists
from gpusim.gpu.optimize.callable import OptimizedStep
from gpusim.gpu.optimize.lists import CHUNK_ELEMENTS, ENOUGH_BLOCKS, MOST_TENSORS, split_list_call
from tests.support.optimizing import close, fast, same_states


def _parts(sizes: Mapping[str, int], momenta: bool = True) -> list[list[str]]:
    """Return the parameters of each part of one update by SGD."""
    lists = [[Value(f"{kind}{name}") for name in sizes] for kind in ("", "gradient_", "momentum_")]
    update = Call(
        name="step",
        function=torch.ops.aten._fused_sgd_.default,
        args=(*lists[:2], lists[2] if momenta else []),
        kwargs={"lr": 0.1},
        phase="optimizer",
        layer="",
    )
    parts = list(split_list_call(update, sizes))
    assert len({part.name for part in parts}) == len(parts)
    for part in parts:
        names = [value.node for value in part.args[0]]
        assert [value.node for value in part.args[1]] == [f"gradient_{name}" for name in names]
        assert [value.node for value in part.args[2]] == ([f"momentum_{name}" for name in names] if momenta else [])
        assert part.kwargs == update.kwargs
    return [[value.node for value in part.args[0]] for part in parts]


def test_part_ends_once_its_blocks_fill_the_gpu() -> None:
    """Tables of 49 blocks: three of them are 147, more than the 132 SMs."""
    table = 48 * CHUNK_ELEMENTS + 1
    assert 2 * 49 < ENOUGH_BLOCKS <= 3 * 49
    assert _parts(dict.fromkeys("abcdefgh", table)) == [["a", "b", "c"], ["d", "e", "f"], ["g", "h"]]


def test_small_tensors_fill_a_launch() -> None:
    parts = _parts({f"p{n}": 10 for n in range(100)})
    assert [len(part) for part in parts] == [MOST_TENSORS[3], MOST_TENSORS[3], 100 - 2 * MOST_TENSORS[3]]
    assert [len(part) for part in _parts({f"p{n}": 10 for n in range(100)}, momenta=False)] == [64, 36]


def test_large_tensor_ends_its_part() -> None:
    large = ENOUGH_BLOCKS * CHUNK_ELEMENTS
    assert _parts({"a": 1, "b": large, "c": 1, "d": 1}) == [["a", "b"], ["c", "d"]]
    assert _parts({"a": 1, "b": 1}) == [["a", "b"]]


def test_call_that_returns_its_results_stays_whole() -> None:
    names = [Value(f"p{n}") for n in range(200)]
    call = Call("sum", torch.ops.aten._foreach_add.Scalar, (names, 1), {}, "optimizer", "")
    assert list(split_list_call(call, {})) == [call]


@pytest.mark.parametrize(
    ("make", "update"),
    [(torch.optim.SGD, "aten._fused_sgd_.tensor_lr"), (torch.optim.AdamW, "aten._fused_adamw_.tensor_lr")],
)
def test_step_updates_its_parameters_in_parts_as_eagerly(
    make: Any, update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers with weights of one block each fill a GPU of two; both parts have the effect of the whole update."""
    monkeypatch.setattr(lists, "ENOUGH_BLOCKS", 2)
    model = nn.Sequential(
        nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Linear(8, 2, bias=False)
    )
    other = copy.deepcopy(model)
    optimizer, other_optimizer = (make(each.parameters(), lr=0.1) for each in (model, other))
    x, y = torch.randn(4, 8), torch.randn(4, 2)
    step = fast(model, (x, y), loss=F.mse_loss, optimizer=optimizer)
    assert isinstance(step, OptimizedStep)
    (variant,) = step._variants.values()
    assert variant is not None
    assert [len(op.args[0]) for op in variant.captured.trace.ops if op.target == update] == [2, 1]
    for _ in range(3):
        other_optimizer.zero_grad()
        loss = F.mse_loss(other(x), y)
        loss.backward()
        other_optimizer.step()
        close(step(x, y), loss)
    same_states(model.state_dict(), other.state_dict())
