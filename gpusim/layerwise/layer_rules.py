"""Rules that make layers of traced operators: kind, valid splits, frame of the result, parts needed of inputs.

An operator without a rule is of kind `other` and has no known split. Every GPU then has its whole result, so later
layers may be split by its dimensions, whatever they mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from gpusim.formats.trace import Op, Trace
from gpusim.layerwise import op_rules as rules
from gpusim.layerwise.frames import Frame, by_rank
from gpusim.layerwise.image_rules import IMAGE, of_image, of_sequence
from gpusim.layerwise.layers import ALL, SAME, Extents, Need
from gpusim.layerwise.norm_rules import is_over_channels, normalisation
from gpusim.layerwise.rule import Inputs, Needs, Rule, parameters_of, second_factor, tensors_in
from gpusim.layerwise.table_rules import embedding, embedding_bag


def rule_of(
    trace: Trace,
    op: Op,
    name: str,
    inputs: Inputs,
    shape: Sequence[int],
    batch: int,
    *,
    whole: bool = True,
    ends: bool = False,
) -> Rule:
    """Return the rule of an operator with a result of this shape.

    Without `whole`, inputs lack every other element. With `ends`, the result is part of the step's loss.
    """
    frames = [frame for _, frame in inputs]
    first = frames[0]
    rule: Rule | None = None
    if not whole:
        rule = _by_sample(trace, op, name, inputs, batch)
        return rule or Rule("other", "", by_rank(shape, batch), prod(shape))
    if first is not None:
        if first.is_rows_of(*IMAGE):
            rule = of_image(trace, op, name, first, shape, inputs)
        if rule is None:
            rule = of_sequence(trace, op, name, first, shape, inputs)
        if rule is None and name in rules.LINEAR:
            rule = _linear(trace, op, first, shape)
        if rule is None and name in rules.ATTENTION:
            rule = _attention(frames)
        if rule is None:
            rule = normalisation(op, name, first)
    if rule is None and name == "cat":
        rule = _concat(op, frames, shape)
    over_channels = name in rules.BATCH_NORMS and first is not None and is_over_channels(first)
    if rule is None and (name in rules.POINTWISE or over_channels or rules.same_elements(trace, op, name)):
        rule = _pointwise(trace, name, inputs, shape)
    if rule is None and name == "embedding":
        rule = embedding(frames, shape)
    if rule is None and name in rules.BAGS:
        rule = embedding_bag(trace, op, inputs, shape)
    if rule is None and ends and not shape and name in rules.TOTALS:
        rule = _total(first)
    mixes = rules.touches_samples(op, name, len(trace.tensors[inputs[0][0]].shape))
    if rule is None and name in rules.LOSSES and not mixes and (ends or name != "_log_softmax"):
        rule = Rule("loss", "n", by_rank(shape, batch) if shape else None, prod(shape))
    if rule is None:
        rule = _by_sample(trace, op, name, inputs, batch)
    return rule or Rule("other", "", by_rank(shape, batch), prod(shape))


def _linear(trace: Trace, op: Op, first: Frame, shape: Sequence[int]) -> Rule | None:
    """Return the rule of a product with a parameter; the rows of the matrix keep their meaning."""
    if len(first.rows) != 2 or not _by_parameter(trace, op):
        return None
    kept = first.letters(0)
    if "n" not in kept or not set(kept) <= set("nhw"):
        return None
    frame = Frame((first.rows[0], (("c", shape[1]),)))
    features = prod(size for _, size in first.rows[1])
    both = {letter for letter, size in first.rows[1] if size > 1}  # not split, if it has positions, too
    n, c, h, w = (SAME if letter in kept and letter not in both else ALL for letter in "nchw")
    splits = "".join(x for x in "nchw" if x == "c" or (x in kept and x not in both))
    return Rule("linear", splits, frame, 2 * prod(shape) * features, ((n, c, h, w),))


def _by_parameter(trace: Trace, op: Op) -> bool:
    """Whether the second factor is a parameter or a view of one."""
    matrices = [t for t in tensors_in(op.args) if len(trace.tensors[t].shape) == 2]
    return bool(matrices) and bool(parameters_of(trace, matrices[-1]))


def _attention(frames: Sequence[Frame | None]) -> Rule | None:
    """Return the rule of attention: heads are channels, and every query needs all keys.

    Positions are those of a sequence or, row by row, of a map.
    """
    known = [frame for frame in frames[:3] if frame is not None and _has_heads(frame)]
    if len(known) < min(3, len(frames)) or not known:
        return None
    query, keys = known[0], known[1] if len(known) > 1 else known[0]
    whole = (SAME, SAME, ALL, ALL if keys.extents[3] > 1 else SAME)
    width = prod(size for _, size in query.rows[3])
    flops = 4 * prod(query.extents) * prod(keys.extents[2:])
    return Rule("attention", "nchw", query, flops, ((SAME, SAME, SAME, SAME), whole, whole), width)


def _has_heads(frame: Frame) -> bool:
    """Whether dimensions are samples, heads, positions and features."""
    positions = [letter for letter, size in frame.rows[2] if size > 1] if len(frame.rows) == 4 else []
    rest = frame.rows[:2] + frame.rows[3:]
    return len(rest) == 3 and Frame(rest).is_rows_of("n", "c", "c") and positions in ([], ["h"], ["w"], ["h", "w"])


def _concat(op: Op, frames: Sequence[Frame | None], shape: Sequence[int]) -> Rule | None:
    """Return the rule of a concatenation along the channels, of frames that otherwise agree."""
    dim = int(op.args[1]) % len(shape) if len(op.args) > 1 else 0
    known = [f for f in frames if f is not None and len(f.rows) == len(shape) and f.letters(dim) in ("c", "")]
    if len(known) < len(frames):
        return None
    rest = [tuple(row for place, row in enumerate(f.rows) if place != dim) for f in known]
    if any(each != rest[0] for each in rest) or any("c" in letter for row in rest[0] for letter, _ in row):
        return None
    needs, channels = [], 0
    for frame in known:
        needs.append((SAME, Need("shift", offset=channels), SAME, SAME))
        channels += frame.extents[1]
    if channels != shape[dim]:
        return None
    rows = list(known[0].rows)
    rows[dim] = (("c", channels),)
    return Rule("concat", "nchw", Frame(tuple(rows)), prod(shape), tuple(needs))


def _pointwise(trace: Trace, name: str, inputs: Inputs, shape: Sequence[int]) -> Rule | None:
    """Return the rule of a pointwise operator on matching frames; an input may be broadcast."""
    frame = _widest(trace, inputs, shape) or _broadcast_by_constants(inputs, shape)
    if frame is None:
        return None
    kind = "batch_norm" if name in rules.BATCH_NORMS else "add" if len(inputs) > 1 else name
    needs = tuple(None if each is None else broadcast(each.extents, frame.extents) for _, each in inputs)
    return Rule(kind, "nchw", frame, prod(shape), needs)


def _widest(trace: Trace, inputs: Inputs, shape: Sequence[int]) -> Frame | None:
    """Return the frame of the input that has the result's shape; None if frames do not match."""
    frames = [frame for t, frame in inputs if frame is not None and trace.tensors[t].shape == tuple(shape)]
    if not frames or any(frame is None or len(frame.rows) != len(shape) for _, frame in inputs):
        return None
    widest = frames[0]
    for _, frame in inputs:
        assert frame is not None
        for dimension, row in enumerate(frame.rows):
            if prod(size for _, size in row) > 1 and row != widest.rows[dimension]:
                return None
    return widest


def _broadcast_by_constants(inputs: Inputs, shape: Sequence[int]) -> Frame | None:
    """Return the frame of a single input broadcast by constants, as positions times frequencies are; else None.

    Dimensions that come from a constant get a letter that the input does not have.
    """
    first = inputs[0][1]
    if len(inputs) > 1 or first is None or len(first.rows) != len(shape):
        return None
    free = [letter for letter in "chw" if all(letter not in first.letters(d) for d in range(len(shape)))]
    rows = []
    for row, size in zip(first.rows, shape, strict=True):
        have = prod(each for _, each in row)
        if have != size and (have != 1 or not free):
            return None
        rows.append(row if have == size else (*(atom for atom in row if atom[0] == "n"), (free.pop(0), size)))
    return Frame(tuple(rows))


def broadcast(extents: Extents, result: Extents) -> Needs | None:
    """Need of each dimension: the same, or all of one that has size 1; None if sizes do not match."""
    if any(have not in (1, want) for have, want in zip(extents, result, strict=True)):
        return None
    n, c, h, w = (SAME if have == want else ALL for have, want in zip(extents, result, strict=True))
    return n, c, h, w


def _total(first: Frame | None) -> Rule | None:
    """Return the rule of a loss that is the mean or the sum of all elements: of parts of the batch, these are added."""
    if first is None or not any("n" in first.letters(dimension) for dimension in range(len(first.rows))):
        return None
    return Rule("loss", "n", None, prod(first.extents))


def _by_sample(trace: Trace, op: Op, name: str, inputs: Inputs, batch: int) -> Rule | None:
    """Return the rule of an operator that treats each sample separately."""
    alike = rules.BY_SAMPLE | rules.ATTENTION | rules.WINDOWS | rules.LINEAR | rules.CONVOLUTIONS | rules.POINTWISE
    if name not in alike:
        return None
    if rules.touches_samples(op, name, len(trace.tensors[inputs[0][0]].shape)):
        return None
    if second_factor(op, name) in {tensor for tensor, _ in inputs}:
        return None
    if any(frame is None or not frame.rows or not frame.letters(0).startswith("n") for _, frame in inputs):
        return None
    if len({frame.rows[0] for _, frame in inputs if frame is not None}) > 1 and name in rules.POINTWISE:
        return None
    frame = rules.by_sample_frame(trace, op, name, inputs[0][1], batch)
    return None if frame is None else Rule("by_sample", "n", frame, prod(prod(s for _, s in row) for row in frame.rows))
