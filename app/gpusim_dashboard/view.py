"""Parts of pages: figures in the session's theme, tables, downloads, and the equivalent command line."""

from __future__ import annotations

import functools
import re
import shlex
import time
from collections.abc import Callable, Iterable
from html import unescape
from typing import TYPE_CHECKING, Any

import streamlit as st

import gpusim
from gpusim.errors import GpusimError
from gpusim.report.summary import Summary
from gpusim.text import shortened, visible
from gpusim.units import counted, format_ns
from gpusim_dashboard import html, lifetime
from gpusim_dashboard.choice import Choice

if TYPE_CHECKING:
    from gpusim.report.figures.theme import Theme
    from gpusim_dashboard.results import Shown

#: plotly.js loads and sends nothing.
CONFIG = {"displaylogo": False, "showSendToCloud": False, "responsive": True}


EXPLORING = "Running every policy and a short search (the first after an installation compiles the engine: 10 s) ..."
SIMULATING = "Simulating ..."
#: Time that the server needs to send what was drawn while no page computes.
SENDING_S = 0.04
SCHEDULE_NOTE = "best.json is the schedule that the Search page offers for download."
#: Why a profile has no answer.
NO_TENSORS = "It has kernels and no tensors. Capture the step, and its memory is known before it runs."
NO_DEPENDENCIES = (
    "It does not say which operations need each other, so no other order can be tried. Import it with the run's "
    "execution trace, or capture the step."
)
MARKUP = "\\`*_[]<>$~&|#"
#: Text that Streamlit turns into links, emoji, icons and colours and that no backslash escapes: up to the character
#: before which an empty, invisible span separates it from the rest.
UNESCAPED = re.compile(r":material(?=/)|:[\w+/-]{1,64}(?=[:\[])|https?(?=://)|www(?=\.)|[\w.+-](?=@)", re.IGNORECASE)
APART = ":small[]"
#: Most characters of a name in a download's file name.
MOST_OF_NAME = 100
CLEAR = "rgba(0,0,0,0)"
#: Plotly's dashes as characters: lines of one colour differ by them alone.
DASHES = {"dot": "┈", "dash": "╌"}
#: Plotly's marker symbols as characters.
SHAPES = {
    "circle": "●",
    "diamond": "◆",
    "square": "■",
    "triangle-up": "▲",
    "cross": "✚",
    "star": "★",
    "triangle-down": "▼",
    "hexagon": "⬢",
    "x": "✖",
    "pentagon": "⬟",
    "bowtie": "⧓",
    "hourglass": "⧗",
    "triangle-left": "◀",
    "triangle-right": "▶",
    "diamond-tall": "⧫",
    "star-square": "✦",
    "hexagram": "✶",
}
#: Width of a number with its label, in pixels: two fit side by side on a phone.
METRIC = 155
#: A smaller share is called less than this.
SMALLEST = 0.001
#: Margin above a plot without a title, and that of a figure with one, in pixels.
TOP, DEFAULT_TOP = 24, 100
#: Margin to the right of a plot whose legend was removed.
RIGHT = 60


def send() -> None:
    """Let the server send what was drawn, the page's answer, before the rest, which takes longer.

    Others' answers come before this page's rest, too.
    """
    time.sleep(SENDING_S)
    lifetime.watch().let_others_answer()


def plain(text: str) -> str:
    """Escape text that may come from a file, so that no part of it becomes Markdown, a link, an icon or a formula."""
    shown, place, parts = visible(text), 0, []
    for match in UNESCAPED.finditer(shown):
        parts += [_escaped(shown[place : match.end()]), APART]
        place = match.end()
    return "".join([*parts, _escaped(shown[place:])])


def _escaped(text: str) -> str:
    return "".join(f"\\{character}" if character in MARKUP else character for character in text)


def option(name: str) -> str:
    """A name from a file as an option of a control, which reads no Markdown."""
    return shortened(visible(name))


def file_name(*parts: str) -> str:
    """A file name for a download; characters other than letters, digits, dots, dashes and underscores become
    underscores.
    """
    return "-".join(re.sub(r"[^\w.-]", "_", part, flags=re.ASCII)[:MOST_OF_NAME].lstrip(".") for part in parts)


def passed_over(summary: Summary) -> None:
    """Explain why a searched schedule that is predicted faster is not recommended, if there is one."""
    row = summary.passed_over
    if row is not None:
        st.caption(
            f"The best searched schedule ({row.policy}, {counted(row.streams, 'stream')}) is predicted at "
            f"{format_ns(row.makespan_ns)}, {row.speedup:.2f}x, and still not recommended: "
            f"{summary.passed_over_reason}. Measure it on your GPU with `gpusim explore --measure`."
        )


def broken_address(problems: list[str]) -> str:
    """The problems of an address as Markdown."""
    parts = "\n".join(f"- {plain(problem)}" for problem in problems)
    return f"Parts of this address cannot be followed; defaults are shown in their place.\n\n{parts}"


def download(cell: Any, label: str, make: Callable[[], bytes | str], name: str, mime: str) -> None:
    """A button for a file that is made on request.

    A click does not rerun the page: the browser would then request a file of the previous run, which is gone.
    """
    cell.download_button(label, make, name, mime, on_click="ignore", width="stretch")


def explained(draw: Callable[[], None]) -> Callable[[], None]:
    """Wrap a fragment of a page, so that its user errors are shown in one line, too."""

    @functools.wraps(draw)
    def drawn() -> None:
        try:
            with lifetime.script():
                draw()
        except GpusimError as error:
            st.error(plain(str(error)), icon=":material/error:")

    return drawn


def dark() -> bool:
    """Whether the page uses the dark theme."""
    return bool(st.context.theme.type == "dark")


def theme() -> Theme:
    """The theme of figures that matches the page's."""
    from gpusim.report.figures.theme import DARK, LIGHT  # here: it brings plotly

    return DARK if dark() else LIGHT


def show(figure: Any, key: str, words: str = "", **options: Any) -> Any:
    """Show one figure over the full width, on the page's background.

    Its title and legend become text of the page, which wraps on a phone. `words` is the alternative text, by default
    the title.
    """
    title, subtitle = _title_of(figure)
    if title:
        st.header(plain(title), anchor=False)
    if subtitle:
        st.caption(plain(subtitle))
    entries = legend_of(figure)
    if entries:
        html.show(html.legend(entries))
    figure.update_layout(
        paper_bgcolor=CLEAR,
        plot_bgcolor=CLEAR,
        title={"text": ""},
        showlegend=False,
        dragmode=options.pop("drag", False),
    )
    if entries and (figure.layout.margin.r or 0) > RIGHT:
        figure.update_layout(margin={"r": RIGHT})
    if figure.layout.margin.t is None or figure.layout.margin.t > TOP:
        shorter = (figure.layout.margin.t or DEFAULT_TOP) - TOP
        if figure.layout.height:
            figure.update_layout(height=figure.layout.height - shorter)
        figure.update_layout(margin={"t": TOP})
    return st.plotly_chart(
        figure, width="stretch", theme=None, key=key, config=CONFIG, alt=words or title or None, **options
    )


def _title_of(figure: Any) -> tuple[str, str]:
    """Title and subtitle of a figure as plain text."""
    first, _, second = (figure.layout.title.text or "").partition("<br>")
    return unescape(re.sub(r"<[^>]*>", "", first)), unescape(re.sub(r"<[^>]*>", "", second))


def legend_of(figure: Any) -> list[tuple[str, str] | tuple[str, str, str]]:
    """The entries of a figure's legend if it has several: name, colour, and shape of points or of a broken line."""
    if figure.layout.showlegend is False:
        return []
    entries: dict[str, tuple[str, str] | tuple[str, str, str]] = {}
    for trace in figure.data:
        marker, line = getattr(trace, "marker", None), getattr(trace, "line", None)
        colour = getattr(marker, "color", None) or getattr(line, "color", None)
        if trace.name and trace.showlegend is not False and isinstance(colour, str):
            name = unescape(trace.name)
            shape = SHAPES.get(str(getattr(marker, "symbol", ""))) or DASHES.get(str(getattr(line, "dash", "")))
            entries.setdefault(name, (name, colour, shape) if shape else (name, colour))
    return list(entries.values()) if len(entries) > 1 else []


def folded(label: str, key: str) -> Any:
    """A box that opens on a click; None while it is closed, so that its content is made only on demand."""
    box = st.expander(label, key=key, on_change="rerun")
    return box if box.open else None


def heading(choice: Choice, warn: bool = True) -> None:
    """Show the step, hardware and streams of a page and, with `warn`, a note if the hardware model is uncalibrated."""
    model = choice.trace.model
    mode = "training" if model.mode == "train" else "inference"
    about = f"{model.network}, {mode}, batch {model.batch}, {model.dtype}"
    if (source := choice.trace.provenance.imported_from) is not None:  # a profile has no network, batch or dtype
        about = f"a profile of {source.writer}, dependencies of quality '{source.dependency_quality}'"
    if choice.trace.provenance.estimated:
        about += ", kernel times estimated"
    html.show(
        f'<p class="g-step"><strong>{html.text(choice.trace.name)}</strong>: {html.text(about)}, on '
        f"<strong>{html.text(choice.hardware.label)}</strong></p>"
    )
    if warn:
        uncalibrated(choice.hardware)


def metrics(*numbers: tuple[str, str, str]) -> None:
    """Show numbers with labels and notes, as many in a row as fit."""
    with st.container(horizontal=True, gap="small"):
        for label, value, note in numbers:
            st.metric(label, value, note or " ", delta_color="off", delta_arrow="off", width=METRIC)


#: Number format of a table's column, by the unit at the end of its name.
FORMATS = {
    ", us": "%.1f",
    ", MiB": "%.2f",
    ", x": "%.2f",
    "error, %": "%+.1f",
    ", ms": "%.3f",
    "share, %": "%.1f",
    "mean": "%.2f",
}


def table(rows: list[dict[str, Any]], words: str = "", **options: Any) -> None:
    """Show a table whose columns sort as numbers. `words` is its name."""
    columns = {
        name: st.column_config.NumberColumn(format=text)
        for name in (rows[0] if rows else ())
        for unit, text in FORMATS.items()
        if name.endswith(unit)
    }
    shown = [{key: option(cell) if isinstance(cell, str) else cell for key, cell in row.items()} for row in rows]
    st.dataframe(shown, hide_index=True, column_config=columns, alt=words or None, **options)


def percent(share: float) -> str:
    """A share of 0 to 1, where something very small is not nothing."""
    return "less than 0.1%" if 0.0 < share < SMALLEST else f"{share:.1%}"


def uncalibrated(hardware: gpusim.HardwareModel) -> None:
    """Show a note if a hardware model is uncalibrated."""
    if not hardware.calibrated:
        st.warning(
            f"The model of {plain(hardware.name)} is uncalibrated: it comes from data sheets, not from measurements on "
            "that GPU. Read what it gives as a trend.",
            icon=":material/warning:",
        )


def command(*words: str) -> None:
    """Show the command line that gives the page's results."""
    commands(words)


def commands(*lines: Iterable[str]) -> None:
    """Show the command lines that give the page's results, if there are any."""
    if not lines:
        return
    st.caption("The same on the command line:")
    text = "\n".join(visible(" ".join(["gpusim", *map(shlex.quote, words)])) for words in lines)
    html.code("Command", text)


def simulate_command(choice: Choice, shown: Shown, *more: str) -> None:
    """Show the command that simulates a schedule; none gives the order of a profile."""
    if shown.observed:
        return
    command("simulate", choice.words, *hardware_words(choice), *shown.words, *more)
    if shown.searched:
        st.caption(SCHEDULE_NOTE)


def unanswered(why: str) -> None:
    """Say that a profile has no answer to the page's question, and end the page."""
    html.answer("trend", "This profile does not say.", why)
    st.page_link(st.session_state.pages["verdict"], label="What it says", icon=":material/arrow_forward:")
    st.stop()


def hardware_words(choice: Choice) -> list[str]:
    """The option `--hw NAME`."""
    return ["--hw", choice.hardware.name]
