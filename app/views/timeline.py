"""Timeline: the streams of one schedule, GPU activity, the worst delay, and a search for ops by name."""

from typing import Any

import msgspec
import streamlit as st
from gpusim_dashboard import clicks, html, measured, perfetto, results, uploads, view
from gpusim_dashboard.address import Settings
from gpusim_dashboard.charts import numbers_of
from gpusim_dashboard.choice import current
from gpusim_dashboard.html import Head

import gpusim
from gpusim.api import dashboard
from gpusim.defaults import LAUNCH_MODES
from gpusim.errors import OptionError
from gpusim.io.files import compress
from gpusim.report.delays import worst_delay
from gpusim.report.figures.timeline import Look, timeline_figure
from gpusim.report.lanes import whole
from gpusim.report.measured import not_comparable
from gpusim.report.perfetto import chrome_trace, run_from_timeline
from gpusim.report.waiting import waiting_text
from gpusim.units import NS_PER_US, format_ns, format_times_ns

#: Share of the step shown around an op that was searched for, and the factor of the zoom buttons.
AROUND, ZOOM = 0.08, 0.5
#: Names of the parts of the critical path on the page.
ON_THE_PATH = {
    "alone": "kernels, as long as alone",
    "slowed": "longer, through concurrent kernels",
    "stream": "waiting for the same stream",
    "dependency": "waiting for another stream",
    "front end": "waiting for the front end",
}
LAUNCHED = {"graph": "one CUDA graph", "stream": "the host"}
choice = current()
view.heading(choice)
settings = Settings("timeline", choice.content, choice.hardware.name)

cells = st.columns([3, 2, 3, 2], vertical_alignment="bottom")
with st.spinner(view.EXPLORING):
    shown = results.shown_of(choice)
graph = results.step_of(choice).graph.choosing(shown.schedule.variants)
labels = dashboard.op_labels(graph.trace)
busy = [op for op, tasks in enumerate(graph.tasks) if tasks]
names = {graph.trace.ops[op].name: op for op in busy}


words = {"": "none"} | {name: view.option(f"{labels[op]} ({name})") for name, op in names.items()}
wanted = settings.select(
    cells[0],
    "Find an op",
    "op",
    ["", *names],
    "",
    format_func=lambda each: words.get(each, each),
    help="Type a part of a layer or an operator. The timeline goes there.",
)
launch = settings.select(
    cells[1], "Launched by", "launch", LAUNCH_MODES, LAUNCH_MODES[0], format_func=lambda each: LAUNCHED.get(each, each)
)
measured.load(cells[3], choice, settings)
measured_name, replayed = measured.choose(cells[2], choice, shown, settings)
uploads.show_error(measured.UPLOADER)
with st.spinner(view.SIMULATING):
    explained = results.explained_of(choice, shown.schedule, launch)
timeline = explained.timeline
if replayed is not None:
    why_not = not_comparable(replayed, choice.hardware, launch, shown.policy, shown.used)
    measured.summary(replayed, timeline.makespan_ns, why_not)

run_ns = whole(replayed.run)[1] if replayed is not None and replayed.run is not None else 0
timed_ns = replayed.timed_ns if replayed is not None else None
end_us = max(1, -(-max(timeline.makespan_ns, run_ns, timed_ns or 0) // 1000))
marked = frozenset(task for task, each in enumerate(timeline.plan.tasks) if wanted and each.op == names[wanted])


def read_window(text: str) -> tuple[float, float]:
    """Parse a window as `120-340`: start and end in us."""
    low, _, high = text.partition("-")
    try:
        begin, end = float(low), float(high)
    except ValueError:
        begin = end = -1.0
    if not 0.0 <= begin < end <= end_us:
        raise OptionError(f"a stretch of the step such as 0-{end_us}, in us")
    return begin, end


def read_bar(text: str) -> int | None:
    """Parse the number of a task."""
    if not (text.isdecimal() and int(text) < len(timeline.plan)):
        raise OptionError(f"the number of a bar, below {len(timeline.plan)}")
    return int(text)


def zoom_to(begin_us: float, end_us_: float) -> None:
    """Show a window of the step, at least 1 us long."""
    length = max(1.0, min(end_us_ - begin_us, float(end_us)))
    begin = min(max(0.0, begin_us), end_us - length)
    stretch = (round(begin, 1), round(begin + length, 1))
    settings.keep("window", f"{stretch[0]:g}-{stretch[1]:g}", f"0-{end_us}")


# Move once to an op that was just searched for, unless the address also gives a window.
state = st.session_state
if wanted and state.get("went to") != wanted and ("went to" in state or "window" not in settings.texts):
    first = min(timeline.start_ns[task] for task in marked) / NS_PER_US
    last = max(timeline.end_ns[task] for task in marked) / NS_PER_US
    half = max(AROUND * end_us, last - first) / 2
    zoom_to((first + last) / 2 - half, (first + last) / 2 + half)
    settings.keep("bar", None, None)
state["went to"] = wanted
# A selected bar is valid for one schedule only.
if state.setdefault("bar of", shown.label) != shown.label:
    settings.keep("bar", None, None)
    state["bar of"] = shown.label
window_us = settings.value("window", (0.0, float(end_us)), read_window)
picked = settings.value("bar", None, read_bar)
settings.finish()

tools = st.container(horizontal=True, vertical_alignment="center")
length_us, middle_us = window_us[1] - window_us[0], sum(window_us) / 2
steps = (
    ("Earlier", "chevron_left", window_us[0] - length_us / 2, window_us[1] - length_us / 2),
    ("Later", "chevron_right", window_us[0] + length_us / 2, window_us[1] + length_us / 2),
    ("Closer", "zoom_in", middle_us - ZOOM * length_us / 2, middle_us + ZOOM * length_us / 2),
    ("All", "zoom_out_map", 0.0, float(end_us)),
)
for label, icon, begin_us, stop_us in steps:
    tools.button(label, icon=f":material/{icon}:", on_click=zoom_to, args=(begin_us, stop_us))
if worst := worst_delay(explained):
    html.show(f'<p class="g-step"><strong>Worst delay:</strong> {html.sentence(worst.text)}</p>')
else:
    html.show('<p class="g-step"><strong>No delay:</strong> the step takes as long as its critical path.</p>')


def draw(drawn: gpusim.Timeline, key: str) -> Any:
    """Draw a timeline in the window; returns what was selected in it."""
    figure = timeline_figure(
        drawn,
        graph.trace,
        graph.hardware,
        title=f"simulated: {shown.label}",
        measured=replayed.run if replayed is not None else None,
        measured_ns=timed_ns,
        look=Look(
            theme=view.theme(),
            window_ns=(round(window_us[0] * NS_PER_US), round(window_us[1] * NS_PER_US)),
            fold=True,
            marked=marked,
            bare=True,
        ),
    )
    legend = [(each.name, each.marker.color) for each in figure.data if each.type == "bar" and each.showlegend]
    html.show(html.legend([*legend, ("critical path", view.theme().ink)]))
    return view.show(
        figure,
        key,
        f"Timeline of {shown.label}: {format_ns(drawn.makespan_ns)} on {shown.used} streams",
        on_select="rerun",
        selection_mode="box",
        drag="select",
    )


place = st.empty()
if not timeline.occupied:
    about = (choice.content, choice.hardware.name, hash(shown.schedule), launch)
    if state.get("recorded") != about:
        with place.container():
            draw(timeline, "early timeline")
    with st.spinner("Simulating once more, for the load of the GPU ..."):
        timeline = results.timeline_of(choice, shown.schedule, launch)
    state["recorded"] = about
run = run_from_timeline(timeline, graph.trace, f"simulated: {shown.label}", graph.hardware)
perfetto.button(
    tools,
    lambda: compress(msgspec.json.encode(chrome_trace([run]))),
    f"{choice.trace.name}, {shown.label}",
    "perfetto",
)
with place.container():
    event = draw(timeline, f"timeline {window_us} {wanted}")
box = next(iter(event.selection.get("box", [])), None)
if box and len(box.get("x", ())) == 2 and abs(box["x"][1] - box["x"][0]) > 0.0:
    zoom_to(min(box["x"]), max(box["x"]))
    st.rerun()

st.caption(
    "Drag over the lanes to zoom, click a bar for its reasons. Perfetto opens in a tab of its own, and the file goes "
    "from tab to tab."
)
left, right = st.columns(2)
with left:
    chosen = picked
    if chosen is None and marked:
        chosen = min(marked)
    if chosen is None and worst is not None:
        chosen = worst.delay.task
    st.header("Why not sooner?", anchor=False)
    if chosen is None:
        st.markdown("Nothing waits here. Click a bar to see what decided when that kernel started.")
    else:
        st.markdown(waiting_text(timeline, graph.trace, graph.hardware, run, chosen))
        st.caption("Of the worst delay, of an op that is looked for, or of a bar that is clicked.")
with right:
    st.header("Critical path", anchor=False)
    totals = dashboard.path_of(timeline, graph.hardware).totals_ns()
    numbers, unit = numbers_of(format_times_ns(totals.values()))
    html.table(  # not a table of Streamlit's: that one is 1.4 MB of JavaScript
        "Time on the critical path",
        (Head("on the critical path"), Head(f"time, {unit}", True), Head("share", True)),
        [
            (
                (
                    html.text(ON_THE_PATH.get(name, f"waiting: {name}")),
                    number,
                    f"{time / max(1, timeline.makespan_ns):.1%}",
                ),
                False,
            )
            for (name, time), number in zip(totals.items(), numbers, strict=True)
        ],
    )
    st.caption(f"Along the critical path these add up to {format_ns(timeline.makespan_ns)}.")
clicks.listen(lambda task: settings.keep("bar", task, None))
more = ["--launch", launch, "--html", "timeline.html"]
if replayed is not None:
    more += ["--measured", measured_name]
view.simulate_command(choice, shown, *more)
