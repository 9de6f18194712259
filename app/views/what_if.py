"""What-if: another GPU, other costs, a faster op: the result beside the baseline, and what it is sensitive to."""

import time
from typing import get_args

import streamlit as st
from gpusim_dashboard import changes, results, view
from gpusim_dashboard.choice import current, hardware_model, trace_of, write_address

from gpusim.hardware.model import bundled_hardware
from gpusim.plan.graph import OpGraph
from gpusim.plan.tasks import LaunchMode
from gpusim.report.figures.comparisons import tornado_figure
from gpusim.search.whatif import longest, op_label
from gpusim.units import counted, format_bytes, format_ns

OPS_OFFERED = 60
#: What the server needs to send an answer, while no page computes.
SENDING_S = 0.04
choice = current()
view.heading(choice)
batches = changes.batches_of(choice.trace)
with st.spinner(view.EXPLORING):
    shown = results.shown_of(choice)
st.caption("The page's address has every setting, so a reload keeps them and a link shows them to somebody else.")


def op_text(graph: OpGraph, op: int) -> str:
    """An op of the list: its layer, what it is, and its time."""
    return f"{view.option(op_label(graph.trace.ops[op]))}: {format_ns(sum(task.dur_ns for task in graph.tasks[op]))}"


@st.fragment
@view.explained
def what_if() -> None:
    """Controls and answer: a fragment, so that a slider runs this again and not the frame around it."""
    about = (choice.content[:8], choice.hardware.name)
    first = st.columns(4)
    gpu: str = first[0].selectbox(
        "GPU to try",
        list(bundled_hardware()),
        key=changes.control("gpu", choice.hardware.name, *about),
        format_func=lambda name: hardware_model(name).label,
    )
    if gpu != changes.settings().get("gpu", choice.hardware.name):  # of the GPU before
        for name in ("sms", "queues"):
            changes.settings().pop(name, None)
    changes.keep("gpu", gpu, choice.hardware.name)
    model = hardware_model(gpu)
    own_batch = choice.trace.model.batch
    batch: int = first[1].selectbox(
        "Batch",
        sorted({own_batch, *batches}),
        disabled=not batches,
        key=changes.control("batch", own_batch, *about),
        help="Those that there are traces for.",
    )
    changes.keep("batch", batch, own_batch)
    mode: LaunchMode = first[2].selectbox(
        "Launched by",
        get_args(LaunchMode),
        key=changes.control("launch", "graph", *about),
        help="One CUDA graph, or the host's streams.",
    )
    changes.keep("launch", mode, "graph")
    # On the steps that a search's schedule is not for, a policy takes its place.
    fixed = shown.searched and batch == own_batch
    usual_streams = min(changes.MAX_STREAMS, shown.streams)
    streams: int = first[3].slider(
        "Streams to try",
        1,
        changes.MAX_STREAMS,
        key=changes.control("on_streams", usual_streams, *about, choice.policy, choice.streams),
        disabled=fixed,
    )
    changes.keep("on_streams", streams, usual_streams)
    second = st.columns(4)
    sms: int = second[0].slider(
        "SMs",
        1,
        changes.MAX_SMS_FACTOR * model.limits.sms,
        key=changes.control("sms", model.limits.sms, *about, gpu),
    )
    changes.keep("sms", sms, model.limits.sms)
    bandwidth: float = second[1].slider(
        "DRAM bandwidth, x", *changes.BANDWIDTH, step=0.05, key=changes.control("bandwidth", 1.0, *about)
    )
    changes.keep("bandwidth", bandwidth, 1.0)
    launch_cost: float = second[2].slider(
        "Launch cost, x",
        *changes.LAUNCH_COST,
        step=0.1,
        key=changes.control("launch_cost", 1.0, *about),
        help="Gaps, forks, joins, the front end and the host.",
    )
    changes.keep("launch_cost", launch_cost, 1.0)
    queues: int = second[3].slider(
        "Hardware queues",
        1,
        model.stream.max_queues,
        disabled=mode == "graph",
        help="Only where the host launches: CUDA_DEVICE_MAX_CONNECTIONS.",
        key=changes.control("queues", model.stream.queues, *about, gpu),
    )
    changes.keep("queues", queues, model.stream.queues)

    same = batch == own_batch
    name = choice.name if same else batches[batch]
    content, trace = trace_of(name)
    graph = results.other_graph(name, content, gpu, trace, model)
    third = st.columns([3, 1])
    names = [each.name for each in trace.ops]
    offered = [names[index] for index in longest(graph, OPS_OFFERED)]
    linked = changes.settings().get("op")
    if linked in names and linked not in offered:
        offered.append(str(linked))
    elif linked not in names:
        changes.settings().pop("op", None)
    chosen: str | None = third[0].selectbox(
        "Op",
        offered,
        format_func=lambda each: op_text(graph, names.index(each)),
        help=f"The {OPS_OFFERED} longest.",
        key=changes.control("op", offered[0], *about, batch) if offered else "no op",
    )
    op = names.index(chosen) if chosen is not None else 0
    if chosen is not None:
        changes.keep("op", chosen, offered[0])
    speed: float = third[1].slider(
        "Op speed-up, x", *changes.OP_SPEED, step=0.25, key=changes.control("op_speed", 1.0, *about)
    )
    changes.keep("op_speed", speed, 1.0)
    write_address("what-if", changes.settings())
    if changes.settings():
        st.button("Reset", icon=":material/undo:", on_click=changes.reset)

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
    # Of another batch, each sample is compared.
    change = (result.makespan_ns / batch) / (baseline.makespan_ns / own_batch) - 1
    view.metric(
        cells[1],
        f"What if{per}",
        format_ns(result.makespan_ns),
        f"{change:+.1%} time{' a sample' if not same else ''}" if change else "the same",
    )
    view.metric(cells[2], "Speed-up", f"{result.speedup:.2f}x", f"baseline {baseline.speedup:.2f}x")
    low_ns, high_ns = graph.hardware.interval_ns(result.makespan_ns, result.streams, graph.may_lose_cache)
    note = "Speed-up is over the sequential graph of the same, changed kernels. "
    peaks = format_bytes(result.peak_bytes), format_bytes(baseline.peak_bytes)
    note += f"Peak memory {peaks[0]}, baseline {peaks[1]}. "
    if changed.hardware.calibrated and speed == 1.0:
        note += (
            f"90 % of past measurements lay within {format_ns(low_ns)} to {format_ns(high_ns)} of such a prediction."
        )
    else:
        note += "No interval: nothing like it has been measured."
    if not same:
        per_sample = result.makespan_ns / batch, baseline.makespan_ns / own_batch
        note += f" For each sample {format_ns(per_sample[0])}, baseline {format_ns(per_sample[1])}."
    st.caption(note)
    # After the answer, and once it is on its way: they take longer than it.
    time.sleep(SENDING_S)
    view.metric(cells[3], "Largest bound", format_ns(result.bounds.largest[0]), result.bounds.largest[1])

    rows = results.sensitivities_of(choice, question, result)
    view.show(
        tornado_figure(rows, view.theme(), f"Sensitivities: {graph.trace.name} on {gpu}"),
        "tornado",
    )
    st.caption("The schedule stays as it is while one parameter at a time goes through its range.")
    if not fixed:
        words = ["--policy", result.policy, "--streams", str(streams), "--launch", mode, "--hw", gpu]
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
