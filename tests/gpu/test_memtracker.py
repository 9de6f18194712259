"""Peaks against PyTorch's MemTracker: equal where both count the same tensors, also in the results files."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from gpusim.units import MIB
from tests.repo.test_readme import ROOT, script

OWN_MODEL = """
from torch import nn
import torch


def make(batch):
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(),
        nn.Dropout(0.5), nn.Linear(8 * 7 * 7, 32), nn.GELU(), nn.Linear(32, 10),
    )
    return module, torch.randn(batch, 3, 16, 16)


def wide(batch):
    return nn.Sequential(nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 10)), torch.randn(batch, 600)
"""


@pytest.fixture(scope="module")
def compare() -> ModuleType:
    return script("compare_memtracker")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN_MODEL, encoding="utf-8")
    return path


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_peak_of_small_tensors_is_that_of_memtracker(compare: ModuleType, own: Path, batch: int) -> None:
    """Small blocks are always split, so that only tensors count."""
    row = compare.compared(f"{own}:make", batch, {})
    assert row.gpusim_bytes == row.lifetimes_bytes
    assert row.memtracker_bytes == pytest.approx(row.gpusim_bytes, rel=0.02)
    kinds = row.memtracker_kinds
    assert kinds["Optstate"] == kinds["Parameter"]  # the momentum, from before the step


def test_blocks_that_are_not_split_count_on_top(compare: ModuleType, own: Path) -> None:
    """A weight of 1.37 MiB and its momentum share a segment of 20 MiB; so do its gradient and the remainder."""
    row = compare.compared(f"{own}:wide", 2, {})
    assert 0 <= row.gpusim_bytes - row.lifetimes_bytes <= MIB


def test_results_say_that_captured_peaks_are_within_one_percent() -> None:
    path = max((ROOT / "research" / "data").glob("memtracker_*.json"))
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["gpu"] is None
    rows = document["rows"]
    assert len({row["trace"] for row in rows}) == 15
    known = [row for row in rows if row["captured_workspace_bytes"] is not None and row["measured_bytes"]]
    assert len(known) >= 2
    for row in known:
        assert row["captured_bytes"] == pytest.approx(row["measured_bytes"], rel=0.01)
        assert abs(row["memtracker_bytes"] - row["measured_bytes"]) > abs(row["captured_bytes"] - row["measured_bytes"])
    for row in rows:
        assert row["lifetimes_bytes"] <= row["gpusim_bytes"]
