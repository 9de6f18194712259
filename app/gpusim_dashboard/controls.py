"""The sidebar: the choice of trace, hardware, policy and streams, which holds on every page."""

from __future__ import annotations

import streamlit as st

from gpusim.defaults import RECOMMENDED
from gpusim.file_limits import MAX_UPLOAD_BYTES
from gpusim.hardware.model import bundled_hardware
from gpusim.policies.registry import POLICIES
from gpusim.trace.store import bundled_traces
from gpusim.units import MIB
from gpusim_dashboard import choice, shelf, uploads, view

UPLOADER = "upload"


def sidebar() -> None:
    """Draw it; an upload is taken and chosen here."""
    state = st.session_state
    with st.sidebar:
        above = st.container()
        file = st.file_uploader(
            "or a trace of your own, from `gpusim capture`",
            key=UPLOADER,
            help=f"Up to {MAX_UPLOAD_BYTES // MIB} MiB, under any file name. Nothing in it is executed. "
            f"{shelf.BOUNDS}, in memory: a reload finds yours again, and so does anybody with its address.",
        )
        st.caption("Any file name: its content counts. A reload keeps it.")
        # Before the choice of traces is drawn: a new upload is chosen, and after that it could not be.
        uploads.take(file, UPLOADER, _choose_upload)
        above.selectbox(
            "Trace",
            [*bundled_traces(), *state.uploads],
            key="trace",
            format_func=_trace_label,
            on_change=uploads.forget_error,
            args=(UPLOADER,),
        )
        st.selectbox(
            "Hardware", list(bundled_hardware()), key="hw", format_func=lambda n: choice.hardware_model(n).label
        )
        st.selectbox(
            "Policy",
            choice.policies(),
            key="policy",
            format_func=_policy_label,
            help="The schedule that Timeline, What-if and Memory show. Overview and Explore compare all of them.",
        )
        top = max(choice.STREAMS_OFFERED, state.streams)
        st.slider("Streams, at most", 1, top, key="streams")


def upload_error() -> str:
    """What is wrong with the file that was uploaded last; empty where nothing is."""
    return uploads.error(UPLOADER)


def show_upload_error() -> None:
    """In the place of a page: what the file is and what to do, and no other step's answer."""
    st.error(view.plain(upload_error()), icon=":material/error:")
    st.markdown(
        "No page is shown for this file. A trace for this dashboard comes from `gpusim capture` on a machine with a "
        "GPU; its name does not matter, its content does. A trace of PyTorch's profiler can be drawn below a simulated "
        "run: load it on the Timeline page. Upload another file at the left, or go on with "
        f"**{view.plain(_trace_label(st.session_state.trace))}**."
    )
    st.button("Go on without it", on_click=uploads.forget_error, args=(UPLOADER,))


def _choose_upload(data: bytes, name: str) -> None:
    st.session_state.trace = choice.take_upload(data, name)


def _trace_label(name: str) -> str:
    upload = st.session_state.uploads.get(name)
    return f"{view.option(upload.trace.name)} (uploaded)" if upload else name


def _policy_label(name: str) -> str:
    if name == RECOMMENDED:
        return "recommended by the verdict"
    if name == choice.SEARCH:
        return "search: the best found by searching"
    policy = POLICIES[name]
    return f"{name} ({policy.source}{', slow' if policy.slow else ''})"
