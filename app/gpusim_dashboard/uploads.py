"""Uploaded files: each is read once, and its error is shown until the next upload."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import streamlit as st

from gpusim.errors import GpusimError
from gpusim_dashboard import view

if TYPE_CHECKING:
    from streamlit.runtime.uploaded_file_manager import UploadedFile


#: Files read at the same time by all sessions; each may take `MAX_APART_BYTES`.
AT_ONCE: Final = 4


@st.cache_resource(show_spinner=False)
def _turns() -> threading.Semaphore:
    return threading.Semaphore(AT_ONCE)


def take(file: UploadedFile | None, place: str, read: Callable[[bytes, str], None]) -> None:
    """Call `read` with content and name of a file that is new in the control `place`."""
    state = st.session_state
    seen, state[f"seen in {place}"] = state.get(f"seen in {place}"), file.file_id if file else None
    if state[f"seen in {place}"] == seen:
        return
    state[f"wrong in {place}"] = ""
    if file is None:
        return
    try:
        with _turns():
            read(file.getvalue(), file.name)
    except GpusimError as error:
        say(place, str(error))


def say(place: str, wrong: str) -> None:
    """Store an error for the control `place`."""
    st.session_state[f"wrong in {place}"] = wrong


def error(place: str) -> str:
    """The error of the file in the control `place`; empty if there is none."""
    return str(st.session_state.get(f"wrong in {place}", ""))


def show_error(place: str) -> None:
    """Show the error of the control `place`, if there is one."""
    if wrong := error(place):
        st.error(view.plain(wrong), icon=":material/error:")
