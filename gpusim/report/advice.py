"""Advice from a verdict: an answer, the ways to run the step, and reasons."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from gpusim.bounds.names import AREA, BANDWIDTH, CONTENTION, CRITICAL_PATH, FRONT_END
from gpusim.units import counted, format_times_ns

if TYPE_CHECKING:
    from gpusim.formats.results import Results
    from gpusim.formats.trace import Model
    from gpusim.report.summary import Summary

#: Baselines with fused kernels by their name in results files, with names for users.
FUSED: Final = {
    "torch_compile_own_graph": "torch.compile in one CUDA graph",
    "torch_compile_reduce_overhead": "torch.compile(mode='reduce-overhead')",
    "torch_compile_max_autotune": "torch.compile(mode='max-autotune')",
    "torch_compile_combo_kernels": "torch.compile with combo kernels",
}
#: Policy name of results rows of `gpusim.optimize`.
OPTIMIZE: Final = "optimize"
#: Name of the fastest torch.compile baseline.
COMPILE: Final = "compile"
#: Smallest speed-up left by a bound that counts as a possible gain.
NOTHING_LEFT: Final = 1.02
#: A step with less mean parallelism than this is a chain.
CHAIN_WIDTH: Final = 1.25
_TAKES: Final = {
    "eager": "what runs today",
    "graph": "torch.cuda.graph around the step; shapes stay fixed",
    "streams": "the schedule below, in that graph",
}
_BOUND: Final = {
    CRITICAL_PATH: "Its operations need each other: on average {width:.1f} of them could run at once.",
    AREA: "Each kernel fills the GPU: concurrent kernels would only share the SMs that each has alone.",
    CONTENTION: "Each kernel fills the GPU: concurrent kernels would only slow each other down.",
    BANDWIDTH: "Its kernels wait for memory: concurrent kernels would share the same bandwidth.",
    FRONT_END: "Its kernels are so short that starting them takes the time: streams do not start them faster.",
}


_BOUND_IN_WORDS: Final = {
    CRITICAL_PATH: "operations need each other",
    AREA: "kernels fill the GPU",
    CONTENTION: "kernels fill the GPU",
    BANDWIDTH: "memory bandwidth",
    FRONT_END: "starting the kernels",
}


def bound_in_words(name: str) -> str:
    """Return the origin of a lower bound, for readers who do not know its name."""
    return _BOUND_IN_WORDS.get(name, name)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run the step."""

    what: str
    """`eager`, `graph`, `streams`, `compile` or `optimize`."""
    name: str
    time_ns: int
    measured: bool
    over_eager: float | None
    """Eager time over this one; None if the eager time is unknown."""
    takes: str
    """Action for the user."""
    recommended: bool = False
    source: str = ""
    """Where and when fused kernels were measured, and the eager time there; empty for the other ways."""


def ways(summary: Summary, fused: Sequence[Way] = ()) -> list[Way]:
    """Return the ways worth a row: eager, one CUDA graph, streams in the graph, and known fused kernels."""
    rows = [
        Way(row.what, row.label, row.time_ns, row.measured, row.speedup_over_eager, _TAKES[row.what], row.best)
        for row in summary.verdict.rows
        if row.what in _TAKES
    ]
    eager_ns = next((row.time_ns for row in summary.verdict.rows if row.what == "eager"), None)
    return rows + [replace(way, over_eager=eager_ns / way.time_ns if eager_ns else None) for way in fused]


def fused_ways(model: Model, gpu: str, files: Iterable[Results]) -> list[Way]:
    """Return the newest measurements of fused kernels for this step on this GPU: the fastest torch.compile that was
    measured, and `gpusim.optimize`. Empty if there are none.
    """
    best: dict[str, tuple[str, Way]] = {}
    step = (model.network, model.mode, model.batch, model.dtype, model.memory_format)
    for results in files:
        for case in results.cases:
            if results.gpu != gpu or step != (case.network, case.mode, case.batch, case.dtype, case.memory_format):
                continue
            date = case.date or results.date
            source = f"{results.gpu}, {date}, {results.recipe}.toml"
            if case.eager_ns is not None:
                [eager] = format_times_ns((case.eager_ns,))
                source = f"{source}, where eager took {eager}"
            times = [
                (case.alongside_ns(name), name)
                for name, time_ns in case.baselines.items()
                if name in FUSED and time_ns > 0
            ]
            if times:
                time_ns, name = min(times)
                _keep(best, date, Way(COMPILE, "fused kernels", time_ns, True, None, FUSED[name], source=source))
            if case.policy == OPTIMIZE and case.ablation is None and case.outputs_equal:
                name = f"gpusim.optimize, {counted(case.streams, 'stream')}"
                takes = "one line, below: its own search on your GPU, among other kernels, too"
                _keep(best, date, Way(OPTIMIZE, name, case.measured_ns, True, None, takes, source=source))
    return [best[what][1] for what in (COMPILE, OPTIMIZE) if what in best]


def _keep(best: dict[str, tuple[str, Way]], date: str, way: Way) -> None:
    """Keep the newest way of its kind, and the fastest of one day."""
    before = best.get(way.what)
    if before is None or (date, -way.time_ns) > (before[0], -before[1].time_ns):
        best[way.what] = date, way


def against_fused(rows: Sequence[Way]) -> str:
    """Return the effect of measured fused kernels on the answer in a sentence or two; empty without measurements."""
    compiled, optimized = (next((row for row in rows if row.what == what), None) for what in (COMPILE, OPTIMIZE))
    own = min((row for row in rows if row.what in ("graph", "streams")), key=lambda row: row.time_ns, default=None)
    if own is None or (compiled is None and optimized is None):
        return ""
    if optimized is not None and all(optimized.time_ns < row.time_ns for row in (own, compiled) if row is not None):
        over = "" if compiled is None else f", {_over(compiled, optimized)} over {compiled.takes}"
        time = _alike(optimized.time_ns, rows)
        return f"gpusim.optimize, which chooses kernels as well, was measured at {time}{over}."
    if compiled is not None and compiled.time_ns < own.time_ns:
        time = _alike(compiled.time_ns, rows)
        return f"Fuse kernels first: {compiled.takes} was measured at {time}, {_over(own, compiled)} over {own.name}."
    return "Fused kernels were measured, too, and are slower than the best of the other rows."


def note_on_fused(rows: Sequence[Way]) -> str:
    """Return where fused kernels were measured, in a sentence; empty without measurements."""
    sources = dict.fromkeys(row.source for row in rows if row.source)
    return f"Fused kernels: measured on {'; '.join(sources)}." if sources else ""


def _alike(time_ns: int, rows: Sequence[Way]) -> str:
    """Return a time in the unit of the whole table."""
    return format_times_ns([time_ns, *(row.time_ns for row in rows)])[0]


def _over(slow: Way, fast: Way) -> str:
    return f"{slow.time_ns / fast.time_ns:.2f}x"


def headline(summary: Summary, calibrated: bool) -> str:
    """Return the answer to "should I use streams", in one sentence."""
    verdict = summary.verdict
    eager = next((row for row in verdict.rows if row.what == "eager"), None)
    graph = next(row for row in verdict.rows if row.what == "graph")
    best = next((row for row in verdict.rows if row.best), graph)
    if not calibrated:
        return f"As a trend: {verdict.speedup:.2f}x over one CUDA graph. The model of this GPU is uncalibrated."
    if verdict.unknown:
        return f"Unknown. {verdict.speedup:.2f}x is predicted, within the doubt of its kernels: capture the step."
    if not verdict.worth_it:
        if eager is None or not graph.speedup_over_eager:
            return "No. Streams gain nothing here: keep one CUDA graph."
        before, after = format_times_ns((eager.time_ns, graph.time_ns))
        return (
            f"No. Streams gain nothing here. One CUDA graph does: {after} instead of {before}, "
            f"{graph.speedup_over_eager:.2f}x."
        )
    if eager is None or not best.speedup_over_eager:
        before, after = format_times_ns((graph.time_ns, best.time_ns))
        return f"Yes. {after} a step instead of {before} in one CUDA graph: {verdict.speedup:.2f}x."
    before, after = format_times_ns((eager.time_ns, best.time_ns))
    return (
        f"Yes. {after} a step instead of {before} eager: {best.speedup_over_eager:.2f}x. "
        f"Of that, one CUDA graph is {graph.speedup_over_eager or 1.0:.2f}x and streams in it {verdict.speedup:.2f}x."
    )


def reason(summary: Summary) -> str:
    """Return the reason why the gain is limited or zero, in a sentence or two."""
    bound_ns, name = summary.largest_bound
    ceiling = summary.sequential_ns / bound_ns if bound_ns else 1.0
    chain_ns = next((time_ns for time_ns, other in summary.bounds if other == CRITICAL_PATH), 0)
    width = summary.sequential_ns / chain_ns if chain_ns else 1.0
    said = _BOUND[name].format(width=width)
    if name == CRITICAL_PATH and width < CHAIN_WIDTH:
        said = f"It is a chain. {said}"
    if ceiling < NOTHING_LEFT:
        return f"{said} No schedule can win anything."
    if summary.verdict.worth_it:
        return said
    return (
        f"{said} No schedule can pass {ceiling:.2f}x, and the best one found is predicted at "
        f"{summary.verdict.speedup:.2f}x: within what predictions are wrong by."
    )


def note_without_graph(summary: Summary) -> str:
    """Return a warning if streams without a CUDA graph are slower than a simpler way; else an empty text."""
    row = next((row for row in summary.verdict.rows if row.what == "streams_without_graph"), None)
    if row is None or not row.advice:
        return ""
    [time] = format_times_ns((row.time_ns,))
    return f"{row.label[0].upper()}{row.label[1:]}: {time}, {row.advice}."
