"""What-if: another GPU, other costs, a faster op: the result beside the baseline, and what it is sensitive to."""

import time
from typing import get_args

import streamlit as st
from gpusim_dashboard import results, view
from gpusim_dashboard.choice import SEARCH, bundled_trace, current, hardware_model, trace_of

from gpusim.hardware.model import bundled_hardware
from gpusim.plan.tasks import LaunchMode
from gpusim.report.figures.comparisons import tornado_figure
from gpusim.search.whatif import longest, op_label
from gpusim.trace.store import bundled_traces, other_batches
from gpusim.units import counted, format_bytes, format_ns

OPS_OFFERED = 60
#: What the server needs to send an answer, while no page computes.
SENDING_S = 0.04
choice = current()
view.heading(choice)
batches = other_batches(choice.trace, {name: bundled_trace(name)[1] for name in bundled_traces()})


@st.fragment
@view.explained
def what_if() -> None:
    """Controls and answer: a fragment, so that a slider runs this again and not the frame around it."""
    first = st.columns(4)
    gpu = first[0].selectbox(
        "GPU",
        list(bundled_hardware()),
        list(bundled_hardware()).index(choice.hardware.name),
        format_func=lambda name: hardware_model(name).label,
    )
    model = hardware_model(gpu)
    batch = first[1].selectbox(
        "Batch",
        sorted({choice.trace.model.batch, *batches}),
        disabled=not batches,
        key="batch_" + choice.content[:8],
        index=sorted({choice.trace.model.batch, *batches}).index(choice.trace.model.batch),
        help="Those that there are traces for.",
    )
    mode: LaunchMode = first[2].selectbox(
        "Launched by", get_args(LaunchMode), help="One CUDA graph, or the host's streams."
    )
    streams = first[3].slider("Streams", 1, 32, min(32, choice.streams), disabled=choice.policy == SEARCH)
    second = st.columns(4)
    sms = second[0].slider("SMs", 1, 2 * model.limits.sms, model.limits.sms, key=f"sms of {gpu}")
    bandwidth = second[1].slider("DRAM bandwidth, x", 0.25, 4.0, 1.0, 0.05)
    launch_cost = second[2].slider(
        "Launch cost, x", 0.0, 4.0, 1.0, 0.1, help="Gaps, forks, joins, the front end and the host."
    )
    queues = second[3].slider(
        "Hardware queues",
        1,
        model.stream.max_queues,
        model.stream.queues,
        disabled=mode == "graph",
        help="Only where the host launches: CUDA_DEVICE_MAX_CONNECTIONS.",
        key=f"queues of {gpu}",
    )

    same = batch == choice.trace.model.batch
    name = choice.name if same else batches[batch]
    content, trace = trace_of(name)
    graph = results.other_graph(name, content, gpu, trace, model)
    third = st.columns([3, 1])
    offered = longest(graph, OPS_OFFERED)
    op = third[0].selectbox(
        "Op",
        offered,
        format_func=lambda index: (
            f"{view.option(op_label(graph.trace.ops[index]))}: {format_ns(sum(t.dur_ns for t in graph.tasks[index]))}"
        ),
        help=f"The {OPS_OFFERED} longest.",
        key=f"op of {trace.name}",
    )
    speed = third[1].slider("is so many times as fast", 0.25, 8.0, 1.0, 0.25)

    question = results.Question(name, gpu, mode, streams, sms, bandwidth, launch_cost, queues, op, speed)
    baseline = results.baseline_of(choice, "graph")
    result = results.answer_of(choice, question, graph)
    changed = result.graph
    if model.calibrated and not changed.hardware.calibrated:
        st.warning(
            f"Uncalibrated: {view.plain(changed.hardware.label)}. Kernel times are scaled, not measured; read the "
            "result as a trend.",
            icon=":material/warning:",
        )
    elif model is not choice.hardware:
        view.uncalibrated(model)

    per = f" for {batch} samples" if not same else ""
    cells = st.columns(4)
    view.metric(
        cells[0],
        "Baseline",
        format_ns(baseline.makespan_ns),
        f"{baseline.policy}, {counted(baseline.streams, 'stream')}",
    )
    change = result.makespan_ns / baseline.makespan_ns - 1
    view.metric(
        cells[1], f"What if{per}", format_ns(result.makespan_ns), f"{change:+.1%} time" if change else "the same"
    )
    view.metric(cells[2], "Speed-up", f"{result.speedup:.2f}x", f"baseline {baseline.speedup:.2f}x")
    low_ns, high_ns = graph.hardware.interval_ns(result.makespan_ns, result.streams, graph.may_lose_cache)
    note = "Speed-up is over the sequential graph of the same, changed kernels. "
    peaks = format_bytes(result.timeline.peak_bytes), format_bytes(baseline.timeline.peak_bytes)
    note += f"Peak memory {peaks[0]}, baseline {peaks[1]}. "
    if changed.hardware.calibrated and speed == 1.0:
        note += (
            f"90 % of past measurements lay within {format_ns(low_ns)} to {format_ns(high_ns)} of such a prediction."
        )
    else:
        note += "No interval: nothing like it has been measured."
    if not same:
        per_sample = result.makespan_ns / batch, baseline.makespan_ns / choice.trace.model.batch
        note += f" For each sample {format_ns(per_sample[0])}, baseline {format_ns(per_sample[1])}."
    st.caption(note)
    # After the answer, and once it is on its way: they take longer than it.
    time.sleep(SENDING_S)
    view.metric(cells[3], "Largest bound", format_ns(result.bounds.largest[0]), result.bounds.largest[1])

    rows = results.sensitivities_of(choice, question, result)
    view.show(
        tornado_figure(rows, view.theme(), f"What {graph.trace.name} on {changed.hardware.label} is sensitive to"),
        "tornado",
    )
    st.caption("The schedule stays as it is while one parameter at a time goes through its range.")
    if choice.policy != SEARCH:
        words = ["--policy", choice.policy, "--streams", str(streams), "--launch", mode, "--hw", gpu]
        for option, value, default in (
            ("--sms", sms, model.limits.sms),
            ("--bandwidth", bandwidth, 1.0),
            ("--launch-cost", launch_cost, 1.0),
            ("--queues", queues, model.stream.queues),
        ):
            words += [option, f"{value:g}"] if value != default else []
        words += ["--op", trace.ops[op].name, f"{speed:g}"] if speed != 1.0 else []
        view.command("whatif", choice.words if same else name, *words)


what_if()
