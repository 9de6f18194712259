"""Fixtures of the dashboard's tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.support.browser import browser, server, tab, tabs

__all__ = ["browser", "main_module", "server", "tab", "tabs"]

MAIN = sys.modules["__main__"]


@pytest.fixture(autouse=True)
def main_module() -> Iterator[None]:
    """Streamlit runs a page as `__main__`; processes that later tests start must not inherit it."""
    yield
    sys.modules["__main__"] = MAIN
