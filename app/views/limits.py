"""Limits: how much could run at once, and what keeps the GPU from it."""

import streamlit as st
from gpusim_dashboard import results, view
from gpusim_dashboard.choice import current

from gpusim.report.figures.limits import limits_figure
from gpusim.report.limits_table import limits_csv
from gpusim.report.limits_text import limits_sentences
from gpusim.units import NS_PER_US, counted, format_ns

choice = current()
view.heading(choice)
with st.spinner("Switching limits on, one after the other ..."):
    found = results.limits_of(choice)
step = found.scopes[-1]
parallelism = step.parallelism
with st.spinner(view.EXPLORING):
    best = results.explored_of(choice).best
st.markdown(" ".join(limits_sentences(step)))
cells = st.columns(5)
view.metric(cells[0], "Ops at once, mean", f"{parallelism.mean:.2f}", "T1 / T-inf")
view.metric(cells[1], "At most", f"{parallelism.maximum}", "in the ASAP schedule")
width = f"{'' if parallelism.width_exact else 'at least '}{parallelism.width}"
view.metric(cells[2], "Width", width, "independent ops")
view.metric(
    cells[3], "Best list schedule", format_ns(step.best_ns), f"{step.speedup:.2f}x, {counted(step.streams, 'stream')}"
)
view.metric(cells[4], "Recommended", format_ns(best.makespan_ns), f"{best.policy}, {counted(best.streams, 'stream')}")
view.show(limits_figure(found, view.theme()), "limits")
view.table(
    [
        {
            "scope": scope.name,
            "ops": scope.ops,
            "T1, us": scope.parallelism.work_ns / NS_PER_US,
            "T-inf, us": scope.parallelism.span_ns / NS_PER_US,
            "mean": scope.parallelism.mean,
            "max": scope.parallelism.maximum,
            "width": scope.parallelism.width,
            "sequential, us": scope.sequential_ns / NS_PER_US,
            "best, us": scope.best_ns / NS_PER_US,
            "streams": scope.streams,
            "speed-up, x": scope.speedup,
        }
        for scope in found.scopes
    ]
)
view.download(st, "Losses (CSV)", lambda: limits_csv(found), view.file_name(found.trace, "limits.csv"), "text/csv")
words = ["--streams", str(choice.streams), "--html", "limits.html"]
view.command("limits", choice.words, *view.hardware_words(choice), *words)
