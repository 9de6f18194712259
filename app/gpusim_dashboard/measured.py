"""A measured run beside the simulated one: bundled, or an uploaded file stored under its hash."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import streamlit as st

import gpusim
from gpusim.errors import GpusimError, MeasurementError
from gpusim.report.measured import Measured, bundled_measured, parse_measured_upload, read_measured
from gpusim.text import shortened
from gpusim.units import format_ns
from gpusim_dashboard import shelf, uploads, view
from gpusim_dashboard.address import Settings
from gpusim_dashboard.cache import cached
from gpusim_dashboard.choice import NAME_DIGITS, UPLOAD, Choice
from gpusim_dashboard.results import Shown

NONE: Final = "none"
UPLOADER: Final = "replay"


@cached
def _bundled(path: Path, content: str, _trace: gpusim.Trace) -> Measured:
    return read_measured(path, _trace)


def load(cell: Any, choice: Choice, settings: Settings) -> None:
    """The control that loads a file."""
    mine: dict[str, tuple[str, Measured]] = st.session_state.measured.setdefault(choice.content, {})

    def read(data: bytes, file: str) -> None:
        measured = parse_measured_upload(data, file, choice.trace)
        name = f"{UPLOAD}{shelf.shelf().put(file, data)[:NAME_DIGITS]}"
        mine[name] = (file, measured)
        settings.keep("measured", name, "")

    with cell.popover("Load a replay", icon=":material/upload:", width="stretch"):
        file = st.file_uploader(
            "What `gpusim replay --perfetto` or `-o` wrote, or a trace of PyTorch's profiler",
            key=f"replay of {choice.content[:16]}",
            help=f"Under any file name. {shelf.BOUNDS}, in memory.",
        )
        uploads.take(file, UPLOADER, read)


def choose(cell: Any, choice: Choice, shown: Shown, settings: Settings) -> tuple[str, Measured | None]:
    """The control that selects a measured run; returns its name and the run, or None."""
    mine: dict[str, tuple[str, Measured]] = st.session_state.measured.setdefault(choice.content, {})
    wanted = settings.texts.get("measured", "")
    if wanted.startswith(UPLOAD) and wanted not in mine:
        _reopen(wanted, choice, mine)
    bundled = bundled_measured(choice.trace)
    offered = [NONE, *bundled, *mine]
    fitting = f"{shown.policy}-{shown.streams}"
    name = settings.select(
        cell,
        "Measured run",
        "measured",
        offered,
        fitting if fitting in offered else NONE,
        format_func=lambda each: view.option(mine[each][0]) if each in mine else view.option(each),
        disabled=offered == [NONE],
        help="Drawn below the simulated one. It was profiled on a GPU, which slows a step: the dotted line is its time "
        "without a profiler. Kernels are matched with the simulated ones by name and order.",
    )
    if name == NONE:
        return name, None
    return name, mine[name][1] if name in mine else _bundled(bundled[name], choice.content, choice.trace)


def _reopen(name: str, choice: Choice, mine: dict[str, tuple[str, Measured]]) -> None:
    """Read an uploaded run that the server still has into a session that has not opened it."""
    digits = name.removeprefix(UPLOAD)
    file = shelf.shelf().get(digits) if len(digits) == NAME_DIGITS else None
    try:
        if file is None:
            raise MeasurementError(name, f"the uploaded replay is gone; load it again. {shelf.BOUNDS}")
        mine[name] = (file.name, parse_measured_upload(file.data, file.name, choice.trace))
    except GpusimError as error:
        uploads.say(UPLOADER, str(error))


def summary(measured: Measured, simulated_ns: int, why_not: str) -> None:
    """Show measured and simulated numbers, with the error unless `why_not` gives a reason against comparing them."""
    measurement = measured.measurement
    compared = "another run than the measured one"
    if not why_not and measured.makespan_ns:
        compared = f"{simulated_ns / measured.makespan_ns - 1:+.1%} against measured"
    numbers = [("Simulated", format_ns(simulated_ns), compared)]
    if measurement is not None:
        profiled = f"profiled: {format_ns(measured.profiled_ns)}" if measured.profiled_ns else "not profiled"
        about = view.plain(shortened(f"{measurement.gpu.name}, {measurement.date}"))
        numbers += [
            ("Measured", format_ns(measurement.schedule.median_ns), profiled),
            (
                "Measured speed-up",
                f"{measurement.speedup:.2f}x",
                f"sequential {format_ns(measurement.sequential.median_ns)}",
            ),
            ("Outputs", measurement.outputs_text, about),
        ]
    else:
        numbers.append(("Measured, profiled", format_ns(measured.makespan_ns), view.plain(shortened(measured.title))))
    view.metrics(*numbers)
    if why_not:
        st.caption(f"No error is given: {view.plain(why_not)}.")
