"""Fixtures of the dashboard's tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.support.browser import browser, server, tab, tabs
from tests.support.pages import APP

__all__ = ["app_on_path", "browser", "main_module", "server", "tab", "tabs"]

MAIN = sys.modules["__main__"]


@pytest.fixture(autouse=True)
def main_module() -> Iterator[None]:
    """Streamlit runs a page as `__main__`; processes that later tests start must not inherit it."""
    yield
    sys.modules["__main__"] = MAIN


@pytest.fixture(autouse=True)
def app_on_path(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Put the dashboard's folder on the path as `streamlit run` does, and keep its cache away from the user's."""
    monkeypatch.syspath_prepend(str(APP))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    # Before every run Streamlit reads the metadata of all installed packages for components: half of all CPU time.
    monkeypatch.setattr("streamlit.components.v2.manifest_scanner.scan_component_manifests", list)
