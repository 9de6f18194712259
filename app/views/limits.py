"""Limits: the reason why the GPU does not run more at once, and the figures behind it."""

import streamlit as st
from gpusim_dashboard import charts, html, results, view
from gpusim_dashboard.choice import current

from gpusim.report.delays import causes_sentence
from gpusim.report.figures.limits import parallelism_figure
from gpusim.report.limits_table import limits_csv
from gpusim.report.limits_text import conclusion
from gpusim.report.waterfall import limit_rows
from gpusim.units import NS_PER_MS, counted, format_ns

choice = current()
view.heading(choice)
with st.spinner(view.EXPLORING):
    shown = results.shown_of(choice)
    explained = results.explained_of(choice, shown.schedule)
best_ns = explained.timeline.makespan_ns
causes = causes_sentence(explained)
early = st.empty()
early.markdown(view.plain(causes))
with st.spinner("Switching limits on, one after the other ..."):
    analysed = results.limits_of(choice)
early.empty()
step = analysed.scopes[-1]
parallelism = step.parallelism
if choice.searchable:
    html.answer("no", conclusion(step), causes)
else:
    html.answer(
        "trend",
        f"With the order that was observed, no schedule is faster than {format_ns(step.gap.bound_ns)}.",
        "A profile does not say which operations need each other: dependencies below are its order on streams, and a "
        "capture may have fewer.",
        causes,
    )
width = f"{'' if parallelism.width_exact else 'at least '}{parallelism.width}"
view.metrics(
    ("Ops at once, mean", f"{parallelism.mean:.2f}", "dependencies alone"),
    ("Ops at once, most", f"{parallelism.maximum}", "dependencies alone"),
    ("Independent ops", width, "at most"),
    ("Best list schedule", format_ns(step.best_ns), f"{step.speedup:.2f}x, {counted(step.streams, 'stream')}"),
    (
        "Recommended" if shown.recommended else "Shown",
        format_ns(best_ns),
        f"{shown.policy}, {counted(shown.used, 'stream')}",
    ),
)
st.header("Where the potential goes", anchor=False)
st.caption(
    f"From the longest op to the sequential graph: what each limit costs when switched on after those above, on at "
    f"most {counted(analysed.streams, 'stream')}."
)
charts.waterfall(limit_rows(step), "Where the potential goes", "of what there is to win")
if box := view.folded("Ops that could run at once, over the step", "ops at once"):
    with box:
        view.show(parallelism_figure(analysed, view.theme()), "parallelism")
if box := view.folded("By phase, and as numbers", "by phase"):
    with box:
        for scope in analysed.scopes[:-1]:
            st.subheader(f"{scope.name}: {scope.speedup:.2f}x", anchor=False)
            charts.waterfall(limit_rows(scope), f"Where the potential of {scope.name} goes", "of what there is to win")
        view.table(
            [
                {
                    "scope": scope.name,
                    "ops": scope.ops,
                    "in a row, ms": scope.parallelism.work_ns / NS_PER_MS,
                    "chain, ms": scope.parallelism.span_ns / NS_PER_MS,
                    "at once, mean": scope.parallelism.mean,
                    "at once, most": scope.parallelism.maximum,
                    "independent": scope.parallelism.width,
                    "graph, ms": scope.sequential_ns / NS_PER_MS,
                    "best, ms": scope.best_ns / NS_PER_MS,
                    "streams": scope.streams,
                    "speed-up, x": scope.speedup,
                }
                for scope in analysed.scopes
            ],
            "Parallelism and best schedules of each phase",
        )
view.download(
    st, "Losses (CSV)", lambda: limits_csv(analysed), view.file_name(analysed.trace, "limits.csv"), "text/csv"
)
words = ["--streams", str(choice.streams), "--html", "limits.html"]
view.command("limits", choice.words, *view.hardware_words(choice), *words)
