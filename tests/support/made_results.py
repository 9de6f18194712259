"""Synthetic results: cases in which only times matter."""

from __future__ import annotations

from collections.abc import Sequence

from gpusim.formats.results import SCHEMA, ResultCase, Results


def case(
    predicted_ns: int,
    measured_ns: int,
    *,
    trace: str = "a-infer-b1",
    streams: int = 4,
    interval_ns: tuple[int, int] = (0, 0),
    fitted: bool = False,
    outputs_equal: bool = True,
) -> ResultCase:
    """Make a replayed schedule."""
    return ResultCase(
        trace=trace,
        network=trace.partition("-")[0],
        mode="infer",
        batch=1,
        dtype="tf32",
        memory_format="contiguous",
        frontend="aten",
        policy="random",
        streams=streams,
        predicted_ns=predicted_ns,
        predicted_interval_ns=interval_ns,
        measured_ns=measured_ns,
        interval_ns=(measured_ns, measured_ns),
        sequential_ns=2000,
        sequential_interval_ns=(2000, 2000),
        predicted_sequential_ns=2000,
        eager_ns=5000,
        outputs_equal=outputs_equal,
        bit_equal=True,
        worst_error=0.0,
        sequential_error=0.0,
        fitted=fitted,
        worth_it=True,
        bounds_ns={},
        predicted_peak_bytes=1,
        measured_peak_bytes=1,
        sequential_peak_bytes=1,
        events=1,
        sm_clock_mhz=1980,
    )


def make_results(cases: Sequence[ResultCase] = (), recipe: str = "r") -> Results:
    """Make the document of a run on an H200."""
    return Results(
        schema=SCHEMA,
        recipe=recipe,
        gpu="NVIDIA H200",
        date="2025-03-04",
        command="c",
        hardware="h200",
        versions={"torch": "2"},
        cases=tuple(cases),
    )
