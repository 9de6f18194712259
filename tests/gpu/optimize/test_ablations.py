"""Freedoms taken away from an optimized step, one at a time."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import nn

from gpusim.formats.results import Ablation
from gpusim.formats.trace import Trace
from gpusim.gpu.optimize import choose, make
from gpusim.gpu.optimize.callable import Gain
from gpusim.gpu.optimize.captured import Captured
from tests.gpu.optimize.test_mix import Uneven
from tests.support.optimizing import batches, fast

X = batches(1)[0][0]


class Forks(nn.Module):
    """Two branches: in one a softmax, and elementwise calls that Inductor fuses."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 8), nn.Linear(6, 8)
        self.after, self.last = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left = self.after(self.left(x).softmax(-1)).sigmoid() * 2 + 1
        return self.last(left + self.right(x))


class Tuned(Uneven):
    """Products take long, the softmax of Inductor and the sigmoid of ATen, too; and it notes whose ops it tunes."""

    def __init__(self) -> None:
        super().__init__(("addmm", "sigmoid"), ("addmm", "softmax"))
        self.tuned: list[str] = []

    def with_variants(self, captured: Captured, trace: Trace, *given: Any) -> Trace:
        self.tuned.append(captured.style)
        return trace


@pytest.fixture(autouse=True)
def _short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    original = choose.explore
    monkeypatch.setattr(choose, "explore", lambda graph, **given: original(graph, **{**given, "budget_s": 0.02}))
    monkeypatch.setattr(make, "CHOICE_S", {"infer": 1e4, "train": 1e4})


def made(ablation: Ablation | None) -> tuple[Gain, bool]:
    """Return the gain, and whether other algorithms were asked for."""
    torch.manual_seed(0)
    model, executor = Forks().eval(), Tuned()
    step = fast(model, X, ablation=ablation, limit_s=1e4, budget_s=choose.KERNELS_FROM_S, executor=executor)
    with torch.no_grad():
        torch.testing.assert_close(step(X), model(X), rtol=1e-4, atol=1e-5)
    return step.gain, bool(executor.tuned)


def test_each_ablation_takes_one_freedom_away_and_no_other() -> None:
    """Each after the whole step: what that left in the cache is not taken for it."""
    names = (None, *get_args(Ablation))
    steps = {name: made(name) for name in names}
    gains = {name: gain for name, (gain, _) in steps.items()}
    assert len({gain.decided_by for gain in gains.values()}) == 1
    assert [name for name, gain in gains.items() if not gain.mixed] == ["aten", "inductor", "no_regions"]
    assert [name for name, gain in gains.items() if gain.frontend == "aten"] == ["aten"]
    assert [name for name, gain in gains.items() if gain.streams == 1] == ["one_stream"]
    assert [name for name, (_, tuned) in steps.items() if not tuned] == ["no_variants"]


def test_a_step_has_the_time_of_its_mode_unless_told_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "LIMIT_S", {"infer": 0.0, "train": 0.0})
    given = {"budget_s": choose.KERNELS_FROM_S, "frontends": ("aten",)}
    for limit_s, whether in ((None, False), (1e4, True)):
        executor = Tuned()
        fast(Forks().eval(), X, executor=executor, limit_s=limit_s, **given)
        assert bool(executor.tuned) == whether
