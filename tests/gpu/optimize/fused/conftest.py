"""Searches of this folder are very short, with a budget that allows Inductor's kernels."""

from __future__ import annotations

import pytest

from gpusim.gpu.optimize import choose


@pytest.fixture(autouse=True)
def _short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    original = choose.explore
    monkeypatch.setattr(choose, "explore", lambda graph, **given: original(graph, **{**given, "budget_s": 0.02}))
