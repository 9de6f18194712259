"""The sidebar: the choice of trace, hardware, policy and streams, which holds on every page."""

from __future__ import annotations

import streamlit as st

from gpusim.file_limits import MAX_UPLOAD_BYTES
from gpusim.hardware.model import bundled_hardware
from gpusim.policies.registry import POLICIES
from gpusim.trace.store import bundled_traces
from gpusim.units import MIB
from gpusim_dashboard import choice, uploads

UPLOADER = "upload"


def sidebar() -> None:
    """Draw it; an upload is taken and chosen here."""
    state = st.session_state
    with st.sidebar:
        above = st.container()
        file = st.file_uploader(
            "or a trace of your own (.json, .json.gz)",
            type=["json", "gz"],
            key=UPLOADER,
            help=f"From `gpusim capture`, up to {MAX_UPLOAD_BYTES // MIB} MiB. It stays in this session. Nothing in "
            "it is executed.",
        )
        # Before the choice of traces is drawn: a new upload is chosen, and after that it could not be.
        uploads.take(file, UPLOADER, _choose_upload)
        above.selectbox("Trace", [*bundled_traces(), *state.uploads], key="trace", format_func=_trace_label)
        uploads.show_error(UPLOADER)
        st.selectbox(
            "Hardware", list(bundled_hardware()), key="hw", format_func=lambda n: choice.hardware_model(n).label
        )
        st.selectbox(
            "Policy",
            choice.policies(),
            key="policy",
            format_func=_policy_label,
            help="The schedule that Timeline, What-if and Memory show; Overview and Explore compare all.",
        )
        top = max(choice.STREAMS_OFFERED, state.streams)
        st.slider("Streams, at most", 1, top, key="streams")


def _choose_upload(data: bytes, name: str) -> None:
    st.session_state.trace = choice.take_upload(data, name)


def _trace_label(name: str) -> str:
    upload = st.session_state.uploads.get(name)
    return f"{upload.trace.name} (uploaded)" if upload else name


def _policy_label(name: str) -> str:
    if name == choice.SEARCH:
        return "search: the best found by searching"
    policy = POLICIES[name]
    return f"{name} ({policy.source}{', slow' if policy.slow else ''})"
