"""The kinds of bundled steps, each with a name, a sentence and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from gpusim.api import dashboard

#: Sizes of a picture, in SVG units.
WIDTH, HEIGHT, RADIUS = 240, 64, 5.0
BLUE, GREY = "#2E86C8", "#8A8A8A"


@dataclass(frozen=True)
class Kind:
    """One kind of step."""

    title: str
    sentence: str
    columns: tuple[int, ...]
    """Number of ops in each column of the picture, from first to last."""
    arcs: tuple[tuple[int, int], ...] = ()
    """Pairs of columns connected by a shortcut."""


KINDS: Final = {
    "branches": Kind(
        "CNN with branches",
        "Branches of a block need nothing of each other: they run side by side, forward and backward.",
        (1, 4, 1, 4, 1, 4, 1),
    ),
    "transformer": Kind(
        "Transformer",
        "Queries, keys and values side by side; the rest is a chain of large products that fill the GPU.",
        (1, 3, 1, 1, 1, 3, 1, 1, 1),
    ),
    "experts": Kind(
        "Mixture of experts",
        "Every expert is a small network of its own: the most that streams can win.",
        (1, 1, 6, 6, 1, 1),
    ),
    "decoder": Kind(
        "One token of a decoder",
        "Many short kernels, few of them side by side: launches cost more than the work.",
        (1, 2, 1, 1, 2, 1, 1, 2, 1, 1),
    ),
    "unet": Kind(
        "U-Net",
        "Down, up and shortcuts between: little to overlap, most of it with the time embedding.",
        (1, 1, 1, 1, 1, 1, 1),
        ((0, 6), (1, 5), (2, 4)),
    ),
    "shortcuts": Kind(
        "CNN with shortcuts",
        "A chain forward; backward, weight gradients run concurrently with data gradients.",
        (1, 1, 1, 1, 1, 1, 1, 1),
        ((0, 2), (2, 4), (4, 6)),
    ),
    "chain": Kind(
        "A chain",
        "Each operation needs the one before: streams gain nothing, and the page says so.",
        (1, 1, 1, 1, 1, 1, 1, 1),
    ),
}
#: Used for kinds without a description here.
OTHER: Final = Kind("Other steps", "Captured on a GPU and bundled.", (1, 2, 1, 2, 1))


def samples() -> dict[str, list[dict[str, Any]]]:
    """The bundled steps by kind, in the order of `KINDS`; in each kind ATen's kernels, the usual dtype, training and
    small steps first.
    """
    entries_of: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for entry in dashboard.manifest():
        entries_of.setdefault(entry["kind"], []).append(entry)
    return {kind: sorted(entries, key=_order) for kind, entries in entries_of.items() if entries}


def _order(entry: dict[str, Any]) -> tuple[Any, ...]:
    unusual = entry["frontend"] != "aten", entry["dtype"] != "tf32", entry["mode"] != "train"
    return *unusual, entry["batch"], entry["kernels"], entry["name"]


def label(entry: dict[str, Any]) -> str:
    """A sample in a few words."""
    mode = "training" if entry["mode"] == "train" else "inference"
    dtype = "" if entry["dtype"] == "tf32" else f", {entry['dtype']}"
    whose = "" if entry["frontend"] == "aten" else ", Inductor's kernels"
    return f"{entry['network']}, {mode}, batch {entry['batch']}{dtype}{whose}"


def picture(kind: Kind) -> str:
    """The kind as SVG: dots for ops, lines for dependencies."""
    columns = kind.columns
    step = (WIDTH - 4 * RADIUS) / (len(columns) - 1)
    places = [
        [(2 * RADIUS + step * number, HEIGHT * (row + 1) / (count + 1)) for row in range(count)]
        for number, count in enumerate(columns)
    ]
    lines = [
        f'<line x1="{a:.1f}" y1="{b:.1f}" x2="{c:.1f}" y2="{d:.1f}"/>'
        for left, right in pairwise(places)
        for (a, b), (c, d) in _pairs(left, right)
    ]
    for left, right in kind.arcs:
        (a, b), (c, d) = places[left][0], places[right][0]
        lines.append(f'<path d="M{a:.1f} {b:.1f} Q{(a + c) / 2:.1f} {b - 1.7 * HEIGHT / 2:.1f} {c:.1f} {d:.1f}"/>')
    dots = [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS}" fill="{BLUE if len(column) > 1 else GREY}"/>'
        for column in places
        for x, y in column
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
        f'<g stroke="{GREY}" stroke-width="1.5" fill="none">{"".join(lines)}</g>{"".join(dots)}</svg>'
    )


def _pairs(
    left: Sequence[tuple[float, float]], right: Sequence[tuple[float, float]]
) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Return the lines between neighbouring columns: one to one if they have equally many dots, else all pairs."""
    if len(left) == len(right):
        return list(zip(left, right, strict=True))
    return [(one, other) for one in left for other in right]
