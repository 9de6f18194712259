"""What a session looks at: trace, hardware, policy and streams, in the session's state and in the page's address."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import streamlit as st

from gpusim.defaults import DEFAULT_STREAMS, RECOMMENDED
from gpusim.errors import GpusimError, OptionError, TraceError, UnknownNameError
from gpusim.hardware import model as hardware_models
from gpusim.hardware.model import HardwareModel, bundled_hardware, load_hardware
from gpusim.plan.schedule import MAX_STREAMS
from gpusim.policies.registry import POLICIES
from gpusim.trace.schema import Trace
from gpusim.trace.store import bundled_traces, parse_trace, parse_upload
from gpusim_dashboard.cache import cached
from gpusim_dashboard.shelf import BOUNDS, shelf

DEFAULT_TRACE = "googlenet-train-b8"
UPLOAD = "upload-"
#: Digits of an upload's hash in its name, hence in the address: as hard to guess as the file.
NAME_DIGITS = 32
#: As `gpusim.search.searches` has it, which would load the engine: the first page does without.
SEARCH = "search"
#: The most that the control offers; an address may say more, up to what a GPU can have.
STREAMS_OFFERED = 32


@dataclass(frozen=True)
class Choice:
    """What the pages show; frozen values, which every session may share."""

    name: str
    """Bundled name, or `upload-...`."""
    content: str
    """Hash of the trace file: what results are cached under."""
    trace: Trace
    hardware: HardwareModel
    policy: str
    streams: int

    @property
    def uploaded(self) -> bool:
        """Whether the trace is this session's own."""
        return self.name.startswith(UPLOAD)

    @property
    def words(self) -> str:
        """The trace as the command line wants it."""
        return st.session_state.uploads[self.name].file if self.uploaded else self.name


@dataclass(frozen=True)
class Upload:
    """A trace that this session uploaded, or opened by the address of one."""

    file: str
    content: str
    trace: Trace


@cached
def bundled_trace(name: str) -> tuple[str, Trace]:
    """Hash and value of a bundled trace."""
    data = bundled_traces()[name].read_bytes()
    return hashlib.sha256(data).hexdigest(), parse_trace(data, name)


@cached
def hardware_model(name: str) -> HardwareModel:
    """A bundled hardware model."""
    return load_hardware(name)


def policies() -> tuple[str, ...]:
    """What may be chosen: the recommended schedule, the policies, and the best schedule that the search found."""
    return (RECOMMENDED, *POLICIES, SEARCH)


def take_upload(data: bytes, file: str) -> str:
    """Check an uploaded file and keep it; gives the name it is chosen by. Raises `TraceError`."""
    trace = parse_upload(data, file)
    content = shelf().put(file, data)
    name = f"{UPLOAD}{content[:NAME_DIGITS]}"
    st.session_state.uploads[name] = Upload(file, content, trace)
    return name


def _reopened(name: str) -> Upload:
    """An upload that the server has kept, for a session that has not opened it. Raises `TraceError`."""
    digits = name.removeprefix(UPLOAD)
    file = shelf().get(digits) if len(digits) == NAME_DIGITS else None
    if file is None:
        raise TraceError(name, f"the uploaded file is gone; upload it again. {BOUNDS}, until it is restarted")
    upload = Upload(file.name, hashlib.sha256(file.data).hexdigest(), parse_upload(file.data, file.name))
    st.session_state.uploads[name] = upload
    return upload


def trace_of(name: str) -> tuple[str, Trace]:
    """Hash and trace of a name. Raises `TraceError` for an upload that is gone, `UnknownNameError`."""
    if name.startswith(UPLOAD):
        upload: Upload = st.session_state.uploads.get(name) or _reopened(name)
        return upload.content, upload.trace
    if name not in bundled_traces():
        raise UnknownNameError("trace", name, bundled_traces())
    return bundled_trace(name)


def default_hardware(trace: Trace) -> str:
    """The name of the model of the GPU that the trace was captured on, or of the library's default."""
    model = hardware_models.default_hardware(trace.provenance.gpu.name)
    return next(name for name in bundled_hardware() if hardware_model(name) == model)


def begin(link: Mapping[str, str]) -> list[str]:
    """Set a new session's state from the address; gives what is wrong with that, each in one line.

    What is wrong falls back to the default.
    """
    state = st.session_state
    state.uploads = {}
    state.explorations = {}
    state.search_words = {}
    state.measured = {}
    state.measured_chosen = {}
    state.what_if = {}
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

    state.trace = valid("trace", trace_of) or DEFAULT_TRACE
    state.hw = valid("hw", _check_hardware) or default_hardware(trace_of(state.trace)[1])
    state.policy = valid("policy", _check_policy) or RECOMMENDED
    state.streams = int(valid("streams", _check_streams) or DEFAULT_STREAMS)
    return problems


def first() -> Choice:
    """What a session looks at whose address says nothing."""
    content, trace = bundled_trace(DEFAULT_TRACE)
    hardware = hardware_model(default_hardware(trace))
    return Choice(DEFAULT_TRACE, content, trace, hardware, RECOMMENDED, DEFAULT_STREAMS)


def current() -> Choice:
    """What this session looks at now."""
    state = st.session_state
    content, trace = trace_of(state.trace)
    return Choice(state.trace, content, trace, hardware_model(state.hw), state.policy, state.streams)


def write_address(page: str, more: Mapping[str, object] | None = None) -> None:
    """Put the state and `more` into the page's address, so that it survives a reload and can be sent to others."""
    state = st.session_state
    wanted = {
        "page": page,
        "trace": state.trace,
        "hw": state.hw,
        "policy": state.policy,
        "streams": str(state.streams),
        **{name: str(value) for name, value in (more or {}).items()},
    }
    if st.query_params.to_dict() != wanted:
        st.query_params.from_dict(wanted)


def _check_hardware(name: str) -> None:
    if name not in bundled_hardware():
        raise UnknownNameError("hardware", name, bundled_hardware())


def _check_policy(name: str) -> None:
    if name not in policies():
        raise UnknownNameError("policy", name, policies())


def _check_streams(text: str) -> None:
    if not (text.isdecimal() and len(text) <= 6 and 1 <= int(text) <= MAX_STREAMS):
        raise OptionError(f"a number between 1 and {MAX_STREAMS}")
