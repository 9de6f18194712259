"""The verdict: is a concurrent schedule worth it, how much, and what stands in the way of more."""

from __future__ import annotations

from dataclasses import dataclass

from gpusim.hardware.model import HardwareModel
from gpusim.search.bounds import Bounds
from gpusim.units import format_ns


@dataclass(frozen=True, slots=True)
class Verdict:
    """`worth_it` only where even the low end of the predicted speed-up is a gain."""

    worth_it: bool
    speedup: float
    low: float
    high: float
    """Interval of the speed-up over the sequential graph that 90 % of past cases lay in."""
    text: str
    may_lose_cache: bool = False
    """Whether the interval counts that, too."""
    other_kernels: bool = False
    """Whether the schedule runs variants, which the interval counts as well."""


def verdict(
    hardware: HardwareModel,
    sequential_ns: int,
    best_ns: int,
    best_policy: str,
    streams: int,
    bound: Bounds,
    may_lose_cache: bool = False,
    other_kernels: bool = False,
) -> Verdict:
    """The verdict on the best schedule found."""
    speedup = sequential_ns / best_ns
    spread = hardware.uncertainty.schedule_frac if streams > 1 else 0.0
    late = hardware.uncertainty.late_frac(streams, may_lose_cache, other_kernels)
    cache = hardware.uncertainty.late_frac(streams, may_lose_cache)
    low, high = speedup / (1 + spread) / (1 + late), speedup / (1 - spread)
    limit_ns, limit = bound.largest
    ceiling = sequential_ns / limit_ns if limit_ns else 1.0
    worth_it = low > 1.0
    source = "" if hardware.calibrated else f" The model of {hardware.name} is uncalibrated: treat this as a trend."
    if late > cache:
        variants = hardware.uncertainty.variants_frac
        source = f" It runs other kernels, which are less well known: it may take {variants:.1%} longer.{source}"
    if cache:
        source = (
            f" Its memory fits the L2 cache on one stream and may not on several: it may take {cache:.0%} longer."
        ) + source
    room = (
        f"No schedule can pass {ceiling:.2f}x ({limit}: {format_ns(limit_ns)}); `gpusim limits` says what is between."
    )
    if worth_it:
        text = (
            f"Worth it: {speedup:.2f}x ({low:.2f} to {high:.2f}) over the sequential CUDA graph with {streams} streams "
            f"({best_policy}). {room}{source}"
        )
    else:
        why = "even the bound leaves nothing to win" if ceiling < 1.02 else f"the bound is {ceiling:.2f}x ({limit})"
        text = (
            f"Not worth it: predicted {speedup:.2f}x ({low:.2f} to {high:.2f}) over the sequential CUDA graph, an "
            f"interval that includes no gain; {why}. Keep the sequential schedule.{source}"
        )
    return Verdict(worth_it, speedup, low, high, text, cache > 0.0, other_kernels)
