"""What the first pages need, computed before anybody asks."""

from __future__ import annotations

import contextlib
import importlib
import threading
from dataclasses import replace

import streamlit as st

from gpusim_dashboard import kept
from gpusim_dashboard.choice import first


@st.cache_resource(show_spinner=False)
def shown() -> threading.Event:
    """Set once a page has been shown to anybody."""
    return threading.Event()


def first_page() -> None:
    """The overview of the default trace; drawn once, too, because plotly loads its parts on first use."""
    with contextlib.suppress(ImportError):  # what Streamlit looks a page's icon up in; other versions have it elsewhere
        importlib.import_module("streamlit.emojis")
    from gpusim.report.figures.breakdown import breakdown_figure
    from gpusim.report.figures.explored import bounds_figure, gain_figure

    choice = first()
    found = kept.load(choice, *kept.QUICK)
    if found is not None:
        overview = (found.summary, found.breakdown)
    else:
        from gpusim.report.summary import summarize
        from gpusim_dashboard import results

        overview = (summarize(results.quick_of(choice)), results.breakdown_of(choice))
    bounds_figure(overview[0])
    gain_figure(overview[0])
    breakdown_figure(overview[1], "")


def other_pages() -> None:
    """The engine, which a first page that was on disk did without."""
    from gpusim_dashboard import results

    # A policy's: what is recommended may be of a session, and this thread is in none.
    results.baseline_of(replace(first(), policy=results.STAND_IN), "graph")
