"""What-if: another GPU, other costs or a faster op, in one or two settings compared with the unchanged step."""

from collections.abc import Iterator
from typing import Any

import streamlit as st
from gpusim_dashboard import charts, html, results, view
from gpusim_dashboard.address import Settings
from gpusim_dashboard.choice import current, hardware_model
from gpusim_dashboard.controls import hardware_label
from gpusim_dashboard.html import Head
from gpusim_dashboard.results import Question

import gpusim
from gpusim.api import dashboard
from gpusim.defaults import LAUNCH_MODES
from gpusim.report.advice import bound_in_words
from gpusim.units import counted, format_ns, format_peak, format_times_ns

#: Ranges of the sliders without a natural range.
BANDWIDTH, LAUNCH_COST, CONTENTION, OP_SPEED = (0.25, 4.0), (0.0, 4.0), (0.0, 4.0), (0.25, 8.0)
#: Largest number of streams on the page, and largest multiple of the GPU's SMs.
MAX_STREAMS, MAX_SMS_FACTOR = 32, 2
OPS_OFFERED = 60
LAUNCHED = {"graph": "one CUDA graph", "stream": "the host"}
choice = current()
view.heading(choice)
settings = Settings("what-if", choice.content, choice.hardware.name)
batches = dashboard.batches(choice.trace)
with st.spinner(view.EXPLORING):
    shown = results.shown_of(choice)


def cells_of(place: Any, across: int) -> Iterator[Any]:
    """Return cells one after the other, row by row."""
    while True:
        yield from place.columns(across, vertical_alignment="bottom")


def setting(cells: Iterator[Any], mark: str) -> tuple[Question, int]:
    """Draw the controls of one setting; their names in the address begin with `mark`. Returns its question and
    batch.
    """
    gpu = settings.select(
        next(cells), "GPU", f"{mark}gpu", gpusim.list_hardware(), choice.hardware.name, format_func=hardware_label
    )
    model = hardware_model(gpu)
    own = choice.trace.model.batch
    batch = settings.select(
        next(cells),
        "Batch",
        f"{mark}batch",
        sorted({own, *batches}),
        own,
        disabled=not batches,
        help="Of which there are traces: no time is scaled from one batch to another.",
    )
    launch = settings.select(
        next(cells),
        "Launched by",
        f"{mark}launch",
        LAUNCH_MODES,
        LAUNCH_MODES[0],
        format_func=lambda each: LAUNCHED.get(each, each),
    )
    fixed = shown.searched and batch == own
    usual = min(MAX_STREAMS, shown.streams)
    streams = settings.slider(next(cells), "Streams", f"{mark}on_streams", 1, MAX_STREAMS, usual, disabled=fixed)
    most_sms = MAX_SMS_FACTOR * model.limits.sms
    sms = settings.slider(next(cells), "SMs", f"{mark}sms", 1, most_sms, model.limits.sms)
    bandwidth = settings.slider(next(cells), "DRAM bandwidth, x", f"{mark}bandwidth", *BANDWIDTH, 1.0, step=0.05)
    launch_cost = settings.slider(
        next(cells),
        "Launch cost, x",
        f"{mark}launch_cost",
        *LAUNCH_COST,
        1.0,
        step=0.1,
        help="Gaps, forks, joins, the front end and the host.",
    )
    contention = settings.slider(
        next(cells),
        "Contention, x",
        f"{mark}contention",
        *CONTENTION,
        1.0,
        step=0.1,
        help="How much kernels that share SMs slow each other down.",
    )
    queues = settings.slider(
        next(cells),
        "Hardware queues",
        f"{mark}queues",
        1,
        model.stream.max_queues,
        model.stream.queues,
        disabled=launch == "graph",
        help="Only where the host launches: CUDA_DEVICE_MAX_CONNECTIONS.",
    )
    name = choice.name if batch == own else batches[batch]
    step = results.other_step(name, gpu)
    ops = dashboard.longest_ops(step, OPS_OFFERED)
    words = {"": "none"} | {step.trace.ops[op].name: f"{view.option(label)}: {format_ns(ns)}" for op, label, ns in ops}
    index = {step.trace.ops[op].name: op for op, _, _ in ops}
    op = settings.select(
        next(cells),
        "A faster op",
        f"{mark}op",
        list(words),
        "",
        format_func=lambda each: words.get(each, each),
        help=f"One of the {OPS_OFFERED} longest.",
    )
    speed = settings.slider(
        next(cells), "Op speed-up, x", f"{mark}op_speed", *OP_SPEED, 1.0, step=0.25, disabled=not op
    )
    question = Question(
        name,
        gpu,
        launch,
        streams,
        sms,
        bandwidth,
        launch_cost,
        contention,
        queues,
        index.get(op),
        speed if op else 1.0,
    )
    return question, batch


def answers(asked: list[tuple[str, Question, int]]) -> list[gpusim.Simulated]:
    """Show the baseline and each setting as rows of one table; returns the changed steps."""
    baseline = results.baseline_of(choice, shown)
    own = choice.trace.model.batch
    runs = [results.answer_of(choice, question, shown) for _, question, _ in asked]
    rows = [("as it is", baseline, own), *((name, each, b) for (name, _, b), each in zip(asked, runs, strict=True))]
    times = format_times_ns(run.makespan_ns for _, run, _ in rows)
    samples = format_times_ns(run.makespan_ns / batch for _, run, batch in rows)
    before = baseline.makespan_ns / own
    cells = []
    for (name, run, batch), whole, each in zip(rows, times, samples, strict=True):
        change = run.makespan_ns / batch / before - 1
        used = run.graph.hardware
        sure = "" if used.calibrated else html.tag("uncalibrated: a trend")
        schedule = f"{run.policy}, {counted(run.streams, 'stream')}"
        about = f"{html.text(name)}{sure}{html.small(schedule)}"
        changed = "the same" if not change else f"{change:+.1%}"
        bound_ns, bound = run.bounds.largest
        cells.append(
            (
                (
                    about,
                    whole.rpartition(" ")[0],
                    each.rpartition(" ")[0],
                    "" if run is baseline else changed,
                    f"{run.speedup:.2f}x",
                    f"<span>{format_ns(bound_ns)}{html.small(bound_in_words(bound))}</span>",
                    format_peak(run.peak_bytes),
                ),
                False,
            )
        )
    heads = (
        Head("setting"),
        Head(f"step, {times[0].rpartition(' ')[2]}", True),
        Head(f"a sample, {samples[0].rpartition(' ')[2]}", True),
        Head("change a sample", True),
        Head("over one CUDA graph", True),
        Head("no schedule below", True),
        Head("peak memory", True),
    )
    html.table("The step as it is and with the settings below", heads, cells)
    return runs


def notes(asked: list[tuple[str, Question, int]], runs: list[gpusim.Simulated]) -> None:
    """Show how certain the answers are."""
    for (name, question, _), run in zip(asked, runs, strict=True):
        calibrated = run.graph.hardware.calibrated and question.op_speed == 1.0
        who = "" if len(asked) == 1 else f"{name}: "
        if run.graph.trace.provenance.estimated:
            st.caption(f"{who}No interval: the kernel times are estimated; nothing ran on a GPU.")
        elif calibrated:
            low, high = format_times_ns(run.interval_ns)
            st.caption(f"{who}90 % interval, from past measurements: {low} to {high}.")
        else:
            st.caption(f"{who}No interval: nothing like it has been measured. Kernel times are scaled.")


def command(question: Question) -> None:
    """Show the equivalent command line."""
    model = hardware_model(question.gpu)
    words = ["--policy", results.answer_of(choice, question, shown).policy, "--streams", str(question.streams)]
    words += ["--launch", question.launch, "--hw", question.gpu]
    for option, value, default in (
        ("--sms", question.sms, model.limits.sms),
        ("--bandwidth", question.bandwidth, 1.0),
        ("--launch-cost", question.launch_cost, 1.0),
        ("--contention", question.contention, 1.0),
        ("--queues", question.queues, model.stream.queues),
    ):
        words += [option, f"{value:g}"] if value != default else []
    if question.op is not None and question.op_speed != 1.0:
        step = results.other_step(question.trace, question.gpu)
        words += ["--op", step.trace.ops[question.op].name, f"{question.op_speed:g}"]
    view.command("whatif", choice.words if question.trace == choice.name else question.trace, *words)


@st.fragment
@view.explained
def what_if() -> None:
    """Draw controls and answers; a fragment, so that a slider does not rerun the frame."""
    place = st.container()
    tools = st.columns([2, 1, 3], vertical_alignment="center")
    both = settings.toggle(tools[0], "Compare with a second setting", "second")
    reset = tools[1].container()
    asked: list[tuple[str, Question, int]] = []
    if both:
        for column, name, mark in zip(st.columns(2, gap="large"), "AB", ("", "b_"), strict=True):
            column.header(name, anchor=False)
            asked.append((name, *setting(cells_of(column, 2), mark)))
    else:
        asked.append(("what if", *setting(cells_of(st, 4), "")))
        settings.forget("b_")
    settings.finish()
    reset.button("Reset", icon=":material/undo:", on_click=settings.reset, disabled=not settings, width="stretch")
    with place:
        runs = answers(asked)
        notes(asked, runs)
    view.send()
    for (name, question, _), run in zip(asked, runs, strict=True):
        rows = results.sensitivities_of(choice, question, run)
        name = f" of {name}" if both else ""
        st.header(f"What the time{name} is sensitive to", anchor=False)
        charts.tornado(rows, f"Sensitivities{name}")
    st.caption("The schedule stays as it is while one parameter at a time goes through its range.")
    if not shown.searched:
        command(asked[0][1])


@st.fragment
@view.explained
def other_gpus() -> None:
    """Compare the unchanged step on every GPU with a model: of a large step, only when asked to."""
    if dashboard.is_large(results.step_of(choice)):
        if box := view.folded("On other GPUs", "other gpus"):
            with box, st.spinner(view.SIMULATING):
                on_other_gpus()
        return
    st.header("On other GPUs", anchor=False)
    on_other_gpus()


def on_other_gpus() -> None:
    """Show the table of all GPUs."""
    base = results.baseline_of(choice, shown)
    run_on = results.on_every_gpu(choice, shown)
    times = format_times_ns(
        [*(run.makespan_ns for run in run_on.values()), *(r.sequential_ns for r in run_on.values())]
    )
    unit = times[0].rpartition(" ")[2]
    cells = []
    for number, (gpu, run) in enumerate(run_on.items()):
        sure = "calibrated" if run.graph.hardware.calibrated else "uncalibrated: a trend"
        here = gpu == choice.hardware.name
        cells.append(
            (
                (
                    f"{html.text(gpu)} <span class='g-takes'>({sure})</span>",
                    times[number].rpartition(" ")[0],
                    times[len(run_on) + number].rpartition(" ")[0],
                    f"{run.speedup:.2f}x",
                    "this one" if here else f"{run.makespan_ns / base.makespan_ns:.2f}x",
                ),
                here,
            )
        )
    heads = (
        Head("GPU"),
        Head(f"on streams, {unit}", True),
        Head(f"one CUDA graph, {unit}", True),
        Head("streams win", True),
        Head("time against this one", True),
    )
    html.table("The same step on other GPUs", heads, cells)
    st.caption("The same policy makes a schedule for each GPU; kernel times are scaled by their traffic and waves.")


what_if()
other_gpus()
