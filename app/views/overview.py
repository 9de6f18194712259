"""Overview: what the step is, the verdict, the bounds, where time and gain come from."""

import streamlit as st
from gpusim_dashboard import results, view
from gpusim_dashboard.choice import current

from gpusim.report.figures.breakdown import breakdown_figure
from gpusim.report.figures.explored import bounds_figure, gain_figure
from gpusim.units import counted, format_bytes, format_ns

choice = current()
view.heading(choice)
top = st.container()

provenance = choice.trace.provenance
found = results.breakdown_of(choice)
st.caption(
    view.plain(
        f"{len(choice.trace.ops):,} ops, {found.kernels:,} kernels; captured on {provenance.gpu.name} on "
        f"{provenance.date} with torch {provenance.gpu.torch}, CUDA {provenance.gpu.cuda}"
    )
)
middle = st.container()
title = f"{choice.trace.name} on {choice.hardware.label}"
view.show(breakdown_figure(found, title, view.theme()), "breakdown")

with top, st.spinner(view.EXPLORING):
    explored = results.explored_of(choice)
verdict, best, bounds = explored.verdict, explored.best, explored.bounds
with top:
    box = st.success if verdict.worth_it else st.info
    box(verdict.text, icon=":material/check_circle:" if verdict.worth_it else ":material/do_not_disturb_on:")
    low_ns, high_ns = choice.hardware.interval_ns(best.makespan_ns, best.streams)
    largest_ns, largest = bounds.largest
    cells = st.columns(5)
    view.metric(
        cells[0], "Predicted speed-up", f"{verdict.speedup:.2f}x", f"90 %: {verdict.low:.2f}x to {verdict.high:.2f}x"
    )
    view.metric(cells[1], "Recommended", format_ns(best.makespan_ns), f"{format_ns(low_ns)} to {format_ns(high_ns)}")
    view.metric(cells[2], "Sequential graph", format_ns(explored.sequential_ns), "1.00x")
    view.metric(cells[3], "Largest bound", format_ns(largest_ns), largest)
    view.metric(
        cells[4], "Peak memory", format_bytes(best.peak_bytes), f"{best.policy}, {counted(best.streams, 'stream')}"
    )
with middle:
    view.show(gain_figure(explored, view.theme()), "gain")
    view.show(bounds_figure(explored, view.theme()), "bounds")
view.command(
    "explore",
    choice.words,
    *view.hardware_words(choice),
    "--streams",
    str(choice.streams),
    *results.search_words(choice),
)
