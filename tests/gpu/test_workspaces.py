"""Size of cuBLAS's workspaces while a graph is recorded: a setting of torch's in the environment."""

from __future__ import annotations

import os

import pytest

from gpusim.gpu.replay.cudagraph import SMALL_WORKSPACES, WORKSPACE_VARIABLE, small_workspaces


def test_they_are_small_for_several_streams_and_only_within(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKSPACE_VARIABLE, raising=False)
    for streams, expected in ((1, None), (2, SMALL_WORKSPACES)):
        with small_workspaces(streams):
            assert os.environ.get(WORKSPACE_VARIABLE) == expected
        assert WORKSPACE_VARIABLE not in os.environ


def test_they_are_as_before_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKSPACE_VARIABLE, raising=False)
    with pytest.raises(ValueError, match="within"), small_workspaces(8):
        raise ValueError("within")
    assert WORKSPACE_VARIABLE not in os.environ


def test_a_setting_of_the_users_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE_VARIABLE, ":16:8")
    with small_workspaces(8):
        assert os.environ[WORKSPACE_VARIABLE] == ":16:8"
    assert os.environ[WORKSPACE_VARIABLE] == ":16:8"
