"""Rules of normalisations of each sample by itself: layer norm, RMS norm, group norm, instance norm."""

from __future__ import annotations

from math import prod
from typing import Final

from gpusim.formats.trace import Op
from gpusim.layerwise import op_rules as rules
from gpusim.layerwise.frames import Frame
from gpusim.layerwise.layers import ALL, SAME
from gpusim.layerwise.rule import Rule

#: Arguments of `aten.native_group_norm`: channels and groups.
_CHANNELS, _GROUPS = 4, 6
#: Operators whose statistics are over the last dimensions.
OVER_LAST: Final = {"native_layer_norm": "layer_norm", "_fused_rms_norm": "rms_norm"}


def normalisation(op: Op, name: str, first: Frame) -> Rule | None:
    """Return the rule of a normalisation; None if it is another operator, or if dimensions are not known."""
    if name in OVER_LAST and first.rows:
        return _over_last(op, OVER_LAST[name], first)
    if name == "native_group_norm" and _is_maps(first) and first.extents[1] == op.args[_CHANNELS]:
        return _over_groups(first, int(op.args[_GROUPS]))
    if name in rules.BATCH_NORMS and is_of_each_sample(first):
        return _over_groups(first, first.extents[1])
    return None


def _over_last(op: Op, kind: str, first: Frame) -> Rule:
    """Normalised dimensions stay together."""
    dims = len(op.args[1])
    together = {letter for place in range(dims) for letter in first.letters(len(first.rows) - dims + place)}
    splits = "".join(x for x in "nhw" if x not in together)
    return Rule(kind, splits, first, prod(first.extents), ((SAME, SAME, SAME, SAME),))


def _over_groups(first: Frame, groups: int) -> Rule:
    """Each part has whole groups of channels, with the whole map: statistics are its own."""
    unit = first.extents[1] // groups
    return Rule("group_norm", "nc", first, prod(first.extents), ((SAME, SAME, ALL, ALL),), unit)


def _is_maps(first: Frame) -> bool:
    """Whether dimensions are samples, channels and positions."""
    letters = [set(first.letters(place)) for place in range(len(first.rows))]
    return (
        len(letters) > 1 and letters[0] == {"n"} and letters[1] <= {"c"} and not set("nc") & set().union(*letters[2:])
    )


def is_of_each_sample(frame: Frame) -> bool:
    """Whether a BatchNorm takes the channels of all samples for its channels: it is an instance norm."""
    return len(frame.rows) > 1 and all(size == 1 for _, size in frame.rows[0]) and frame.letters(1) == "nc"


def is_over_channels(frame: Frame) -> bool:
    """Whether the second dimension, for which a BatchNorm has statistics, is that of all channels, after samples."""
    if len(frame.rows) < 2 or "n" not in frame.letters(0) or frame.letters(1) != "c":
        return False
    return prod(size for _, size in frame.rows[1]) == frame.extents[1]
