"""Draw the figures of the README: python scripts/make_figures.py [--traces DIR] [--results FILE ...] [-o DIR].

Needs matplotlib, which gpusim itself does not. `timeline.png` is simulated here, from a trace; `predicted_measured.png`
shows results files.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from gpusim.defaults import SEARCH
from gpusim.engine.base import Timeline
from gpusim.engine.reference import ReferenceEngine
from gpusim.formats.hardware import load_hardware
from gpusim.formats.results import ResultCase, Results, first_of_each_step, newest_results, read_results
from gpusim.formats.trace import Trace
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.policies.registry import POLICIES
from gpusim.search.explore import explore
from gpusim.search.explored import Explored
from gpusim.trace.store import read_trace
from gpusim.validation.recipe import WITHOUT_VARIANTS

ROOT = Path(__file__).resolve().parent.parent
TIMELINE_TRACE = "googlenet-train-b8"
#: Recipes that compare the searched schedule with all policies.
SEARCHES = ("search_again", "search_inference", "search_training", "search_training_32", "search_training_large")

#: Okabe and Ito's palette, distinguishable with any colour vision and in grey.
BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
INK, PALE = "#222222", "#9A9A9A"
PHASES = {"forward": BLUE, "backward": ORANGE, "optimizer": GREEN}
#: Marks and colours by replayed schedule; all policies share one.
MARKS = {
    "policies": ("s", PALE),
    WITHOUT_VARIANTS: ("D", GREEN),
    SEARCH: ("o", BLUE),
}
#: Width of the window for averages of SM residency, in us.
WINDOW_US = 25.0
#: Relative difference below which predictions on equal stream counts are of one schedule; searches differ between runs.
SAME_LENGTH = 0.002
#: Drawn 9 inches wide and shown at about 900 pixels: 200 dots per inch stay sharp on dense screens.
WIDTH_IN, DPI = 9.0, 200

STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.edgecolor": PALE,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


def residency(timeline: Timeline, edges_us: np.ndarray) -> np.ndarray:
    """Return the mean GPU residency between neighbouring edges, in percent."""
    times = np.array([time for time, _ in timeline.occupied]) / 1e3
    levels = np.array([level for _, level in timeline.occupied])
    area = np.concatenate([[0.0], np.cumsum(np.diff(times) * levels[:-1])])
    return 100 * np.diff(np.interp(edges_us, times, area)) / np.diff(edges_us)


def draw_lanes(axes: Axes, timeline: Timeline, trace: Trace) -> None:
    """Draw one row per stream, first stream on top, and a bar per kernel, coloured by phase."""
    streams = sorted({task.queue for task in timeline.plan.tasks})
    for phase, colour in PHASES.items():
        for row, stream in enumerate(streams):
            bars = [
                (start / 1e3, (end - start) / 1e3)
                for task, start, end in zip(timeline.plan.tasks, timeline.start_ns, timeline.end_ns, strict=True)
                if task.queue == stream and trace.ops[task.op].phase == phase
            ]
            axes.broken_barh(bars, (row - 0.38, 0.76), facecolors=colour, linewidth=0)
    axes.set_ylim(len(streams) - 0.4, -0.6)
    axes.set_yticks(range(len(streams)), [f"stream {n + 1}" for n in range(len(streams))])
    axes.tick_params(left=False, bottom=False, labelbottom=False)
    axes.spines[["left", "bottom"]].set_visible(False)


def draw_residency(axes: Axes, timeline: Timeline) -> None:
    """Draw SM residency over time below the bars, with its mean."""
    end_us = timeline.makespan_ns / 1e3
    edges = np.linspace(0.0, end_us, max(2, round(end_us / WINDOW_US)))
    values = residency(timeline, edges)
    mean = float(np.average(values, weights=np.diff(edges)))
    axes.stairs(values, edges, fill=True, color="#B9C3CC")
    axes.set_ylim(0, 100)
    axes.set_yticks([0, 50, 100])
    axes.set_ylabel("SMs, %")
    axes.annotate(
        f"SM residency:\n{mean:.0f} % on average",
        (end_us, 50),
        xytext=(10, 0),
        textcoords="offset points",
        va="center",
        linespacing=1.4,
        annotation_clip=False,
    )


def annotate_end(axes: Axes, timeline: Timeline, text: str) -> None:
    """Mark the makespan at the end of the bars."""
    end_us = timeline.makespan_ns / 1e3
    axes.axvline(end_us, color=INK, linewidth=1)
    axes.annotate(
        text,
        (end_us, sum(axes.get_ylim()) / 2),
        xytext=(10, 0),
        textcoords="offset points",
        va="center",
        linespacing=1.4,
        annotation_clip=False,
    )


def timeline_figure(trace: Trace, explored: Explored, sequential: Timeline, measured: ResultCase | None) -> plt.Figure:
    """Draw the sequential graph above the recommended schedule, on one time axis."""
    best = explored.timeline
    lanes = len({task.queue for task in best.plan.tasks})
    figure = plt.figure(figsize=(WIDTH_IN, 3.6 + 0.25 * lanes))
    grid = figure.add_gridspec(5, 1, height_ratios=[0.7, 0.8, 0.65, 0.4 * lanes + 0.3, 0.8], hspace=0.12)
    first = figure.add_subplot(grid[0])
    axes = [first, *(figure.add_subplot(grid[row], sharex=first) for row in (1, 3, 4))]
    alone_us, best_us = sequential.makespan_ns / 1e3, best.makespan_ns / 1e3
    gain = f"{best_us:,.0f} us, {alone_us / best_us:.2f}x as fast"
    seen = seen_best = ""
    if measured is not None:
        seen = f"\n(measured: {measured.sequential_ns / 1e3:,.0f} us)"
        seen_best = f"\n(measured: {measured.measured_ns / 1e3:,.0f} us, {measured.speedup:.2f}x)"
    for (lane_axes, sm_axes), timeline, text in (
        (axes[:2], sequential, f"{alone_us:,.0f} us{seen}"),
        (axes[2:], best, f"{gain}{seen_best}"),
    ):
        draw_lanes(lane_axes, timeline, trace)
        annotate_end(lane_axes, timeline, text)
        draw_residency(sm_axes, timeline)
    title = {"loc": "left", "fontsize": 10.5, "fontweight": "bold"}
    axes[0].set_title("Sequential CUDA graph", **title)
    axes[2].set_title(f"Recommended schedule: the same kernels on {lanes} streams", **title)
    axes[1].tick_params(labelbottom=False)
    axes[3].set_xlabel("simulated time from the start of the step, us")
    axes[3].xaxis.set_major_formatter("{x:,.0f}")
    axes[3].set_xlim(0, alone_us)
    handles = [Patch(color=colour, label=phase) for phase, colour in PHASES.items()]
    axes[0].legend(
        handles=handles, loc="lower right", bbox_to_anchor=(1.01, 1.0), ncols=3, frameon=False, borderpad=0,
        borderaxespad=0.4, handlelength=1.2, columnspacing=1.4,
    )  # fmt: skip
    model = trace.model
    figure.suptitle(
        f"One training step of {model.network}, batch {model.batch}, {model.dtype.upper()}, on an "
        f"{trace.provenance.gpu.name}",
        x=0.09,
        y=0.985,
        ha="left",
        fontsize=12,
    )
    figure.subplots_adjust(left=0.09, right=0.8, top=0.86, bottom=0.11)
    return figure


def draw_steps(axes: Axes, cases: Sequence[ResultCase]) -> None:
    """Draw predicted and measured speed-up of each step's recommended schedule over the sequential graph."""
    cases = sorted(cases, key=lambda case: case.speedup)
    for row, case in enumerate(cases):
        low, high = (case.sequential_ns / time for time in reversed(case.interval_ns))
        axes.plot([1.0, case.speedup], [row, row], color="#DDDDDD", linewidth=5, solid_capstyle="butt", zorder=1)
        axes.plot([low, high], [row, row], color=BLUE, linewidth=2, zorder=3)
        axes.plot(case.speedup, row, "o", color=BLUE, markersize=6.5, zorder=4)
        axes.plot(case.predicted_speedup, row, "D", color="white", markeredgecolor=VERMILION, markersize=6, zorder=3.5)
    axes.set_yticks(range(len(cases)), [case.trace for case in cases])
    axes.set_ylim(-0.6, len(cases) - 0.4)
    axes.axvline(1.0, color=PALE, linewidth=1)
    axes.tick_params(left=False)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("speed-up over the sequential CUDA graph")
    axes.xaxis.set_major_formatter("{x:.2f}x")
    axes.set_title("Fastest tried for each step", loc="left", fontsize=10.5, fontweight="bold")
    axes.legend(
        handles=[
            Line2D([], [], marker="o", color=BLUE, linestyle="", markersize=6.5, label="measured"),
            Line2D([], [], marker="D", color="white", markeredgecolor=VERMILION, label="predicted", linestyle=""),
        ],
        loc="lower right",
        frameon=False,
    )


def draw_errors(axes: Axes, cases: Sequence[ResultCase]) -> None:
    """Draw the prediction error of every schedule replayed on several streams."""
    cases = [case for case in cases if case.streams > 1]
    axes.axhspan(-5, 5, color="#EBEBEB", linewidth=0)
    axes.axhline(0, color=PALE, linewidth=1)
    for label, (mark, colour) in MARKS.items():
        mine = [case for case in cases if (case.policy if case.policy in MARKS else "policies") == label]
        axes.plot(
            [case.measured_ns / 1e6 for case in mine],
            [100 * case.error for case in mine],
            mark,
            color=colour,
            markersize=5.5,
            markeredgecolor="white",
            markeredgewidth=0.6,
            label=label,
        )
    times = [case.measured_ns / 1e6 for case in cases]
    limits = min(times) / 1.3, max(times) * 1.3
    reach = max(10.0, *(abs(100 * case.error) + 2 for case in cases))
    axes.set_xscale("log")
    ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if limits[0] <= tick <= limits[1]]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlim(*limits)
    axes.set_ylim(-reach, reach)
    axes.set_xlabel("measured time of the step, ms")
    axes.set_ylabel("(predicted - measured) / measured, %")
    axes.set_title(f"Error, {len(cases)} concurrent schedules", loc="left", fontsize=10.5, fontweight="bold")
    handles, _ = axes.get_legend_handles_labels()
    handles.append(Patch(color="#EBEBEB", label="within 5 %"))
    axes.legend(handles=handles, loc="upper right", frameon=False, handlelength=1.4)


def results_figure(files: Sequence[Results]) -> plt.Figure:
    """Draw predicted against measured times, for all cases of some results files."""
    cases = [case for results in files for case in results.cases]
    best = [case for case in cases if case.policy == SEARCH]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(WIDTH_IN, max(3.6, 1.5 + 0.24 * len(best))), width_ratios=[1.15, 1], layout="constrained"
    )
    draw_steps(left, best)
    draw_errors(right, cases)
    return figure


def measured_case(files: Sequence[Results], explored: Explored) -> ResultCase | None:
    """Return the replay of the drawn schedule: same number of streams and predicted time."""
    best = explored.best
    for case in (case for results in files for case in results.cases):
        same_length = abs(case.predicted_ns / best.makespan_ns - 1) < SAME_LENGTH
        if case.trace == explored.trace.name and case.streams == best.streams and same_length:
            return case
    return None


def save(path: Path, draw: Callable[[], plt.Figure]) -> None:
    """Draw and write one figure."""
    with plt.rc_context(STYLE):
        figure = draw()
        figure.savefig(path, dpi=DPI, metadata={"Software": None})
        plt.close(figure)
    print(path)


def main() -> None:
    """Write both figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=ROOT / "traces", help="folder of the traces")
    parser.add_argument("--results", type=Path, nargs="+", help="results files [default: the newest]")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "images", help="folder of the figures")
    options = parser.parse_args()
    paths = options.results or [newest_results(ROOT / "validate" / "results", recipe) for recipe in SEARCHES]
    if not paths:
        raise SystemExit("no results files: give some with --results")
    files = first_of_each_step([read_results(path) for path in paths])
    trace = read_trace(options.traces / f"{TIMELINE_TRACE}.json.gz")
    hardware = load_hardware("h200")
    explored = explore(OpGraph.build(trace, hardware))
    graph = OpGraph.build(trace, hardware)
    alone = POLICIES["sequential"](graph, 1)
    sequential = ReferenceEngine().run(lower(graph, alone), graph.hardware)
    measured = measured_case(files, explored)
    save(options.output / "timeline.png", lambda: timeline_figure(trace, explored, sequential, measured))
    save(options.output / "predicted_measured.png", lambda: results_figure(files))


if __name__ == "__main__":
    main()
