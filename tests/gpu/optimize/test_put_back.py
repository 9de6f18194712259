"""What a refused step has counted or collected anywhere is as it was before its trial runs."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest
import torch

from tests.support.optimizing import fast, net, warned

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def test_a_counter_and_a_list_outside_of_the_step_are_put_back() -> None:
    model = net().eval()
    losses: list[torch.Tensor] = []
    calls = 0

    def listing(x: torch.Tensor) -> torch.Tensor:
        losses.append(model(x).sum())
        return losses[-1]

    def counting(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return model(x)

    for step, named in ((listing, "losses"), (counting, "calls")):
        found, text = warned(lambda step=step: fast(step, X))
        assert found is step
        assert f"'{named}'" in text
    assert losses == []
    assert calls == 0


class Counter:
    """Counts in its class and, of each object, in a slot."""

    __slots__ = ("of_object",)
    of_class = 0

    def __init__(self) -> None:
        self.of_object = 0


COUNTER, COUNTS_OF_MODULE = Counter(), types.ModuleType("counts")
COUNTS_OF_MODULE.calls = 0  # type: ignore[attr-defined]


def count_in_class() -> None:
    Counter.of_class += 1


def count_in_slot() -> None:
    COUNTER.of_object += 1


def count_in_module() -> None:
    COUNTS_OF_MODULE.calls += 1  # type: ignore[attr-defined]


def count_in_function() -> None:
    count_in_function.calls += 1  # type: ignore[attr-defined]


count_in_function.calls = 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("count", "read", "name"),
    [
        (count_in_class, lambda: Counter.of_class, "Counter.of_class"),
        (count_in_slot, lambda: COUNTER.of_object, "COUNTER.of_object"),
        (count_in_module, lambda: COUNTS_OF_MODULE.calls, "COUNTS_OF_MODULE.calls"),  # type: ignore[attr-defined]
        (count_in_function, lambda: count_in_function.calls, "count.calls"),  # type: ignore[attr-defined]
    ],
    ids=["class", "slot", "module", "function"],
)
def test_a_counter_in_any_attribute_is_put_back(count: Callable[[], None], read: Callable[[], int], name: str) -> None:
    model = net().eval()

    def step(x: torch.Tensor) -> torch.Tensor:
        count()
        scores: torch.Tensor = model(x)
        return scores

    before = read()
    step_again, text = warned(lambda: fast(step, X))
    assert step_again is step
    assert f"the step changes '{name}'" in text
    assert read() == before
    step(X)
    assert read() == before + 1
