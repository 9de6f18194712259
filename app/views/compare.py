"""Compare: numbers and timelines of two steps, GPUs or schedules, one above the other."""

import streamlit as st
from gpusim_dashboard import choice as choosing
from gpusim_dashboard import html, results, view
from gpusim_dashboard.address import Settings
from gpusim_dashboard.choice import Choice
from gpusim_dashboard.controls import hardware_label, labels, policy_label, trace_label
from gpusim_dashboard.html import Head
from gpusim_dashboard.results import Shown

import gpusim
from gpusim.api import dashboard
from gpusim.defaults import DEFAULT_STREAMS, DEFAULT_TRACE, RECOMMENDED
from gpusim.report.figures.compared import Compared, compared_figure
from gpusim.report.figures.timeline import Look
from gpusim.units import counted, format_ns, format_peak, format_times_ns

state = st.session_state
settings = Settings("compare")
steps = [*gpusim.list_traces(), *state.uploads]


def side(mark: str, name: str, policy: str) -> Choice:
    """Draw the controls of one side in a row; their names in the address begin with `mark`."""
    cells = st.columns([3, 2, 3, 2], vertical_alignment="bottom")
    usual = state.trace if state.trace in steps else DEFAULT_TRACE
    trace = settings.select(
        cells[0], f"Step of {name}", f"{mark}step", steps, usual, format_func=labels(steps, trace_label)
    )
    home = state.hw if trace == state.trace else dashboard.home_hardware(choosing.trace_of(trace)[1])
    hw = settings.select(
        cells[1], f"GPU of {name}", f"{mark}on", gpusim.list_hardware(), home, format_func=hardware_label
    )
    chosen = settings.select(
        cells[2], f"Schedule of {name}", f"{mark}by", choosing.policies(), policy, format_func=policy_label
    )
    streams = settings.slider(
        cells[3], f"Streams of {name}, at most", f"{mark}most", 1, choosing.STREAMS_OFFERED, DEFAULT_STREAMS
    )
    return choosing.chosen(trace, hw, chosen, streams)


# Uploads that the address names and this session has not opened.
for text in (settings.texts.get("a_step", ""), settings.texts.get("b_step", "")):
    if text.startswith(choosing.UPLOAD) and text not in steps:
        choosing.trace_of(text)
        steps.append(text)
one = side("a_", "A", "sequential")
other = side("b_", "B", RECOMMENDED)
settings.finish()


def simulated(choice: Choice) -> tuple[Shown, gpusim.Timeline]:
    """Return the schedule and the timeline of a side."""
    shown = results.shown_of(choice)
    return shown, results.timeline_of(choice, shown.schedule)


with st.spinner(view.EXPLORING):
    (first, before), (second, after) = simulated(one), simulated(other)
times = (before.makespan_ns, after.makespan_ns)
samples = tuple(time_ns / each.trace.model.batch for time_ns, each in zip(times, (one, other), strict=True))
a, b = format_times_ns(samples)
if samples[0] == samples[1]:
    said = f"Both take {a} a sample."
else:
    faster, by = ("B", samples[0] / samples[1]) if samples[1] < samples[0] else ("A", samples[1] / samples[0])
    said = f"{faster} is {by:.2f}x as fast: A takes {a} a sample, B {b}."
html.answer("no", said)


def row(name: str, choice: Choice, shown: Shown, timeline: gpusim.Timeline, time: str, sample: str) -> tuple[str, ...]:
    """The table row of a side."""
    about = f"{choice.trace.name} on {choice.hardware.label}"
    label = f"{shown.policy}, {counted(shown.used, 'stream')}"
    return (
        f"{name}: {html.text(about)}{html.small(label)}",
        time.rpartition(" ")[0],
        sample.rpartition(" ")[0],
        format_peak(timeline.peak_bytes),
        f"{len(timeline.plan.tasks):,}",
    )


whole = format_times_ns(times)
heads = (
    Head("side"),
    Head(f"step, {whole[0].rpartition(' ')[2]}", True),
    Head(f"a sample, {a.rpartition(' ')[2]}", True),
    Head("peak memory", True),
    Head("kernels", True),
)
rows = [
    (row("A", one, first, before, whole[0], a), samples[0] < samples[1]),
    (row("B", other, second, after, whole[1], b), samples[1] < samples[0]),
]
html.table("The two sides", heads, rows)
same = one.content == other.content
if same:
    moved = sum(x != y for x, y in zip(first.schedule.streams, second.schedule.streams, strict=True))
    st.caption(f"The same step: {moved} of {len(first.schedule.streams)} ops are on another stream.")
view.uncalibrated(one.hardware)
if other.hardware.name != one.hardware.name:
    view.uncalibrated(other.hardware)

runs = []
for name, choice, shown, timeline in (("A", one, first, before), ("B", other, second, after)):
    graph = results.step_of(choice).graph.choosing(shown.schedule.variants)
    runs.append(Compared(name, timeline, graph.trace, graph.hardware))
st.header("Both timelines, from the same start", anchor=False)
figure = compared_figure(runs, Look(theme=view.theme(), bare=True))
legend = [(each.name, each.marker.color) for each in figure.data if each.type == "bar" and each.showlegend]
html.show(html.legend([*legend, ("critical path", view.theme().ink), ("end of the step", view.theme().loss)]))
words = f"Timelines of A, {format_ns(times[0])}, and B, {format_ns(times[1])}, on one axis"
view.show(figure, "compared", words, drag="zoom")
view.commands(
    *(
        ["simulate", choice.words, *view.hardware_words(choice), *shown.words]
        for choice, shown in ((one, first), (other, second))
        if not shown.observed
    )
)
