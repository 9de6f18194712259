"""Files that a session uploads: each read once, and what is wrong with one said until there is another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import streamlit as st

from gpusim.errors import GpusimError
from gpusim_dashboard import view

if TYPE_CHECKING:
    from streamlit.runtime.uploaded_file_manager import UploadedFile


#: Files of all sessions that are read at once; each may take `MAX_APART_BYTES`.
AT_ONCE: Final = 4


@st.cache_resource(show_spinner=False)
def _turns() -> threading.Semaphore:
    return threading.Semaphore(AT_ONCE)


def take(file: UploadedFile | None, place: str, read: Callable[[bytes, str], None]) -> None:
    """Call `read` with content and name of a file that was not in the control `place` in the run before."""
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
    """Something is wrong with what belongs to the control."""
    st.session_state[f"wrong in {place}"] = wrong


def error(place: str) -> str:
    """What was wrong with the file in the control; empty where nothing was."""
    return str(st.session_state.get(f"wrong in {place}", ""))


def show_error(place: str) -> None:
    """Show it, where anything was wrong."""
    if wrong := error(place):
        st.error(view.plain(wrong), icon=":material/error:")


def forget_error(place: str) -> None:
    """Say no more of it."""
    st.session_state[f"wrong in {place}"] = ""
