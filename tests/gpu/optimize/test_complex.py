"""Complex numbers: conjugates that only a bit shows, comparison of both parts, and views in Inductor's graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gpusim.gpu.optimize.callable import OptimizedStep
from gpusim.gpu.optimize.verify import shares
from gpusim.gpu.replay.compare import in_double
from tests.support.optimizing import Net, close, fast

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Conjugates(Net):
    """A conjugate is a view of the same memory: address, shape and strides are those of the original."""

    def forward(self, x: torch.Tensor) -> Any:
        z = torch.complex(super().forward(x), x[:, :5])
        return z.conj(), z, (z.conj() * z).imag, z.conj().imag


def test_a_conjugate_is_not_its_original() -> None:
    model = Conjugates().eval()
    step = fast(model, X)
    assert isinstance(step, OptimizedStep)
    with torch.no_grad():
        for x in (X, X + 1):
            for found, wanted in zip(step(x), model(x), strict=True):
                torch.testing.assert_close(found.resolve_conj(), wanted.resolve_conj().resolve_neg())


def test_a_conjugate_from_before_the_step_is_refused() -> None:
    factors = torch.complex(X, X + 1).conj()
    step = nn.Identity()
    step.register_buffer("factors", factors)
    step.forward = lambda x: (x * step.factors).real  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="conjugate or negative view from before it"):
        assert fast(step, X) is step


def test_imaginary_parts_are_compared() -> None:
    one, other = torch.complex(X, X), torch.complex(X, -X)
    assert in_double(one).dtype is torch.complex128
    assert in_double(X).dtype is torch.float64
    by_kind = shares({"output 0": one}, {"output 0": other}, {}, {})
    assert by_kind["output"] == pytest.approx(2 / 2**0.5)


def test_a_view_by_an_operator_that_inductor_does_not_know_has_its_offset() -> None:
    """Inductor gives a slice of complex numbers the offset 0."""

    def step(x: torch.Tensor) -> torch.Tensor:
        z = torch.complex(x, x + 1)
        z[:, 2:4].mul_(2)
        return torch.view_as_real(z[:, 1:])

    optimized = fast(step, X, frontends=("inductor",))
    assert isinstance(optimized, OptimizedStep)
    for x in (X, X + 1):
        close(optimized(x), step(x))
