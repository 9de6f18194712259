"""Size of cuBLAS's workspaces while a graph is recorded: a setting of torch's in the environment."""

from __future__ import annotations

import os

import pytest
import torch

from gpusim.gpu.replay.cudagraph import SMALL_WORKSPACES, WORKSPACE_VARIABLE, own_workspaces, small_workspaces


def test_they_are_small_only_within(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKSPACE_VARIABLE, raising=False)
    with small_workspaces():
        assert os.environ[WORKSPACE_VARIABLE] == SMALL_WORKSPACES
    assert WORKSPACE_VARIABLE not in os.environ


@pytest.mark.parametrize(("streams", "capability", "expected"), [(1, 9, None), (2, 9, SMALL_WORKSPACES), (2, 8, None)])
def test_graphs_on_several_streams_have_small_ones_where_torchs_are_large(
    monkeypatch: pytest.MonkeyPatch, streams: int, capability: int, expected: str | None
) -> None:
    monkeypatch.delenv(WORKSPACE_VARIABLE, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
    with own_workspaces(streams):
        assert os.environ.get(WORKSPACE_VARIABLE) == expected


def test_they_are_as_before_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKSPACE_VARIABLE, raising=False)
    with pytest.raises(ValueError, match="within"), small_workspaces():
        raise ValueError("within")
    assert WORKSPACE_VARIABLE not in os.environ


def test_a_setting_of_the_users_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE_VARIABLE, ":16:8")
    with small_workspaces():
        assert os.environ[WORKSPACE_VARIABLE] == ":16:8"
    assert os.environ[WORKSPACE_VARIABLE] == ":16:8"
