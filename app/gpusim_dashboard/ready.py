"""Results that the first pages need, computed in advance."""

from __future__ import annotations

import contextlib
import importlib
import threading
from dataclasses import replace

import streamlit as st

import gpusim
from gpusim.errors import GpusimError
from gpusim_dashboard import kept
from gpusim_dashboard.choice import Choice, as_begun, first


@st.cache_resource(show_spinner=False)
def shown() -> threading.Event:
    """An event that is set once any session has shown a page."""
    return threading.Event()


def first_page() -> None:
    """Load the samples and the verdict on the default one."""
    with contextlib.suppress(ImportError):  # what Streamlit looks a page's icon up in; other versions have it elsewhere
        importlib.import_module("streamlit.emojis")
    from gpusim_dashboard import kinds

    kinds.samples()
    choice = first()
    if kept.load(choice, *kept.QUICK) is None:
        from gpusim_dashboard import results

        results.quick_of(choice)


def other_pages() -> None:
    """Load the engine and the figures, then compute the pages of every sample.

    Each waits until no page computes: Python runs one thread at a time.
    """
    from gpusim_dashboard import lifetime, results

    # A policy's schedule: the recommended one may depend on a session, and this thread has none.
    one = replace(first(), policy=results.STAND_IN)
    results.baseline_of(one, results.shown_of(one))
    for figure in ("timeline", "limits", "breakdown"):
        importlib.import_module(f"gpusim.report.figures.{figure}")
    samples = [as_begun(name) for name in gpusim.list_traces()]
    for page in (results.quick_of, results.limits_of, timeline, what_if):
        for sample in samples:
            lifetime.watch().wait_for_quiet()
            with contextlib.suppress(GpusimError):
                page(sample)


def timeline(sample: Choice) -> None:
    """Compute the timeline of the schedule that the short exploration recommends."""
    from gpusim_dashboard import results

    results.explained_of(sample, results.quick_of(sample).best.schedule)


def what_if(sample: Choice) -> None:
    """Compute the unchanged step, on its own GPU and on others."""
    from gpusim_dashboard import results

    shown = results.recommended(results.quick_of(sample))
    results.baseline_of(sample, shown)
    home = sample.hardware.name
    as_it_is = results.on_every_gpu(sample, shown)[home]
    results.sensitivities_of(sample, results.usual_question(sample, home, shown), as_it_is)
