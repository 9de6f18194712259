"""What a step does beside its results: random numbers that it draws in vain, and what it asserts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gpusim.gpu.optimize.callable import OptimizedStep
from gpusim.gpu.optimize.choose import KERNELS_FROM_S
from tests.support.optimizing import batches, close, fast

X = batches(1)[0][0]


class WithHead(nn.Module):
    """Has a second head with dropout, as GoogLeNet has in training."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.drop, self.head = nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 5)
        self.other = nn.Sequential(nn.Dropout(0.7), nn.Linear(8, 5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.trunk(x)
        other = self.other(x)
        return self.head(self.drop(x)), other


def of_first_head(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        torch.empty(3).normal_()
        out, _ = model(x)
        return out.detach()

    return step


def test_random_numbers_that_a_step_draws_in_vain_are_drawn() -> None:
    torch.manual_seed(0)
    eager = of_first_head(WithHead())
    step = fast(eager, X)
    assert isinstance(step, OptimizedStep)
    ends = []
    for each in (step, eager):
        torch.manual_seed(7)
        ends.append((each(X), each(X), torch.rand(1)))
    for mine, theirs in zip(*ends, strict=True):
        close(mine, theirs)


@pytest.mark.parametrize(("dropout", "attentions"), [(0.0, 1), (0.5, 2)])
def test_attention_without_dropout_draws_nothing(dropout: float, attentions: int) -> None:
    """The second result is used, the first is not."""

    def step(x: torch.Tensor) -> torch.Tensor:
        parts = x.view(1, 2, 4, -1)
        nn.functional.scaled_dot_product_attention(parts, parts, parts + 1, dropout_p=dropout)
        return nn.functional.scaled_dot_product_attention(parts, parts, parts)

    mine = fast(step, torch.randn(2, 32))
    assert isinstance(mine, OptimizedStep)
    (variant,) = mine._variants.values()
    recorded = [op.target for op in variant.captured.trace.ops]
    if dropout:  # a CPU decomposes it
        assert any("bernoulli" in target for target in recorded)
    else:
        assert sum("attention" in target for target in recorded) == attentions


def test_a_step_that_draws_in_vain_has_atens_kernels() -> None:
    """Inductor removes what nothing uses."""
    eager = of_first_head(WithHead())
    with pytest.warns(UserWarning, match="draws random numbers in vain, which Inductor would leave out"):
        assert fast(eager, X, budget_s=KERNELS_FROM_S, frontends=("inductor",)) is eager


def test_what_a_step_asserts_of_elements_is_asserted_by_the_users_own() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x >= 0).all())
        return x.sin() + x.cos()

    with pytest.warns(UserWarning, match=r"test_effects\.py:\d+: the step asserts something of a tensor"):
        mine = fast(step, X.abs())
    close(mine(X.abs()), step(X.abs()))
    with pytest.raises(RuntimeError, match="nonzero"):
        mine(-X.abs())
