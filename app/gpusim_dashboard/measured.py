"""The measured run beside the simulated one: bundled, or a file that this session uploaded."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from gpusim.plan.measurement import outputs_in_words
from gpusim.report.measured import Measured, bundled_measured, parse_measured_upload, read_measured
from gpusim.text import shortened
from gpusim.trace.schema import Trace
from gpusim.units import format_ns
from gpusim_dashboard import uploads, view
from gpusim_dashboard.cache import cached
from gpusim_dashboard.choice import Choice
from gpusim_dashboard.results import Shown

NONE = "none"
UPLOADER = "replay"


@cached
def _bundled(path: Path, content: str, _trace: Trace) -> Measured:
    return read_measured(path, _trace)


def choose(choice: Choice, shown: Shown) -> tuple[str, Measured | None]:
    """Two controls, one to choose a measured run and one to load it; gives its name and the run, if one is chosen."""
    cells = st.columns([3, 1], vertical_alignment="bottom")
    mine: dict[str, Measured] = st.session_state.measured.setdefault(choice.content, {})
    key = f"measured run of {choice.content[:16]}"

    def read(data: bytes, name: str) -> None:
        mine[name] = parse_measured_upload(data, name, choice.trace)
        # Before the control is drawn: after that its value could not be set.
        st.session_state[key] = name

    with cells[1].popover("Load a replay", icon=":material/upload:", width="stretch"):
        file = st.file_uploader(
            "What `gpusim replay --perfetto` or `-o` wrote, or a trace of PyTorch's profiler",
            key=f"upload of {key}",
            help="Under any file name. It stays in this session.",
        )
        uploads.take(file, UPLOADER, read)
    bundled = bundled_measured(choice.trace)
    offered = [NONE, *bundled, *(name for name in mine if name not in bundled)]
    fitting = f"{shown.policy}-{shown.streams}"
    if st.session_state.get(key) not in offered:
        # Streamlit forgets the value of a control whose page is left.
        before = st.session_state.measured_chosen.get(choice.content)
        default = before if before in offered else fitting
        st.session_state[key] = default if default in offered else NONE
    name = cells[0].selectbox(
        "Measured run below the simulated one",
        offered,
        key=key,
        format_func=view.option,
        disabled=offered == [NONE],
        help="Profiled on a GPU, which slows a step: the dotted line is its time without. Lanes are the CUDA graph "
        "executor's own.",
    )
    uploads.show_error(UPLOADER)
    st.session_state.measured_chosen[choice.content] = name
    if name == NONE:
        return name, None
    return name, mine[name] if name in mine else _bundled(bundled[name], choice.content, choice.trace)


def summary(found: Measured, simulated_ns: int, why_not: str) -> None:
    """Measured beside simulated, as numbers; with an error where nothing says `why_not` to compare them."""
    cells = st.columns(4)
    measurement = found.measurement
    compared = "another run than the measured one"
    if not why_not and found.makespan_ns:
        compared = f"{simulated_ns / found.makespan_ns - 1:+.1%} against measured"
    view.metric(cells[0], "Simulated", format_ns(simulated_ns), compared)
    if measurement is not None:
        profiled = f"profiled: {format_ns(found.profiled_ns)}" if found.profiled_ns else "not profiled"
        view.metric(cells[1], "Measured", format_ns(measurement.schedule.median_ns), profiled)
        view.metric(
            cells[2],
            "Measured speed-up",
            f"{measurement.speedup:.2f}x",
            f"sequential {format_ns(measurement.sequential.median_ns)}",
        )
        outputs = measurement.outputs
        equal = outputs_in_words(outputs.equal, outputs.bit_equal, outputs.sensitive)
        view.metric(cells[3], "Outputs", equal, view.plain(shortened(f"{measurement.gpu.name}, {measurement.date}")))
    else:
        view.metric(cells[1], "Measured, profiled", format_ns(found.makespan_ns), view.plain(shortened(found.title)))
    if why_not:
        st.caption(f"No error is given: {view.plain(why_not)}.")
