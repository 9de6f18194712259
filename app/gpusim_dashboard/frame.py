"""The frame around every page: navigation, the choice of trace, hardware and schedule, and one place for errors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import streamlit as st

from gpusim.errors import GpusimError, UnknownNameError
from gpusim.hardware.model import bundled_hardware
from gpusim.policies.registry import POLICIES
from gpusim.search.explore import SEARCH
from gpusim.trace.store import MAX_UPLOAD_BYTES, bundled_traces
from gpusim.units import MIB
from gpusim_dashboard import choice

if TYPE_CHECKING:
    from streamlit.runtime.uploaded_file_manager import UploadedFile

#: Less empty space around a page than by default: figures need the width.
STYLE = "<style>.stMainBlockContainer { padding: 3rem 2rem 2rem; }</style>"
#: Not named `pages`: Streamlit would take the files in it for pages of their own.
FOLDER = Path(__file__).resolve().parent.parent / "views"
#: Name in addresses -> title and icon.
PAGES = {
    "overview": ("Overview", "dashboard"),
    "explore": ("Explore", "search"),
    "timeline": ("Timeline", "view_timeline"),
    "what-if": ("What-if", "tune"),
    "limits": ("Limits", "speed"),
    "memory": ("Memory", "memory"),
    "fidelity": ("Fidelity", "straighten"),
}


def main() -> None:
    """One run of the dashboard's script."""
    st.set_page_config(page_title="gpusim", page_icon="⏱️", layout="wide")
    st.html(STYLE)
    pages = {
        name: st.Page(
            FOLDER / f"{name.replace('-', '_')}.py",
            title=title,
            icon=f":material/{icon}:",
            url_path=name,
            default=name == "overview",
        )
        for name, (title, icon) in PAGES.items()
    }
    page = st.navigation(list(pages.values()))
    name = next(name for name, each in pages.items() if each.title == page.title)
    state = st.session_state
    if "trace" not in state or "uploads" not in state:
        link = st.query_params.to_dict()
        state.problems = choice.begin(link)
        wanted = link.get("page", name)
        if wanted not in PAGES:
            state.problems.append(f"The address says page={wanted!r}: {UnknownNameError('page', wanted, PAGES)}")
        elif wanted != name and name == "overview":
            st.switch_page(pages[wanted])
    for problem in state.problems:
        st.error(problem, icon=":material/link_off:")
    state.problems = []
    _sidebar()
    choice.write_address(name)
    try:
        page.run()
    except GpusimError as error:  # the user's: one line, as on the command line
        st.error(str(error), icon=":material/error:")


def _sidebar() -> None:
    state = st.session_state
    with st.sidebar:
        above = st.container()
        file = st.file_uploader(
            "or a trace of your own (.json, .json.gz)",
            type=["json", "gz"],
            key="upload",
            help=f"From `gpusim capture`, up to {MAX_UPLOAD_BYTES // MIB} MiB. It stays in this session. Nothing in "
            "it is executed.",
        )
        # Before the choice of traces is drawn: a new upload is chosen, and after that it could not be.
        _take_upload(file)
        above.selectbox("Trace", [*bundled_traces(), *state.uploads], key="trace", format_func=_trace_label)
        if state.get("upload_error"):
            st.error(state.upload_error, icon=":material/error:")
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


def _take_upload(file: UploadedFile | None) -> None:
    """Choose a file that was not there in the run before; what is wrong with it is shown until there is another."""
    state = st.session_state
    seen, state.upload_seen = state.get("upload_seen"), file.file_id if file else None
    if state.upload_seen == seen:
        return
    state.upload_error = ""
    if file is None:
        return
    try:
        state.trace = choice.take_upload(file.getvalue(), file.name)
    except GpusimError as error:
        state.upload_error = str(error)


def _trace_label(name: str) -> str:
    upload = st.session_state.uploads.get(name)
    return f"{upload.trace.name} (uploaded)" if upload else name


def _policy_label(name: str) -> str:
    if name == SEARCH:
        return "search: the best found by searching"
    policy = POLICIES[name]
    return f"{name} ({policy.source}{', slow' if policy.slow else ''})"
