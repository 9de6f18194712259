"""Tests of this folder neither read nor write the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpusim.gpu.optimize import cache


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
