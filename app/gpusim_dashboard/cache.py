"""Results that all sessions share, each computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import streamlit as st

Function = TypeVar("Function", bound=Callable[..., Any])
MAX_ENTRIES = 64


def cached(function: Function) -> Function:
    """The function with its results kept, under its arguments but for those whose name begins with `_`.

    Results are frozen values, so every session gets the same object (`cache_resource`): to unpickle one on every rerun
    (`cache_data`) would take longer than to simulate it.
    """
    kept: Function = st.cache_resource(max_entries=MAX_ENTRIES, show_spinner=False)(function)
    return kept
