"""Search: policies and a search in the background, its results, and downloads."""

from __future__ import annotations

import msgspec
import streamlit as st
from gpusim_dashboard import charts, html, kept, lifetime, results, view
from gpusim_dashboard.address import Settings
from gpusim_dashboard.choice import current

from gpusim.api import dashboard
from gpusim.defaults import DEFAULT_BUDGET_S
from gpusim.errors import GpusimError
from gpusim.io.files import compress
from gpusim.report.choices import choices_lines
from gpusim.report.explored_table import rows_csv
from gpusim.report.figures.breakdown import front_figure
from gpusim.report.perfetto import chrome_trace, run_from_timeline
from gpusim.report.summary import summarize
from gpusim.units import MIB, NS_PER_MS, counted, format_ns, format_times_ns

MAX_BUDGET_S, MAX_EVALUATIONS, MAX_SEED = 300, 10_000_000, 2**31
choice = current()
state = st.session_state
view.heading(choice)
if not choice.searchable:
    view.unanswered(view.NO_DEPENDENCIES)
settings = Settings("search", choice.content, choice.hardware.name)
key = kept.exploration_key(choice)
job: dashboard.Exploration | None = state.get("job") if state.get("job_key") == key else None
running = job is not None and job.running
policies = dashboard.registered_policies()

top = st.columns([2, 1, 1, 3], vertical_alignment="bottom")
budget_s = settings.number(
    top[0], "Seconds to search", "seconds", 1, MAX_BUDGET_S, round(DEFAULT_BUDGET_S), disabled=running
)
with st.expander("Advanced: policies, seed, an end by number, partitions of the SMs"):
    chosen = settings.choose_several(
        st,
        "Policies",
        "policies",
        [name for name in policies if name != "sequential"],
        [name for name, policy in policies.items() if not policy.slow and name != "sequential"],
        disabled=running,
        help="The sequential graph is always among the results. A slow policy may take a minute.",
    )
    cells = st.columns(3, vertical_alignment="bottom")
    evaluations = settings.number(
        cells[0],
        "Simulations, about",
        "schedules",
        1,
        MAX_EVALUATIONS,
        None,
        placeholder="no limit",
        disabled=running,
        help="A search that ends by this number finds the same on every machine.",
    )
    seed = settings.number(cells[1], "Seed", "seed", 0, MAX_SEED, 0, disabled=running)
    asked = settings.text(
        cells[2],
        "Partitions of the SMs",
        "partitions",
        placeholder="none",
        disabled=running or choice.streams < 2,
        max_chars=100,
        help="Search schedules on these splits of the SMs, too: each gives some SMs to some of the streams. "
        "`64+68,96+36` are two splits in two; `auto` tries a few.",
    )
    if varied := sum(bool(op.variants) for op in choice.trace.ops):
        st.caption(
            f"{varied} ops of this step have variants, other kernels for the same work; the search tries them, too."
        )
settings.finish()
wrong = ""
if asked and choice.streams > 1:
    try:
        dashboard.check_partitions(results.step_of(choice), asked, choice.streams)
    except GpusimError as error:
        wrong = str(error)
        st.error(view.plain(wrong), icon=":material/error:")
if top[1].button("Start", type="primary", disabled=running or bool(wrong), width="stretch"):
    if state.get("job") is not None:
        state.job.interrupt()
    limit = ["--evaluations", str(evaluations)] if evaluations else []
    parts = ["--partitions", asked] if asked and choice.streams > 1 else []
    job = dashboard.explore_in_background(
        results.step_of(choice),
        streams=choice.streams,
        budget_s=float(budget_s or DEFAULT_BUDGET_S),
        evaluations=evaluations,
        seed=int(seed or 0),
        policies=tuple(chosen),
        partitions=asked if parts else "",
    )
    lifetime.search(job)
    # Set all three after the start: a job that failed to start must not leave another's result under this key.
    state.job, state.job_key = job, key
    state.job_words = ["--budget", str(budget_s), "--seed", str(seed), *limit, *parts]
    st.rerun()
if top[2].button("Stop", disabled=not running, width="stretch") and job is not None:
    job.stop()


def table(rows: list[dashboard.Row]) -> None:
    """Show the schedules found so far, the fastest first."""
    view.table(
        [
            {
                "no.": number,
                "policy": row.policy,
                "streams": row.streams,
                "predicted, ms": row.makespan_ns / NS_PER_MS,
                "speed-up, x": row.speedup,
                "peak memory, MiB": row.peak_bytes / MIB,
            }
            for number, row in enumerate(sorted(rows, key=lambda row: row.makespan_ns), 1)
        ],
        "Schedules, the fastest first",
        height=300,
    )


@st.fragment(run_every=0.5 if running else None)
def progress() -> None:
    """Show the progress of a running job; reruns the page when it ends."""
    if job is None:
        return
    if running and not job.running:
        st.rerun()
    if running:
        best = "" if job.best_ns is None else f", best so far {format_ns(job.best_ns)}"
        st.progress(min(1.0, job.share), f"{view.plain(job.what)}: {len(job.rows)} schedules kept{best}")
        table(list(job.rows))


progress()
if running:
    st.stop()
if job is not None:
    if job.error is not None:
        raise job.error
    if job.bug is not None:
        raise job.bug
    if job.result is None:
        st.warning("Stopped before the search: here is a short exploration instead.", icon=":material/stop_circle:")

with st.spinner(view.EXPLORING):
    explored = results.explored_of(choice)
summary = summarize(explored)
rows = sorted(explored.rows, key=lambda row: row.makespan_ns)
best = explored.best
fastest, recommended = format_times_ns((rows[0].makespan_ns, best.makespan_ns))
where = f"{best.policy} on {counted(best.streams, 'stream')}"
if rows[0] is best:
    said = f"The fastest schedule found is the recommended one: {where}, {recommended}, {best.speedup:.2f}x."
else:
    said = f"Recommended is {where}, {recommended}, {best.speedup:.2f}x. Predicted faster: {rows[0].policy}, {fastest}."
html.answer("no", said)
view.passed_over(summary)
simulations = counted(explored.evaluations, "simulation")
if job is None and key not in state.explorations:
    st.caption(f"Every policy, and a search of {simulations}; press Start to search longer.")
elif explored.interrupted:
    st.caption(f"Stopped after {simulations}: the best found so far.")
for line in choices_lines(explored):
    st.markdown(view.plain(line))

st.header("Take away", anchor=False)
names = [
    f"{n}. {row.policy}, {counted(row.streams, 'stream')}: {format_ns(row.makespan_ns)}"
    for n, row in enumerate(rows, 1)
]
cells = st.columns([3, 2, 2, 2], vertical_alignment="bottom")
place = cells[0].selectbox("Schedule", range(len(rows)), rows.index(best), format_func=names.__getitem__)
row = rows[place]


def perfetto() -> bytes:
    """The timeline of the schedule for Perfetto."""
    timeline = results.timeline_of(choice, row.schedule)
    step = results.step_of(choice)
    ran = step.graph.choosing(row.schedule.variants).trace
    label = f"simulated: {row.policy}, {counted(row.streams, 'stream')}"
    return compress(msgspec.json.encode(chrome_trace([run_from_timeline(timeline, ran, label, step.graph.hardware)])))


view.download(
    cells[1],
    "Schedule (JSON)",
    lambda: msgspec.json.format(msgspec.json.encode(row.schedule.to_document(explored.trace)), indent=1) + b"\n",
    view.file_name(choice.trace.name, f"{row.policy}.json"),
    "application/json",
)
view.download(
    cells[2],
    "Table (CSV)",
    lambda: rows_csv(explored.rows, choice.trace.name, choice.hardware.label, choice.hardware.calibrated),
    view.file_name(choice.trace.name, "schedules.csv"),
    "text/csv",
)
view.download(
    cells[3],
    "Timeline for Perfetto",
    perfetto,
    view.file_name(choice.trace.name, f"{row.policy}.perfetto.json.gz"),
    "application/gzip",
)
st.header("What was found", anchor=False)
table(list(explored.rows))
with st.expander("The best of each policy, and the bounds"):
    charts.schedules(summary)
if box := view.folded("Time against memory of every schedule", "time against memory"):
    with box:
        name = f"{choice.trace.name} on {choice.hardware.label}"
        view.show(front_figure(explored.rows, name, view.theme()), "front")
words = ["--streams", str(choice.streams), *kept.search_words(choice), "-o", "best.json"]
view.command("explore", choice.words, *view.hardware_words(choice), *words)
if left_out := {name for name, policy in policies.items() if not policy.slow} - {row.policy for row in explored.rows}:
    st.caption(f"The command runs all policies, also those left out here: {', '.join(sorted(left_out))}.")
