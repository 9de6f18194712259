"""A cache of results, shared by all sessions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import streamlit as st

Function = TypeVar("Function", bound=Callable[..., Any])
MAX_ENTRIES = 64


def cached(function: Function) -> Function:
    """Return the function with a cache, keyed by all arguments except those whose names begin with `_`.

    Results are immutable, so all sessions share one object (`cache_resource`): unpickling it on every rerun
    (`cache_data`) would take longer than the simulation.
    """
    kept: Function = st.cache_resource(max_entries=MAX_ENTRIES, show_spinner=False)(function)
    return kept
