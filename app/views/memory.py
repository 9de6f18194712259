"""Memory: bytes over time, live tensors at the peak, and time against memory."""

import streamlit as st
from gpusim_dashboard import html, results, view
from gpusim_dashboard.choice import current

from gpusim.report.figures.breakdown import front_figure
from gpusim.report.figures.comparisons import memory_figure
from gpusim.report.live import by_role, peak
from gpusim.units import MIB, NS_PER_US, format_bytes, format_ns

SHOWN = 200
choice = current()
view.heading(choice)
if not choice.trace.tensors:
    view.unanswered(view.NO_TENSORS)
with st.spinner(view.EXPLORING):
    shown = results.shown_of(choice)
with st.spinner("Simulating ..."):
    timeline = results.times_of(choice, shown.schedule)
    alone = results.times_of(choice, "sequential")
capacity = choice.hardware.memory.dram_bytes
share = f"{view.percent(timeline.peak_bytes / capacity)} of the {format_bytes(capacity)} of {choice.hardware.label}"
more = (
    f"One stream needs {format_bytes(alone.peak_bytes)}. Gradients and outputs count from the start of the step here; "
    "Memory plans counts them once they are made, and workspaces, too."
)
if timeline.peak_bytes <= capacity:
    html.answer("yes", f"Yes. At its peak the step needs {format_bytes(timeline.peak_bytes)}: {share}.", more)
else:
    html.answer("no", f"No. At its peak the step needs {format_bytes(timeline.peak_bytes)}: {share}.", more)
st.page_link(
    st.session_state.pages["memory-plans"],
    label="How to need less memory",
    icon=":material/arrow_forward:",
)
title = f"Memory over time: {choice.trace.name} on {choice.hardware.label}"
label = shown.label
runs = [(label, timeline)] if shown.policy == "sequential" else [("sequential", alone), (label, timeline)]
view.show(memory_figure(runs, view.theme(), title), "memory")

at_peak = peak(timeline, results.step_of(choice).graph.choosing(shown.schedule.variants).trace)
st.header(
    f"In memory at the peak of {label}: {format_bytes(at_peak.bytes)} at {format_ns(at_peak.time_ns)}", anchor=False
)
roles = by_role(at_peak.live)
sizes = [f"{role.replace('_', ' ')} **{format_bytes(size)}**" for role, size in roles.items()]
# Keeps a number and its unit on one line.
st.markdown(", ".join(size.replace(" ", "\N{NO-BREAK SPACE}") for size in sizes))
view.table(
    [
        {
            "size, MiB": live.bytes / MIB,
            "role": live.role.replace("_", " "),
            "name": live.name,
            "layer": live.layer,
            "made in": live.phase,
            "from, us": live.from_ns / NS_PER_US,
            "until, us": live.until_ns / NS_PER_US,
        }
        for live in at_peak.live[:SHOWN]
    ],
    "Tensors in memory at the peak",
    height=320,
)
if len(at_peak.live) > SHOWN:
    rest = at_peak.live[SHOWN:]
    st.caption(f"The {SHOWN} largest; {len(rest)} more hold {format_bytes(sum(live.bytes for live in rest))}.")
if choice.searchable and (box := view.folded("Time against memory of every schedule", "time against memory")):
    with box:
        with st.spinner(view.EXPLORING):
            explored = results.explored_of(choice)
        name = f"{choice.trace.name} on {choice.hardware.label}"
        view.show(front_figure(explored.rows, name, view.theme()), "front")
view.simulate_command(choice, shown)
