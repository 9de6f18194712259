"""Gains of variants and partitions, as lines and as a document, with evidence if there is no gain."""

from __future__ import annotations

from typing import Any

from gpusim.search.explored import Explored
from gpusim.search.variants import PartitionsTried, VariantsTried
from gpusim.units import format_ns

#: Gains up to this share are within the noise between equal searches.
NOTHING_FRAC = 0.002


def choices_lines(explored: Explored) -> list[str]:
    """Return a line on variants, if the trace has any, and one on partitions, if requested."""
    lines = []
    if explored.variants is not None:
        lines.append(_variants_line(explored.variants))
    if explored.partitions:
        lines.append(_partitions_line(explored.partitions))
    return lines


def _variants_line(tried: VariantsTried) -> str:
    fastest = f"each op's fastest kernel in the schedule without variants: {format_ns(tried.fastest_ns)}"
    times = f"{format_ns(tried.without_ns)} without, {format_ns(tried.with_ns)} with them, searched as long; {fastest}"
    if tried.gain <= NOTHING_FRAC:
        return f"Variants: nothing gained, evidence: {tried.ops} ops have some; {times}"
    return (
        f"Variants: {tried.used} of {tried.ops} ops use another kernel ({tried.slower} of them a slower one), "
        f"predicted gain {tried.gain:.1%}: {times}"
    )


def _partitions_line(tried: tuple[PartitionsTried, ...]) -> str:
    best = max(tried, key=lambda each: each.gain)
    whole = f"{format_ns(best.without_ns)} on the whole GPU, searched as long"
    if best.gain <= NOTHING_FRAC:
        all_of_them = "; ".join(f"{split.text}: {format_ns(split.makespan_ns)} ({split.gain:+.1%})" for split in tried)
        return f"Partitions: nothing gained, evidence: {whole}; {all_of_them}"
    return f"Partitions: {best.text}: {format_ns(best.makespan_ns)}, predicted gain {best.gain:.1%}: {whole}"


def choices_document(explored: Explored) -> dict[str, Any]:
    """Return the gains for `--json`; empty if nothing was searched."""
    document: dict[str, Any] = {}
    tried = explored.variants
    if tried is not None:
        document["variants"] = {
            "ops": tried.ops,
            "used": tried.used,
            "slower": tried.slower,
            "without_ns": tried.without_ns,
            "with_ns": tried.with_ns,
            "fastest_ns": tried.fastest_ns,
            "gain": tried.gain,
        }
    if explored.partitions:
        document["partitions"] = [
            {
                "sms": [partition.sms for partition in each.partitions],
                "streams": [list(partition.streams) for partition in each.partitions],
                "makespan_ns": each.makespan_ns,
                "without_ns": each.without_ns,
                "gain": each.gain,
            }
            for each in explored.partitions
        ]
    return document
