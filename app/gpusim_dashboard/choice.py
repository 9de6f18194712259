"""The step, hardware, policy and streams of a session, kept in its state and in the page's address."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import streamlit as st

import gpusim
from gpusim.api import dashboard
from gpusim.defaults import DEFAULT_STREAMS, DEFAULT_TRACE, RECOMMENDED, SEARCH
from gpusim.errors import GpusimError, OptionError, TraceError, UnknownNameError
from gpusim_dashboard.cache import cached
from gpusim_dashboard.shelf import BOUNDS, shelf

UPLOAD: Final = "upload-"
#: Digits of an upload's hash in its name, hence in the address: as hard to guess as the file.
NAME_DIGITS: Final = 32
#: Largest number of streams on the slider; an address may name more, up to the GPU's limit.
STREAMS_OFFERED: Final = 32
#: Names in the session's state and in addresses.
NAMES: Final = ("trace", "hw", "policy", "streams")


@dataclass(frozen=True)
class Choice:
    """The step, hardware, policy and streams that pages show; immutable, so sessions can share it."""

    name: str
    """Bundled name, or `upload-...`."""
    content: str
    """Hash of the trace file: the cache key of results."""
    trace: gpusim.Trace
    hardware: gpusim.HardwareModel
    policy: str
    streams: int

    @property
    def uploaded(self) -> bool:
        """Whether this session uploaded the trace."""
        return self.name.startswith(UPLOAD)

    @property
    def searchable(self) -> bool:
        """Whether other schedules can be searched; false for a profile without data dependencies."""
        return dashboard.searchable(self.trace)

    @property
    def words(self) -> str:
        """The trace as an argument of the command line."""
        return st.session_state.uploads[self.name].file if self.uploaded else self.name


@dataclass(frozen=True)
class Upload:
    """A trace that this session uploaded, or opened by the address of one."""

    file: str
    content: str
    trace: gpusim.Trace


@cached
def bundled_trace(name: str) -> tuple[str, gpusim.Trace]:
    """Return the hash and content of a bundled trace."""
    return dashboard.bundled_trace(name)


@cached
def hardware_model(name: str) -> gpusim.HardwareModel:
    """A bundled hardware model."""
    return dashboard.hardware_model(name)


def policies() -> tuple[str, ...]:
    """The choices of schedule: the recommended one, the policies, and the best one found by search."""
    return (RECOMMENDED, *dashboard.registered_policies(), SEARCH)


def take_upload(data: bytes, file: str) -> None:
    """Check an uploaded file, keep it, and look at it. Raises `TraceError`."""
    trace = dashboard.uploaded_trace(data, file)
    content = shelf().put(file, data)
    name = f"{UPLOAD}{content[:NAME_DIGITS]}"
    st.session_state.uploads[name] = Upload(file, content, trace)
    look_at(name)


def look_at(name: str) -> None:
    """Select a step with the defaults of a new session: its own GPU and the recommended schedule."""
    state = st.session_state
    state.trace, state.hw = name, dashboard.home_hardware(trace_of(name)[1])
    state.policy, state.streams = RECOMMENDED, DEFAULT_STREAMS


def _reopened(name: str) -> Upload:
    """Read an upload that the server still has into a session that has not opened it. Raises `TraceError`."""
    digits = name.removeprefix(UPLOAD)
    file = shelf().get(digits) if len(digits) == NAME_DIGITS else None
    if file is None:
        raise TraceError(name, f"the uploaded file is gone; upload it again. {BOUNDS}, until it is restarted")
    content = hashlib.sha256(file.data).hexdigest()
    upload = Upload(file.name, content, dashboard.uploaded_trace(file.data, file.name))
    st.session_state.uploads[name] = upload
    return upload


def trace_of(name: str) -> tuple[str, gpusim.Trace]:
    """Return the hash and content of a trace. Raises `TraceError` for an expired upload, `UnknownNameError`."""
    if name.startswith(UPLOAD):
        upload: Upload = st.session_state.uploads.get(name) or _reopened(name)
        return upload.content, upload.trace
    if name not in gpusim.list_traces():
        raise UnknownNameError("trace", name, gpusim.list_traces())
    return bundled_trace(name)


def begin(link: Mapping[str, str]) -> list[str]:
    """Set a new session's state from the address; returns its problems, one line each.

    Invalid values are replaced by the defaults.
    """
    state = st.session_state
    state.uploads = {}
    state.explorations = {}
    state.search_words = {}
    state.measured = {}
    problems = []

    def valid(key: str, check: Callable[[str], object]) -> str | None:
        if key not in link:
            return None
        try:
            check(link[key])
        except GpusimError as error:
            problems.append(f"{key}={link[key]!r}: {error}")
            return None
        return link[key]

    look_at(valid("trace", trace_of) or DEFAULT_TRACE)
    state.hw = valid("hw", check_hardware) or state.hw
    state.policy = valid("policy", check_policy) or RECOMMENDED
    state.streams = int(valid("streams", check_streams) or DEFAULT_STREAMS)
    return problems


def as_begun(name: str) -> Choice:
    """A bundled step with the defaults of a new session."""
    return chosen(name, dashboard.home_hardware(trace_of(name)[1]), RECOMMENDED, DEFAULT_STREAMS)


def first() -> Choice:
    """The choice of a session whose address names nothing."""
    return as_begun(DEFAULT_TRACE)


def current() -> Choice:
    """The current choice of this session."""
    state = st.session_state
    return chosen(state.trace, state.hw, state.policy, state.streams)


def chosen(trace_name: str, hw: str, policy: str, streams: int) -> Choice:
    """A step on a GPU with a policy. Raises `TraceError`, `UnknownNameError`."""
    content, trace = trace_of(trace_name)
    return Choice(trace_name, content, trace, hardware_model(hw), policy, streams)


def check_hardware(name: str) -> None:
    """Raises `UnknownNameError` if no bundled model has this name."""
    if name not in gpusim.list_hardware():
        raise UnknownNameError("hardware", name, gpusim.list_hardware())


def check_policy(name: str) -> None:
    """Raises `UnknownNameError` for a schedule that cannot be chosen."""
    if name not in policies():
        raise UnknownNameError("policy", name, policies())


def check_streams(text: str) -> None:
    """Raises `OptionError` unless the text is a number of streams that a GPU can have."""
    most = dashboard.MAX_STREAMS
    if not (text.isascii() and text.isdigit() and len(text) <= 6 and 1 <= int(text) <= most):
        raise OptionError(f"a number between 1 and {most}")
