"""What the What-if page changes: kept in the session, and in the page's address where it differs from the default."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import get_args

import streamlit as st

from gpusim.errors import GpusimError, OptionError, UnknownNameError
from gpusim.hardware.model import HardwareModel, bundled_hardware
from gpusim.plan.tasks import LaunchMode
from gpusim.trace.schema import Trace
from gpusim.trace.store import bundled_traces, other_batches
from gpusim_dashboard import choice

Value = str | int | float
#: Ranges of the sliders whose range follows from nothing else.
BANDWIDTH, LAUNCH_COST, OP_SPEED = (0.25, 4.0), (0.0, 4.0), (0.25, 8.0)
#: Streams that the page offers, and how many times as many SMs as the GPU has.
MAX_STREAMS, MAX_SMS_FACTOR = 32, 2
#: In the address, in this order.
NAMES = ("gpu", "batch", "launch", "on_streams", "sms", "bandwidth", "launch_cost", "queues", "op", "op_speed")


def settings() -> dict[str, Value]:
    """The settings of this session that differ from their defaults, to be changed in place; for one step and GPU."""
    state = st.session_state
    about = (state.trace, state.hw)
    if state.setdefault("what_if_about", about) != about:
        reset()
        state.what_if_about = about
    found: dict[str, Value] = state.what_if
    return found


def reset() -> None:
    """Back to the defaults."""
    st.session_state.what_if = {}
    # Controls are named after it: a new one begins at its default.
    st.session_state.what_if_round = st.session_state.get("what_if_round", 0) + 1


def control(name: str, default: Value, *about: object) -> str:
    """The key of a setting's control, which begins at what is set; `about` is what it cannot outlive."""
    key = f"{name} {st.session_state.get('what_if_round', 0)} {' '.join(map(str, about))}"
    if key not in st.session_state:
        st.session_state[key] = settings().get(name, default)
    return key


def keep(name: str, value: Value, default: Value) -> None:
    """Remember a setting, unless it is the default."""
    settings().pop(name, None)
    if value != default:
        settings()[name] = value


def batches_of(trace: Trace) -> dict[int, str]:
    """Batch -> name of the bundled traces of the same network."""
    return other_batches(trace, {name: choice.bundled_trace(name)[1] for name in bundled_traces()})


def from_address(link: Mapping[str, str], problems: list[str]) -> dict[str, Value]:
    """The settings that an address has; what is wrong with one goes to `problems`, and its default holds."""
    found: dict[str, Value] = {}
    trace = choice.trace_of(st.session_state.trace)[1]

    def take(name: str, read: Callable[[str], Value]) -> None:
        if name in link:
            try:
                found[name] = read(link[name])
            except GpusimError as error:
                problems.append(f"{name}={link[name][:40]!r}: {error}")

    def model() -> HardwareModel:
        return choice.hardware_model(str(found.get("gpu", st.session_state.hw)))

    def batch(text: str) -> Value:
        offered = (trace.model.batch, *batches_of(trace))
        return whole(text, known=offered)

    def step() -> Trace:
        other = found.get("batch", trace.model.batch)
        return trace if other == trace.model.batch else choice.trace_of(batches_of(trace)[int(other)])[1]

    take("gpu", lambda text: word(text, "hardware", list(bundled_hardware())))
    take("batch", batch)
    take("launch", lambda text: word(text, "launch mode", list(get_args(LaunchMode))))
    take("on_streams", lambda text: whole(text, 1, MAX_STREAMS))
    take("sms", lambda text: whole(text, 1, MAX_SMS_FACTOR * model().limits.sms))
    take("bandwidth", lambda text: number(text, *BANDWIDTH))
    take("launch_cost", lambda text: number(text, *LAUNCH_COST))
    take("queues", lambda text: whole(text, 1, model().stream.max_queues))
    take("op", lambda text: word(text, "op", [op.name for op in step().ops if op.kernels]))
    take("op_speed", lambda text: number(text, *OP_SPEED))
    return found


def word(text: str, what: str, known: list[str]) -> str:
    """One of the words known. Raises `UnknownNameError`."""
    if text not in known:
        raise UnknownNameError(what, text, known)
    return text


def whole(text: str, low: int = 0, high: int = 0, known: tuple[int, ...] = ()) -> int:
    """A whole number in a range, or one of those known. Raises `OptionError`."""
    value = int(text) if text.isdecimal() and len(text) <= 9 else -1
    if known and value not in known:
        raise OptionError(f"one of {', '.join(map(str, sorted(known)))}")
    if not known and not low <= value <= high:
        raise OptionError(f"a number between {low} and {high}")
    return value


def number(text: str, low: float, high: float) -> float:
    """A number in a range. Raises `OptionError`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise OptionError(f"a number between {low:g} and {high:g}")
    return value
