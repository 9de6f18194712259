"""Rules of lookups in tables of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from gpusim.layerwise.frames import Frame
from gpusim.layerwise.layers import ALL, SAME
from gpusim.layerwise.rule import Rule


def embedding(frames: Sequence[Frame | None], shape: Sequence[int]) -> Rule | None:
    """Return the rule of a lookup of table rows: the frame of the indices, with features."""
    frame = frames[-1]
    if frame is None or len(shape) != len(frame.rows) + 1:
        return None
    rows = Frame((*frame.rows, (("c", shape[-1]),)))
    return Rule("embedding", "nch", rows, prod(shape), ((SAME, ALL, SAME, SAME),))
