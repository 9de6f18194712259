"""Traced operators in the layer graph: their kind, and the frame of their results.

An operator without a rule here is a layer of kind `other`: the input that a part of its output needs is unknown, so
every GPU computes all of it, and a note says so. Later layers may take any part of it.
"""

from __future__ import annotations

from typing import Final

from gpusim.formats.trace import Op, Trace
from gpusim.layerwise.frames import Frame, by_rank, permuted, viewed, with_row
from gpusim.layerwise.layers import DIMS


def names(words: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(words.split())


#: Operators that only give another view of memory: no layers.
VIEWS: Final = names(
    "view _unsafe_view reshape t transpose permute unsqueeze squeeze expand slice select split "
    "split_with_sizes unbind detach alias lift_fresh_copy as_strided"
)
#: Views that put dimensions in another order.
PERMUTATIONS: Final = ("t", "transpose", "permute")
CONVOLUTIONS: Final = names("convolution")
LINEAR: Final = names("addmm mm linear")
BATCH_NORMS: Final = names(
    "cudnn_batch_norm native_batch_norm _native_batch_norm_legit _batch_norm_with_update miopen_batch_norm"
)
WINDOWS: Final = names("max_pool2d_with_indices avg_pool2d")
ATTENTION: Final = names(
    "_scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention "
    "_scaled_dot_product_cudnn_attention scaled_dot_product_attention"
)
#: Each element of the output needs the same element of each input: all splits are valid. Those that torch tags as
#: pointwise and that have one tensor as their result, random numbers, and new tensors like another.
POINTWISE: Final = names(
    "_conj_physical abs acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh bitwise_and "
    "bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min "
    "clip clone conj_physical copysign cos cosh deg2rad digamma div elu eq erf erfc erfinv exp exp2 expm1 float_power "
    "floor floor_divide fmax fmin fmod frac gcd ge gelu gt hardshrink hardsigmoid hardtanh heaviside hypot i0 igamma "
    "igammac isfinite isinf isnan isneginf isposinf lcm ldexp le leaky_relu lerp lgamma log log10 log1p log2 "
    "logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt masked_fill maximum minimum mish "
    "mul mvlgamma nan_to_num ne neg nextafter polygamma positive pow rad2deg reciprocal relu relu6 remainder round "
    "rrelu rsqrt rsub selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink sqrt square sub tan tanh "
    "threshold true_divide trunc where xlogy "
    "_prelu_kernel _to_copy bernoulli copy dropout fill hardswish native_dropout "
    "empty_like full_like ones_like rand_like randn_like zeros_like"
)
#: These treat samples separately if they work on dimensions other than the first; no other split is known.
BY_SAMPLE: Final = names(
    "_softmax _safe_softmax _log_softmax bmm native_group_norm _fused_rms_norm _adaptive_avg_pool2d mean sum cumsum "
    "upsample_nearest2d constant_pad_nd stack cat tril triu max min amax amin argmax argmin any all prod logsumexp "
    "std var var_mean flip roll glu linalg_vector_norm adaptive_max_pool2d adaptive_max_pool3d _adaptive_avg_pool3d "
    "avg_pool3d max_pool3d_with_indices channel_shuffle"
)
#: Place of the argument that names an operator's dimensions, and its default; None: it works on all.
_DIMENSIONS_AT: Final[dict[str, tuple[int, int | None]]] = {
    **dict.fromkeys(
        names("mean sum prod amax amin argmax argmin any all max min std var var_mean logsumexp flip"), (1, None)
    ),
    **dict.fromkeys(names("_softmax _safe_softmax _log_softmax cumsum cat stack"), (1, 0)),
    "glu": (1, -1),
    "roll": (2, None),
    "linalg_vector_norm": (2, None),
}
#: Sums, means ... of several rows of a table.
BAGS: Final = names("_embedding_bag _embedding_bag_forward_only")
#: Operators that take only the type of their tensor; with a size of their own.
CREATIONS: Final = names("new_zeros new_ones new_full new_empty")
#: Operators whose result has the dimensions of their input, if it has its shape.
KEEPING: Final = POINTWISE | names(
    "_softmax _safe_softmax _log_softmax cumsum tril triu flip roll constant_pad_nd channel_shuffle"
)
#: Operators that end a step: they average over samples, which parts of the batch can do separately.
LOSSES: Final = names("_log_softmax nll_loss_forward binary_cross_entropy_with_logits mse_loss")
#: Those of the logarithms of probabilities.
OF_CLASSES: Final = names("nll_loss_forward nll_loss2d_forward")
#: Operators on all elements that end a step, too: losses of the user's own.
TOTALS: Final = names("mean sum")


def base_name(op: Op) -> str:
    """Return an operator's name without library, overload and in-place mark: `aten.relu_.default` is `relu`."""
    name = op.target.split(".")[1] if "." in op.target else op.target
    return name.rstrip("_") or name


def view_frame(trace: Trace, op: Op, name: str, frame: Frame | None, output: int) -> Frame | None:
    """Return the frame of one output of a view; None if its dimensions are no longer known."""
    if frame is None:
        return None
    shape = trace.tensors[output].shape
    if name in ("as_strided", "expand") and tuple(shape) == tuple(trace.tensors[_first(op)].shape):
        return frame
    if name in ("view", "_unsafe_view", "reshape", "detach", "alias"):
        return viewed(frame, shape)
    if name in PERMUTATIONS:
        return permuted(frame, _order(op, name, len(frame.rows)))
    if name in ("unsqueeze", "squeeze"):
        return viewed(frame, shape)
    return _part_frame(trace, op, name, frame, output)


def reorders(op: Op, name: str, frame: Frame | None) -> bool:
    """Whether a permutation changes the order within a letter: two dimensions with that letter change places."""
    if frame is None or name not in PERMUTATIONS:
        return False
    order = _order(op, name, len(frame.rows))
    places = {letter: [d for d in order if letter in frame.letters(d)] for letter in DIMS}
    return any(along != sorted(along) for along in places.values())


def _order(op: Op, name: str, rank: int) -> list[int]:
    """Return the dimensions of a permuted view in their new order."""
    if name == "permute":
        return [int(a) % rank for a in op.args[1]]
    order = list(range(rank))
    if name == "t":
        return order[::-1]
    first, second = (int(a) % rank for a in op.args[1:3])
    order[first], order[second] = order[second], order[first]
    return order


def _part_frame(trace: Trace, op: Op, name: str, frame: Frame, output: int) -> Frame | None:
    """Return the frame of a view of a part: a dimension keeps its letter if it has one."""
    shape = trace.tensors[output].shape
    if name in ("slice", "split", "split_with_sizes") and len(shape) == len(frame.rows):
        for dimension, row in enumerate(frame.rows):
            letters = frame.letters(dimension)
            if len(letters) > 1 and shape[dimension] != _size(row):
                return None
            if shape[dimension] != _size(row):
                frame = with_row(frame, dimension, ((letters or "c", shape[dimension]),))
        return frame
    if name in ("select", "unbind"):
        default = 0
        where = next((int(a) for a in op.args[1:2] if isinstance(a, int)), default) % len(frame.rows)
        rows = tuple(row for dimension, row in enumerate(frame.rows) if dimension != where)
        return Frame(rows) if "n" not in frame.letters(where) else None
    return None


def _first(op: Op) -> int:
    """Return the tensor viewed."""
    argument = op.args[0]
    return int(argument["tensor"]) if isinstance(argument, dict) and "tensor" in argument else op.reads[0]


def _size(row: tuple[tuple[str, int], ...]) -> int:
    size = 1
    for _, each in row:
        size *= each
    return size


def same_elements(trace: Trace, op: Op, name: str) -> bool:
    """Whether `as_strided` gives the tensor that it takes: only strides of dimensions of size 1 may differ."""
    if name != "as_strided" or not op.outputs or op.outputs[0] is None:
        return False
    before, after = trace.tensors[_first(op)], trace.tensors[op.outputs[0]]
    if (before.shape, before.offset) != (after.shape, after.offset):
        return False
    strides = zip(after.shape, before.stride, after.stride, strict=True)
    return all(size == 1 or old == new for size, old, new in strides)


def touches_samples(op: Op, name: str, rank: int) -> bool:
    """Whether a by-sample operator works along the first dimension and so mixes samples."""
    if name not in _DIMENSIONS_AT:
        return False
    place, default = _DIMENSIONS_AT[name]
    dims = op.args[place] if len(op.args) > place else default
    if isinstance(dims, bool):  # `unbiased` of a variance over all dimensions
        return True
    dims = [dims] if isinstance(dims, int) else dims
    return not dims or any(not isinstance(dim, int) or dim % max(1, rank) == 0 for dim in dims)


def by_sample_frame(trace: Trace, op: Op, name: str, first: Frame | None, batch: int) -> Frame | None:
    """Return the frame of a by-sample operator's result: that of its first input, if it keeps dimensions."""
    output = next((index for index in op.outputs if index is not None), None)
    if output is None:
        return None
    shape = tuple(trace.tensors[output].shape)
    if first is not None and name in KEEPING and tuple(map(_size, first.rows)) == shape:
        return first
    if first is not None and name == "cat" and len(first.rows) == len(shape):
        dimension = int(op.args[1]) % len(shape) if len(op.args) > 1 else 0
        letter = first.letters(dimension)
        if len(letter) == 1 and letter != "n":
            return with_row(first, dimension, ((letter, shape[dimension]),))
    return by_rank(shape, batch)
