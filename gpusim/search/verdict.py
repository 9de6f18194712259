"""The verdict on a concurrent schedule: whether it is worth it, its gain, and the limit."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Literal

from gpusim.bounds.bounds import Bounds
from gpusim.engine.evaluate import Evaluator
from gpusim.engine.reference import ReferenceEngine
from gpusim.formats.hardware import HardwareModel
from gpusim.notebook import ShortRepr, html_table, short_repr
from gpusim.plan.estimated_kernels import ESTIMATED_GAIN_FRAC
from gpusim.plan.graph import COMPILED_FROM_OPS, OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule
from gpusim.search.eager import predict_eager
from gpusim.units import counted, format_bytes, format_ns

LIMITS_HINT = "; `gpusim limits` says what is between"
RECOMMENDED_WAY = "recommended"
UNKNOWN_WAY = "unknown: capture the step first"

Way = Literal["eager", "graph", "streams", "streams_without_graph"]
"""Way to run a step: op by op from Python, in one CUDA graph, on streams in the graph, on streams from Python."""


@dataclass(frozen=True, slots=True, repr=False)
class VerdictRow(ShortRepr):
    """One way to run the step, with its time."""

    what: Way
    time_ns: int
    measured: bool
    """True if measured at capture, else predicted."""
    streams: int
    speedup_over_eager: float | None
    """Speed-up over eager; None if the eager time is unknown."""
    advice: str
    """Advice in a few words; may be empty."""

    @property
    def label(self) -> str:
        """Way in words: `6 streams in the graph`."""
        if self.what == "eager":
            return "eager"
        if self.what == "graph":
            return "one CUDA graph"
        if self.what == "streams":
            return f"{counted(self.streams, 'stream')} in the graph"
        return f"{counted(self.streams, 'stream')} without a graph"


def verdict_rows(
    graph: OpGraph,
    schedule: Schedule,
    sequential_ns: int,
    best_ns: int,
    eager_ns: int | None,
    planned_streams: int | None = None,
) -> tuple[VerdictRow, ...]:
    """Return the ways to run a step, from eager to the recommended `schedule` in a CUDA graph, which takes `best_ns`.

    `eager_ns` is the measured eager step; None predicts it if the trace has host times. With host times, a schedule on
    several streams is also predicted as launched from Python, in the engine's stream mode. Times are in ns.
    `planned_streams` are those of a schedule with memory actions, copies included, which runs only in a graph.
    """
    # The compiled engine would have to compile its stream mode, which takes longer for small steps.
    engine = None if len(graph) >= COMPILED_FROM_OPS else ReferenceEngine()
    measured = eager_ns is not None
    if eager_ns is None:
        eager_ns = predict_eager(graph, engine)
    streams = schedule.stream_count

    def row(what: Way, time_ns: int, used: int, advice: str, measured: bool = False) -> VerdictRow:
        return VerdictRow(what, time_ns, measured, used, eager_ns / time_ns if eager_ns and time_ns else None, advice)

    rows = [] if eager_ns is None else [row("eager", eager_ns, 1, "", measured)]
    rows.append(row("graph", sequential_ns, 1, "torch.cuda.graph, needs no gpusim"))
    if planned_streams is not None:
        rows.append(row("streams", best_ns, planned_streams, RECOMMENDED_WAY))
    elif streams > 1 or schedule.has_variants:
        rows.append(row("streams", best_ns, streams, RECOMMENDED_WAY))
    if streams > 1 and not schedule.partitions and planned_streams is None and eager_ns is not None:
        if engine is None:
            without_ns = Evaluator(graph).makespan_ns(schedule, "stream")
        else:
            without_ns = engine.run(lower(graph, schedule, "stream"), graph.hardware, False).makespan_ns
        against = next((simpler for simpler in rows[:2] if without_ns > simpler.time_ns), None)
        advice = f"slower than {against.label}: do not" if against else ""
        rows.append(row("streams_without_graph", without_ns, streams, advice))
    return tuple(rows)


def best_way(rows: tuple[VerdictRow, ...]) -> VerdictRow | None:
    """Return the recommended way: streams in the graph if worth it, else one CUDA graph."""
    inside = [row for row in rows if row.what == "graph" or (row.what == "streams" and row.advice == RECOMMENDED_WAY)]
    return inside[-1] if inside else None


@dataclass(frozen=True, slots=True, repr=False)
class Verdict:
    """Verdict on a schedule; `worth_it` only if even the low end of the predicted speed-up is a gain."""

    worth_it: bool
    speedup: float
    low: float
    high: float
    """High end of the interval of the speed-up over the sequential graph, which held 90 % of past cases; at most what
    the largest lower bound leaves.
    """
    text: str
    other_kernels: bool = False
    """True if the schedule runs variants, for which the interval allows as well."""
    searched: bool = False
    """True if a search found the schedule, for which the interval allows as well."""
    rows: tuple[VerdictRow, ...] = ()
    """Ways to run the step, eager first."""
    less_known: bool = False
    """True if the step is not mostly convolutional, for which the interval allows as well."""
    unknown: bool = False
    """True if a gain is predicted for estimated or imported kernels, whose doubt includes none. `rows` recommend no
    streams.
    """

    @property
    def sentence(self) -> str:
        """Text without the hint at a command, for pages, which have links."""
        return self.text.replace(LIMITS_HINT, "")

    def __str__(self) -> str:
        return self.sentence

    def __repr__(self) -> str:
        worth = "worth it" if self.worth_it else "not worth it"
        return short_repr("Verdict", f"{worth}: {self.speedup:.2f}x ({self.low:.2f} to {self.high:.2f})")

    def _repr_html_(self) -> str:
        rows = [(row.label, format_ns(row.time_ns), row.advice) for row in self.rows]
        return html_table(self.sentence, ("way", "time", "advice"), rows)


def verdict(
    hardware: HardwareModel,
    sequential_ns: int,
    best_ns: int,
    best_policy: str,
    streams: int,
    bound: Bounds,
    misses_left_out: bool = False,
    other_kernels: bool = False,
    searched: bool = False,
    rows: tuple[VerdictRow, ...] = (),
    estimated: bool = False,
    less_known: bool = False,
    within_bytes: int | None = None,
    slowed_frac: float = 0.0,
    unsized_frac: float = 0.0,
) -> Verdict:
    """Return the verdict on the best schedule found; `estimated` is True if no GPU has run the kernels.

    `within_bytes` is the memory limit that it keeps by memory actions, if it has some. `misses_left_out` is True if the
    step may lose the L2 cache and the prediction leaves out what that costs. `slowed_frac` and `unsized_frac` are the
    doubts about the kernels of an imported trace (`gpusim.trace.kernel_doubts`).
    """
    uncertainty = hardware.uncertainty
    speedup = sequential_ns / best_ns
    margins = functools.partial(
        uncertainty.margins,
        best_ns,
        sequential_ns,
        streams,
        other_kernels=other_kernels,
        searched=searched,
        less_known=less_known,
    )
    less, more = margins(least_frac=ESTIMATED_GAIN_FRAC if estimated else 0.0)
    less_known = less_known and streams > 1 and max(uncertainty.less_known_frac, uncertainty.saving_frac) > 0.0
    limit_ns, limit = bound.largest
    ceiling = sequential_ns / limit_ns if limit_ns else 1.0
    low, high = speedup / (1 + more), max(speedup, min(ceiling, speedup / (1 - less)))
    if streams > 1:
        low *= 1 - slowed_frac
        if unsized_frac:  # each kernel may fill the GPU: then streams gain nothing
            low = min(low, 1 / (1 + more))
    worth_it = low > 1.0
    in_doubt = estimated or slowed_frac > 0.0 or unsized_frac > 0.0
    unknown = not worth_it and within_bytes is None and in_doubt and speedup > 1 + uncertainty.schedule_frac
    several, caveats = streams > 1, list[str]()
    if unsized_frac and several:
        caveats.append(
            f"The launch sizes of {unsized_frac:.0%} of its kernel time are unknown, and so is what fits side by side: "
            "import a profile that has them."
        )
    if slowed_frac and several:
        caveats.append(
            "Its kernels were profiled while others ran, which takes longer than alone, so up to "
            f"{slowed_frac:.0%} of the sequential time is in doubt: profile the step on one stream."
        )
    if estimated:
        doubtful = f", so {ESTIMATED_GAIN_FRAC:.0%} of its time is in doubt" if several else ""
        caveats.append(f"The kernels are estimated{doubtful}: capture the step on its GPU before you rely on this.")
    if misses_left_out and several:
        caveats.append(
            "Its memory fits the L2 cache on one stream and may not on several; what that costs is not predicted, as "
            f"the model of {hardware.name} has no measured cache."
        )
    variants = uncertainty.variants_frac if other_kernels else 0.0
    if variants:
        caveats.append(f"It runs other kernels, which are less well known: it may take {variants:.1%} longer.")
    if less_known:
        doubt, _ = margins()
        caveats.append(f"It is not mostly convolutional, so less well known: {doubt:.0%} of its time is in doubt.")
    if not hardware.calibrated:
        caveats.append(f"The model of {hardware.name} is uncalibrated: treat this as a trend.")
    caution = "".join(f" {caveat}" for caveat in caveats)
    room = f"No schedule can pass {ceiling:.2f}x ({limit}: {format_ns(limit_ns)}){LIMITS_HINT}."
    if within_bytes is not None:
        text = (
            f"Within {format_bytes(within_bytes)} by memory actions: {speedup:.2f}x ({low:.2f} to {high:.2f}) of the "
            f"sequential CUDA graph that keeps all, on {streams} streams, those of copies included. {room}{caution}"
        )
    elif worth_it:
        text = (
            f"Worth it: {speedup:.2f}x ({low:.2f} to {high:.2f}) over the sequential CUDA graph with "
            f"{counted(streams, 'stream')} ({best_policy}). {room}{caution}"
        )
    else:
        why = "even the bound leaves nothing to win" if ceiling < 1.02 else f"the bound is {ceiling:.2f}x ({limit})"
        answer, advice = ("Unknown", "") if unknown else ("Not worth it", " Keep the sequential schedule.")
        text = (
            f"{answer}: predicted {speedup:.2f}x ({low:.2f} to {high:.2f}) over the sequential CUDA graph, an interval "
            f"that includes no gain; {why}.{advice}{caution}"
        )
    if unknown:
        rows = tuple(dataclasses.replace(row, advice=UNKNOWN_WAY) if row.what == "streams" else row for row in rows)
    return Verdict(worth_it, speedup, low, high, text, other_kernels, searched, rows, less_known, unknown)
