"""Timeline: the streams of one schedule, what the GPU was doing, and why a kernel did not start sooner."""

from typing import get_args

import streamlit as st
from gpusim_dashboard import measured, results, view
from gpusim_dashboard.choice import current

from gpusim.plan.tasks import LaunchMode
from gpusim.report.figures.timeline import timeline_figure
from gpusim.report.lanes import whole
from gpusim.report.measured import not_comparable
from gpusim.report.perfetto import run_from_timeline
from gpusim.report.waiting import waiting_text
from gpusim.search.critical import critical_path
from gpusim.units import NS_PER_US, format_ns

choice = current()
view.heading(choice)
mode: LaunchMode = st.radio(
    "Launched by", get_args(LaunchMode), horizontal=True, help="In one CUDA graph, or kernel by kernel from the host."
)
with st.spinner(view.EXPLORING):
    shown = results.shown_of(choice)
with st.spinner("Simulating ..."):
    timeline = results.timeline_of(choice, shown.schedule, mode)
graph = results.graph_of(choice).choosing(shown.schedule.variants)
measured_name, replayed = measured.choose(choice, shown)
if replayed is not None:
    why_not = not_comparable(replayed, choice.hardware, mode, shown.policy, shown.used)
    measured.summary(replayed, timeline.makespan_ns, why_not)
run_ns = whole(replayed.run)[1] if replayed is not None and replayed.run is not None else 0
timed_ns = replayed.timed_ns if replayed is not None else None
end_us = max(1, -(-max(timeline.makespan_ns, run_ns, timed_ns or 0) // 1000))
window_us = st.slider("Window, us", 0, end_us, (0, end_us), key=f"window of {choice.content} {end_us}")
window_ns = (window_us[0] * 1000, max(window_us[1], window_us[0] + 1) * 1000)
title = f"simulated: {shown.label}"
figure = timeline_figure(
    timeline,
    graph.trace,
    graph.hardware,
    title=title,
    measured=replayed.run if replayed is not None else None,
    measured_ns=timed_ns,
    window_ns=window_ns,
    theme=view.theme(),
)
event = view.show(figure, "timeline", on_select="rerun", selection_mode="points")

left, right = st.columns(2)
with left:
    st.subheader("Why not sooner?")
    tasks = [point.get("customdata") for point in event.selection.points]
    tasks = [task[0] if isinstance(task, list) else task for task in tasks]
    chosen = next((int(task) for task in tasks if task is not None and int(task) >= 0), None)
    if chosen is None or chosen >= len(timeline.plan):
        st.markdown(
            "Click a bar to see why that kernel did not start sooner. Where bars stand for several kernels, narrow the "
            "window first."
        )
    else:
        run = run_from_timeline(timeline, graph.trace, title, graph.hardware)
        st.markdown(waiting_text(timeline, graph.trace, graph.hardware, run, chosen))
with right:
    st.subheader("Critical path")
    totals = critical_path(timeline, graph.hardware).totals_ns()
    view.table(
        [
            {
                "on the critical path": name,
                "time, us": time / NS_PER_US,
                "share, %": 100 * time / max(1, timeline.makespan_ns),
            }
            for name, time in totals.items()
        ]
    )
    st.caption(f"Along the critical path these add up to {format_ns(timeline.makespan_ns)}.")
words = ["--launch", mode, "--html", "timeline.html"]
if replayed is not None:
    words += ["--measured", measured_name]
view.command("simulate", choice.words, *view.hardware_words(choice), *shown.words, *words)
if shown.searched:
    st.caption(view.SCHEDULE_NOTE)
