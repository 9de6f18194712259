"""Tests of this folder neither read nor write the user's cache, and never count frozen objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpusim.gpu.optimize import cache


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Say that objects are frozen, as they are by tests/conftest.py: to count these millions takes 50 ms, twice a
    step.
    """
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """On one thread, Inductor's kernels for a CPU add nothing atomically."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
