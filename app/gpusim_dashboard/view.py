"""Pieces of pages: figures in the session's theme, the mark of an uncalibrated model, the command for the same."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Callable
from typing import Any

import streamlit as st

from gpusim.errors import GpusimError
from gpusim.hardware.model import HardwareModel
from gpusim.report.figures.theme import DARK, LIGHT, Theme
from gpusim.report.summary import SummaryRow, SummaryVerdict
from gpusim.text import shortened, visible
from gpusim.units import counted, format_ns, format_times_ns
from gpusim_dashboard import lifetime
from gpusim_dashboard.choice import Choice

#: plotly.js loads nothing and sends nothing.
CONFIG = {"displaylogo": False, "showSendToCloud": False, "responsive": True}


EXPLORING = "Running every policy and a short search (the first after an installation compiles the engine: 10 s) ..."
SCHEDULE_NOTE = "best.json is the schedule that the Explore page offers for download."
MARKUP = "\\`*_[]<>$~&|#"
NO_VERDICT = "no-verdict"
#: What Streamlit makes links, emoji, icons and colours of in text where no backslash counts: up to the character before
#: which an empty span, of which nothing is seen, keeps it apart from the rest.
UNESCAPED = re.compile(r":material(?=/)|:[\w+/-]{1,64}(?=[:\[])|https?(?=://)|www(?=\.)|[\w.+-](?=@)", re.IGNORECASE)
APART = ":small[]"
#: Characters of a name that a download's name takes.
MOST_OF_NAME = 100
CLEAR = "rgba(0,0,0,0)"


def plain(text: str) -> str:
    """Text that may come from a file, as it is: no part of it becomes Markdown, a link, an icon or a formula."""
    shown, place, parts = visible(text), 0, []
    for found in UNESCAPED.finditer(shown):
        parts += [_escaped(shown[place : found.end()]), APART]
        place = found.end()
    return "".join([*parts, _escaped(shown[place:])])


def _escaped(text: str) -> str:
    return "".join(f"\\{character}" if character in MARKUP else character for character in text)


def option(name: str) -> str:
    """A name from a file as an option of a control, where no Markdown is read."""
    return shortened(visible(name))


def file_name(*parts: str) -> str:
    """A name for a download: what is no letter, digit, dot, dash or underscore in a part becomes an underscore."""
    return "-".join(re.sub(r"[^\w.-]", "_", part, flags=re.ASCII)[:MOST_OF_NAME].lstrip(".") for part in parts)


def verdict_box(verdict: SummaryVerdict, hardware: HardwareModel) -> None:
    """The verdict, and the ways to run the step with their times; grey where the hardware model is uncalibrated."""
    if not hardware.calibrated:
        with st.container(key=NO_VERDICT):
            st.markdown(
                f":material/help: **No verdict: the model of {plain(hardware.name)} is uncalibrated.** It comes from "
                f"data sheets, not from measurements on that GPU. As a trend: {verdict.speedup:.2f}x "
                f"({verdict.low:.2f} to {verdict.high:.2f}) over one CUDA graph."
            )
    elif verdict.worth_it:
        st.success(verdict.text, icon=":material/check_circle:")
    else:
        st.info(verdict.text, icon=":material/do_not_disturb_on:")
    lines = ["| way to run the step | time | over eager |", "|---|--:|--:|"]
    for row, time in zip(verdict.rows, format_times_ns(row.time_ns for row in verdict.rows), strict=True):
        mark = "**" if row.best and hardware.calibrated else ""
        advice = "best as a trend" if row.best and not hardware.calibrated else row.advice
        ratio = "" if row.speedup_over_eager is None else f"{row.speedup_over_eager:.2f}x"
        name = row.label
        if row.what == "eager":  # the others are always predicted
            name = f"eager today ({'measured' if row.measured else 'predicted'})"
        time = time.replace(" ", "\N{NO-BREAK SPACE}")
        told = f": {advice}" if advice else ""
        lines.append(f"| {mark}{name}{mark}{told} | {mark}{time}{mark} | {mark}{ratio}{mark} |")
    st.markdown("\n".join(lines))
    st.page_link("views/limits.py", label="Why not more? See Limits", icon=":material/speed:")


def passed_over(row: SummaryRow | None) -> None:
    """Why a searched schedule that is predicted faster is not recommended, where there is one."""
    if row is not None:
        st.caption(
            f"The best searched schedule ({row.policy}, {counted(row.streams, 'stream')}) is predicted at "
            f"{format_ns(row.makespan_ns)}, {row.speedup:.2f}x, and still not recommended: its lead is within what "
            "predictions of searched schedules overrate. Measure it on your GPU with `gpusim explore --measure`."
        )


def broken_address(problems: list[str]) -> str:
    """What is wrong with an address, as one text of Markdown."""
    parts = "\n".join(f"- {plain(problem)}" for problem in problems)
    return f"Parts of this address cannot be followed; defaults are shown in their place.\n\n{parts}"


def download(cell: Any, label: str, make: Callable[[], bytes | str], name: str, mime: str) -> None:
    """A button for a file that is made when it is asked for.

    A click does not run the page again: the browser would then ask for a file of the run before, which is gone.
    """
    cell.download_button(label, make, name, mime, on_click="ignore", width="stretch")


def explained(draw: Callable[[], None]) -> Callable[[], None]:
    """A part of a page that runs by itself: the user's mistakes are one line there, too."""

    @functools.wraps(draw)
    def drawn() -> None:
        try:
            with lifetime.script():
                draw()
        except GpusimError as error:
            st.error(plain(str(error)), icon=":material/error:")

    return drawn


def theme() -> Theme:
    """The theme of figures that goes with the page's."""
    return DARK if st.context.theme.type == "dark" else LIGHT


def show(figure: Any, key: str, **options: Any) -> Any:
    """One figure, as wide as there is room, on the page's own background."""
    # From the left edge: where the labels of an axis are long, there is no room for a title over the plot alone.
    figure.update_layout(paper_bgcolor=CLEAR, plot_bgcolor=CLEAR, title={"x": 0.0, "xref": "container"})
    return st.plotly_chart(figure, width="stretch", theme=None, key=key, config=CONFIG, **options)


def heading(choice: Choice, warn: bool = True) -> None:
    """What a page is about; and, unless the page says so in another way, that the hardware model is uncalibrated."""
    model = choice.trace.model
    st.markdown(
        f"**{plain(shortened(choice.trace.name))}**: {plain(shortened(model.network))}, {model.mode}, "
        f"batch {model.batch}, {model.dtype}, on "
        f"**{plain(choice.hardware.label)}**"
    )
    if warn:
        uncalibrated(choice.hardware)


def metric(cell: Any, label: str, value: str, note: str = " ") -> None:
    """A number with a note under it that is no change, up or down."""
    cell.metric(label, value, note, delta_color="off", delta_arrow="off")


#: Number format of a table's column by the unit that its name ends with.
FORMATS = {
    ", us": "%.1f",
    ", MiB": "%.2f",
    ", x": "%.2f",
    "error, %": "%+.1f",
    "share, %": "%.1f",
    "mean": "%.2f",
}


def table(rows: list[dict[str, Any]], **options: Any) -> None:
    """A table; numbers stay numbers, so that a click on a column sorts them."""
    columns = {
        name: st.column_config.NumberColumn(format=text)
        for name in (rows[0] if rows else ())
        for unit, text in FORMATS.items()
        if name.endswith(unit)
    }
    shown = [{key: option(cell) if isinstance(cell, str) else cell for key, cell in row.items()} for row in rows]
    st.dataframe(shown, hide_index=True, column_config=columns, **options)


def uncalibrated(hardware: HardwareModel) -> None:
    """Say so where a hardware model is uncalibrated."""
    if not hardware.calibrated:
        st.warning(
            f"The model of {plain(hardware.name)} is uncalibrated: it comes from data sheets, not from measurements on "
            "that GPU. Read what it gives as a trend.",
            icon=":material/warning:",
        )


def command(*words: str, then: str = "") -> None:
    """The command line that gives what the page shows."""
    st.caption("The same on the command line:")
    text = " ".join(["gpusim", *map(shlex.quote, words)]) + (f" {then}" if then else "")
    st.code(visible(text), language="sh", wrap_lines=True)


def hardware_words(choice: Choice) -> list[str]:
    """`--hw NAME`."""
    return ["--hw", choice.hardware.name]
