"""Explore: run policies and a search in the background, compare what they find, take it away."""

import msgspec
import streamlit as st
from gpusim_dashboard import kept, lifetime, results, view
from gpusim_dashboard.choice import current

from gpusim.defaults import DEFAULT_BUDGET_S
from gpusim.errors import GpusimError
from gpusim.files import compress
from gpusim.policies.registry import POLICIES
from gpusim.report.choices import choices_lines
from gpusim.report.explored_table import rows_csv
from gpusim.report.figures.breakdown import front_figure
from gpusim.report.figures.explored import bounds_figure
from gpusim.report.perfetto import chrome_trace, run_from_timeline
from gpusim.report.summary import summarize
from gpusim.search.background import Exploration
from gpusim.search.choices import parse_splits
from gpusim.search.explore import Row
from gpusim.units import MIB, NS_PER_US, counted, format_bytes, format_ns

MAX_BUDGET_S = 300
choice = current()
state = st.session_state
view.heading(choice, warn=False)  # the verdict does
key = kept.exploration_key(choice)
job: Exploration | None = state.get("job") if state.get("job_key") == key else None
running = job is not None and job.running

chosen = st.multiselect(
    "Policies",
    [name for name in POLICIES if name != "sequential"],
    default=[name for name, policy in POLICIES.items() if not policy.slow and name != "sequential"],
    disabled=running,
    help="The sequential graph is always among the results. A slow policy may take a minute.",
)
cells = st.columns([2, 2, 2, 2, 1, 1], vertical_alignment="bottom")
budget_s = cells[0].number_input("Search, seconds", 1, MAX_BUDGET_S, round(DEFAULT_BUDGET_S), disabled=running)
evaluations = cells[1].number_input(
    "Schedules, at most",
    1,
    10_000_000,
    None,
    placeholder="no limit",
    disabled=running,
    help="A search that ends by this number finds the same on every machine.",
)
seed = cells[2].number_input("Seed", 0, 2**31, 0, disabled=running)
asked = cells[3].text_input(
    "Partitions of the SMs",
    placeholder="none",
    disabled=running or choice.streams < 2,
    max_chars=100,
    key=f"partitions of {choice.hardware.name}",
    help="Search schedules on these splits of the SMs, too: each gives some SMs to some of the streams. `64+68,96+36` "
    "are two splits in two; `auto` tries a few.",
)
asked = asked.strip()
wrong = ""
splits = []
if asked and choice.streams > 1:
    try:
        splits = parse_splits(asked, choice.streams, choice.hardware.limits.sms)
    except GpusimError as error:
        wrong = str(error)
        st.error(view.plain(wrong), icon=":material/error:")
if varied := sum(bool(op.variants) for op in choice.trace.ops):
    st.caption(f"{varied} ops of this step have variants, other kernels for the same work; the search tries them, too.")
if cells[4].button("Start", type="primary", disabled=running or bool(wrong), width="stretch"):
    if state.get("job") is not None:
        state.job.stop()
    limit = ["--evaluations", str(evaluations)] if evaluations else []
    parts = ["--partitions", asked] if splits else []
    state.job_words = ["--budget", str(budget_s), "--seed", str(seed), *limit, *parts]
    state.job_key = key
    state.job = Exploration(
        results.graph_of(choice),
        streams=choice.streams,
        budget_s=float(budget_s),
        evaluations=evaluations,
        seed=int(seed),
        policies=tuple(chosen),
        splits=splits,
    ).start()
    lifetime.search(state.job)
    st.rerun()
if cells[5].button("Stop", disabled=not running, width="stretch") and job is not None:
    job.stop()


def table(rows: list[Row]) -> None:
    """The schedules so far, the fastest first."""
    view.table(
        [
            {
                "policy": row.policy,
                "streams": row.streams,
                "predicted, us": row.makespan_ns / NS_PER_US,
                "speed-up, x": row.speedup,
                "peak memory, MiB": row.peak_bytes / MIB,
            }
            for row in sorted(rows, key=lambda row: row.makespan_ns)
        ],
        height=300,
    )


@st.fragment(run_every=0.5 if running else None)
def progress() -> None:
    """What a running job has found so far; the whole page again once it has ended."""
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
    else:
        state.explorations[key] = job.result
        state.search_words[key] = state.job_words

with st.spinner(view.EXPLORING):
    explored = results.explored_of(choice)
if job is None and key not in state.explorations:
    st.caption(f"Every policy and {explored.evaluations} searched schedules; press Start to search longer.")
elif explored.interrupted:
    st.caption(f"Stopped after {explored.evaluations} searched schedules: the best found so far.")
summary = summarize(explored)
view.verdict_box(summary.verdict, choice.hardware)
view.passed_over(summary.passed_over)
for line in choices_lines(explored):
    st.markdown(view.plain(line))
view.show(bounds_figure(summary, view.theme()), "bounds")
view.show(front_figure(explored.rows, f"{choice.trace.name} on {choice.hardware.label}", view.theme()), "front")
table(list(explored.rows))

st.subheader("Compare two schedules")
rows = sorted(explored.rows, key=lambda row: row.makespan_ns)
names = [
    f"{n}. {row.policy}, {counted(row.streams, 'stream')}: {format_ns(row.makespan_ns)}"
    for n, row in enumerate(rows, 1)
]
best_place = rows.index(explored.best)
alone_place = next(place for place, row in enumerate(rows) if row.policy == "sequential")
cells = st.columns(2)
picked = [
    cell.selectbox(
        label, range(len(rows)), place, format_func=names.__getitem__, key=f"{label} {hash(key)} {len(rows)}"
    )
    for cell, label, place in zip(cells, ("one", "the other"), (alone_place, best_place), strict=True)
]
one, other = (rows[place] for place in picked)
cells = st.columns(4)
change_ns = other.makespan_ns - one.makespan_ns
cells[0].metric("Time", format_ns(other.makespan_ns), format_ns(change_ns) if change_ns else None, "inverse")
cells[1].metric("One over the other", f"{one.makespan_ns / other.makespan_ns:.3f}x")
change_mib = (other.peak_bytes - one.peak_bytes) / MIB
cells[2].metric(
    "Peak memory", format_bytes(other.peak_bytes), f"{change_mib:+.1f} MiB" if change_mib else None, "inverse"
)
moved = sum(a != b for a, b in zip(one.schedule.streams, other.schedule.streams, strict=True))
cells[3].metric("Ops on another stream", f"{moved} of {len(other.schedule.streams)}")

st.subheader("Take away")
place = st.selectbox("Schedule", range(len(rows)), best_place, format_func=names.__getitem__)
row = rows[place]
timeline = results.timeline_of(choice, row.schedule)
document = row.schedule.to_document(explored.trace)
ran = results.graph_of(choice).choosing(row.schedule.variants).trace
run = run_from_timeline(timeline, ran, f"simulated: {row.policy}, {counted(row.streams, 'stream')}", choice.hardware)
cells = st.columns(3)
view.download(
    cells[0],
    "Schedule (JSON)",
    lambda: msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n",
    view.file_name(choice.trace.name, f"{row.policy}.json"),
    "application/json",
)
view.download(
    cells[1],
    "Table (CSV)",
    lambda: rows_csv(explored.rows, choice.trace.name, choice.hardware.label, choice.hardware.calibrated),
    view.file_name(choice.trace.name, "schedules.csv"),
    "text/csv",
)
view.download(
    cells[2],
    "Timeline for Perfetto",
    lambda: compress(msgspec.json.encode(chrome_trace([run]))),
    view.file_name(choice.trace.name, f"{row.policy}.perfetto.json.gz"),
    "application/gzip",
)
words = ["--streams", str(choice.streams), *kept.search_words(choice), "-o", "best.json"]
view.command("explore", choice.words, *view.hardware_words(choice), *words)
if left_out := {name for name, policy in POLICIES.items() if not policy.slow} - {row.policy for row in explored.rows}:
    st.caption(f"The command runs all policies, also those left out here: {', '.join(sorted(left_out))}.")
