"""Transfer: schedules tuned for one batch or GPU and used on another, as a heat map of lost time."""

import streamlit as st
from gpusim_dashboard import choice as choosing
from gpusim_dashboard import html, results, turns, view
from gpusim_dashboard.address import Settings
from gpusim_dashboard.cache import cached
from gpusim_dashboard.charts import numbers_of
from gpusim_dashboard.choice import current
from gpusim_dashboard.controls import hardware_label
from gpusim_dashboard.html import Head

import gpusim
from gpusim.api import dashboard
from gpusim.defaults import DEFAULT_STREAMS
from gpusim.errors import OptionError
from gpusim.units import format_times_ns

#: Most settings on the page: each takes a search of a second or more.
MOST_SETTINGS = 16
#: Smallest loss at full colour, so that 0.1 % does not look bad.
LEAST_TOP = 0.05
choice = current()
view.heading(choice, warn=False)
if not choice.searchable:
    view.unanswered(view.NO_DEPENDENCIES)
settings = Settings("transfer", choice.content)
batches = {choice.trace.model.batch: choice.name, **dashboard.batches(choice.trace)}
cells = st.columns(2)
own = choice.trace.model.batch
near = [name for name in (choice.hardware.name, "h200", "a100-80gb") if name in gpusim.list_hardware()]
gpus = settings.choose_several(
    cells[0], "GPUs", "gpus", gpusim.list_hardware(), dict.fromkeys(near[:2] if near[0] != near[1] else near[::2]),
    format_func=hardware_label,
)  # fmt: skip
wanted = settings.choose_several(
    cells[1],
    "Batches",
    "batches",
    map(str, sorted(batches)),
    map(str, sorted(batches)),
    help="Of which there are traces. None is made up: capture the step at a batch that is missing.",
)
settings.finish()
if len(batches) == 1:
    st.caption(
        f"There is no other trace of this network at another batch than {own}: capture one to compare batches. "
        "GPUs can be compared."
    )
if not gpus or not wanted:
    st.info("Choose at least one GPU and one batch.")
    st.stop()
if len(gpus) * len(wanted) > MOST_SETTINGS:
    raise OptionError(f"{len(gpus) * len(wanted)} settings; this page compares at most {MOST_SETTINGS}")


@cached
def transferred(contents: tuple[str, ...], gpus: tuple[str, ...], _names: tuple[str, ...]) -> gpusim.Transfer:
    """Tune each setting once."""
    steps = [results.step_of(choosing.as_begun(n) if n in gpusim.list_traces() else current()) for n in _names]
    with turns.work():
        return gpusim.transfer(steps, hw=gpus, streams=DEFAULT_STREAMS)


names = tuple(batches[int(batch)] for batch in wanted)
contents = tuple(choosing.trace_of(name)[0] for name in names)
with st.spinner(f"Tuning {len(gpus) * len(wanted)} schedules, and using each of them everywhere ..."):
    transfer = transferred(contents, tuple(gpus), names)
html.answer("no", transfer.sentence)
short = {setting.name: f"b{setting.batch}, {setting.hardware}" for setting in transfer.settings}
lost = {(row.tuned_for, row.used_on): row.lost_frac for row in transfer.rows}
html.heat(
    "Time lost with a schedule tuned for something else",
    "tuned for (down), used on (across)",
    list(short.values()),
    [[lost[tuned, used] for used in short] for tuned in short],
    max(LEAST_TOP, transfer.worst.lost_frac),
)
st.caption(
    "Time over the fastest of these schedules, less 1. On the diagonal a schedule is at home; a loss there says that a "
    "schedule found elsewhere is faster."
)
times = format_times_ns(time_ns for row in transfer.rows for time_ns in (row.time_ns, row.best_ns))
numbers, unit = numbers_of(times)
table = [
    (
        (
            html.text(row.tuned_for),
            html.text(row.used_on),
            numbers[2 * number],
            numbers[2 * number + 1],
            f"{row.lost_frac:+.1%}",
        ),
        row.tuned_for == row.used_on,
    )
    for number, row in enumerate(transfer.rows)
]
heads = (
    Head("tuned for"),
    Head("used on"),
    Head(f"time, {unit}", True),
    Head(f"best, {unit}", True),
    Head("lost", True),
)
with st.expander("As a table"):
    html.table("Time lost with a schedule tuned for something else", heads, table)
for gpu in gpus:
    view.uncalibrated(choosing.hardware_model(gpu))
words = ["--hw", ",".join(gpus)]
if len(batches) > 1:
    words += ["--batch", ",".join(wanted)]
view.command("transfer", choice.words, *words)
