"""Verdict: yes or no, the ways to run the step with what each takes, and what to change."""

import streamlit as st
from gpusim_dashboard import charts, controls, html, kept, results, view
from gpusim_dashboard.choice import current
from gpusim_dashboard.html import Head

import gpusim
from gpusim.api.dashboard import Concurrency
from gpusim.report.advice import (
    OPTIMIZE,
    Way,
    against_fused,
    bound_in_words,
    headline,
    note_on_fused,
    note_without_graph,
    reason,
    ways,
)
from gpusim.report.breakdown import Breakdown
from gpusim.report.code_lines import (
    CAPTURE,
    backend_lines,
    by_hand_lines,
    graph_lines,
    kind_in_words,
    optimize_lines,
    parents_in_words,
    sides_in_words,
)
from gpusim.report.summary import Summary, summarize
from gpusim.report.waterfall import gain_rows
from gpusim.units import counted, format_bytes, format_ns, format_times_ns

BY_HAND = "Streams by hand"
ESTIMATED = "kernel times are estimated; nothing ran on a GPU"
#: Rows of modules that are shown at once.
MOST_ROWS = 6
choice = current()
pages = st.session_state.pages
view.heading(choice, warn=False)  # the verdict does


def answer(summary: Summary, rows: list[Way]) -> None:
    """Yes, no, or a trend; why it is no more; and what fused kernels change about it."""
    said = headline(summary, choice.hardware.calibrated)
    estimated = ["Its kernel times are estimates."] if choice.trace.provenance.estimated else []
    if not choice.hardware.calibrated:
        name = choice.hardware.name
        html.answer(
            "trend",
            said,
            f"No verdict: the model of {name} is uncalibrated. It comes from data sheets, not from measurements on "
            "that GPU.",
        )
    elif summary.verdict.worth_it:
        html.answer("yes", said, against_fused(rows), *estimated)
    else:
        html.answer("no", said, reason(summary), against_fused(rows), *estimated)


def ladder(summary: Summary, rows: list[Way]) -> None:
    """The ways to run the step, and what no schedule can pass."""
    bound_ns, bound = summary.largest_bound
    numbers = format_times_ns([*(way.time_ns for way in rows), bound_ns])
    unit = numbers[0].rpartition(" ")[2]
    longest = max(way.time_ns for way in rows)
    cells = []
    for way, time in zip(rows, numbers, strict=False):
        name = f"{html.text(way.name)} <span class='g-takes'>({'measured' if way.measured else 'predicted'})</span>"
        if way.recommended:
            name += html.tag("recommended") if choice.hardware.calibrated else ""
        elif way.what == OPTIMIZE and way.time_ns == min(each.time_ns for each in rows):
            name += html.tag("fastest measured")
        name += f"<div class='g-takes'>{html.text(way.takes)}</div>{html.bar(way.time_ns / longest)}"
        ratio = "" if way.over_eager is None else f"{way.over_eager:.2f}x"
        cells.append(((name, time.rpartition(" ")[0], ratio), way.recommended))
    limit = (
        "no schedule of these kernels is faster <span class='g-takes'>(bound)</span>"
        f"{html.small(bound_in_words(bound))}{html.bar(bound_ns / longest, kind='bound')}"
    )
    eager_ns = next((way.time_ns for way in rows if way.name == "eager"), None)
    possible = f"{eager_ns / bound_ns:.2f}x" if eager_ns and bound_ns else ""
    cells.append(((limit, numbers[-1].rpartition(" ")[0], possible), False))
    html.table(
        "Ways to run the step",
        (Head("way to run the step"), Head(f"time, {unit}", True), Head("over eager", True)),
        cells,
    )
    for note in filter(None, (note_without_graph(summary), note_on_fused(rows))):
        st.caption(view.plain(note))


def facts(summary: Summary) -> None:
    """How sure, how much over one CUDA graph, and how much memory."""
    verdict, best = summary.verdict, summary.best
    low_ns, high_ns = choice.hardware.interval_ns(
        best.makespan_ns,
        summary.sequential_ns,
        best.streams,
        other_kernels=verdict.other_kernels,
        searched=verdict.searched,
        less_known=verdict.less_known,
    )
    low, high = format_times_ns((max(low_ns, min(best.makespan_ns, summary.largest_bound[0])), high_ns))
    # Past measurements say nothing about a GPU that was never measured.
    gain, between = "a trend", "a trend"
    if choice.hardware.calibrated:
        gain = f"90 %: {verdict.low:.2f}x to {verdict.high:.2f}x"
        between = f"{low.rpartition(' ')[0]} to {high}"
    view.metrics(
        ("Over one CUDA graph", f"{verdict.speedup:.2f}x", gain),
        ("Recommended" if choice.hardware.calibrated else "Fastest", format_ns(best.makespan_ns), between),
        ("Peak memory", format_bytes(best.peak_bytes), f"{best.policy}, {counted(best.streams, 'stream')}"),
    )


def what_to_change(summary: Summary, concurrency: Concurrency, optimized: bool) -> None:
    """Which modules run side by side, and the code; `optimized`: `gpusim.optimize` was measured on this step."""
    st.header("What to change", anchor=False)
    mode, streams = choice.trace.model.mode, summary.best.streams
    if streams == 1:
        st.markdown("Put the step into one CUDA graph; nothing in it needs another order or a second stream.")
    else:
        side_by_side(concurrency)
    code: dict[str, tuple[str, str]] = {}
    if streams > 1 or optimized:
        code["gpusim.optimize"] = (
            optimize_lines(mode, streams if streams > 1 else choice.streams),
            "It captures the step on your GPU, searches, tries the best schedules, checks the outputs and gives a "
            "function with the same result. Without a gain it gives your own model back.",
        )
    if streams > 1:
        code["torch.compile backend"] = (backend_lines(streams), "The same behind torch.compile.")
    if streams > 1 and (by_hand := by_hand_lines(concurrency)):
        code[BY_HAND] = (
            by_hand,
            "A sketch from the modules' names: keep your own forward, and move these calls onto these streams. "
            "Autograd runs each backward op on the stream of its forward op.",
        )
    code["One CUDA graph"] = (graph_lines(mode), "The first step, without gpusim; streams pay off in it alone.")
    several = len(code) > 1
    tabs = st.tabs(list(code), key="code", on_change="rerun") if several else [st.container()]
    for tab, (name, (lines, words)) in zip(tabs, code.items(), strict=True):
        if several and not tab.open:
            continue
        with tab:
            html.code(name, lines, python=True)
        tab.caption(words)
        if name == BY_HAND:
            file = view.file_name(choice.trace.name, "streams.py")
            view.download(tab, "The whole schedule, op by op, as Python", whole_schedule, file, "text/x-python")


def whole_schedule() -> str:
    """The recommended schedule as code with streams and events."""
    from gpusim.report.schedule_python import schedule_python

    return schedule_python(gpusim.simulate(results.step_of(choice), results.explored_of(choice).schedule))


def side_by_side(concurrency: Concurrency) -> None:
    """The modules that overlap, the longest first."""
    if not concurrency.rows:
        st.markdown("No two kernels of this schedule run at the same time: what is gained is gaps between kernels.")
        return
    share = concurrency.together_ns / concurrency.makespan_ns if concurrency.makespan_ns else 0.0
    if not concurrency.named:
        st.markdown("This trace does not say which module an operation belongs to: its timeline shows what overlaps.")
        return
    st.markdown(
        f"Run these side by side, on {counted(concurrency.streams, 'stream')} in one CUDA graph. During {share:.0%} of "
        "the step at least two kernels then run at once."
    )
    numbers = format_times_ns(row.together_ns for row in concurrency.rows)
    unit = numbers[0].rpartition(" ")[2]
    cells = []
    for row, time in zip(concurrency.rows, numbers, strict=True):
        if row.kind == "modules":
            where = html.text(parents_in_words(row))
            sides = "".join(f"<span class='g-side'>{html.text(side)}</span>" for side in sides_in_words(row))
            cell = f"<div>{sides}</div>"
        else:
            where, cell = "all modules", f"<div>{html.text(kind_in_words(row))}</div>"
        phases = html.text(" and ".join(row.phases) or "optimizer") if row.kind != "buffers" else ""
        cells.append(((where, cell, phases, time.rpartition(" ")[0]), False))
    heads = (Head("in"), Head("side by side"), Head("phase"), Head(f"together, {unit}", True))
    html.table("Modules that run side by side", heads, cells[:MOST_ROWS])
    if cells[MOST_ROWS:]:
        with st.expander(f"{counted(len(cells) - MOST_ROWS, 'more row')}"):
            html.table("More modules that run side by side", heads, cells[MOST_ROWS:])


def details(summary: Summary, parts: Breakdown) -> None:
    """The research behind it, folded."""
    if box := view.folded("All schedules tried, and the bounds", "schedules"):
        with box:
            charts.schedules(summary)
    if box := view.folded("Where the gain comes from", "gain"):
        with box:
            charts.waterfall(gain_rows(summary), "Where the gain comes from", "of the time before")
    if box := view.folded("Where the time goes", "time"):
        with box:
            st.caption("Each kernel alone on the GPU, without gaps between them.")
            charts.parts(
                (("phase", parts.phases), ("layer", parts.layers), ("operator", parts.families)),
                parts.total_ns,
            )


def next_questions() -> None:
    """The other questions, one click away."""
    names = {
        "limits": "Why not more?",
        "timeline": "What runs when?",
        "memory": "Does it fit?",
        "what-if": "What on another GPU?",
        "accuracy": "How wrong is this?",
    }
    with st.container(horizontal=True, key="next"):
        for name, label in names.items():
            if name in pages:
                st.page_link(pages[name], label=label, icon=":material/arrow_forward:")


def provenance(kernels: int) -> None:
    """Where the step comes from."""
    source = choice.trace.provenance
    if source.estimated:
        st.caption(view.plain(f"{len(choice.trace.ops):,} ops, {kernels:,} kernels; {ESTIMATED}"))
        return
    size = f"{len(choice.trace.ops):,} ops, {kernels:,} kernels"
    if source.imported_from is not None:
        files = ", ".join(source.imported_from.files)
        st.caption(view.plain(f"{size}; imported from {files}, a profile of {source.imported_from.writer}"))
        return
    st.caption(
        view.plain(
            f"{size}; captured on {source.gpu.name} on {source.date} with torch {source.gpu.torch}, "
            f"CUDA {source.gpu.cuda}"
        )
    )


def show(summary: Summary, parts: Breakdown, concurrency: Concurrency) -> None:
    """The page of a step whose schedules can be searched."""
    rows = ways(summary, results.fused_ways_of(choice))
    answer(summary, rows)
    view.send()
    ladder(summary, rows)
    view.passed_over(summary)
    next_questions()
    if summary.verdict.worth_it or not choice.hardware.calibrated:
        facts(summary)
    what_to_change(summary, concurrency, any(row.what == OPTIMIZE for row in rows))
    details(summary, parts)
    provenance(parts.kernels)
    words = ["--streams", str(choice.streams), *kept.search_words(choice)]
    view.command("explore", choice.words, *view.hardware_words(choice), *words)


def show_profile() -> None:
    """The page of a profile without data dependencies: what keeping its order can say."""
    with st.spinner(view.SIMULATING):
        imported = results.as_imported_of(choice)
    rows = [("one CUDA graph, same streams", imported.graph_ns, "torch.cuda.graph around the step")]
    if imported.observed_ns is not None:
        rows.insert(0, ("as observed", imported.observed_ns, "what ran when the profile was taken"))
    if imported.streams > 1:
        rows.append(("one CUDA graph, one stream", imported.chain_ns, "without the overlap that is there"))
    rows.append(("no schedule with these edges is faster", imported.bound_ns, "bound"))
    if imported.observed_ns is None:
        said = f"In one CUDA graph the step is predicted at {format_ns(imported.graph_ns)}."
    elif imported.graph_ns < imported.observed_ns:
        gain = imported.observed_ns / imported.graph_ns
        before, after = format_times_ns((imported.observed_ns, imported.graph_ns))
        said = f"One CUDA graph first: {after} instead of {before}, {gain:.2f}x, with the streams that it has."
    else:
        said = "One CUDA graph gains nothing here: the GPU does not wait for launches."
    html.answer(
        "trend",
        said,
        "Whether more streams would help, this profile cannot say: its dependencies are of quality "
        f"'{imported.dependency_quality}'. {imported.more[0].upper()}{imported.more[1:]}.",
    )
    numbers = format_times_ns(time_ns for _, time_ns, _ in rows)
    unit = numbers[0].rpartition(" ")[2]
    longest = max(time_ns for _, time_ns, _ in rows)
    cells = [
        ((f"{name}<div class='g-takes'>{takes}</div>{html.bar(time_ns / longest)}", number.rpartition(" ")[0]), False)
        for (name, time_ns, takes), number in zip(rows, numbers, strict=True)
    ]
    html.table("Ways to run the step", (Head("way to run the step"), Head(f"time, {unit}", True)), cells)
    next_questions()
    if imported.busy_ns is not None and imported.observed_ns and imported.idle_ns is not None:
        share = imported.idle_ns / imported.observed_ns
        view.metrics(
            ("GPU idle", f"{share:.0%}", f"{format_ns(imported.idle_ns)} of {format_ns(imported.observed_ns)}"),
            ("Two or more at once", format_ns(imported.concurrent_ns or 0), counted(imported.streams, "stream")),
            ("Without any edge", format_ns(imported.no_edges_bound_ns), "no schedule is faster"),
        )
    st.header("What to change", anchor=False)
    if imported.observed_ns is None or imported.graph_ns < imported.observed_ns:
        st.markdown("Put the step into one CUDA graph, and capture it to see what streams would gain:")
        html.code("One CUDA graph", graph_lines(choice.trace.model.mode), python=True)
    else:
        st.markdown("Nothing in how it is launched. Capture the step to see what streams would gain:")
    html.code("Capture a step", CAPTURE, python=True)
    provenance(imported.kernels)
    view.command("explore", choice.words, *view.hardware_words(choice))


if (before := kept.verdict_of(choice)) is not None:
    show(before.summary, before.breakdown, before.concurrency)
elif not choice.searchable:
    controls.sidebar()
    show_profile()
else:
    controls.sidebar()
    with st.spinner(view.EXPLORING):
        explored = results.explored_of(choice)
        together = results.concurrency_of(choice, explored.best.schedule)
    show(summarize(explored), results.breakdown_of(choice), together)
