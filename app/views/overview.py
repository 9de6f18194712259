"""Overview: what the step is, the verdict, the bounds, where time and gain come from."""

import streamlit as st
from gpusim_dashboard import kept, view
from gpusim_dashboard.choice import current

from gpusim.report.breakdown import Breakdown
from gpusim.report.figures.breakdown import breakdown_figure
from gpusim.report.figures.explored import bounds_figure, gain_figure
from gpusim.report.summary import Summary, summarize
from gpusim.units import counted, format_bytes, format_ns

choice = current()
view.heading(choice, warn=False)  # the verdict does
top, about, middle, bottom = (st.container() for _ in range(4))


def show_verdict(found: Summary) -> None:
    """The verdict, its numbers, and what they are made of."""
    verdict, best = found.verdict, found.best
    low_ns, high_ns = choice.hardware.interval_ns(
        best.makespan_ns, best.streams, verdict.may_lose_cache, verdict.other_kernels
    )
    largest_ns, largest = found.largest_bound
    with top:
        view.verdict_box(verdict, choice.hardware)
        cells = st.columns(5)
        interval = f"90 %: {verdict.low:.2f}x to {verdict.high:.2f}x"
        eager = next((row for row in verdict.rows if row.what == "eager"), None)
        source = "predicted" if eager is None or not eager.measured else "measured"
        view.metric(cells[0], "Eager today", "unknown" if eager is None else format_ns(eager.time_ns), source)
        view.metric(
            cells[1], "Recommended", format_ns(best.makespan_ns), f"90 %: {format_ns(low_ns)} to {format_ns(high_ns)}"
        )
        view.metric(cells[2], "Over one CUDA graph", f"{verdict.speedup:.2f}x", interval)
        possible = found.sequential_ns / largest_ns if largest_ns else 1.0
        view.metric(cells[3], "Best possible", f"{possible:.2f}x", f"{format_ns(largest_ns)}, {largest} bound")
        view.metric(
            cells[4], "Peak memory", format_bytes(best.peak_bytes), f"{best.policy}, {counted(best.streams, 'stream')}"
        )
    with middle:
        view.show(gain_figure(found, view.theme()), "gain")
        view.show(bounds_figure(found, view.theme()), "bounds")
        view.passed_over(found.passed_over)


def show_breakdown(found: Breakdown) -> None:
    """What the step is, and where its time goes."""
    provenance = choice.trace.provenance
    about.caption(
        view.plain(
            f"{len(choice.trace.ops):,} ops, {found.kernels:,} kernels; captured on {provenance.gpu.name} on "
            f"{provenance.date} with torch {provenance.gpu.torch}, CUDA {provenance.gpu.cuda}"
        )
    )
    with bottom:
        title = f"{choice.trace.name} on {choice.hardware.label}"
        view.show(breakdown_figure(found, title, view.theme()), "breakdown")


overview = kept.overview_of(choice)
if overview is not None:
    show_verdict(overview[0])
    show_breakdown(overview[1])
else:  # what is there at once first: the rest takes seconds
    from gpusim_dashboard import results

    show_breakdown(results.breakdown_of(choice))
    with top, st.spinner(view.EXPLORING):
        explored = results.explored_of(choice)
    show_verdict(summarize(explored))
words = ["--streams", str(choice.streams), *kept.search_words(choice)]
view.command("explore", choice.words, *view.hardware_words(choice), *words)
