"""The sidebar: controls for step, GPU and schedule, each page with those that it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import streamlit as st

import gpusim
from gpusim.api import dashboard
from gpusim.defaults import RECOMMENDED, SEARCH
from gpusim_dashboard import choice, view
from gpusim_dashboard.pages import FIRST, HARDWARE, SCHEDULE, STEP, STREAMS


def sidebar() -> None:
    """Draw the page's controls in the sidebar, unless this run has drawn them."""
    wanted: tuple[str, ...] = st.session_state.sidebar
    st.session_state.sidebar = ()
    if not wanted:
        return
    with st.sidebar:
        if STEP in wanted:
            _select("trace", "Step", [*gpusim.list_traces(), *st.session_state.uploads], trace_label)
            st.page_link(st.session_state.pages[FIRST], label="Analyse another step", icon=":material/upload_file:")
        if HARDWARE in wanted:
            _select("hw", "GPU", gpusim.list_hardware(), hardware_label)
        if SCHEDULE in wanted:
            _select(
                "policy",
                "Schedule",
                list(choice.policies()),
                policy_label,
                help="Which schedule the page shows. Every page begins with the one that the verdict recommends.",
            )
        if STREAMS in wanted:
            top = max(choice.STREAMS_OFFERED, st.session_state.streams)
            st.session_state.pick_streams = st.session_state.streams
            st.slider("Streams, at most", 1, top, key="pick_streams", on_change=_take, args=("streams",))


def _select(name: str, label: str, options: list[str], words: Callable[[str], str], help: str | None = None) -> None:
    """A select box for one part of the choice; the value persists on pages without it."""
    state = st.session_state
    if state[name] not in options:
        options = [*options, state[name]]
    state[f"pick_{name}"] = state[name]
    st.selectbox(
        label, options, key=f"pick_{name}", format_func=labels(options, words), help=help, on_change=_take, args=(name,)
    )


def _take(name: str) -> None:
    """Store a changed control. Selecting a step of another home GPU also selects that GPU."""
    state = st.session_state
    before = state[name]
    state[name] = state[f"pick_{name}"]
    if name == "trace":
        one, other = (dashboard.home_hardware(choice.trace_of(each)[1]) for each in (before, state.trace))
        state.hw = state.hw if one == other else other


def labels(options: Iterable[str], words: Callable[[str], str]) -> Callable[[str], str]:
    """Return a function from option to label. Labels are computed once: Streamlit asks for them at any time."""
    known = {option: words(option) for option in options}
    return lambda option: known.get(option, option)


def trace_label(name: str) -> str:
    """The label of a step in the list."""
    upload = st.session_state.uploads.get(name)
    return f"{view.option(upload.trace.name)} (yours)" if upload else name


def hardware_label(name: str) -> str:
    """The label of a hardware model in a list."""
    return choice.hardware_model(name).label


def policy_label(name: str) -> str:
    """The label of a schedule in a list."""
    if name == RECOMMENDED:
        return "recommended by the verdict"
    if name == SEARCH:
        return "search: the best found by searching"
    policy = dashboard.registered_policies()[name]
    return f"{name} ({policy.source}{', slow' if policy.slow else ''})"
