"""Operator fusion: a convolution with the ReLU behind it, elementwise ops in one kernel.

Each kernel of a step costs a launch, and an elementwise kernel reads and writes all its data again. cuDNN has
convolutions that add a bias and end in a ReLU (`fused`). In inference, batch norm is a factor and a summand per
channel, folded into the weights. Remaining elementwise ops in sequence become one kernel (`joined`), compiled at its
first call (`torch.cuda.jiterator`). So do sums of several gradients, in place of the last sum; for a step of SGD torch
has a kernel. Convolutions of one input can be one (`merged`, `gpusim.trace.merging`). Without a GPU, plain operators
replace cuDNN's and the compiled ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from gpusim.formats.trace import Composition, Op, Tensor, Trace, VariantSettings
from gpusim.gpu.replay.decompositions import MIN_OP_NS, statistics_by_sample
from gpusim.trace.dependencies import dependencies
from gpusim.trace.fusion import CoverRules

Kept = dict[str, Any]
"""Constants of a fusion, such as weights with batch norm folded in; made at its first call."""
Call = tuple[list[Any], dict[str, Any]]
"""Positional and named arguments of an op."""
Results = list[list[Any]]
Chained = Callable[[list[Call], bool, Kept], Results]

CONVOLUTION: Final = "aten.convolution.default"
NORMS: Final = ("aten.cudnn_batch_norm.default", "aten.native_batch_norm.default")
RELUS: Final = ("aten.relu.default", "aten.relu_.default")
SUMS: Final = ("aten.add.Tensor", "aten.add_.Tensor")
SUM: Final = SUMS[0]
RELU_BACKWARD: Final = "aten.threshold_backward.default"
#: One step of SGD with momentum as launched by `torch.optim`.
SGD: Final = ("aten._foreach_mul_.Scalar", "aten._foreach_add_.List", "aten._foreach_add_.List")

#: Most sums in one kernel: torch's elementwise kernels take eight tensors.
MAX_SUMS: Final = 7

#: Chains by the kinds of their operators, with the settings to try for each, by name.
_FUSED: Final = {
    "fused": VariantSettings(composition="fused"),
    "fused_channels_last": VariantSettings(composition="fused", memory_format="channels_last"),
}
_JOINED: Final = {"joined": VariantSettings(composition="joined")}


@dataclass(frozen=True)
class Chain:
    """One way to fuse an op with the ops that it covers."""

    covers: tuple[int, ...]
    settings: VariantSettings


def chains_of(trace: Trace) -> dict[int, dict[str, Chain]]:
    """Return the fusions to try for each op that can run together with ops behind or before it, by name."""
    rules = CoverRules(trace, dependencies(trace))
    chains: dict[int, dict[str, Chain]] = {}
    for *earlier, last in _sums(trace, rules):
        if rules.problem(last, earlier) is None:
            chains[last] = {"joined_sums": Chain(tuple(earlier), VariantSettings(composition="joined"))}
    for *earlier, last in _sgd_steps(trace):
        if rules.problem(last, earlier) is None:
            chains[last] = {"fused_sgd": Chain(tuple(earlier), VariantSettings(composition="fused"))}
    for index in (index for index, op in enumerate(trace.ops) if op.kernels):
        for covers in _behind(trace, rules, index):
            targets = tuple(trace.ops[each].target for each in (index, *covers))
            for name, settings in {**_FUSED, **_JOINED}.items():
                assert settings.composition is not None
                suits = settings.memory_format is None or trace.model.memory_format == "contiguous"
                if suits and _function(targets, settings.composition) and _applies(trace, (index, *covers), settings):
                    # The longest chain of a name wins.
                    chains.setdefault(index, {})[name] = Chain(covers, settings)
    return chains


def _sums(trace: Trace, rules: CoverRules) -> Iterator[tuple[int, ...]]:
    """Find sums of more than two tensors, added one after the other: gradients from several users of one tensor."""

    def added(op: Op) -> bool:
        tensors = _tensors(trace, op)
        return op.target == SUM and not op.kwargs and len({t.shape for t in tensors}) == 1 and len(tensors) == 2

    def next_sum(index: int) -> int | None:
        users, result = rules.succs[index], {"tensor": trace.ops[index].outputs[0]}
        if len(users) == 1 and added(trace.ops[users[0]]) and trace.ops[users[0]].args.count(result) == 1:
            return users[0]
        return None

    candidates = {i for i, op in enumerate(trace.ops) if op.kernels and added(op) and _all_fp32(trace, [op])}
    later = {following for index in candidates if (following := next_sum(index)) in candidates}
    for index in sorted(candidates - later):
        chain = [index]
        while (following := next_sum(chain[-1])) in candidates and following is not None:
            chain.append(following)
        for first in range(0, len(chain), MAX_SUMS):
            if len(part := chain[first : first + MAX_SUMS]) > 1:
                yield tuple(part)


def _sgd_steps(trace: Trace) -> Iterator[tuple[int, ...]]:
    """Find steps of SGD: three ops on the same lists (momentum times a factor, plus gradients; parameters plus
    momentum).
    """
    ops = [(index, op) for index, op in enumerate(trace.ops) if op.target in SGD]
    for scale, op in ops:
        if op.target != SGD[0] or op.kwargs:
            continue
        momenta = op.args[0]
        adding = [(i, o) for i, o in ops if i > scale and o.target == SGD[1] and momenta in o.args]
        if len(adding) == 2:
            (add, added), (step, stepped) = adding
            in_place = added.args[0] == momenta and stepped.args[1] == momenta
            if in_place and not added.kwargs and set(stepped.kwargs) == {"alpha"}:
                yield scale, add, step


def _behind(trace: Trace, rules: CoverRules, op: int) -> Iterator[tuple[int, ...]]:
    """Yield the chains that start from an op's result, one or two ops long, as far as they could be covered."""
    covers: tuple[int, ...] = ()
    last = op
    while len(covers) < 2:
        result = next(iter(trace.ops[last].outputs), None)
        if result is None:
            return
        users = rules.users[trace.tensors[result].storage]
        following = next((user for user in sorted(users) if user > last), None)
        if following is None or not _takes(trace.ops[following], result):
            return
        covers = (*covers, following)
        last = following
        if rules.problem(op, covers) is None:
            yield covers


def _takes(op: Op, tensor: int) -> bool:
    """Whether a tensor is the op's first argument, its main operand."""
    return bool(op.args) and op.args[0] == {"tensor": tensor}


def _applies(trace: Trace, chain: tuple[int, ...], settings: VariantSettings) -> bool:
    """Whether the arguments are supported by the chain's function."""
    ops = [trace.ops[op] for op in chain]
    first = ops[0]
    if any(op.kwargs for op in ops):
        return False
    if first.target == CONVOLUTION:
        biased = first.args[2] is not None
        return (
            _constant(trace, ops)
            and not first.args[6]
            and len(_tensors(trace, first)[0].shape) == 4
            and all(not op.args[5] for op in ops[1:] if op.target in NORMS)
            and (settings.composition == "fused" or (biased and _all_fp32(trace, ops)))
            and _unseen(trace, ops)
        )
    if first.target in NORMS:
        image = _tensors(trace, first)[0]
        affine = None not in first.args[1:5]
        if first.args[5]:
            worth_it = sum(kernel.dur_ns for op in ops for kernel in op.kernels) >= MIN_OP_NS
            return worth_it and affine and _all_fp32(trace, ops) and len(image.shape) == 4 and image.shape[0] > 1
        return affine and _constant(trace, ops) and _all_fp32(trace, ops) and _unseen(trace, ops)
    shapes = {tensor.shape for op in ops for tensor in _tensors(trace, op)}
    plain = len(shapes) == 1 and _all_fp32(trace, ops) and len(_tensors(trace, first)) == 2
    last = ops[-1]
    return plain and (last.target in RELUS or (last.target == RELU_BACKWARD and last.args[2] == 0))


def _constant(trace: Trace, ops: list[Op]) -> bool:
    """Whether all operands but the first are constant in the step, so that they can be folded once."""
    written = {trace.tensors[t].storage for op in trace.ops for t in op.writes}
    fixed = (tensor for op in ops for tensor in _tensors(trace, op)[1:])
    return all(tensor.init is not None and tensor.storage not in written for tensor in fixed)


def _unseen(trace: Trace, ops: list[Op]) -> bool:
    """Whether the additional results of batch norm are unused; they are empty in inference."""
    extra = {t for op in ops if op.target in NORMS for t in op.outputs[1:]}
    return not any(extra & set(other.reads) for other in trace.ops)


def _tensors(trace: Trace, op: Op) -> list[Tensor]:
    """Return the tensors among an op's arguments."""
    return [trace.tensors[each["tensor"]] for each in op.args if isinstance(each, dict) and "tensor" in each]


def _all_fp32(trace: Trace, ops: list[Op]) -> bool:
    """Whether all arguments are 32-bit floats: the kernels made here do not mix types."""
    return all(tensor.dtype == "float32" for op in ops for tensor in _tensors(trace, op))


def fused(targets: tuple[str, ...], composition: Composition) -> Chained:
    """Return the function that replaces these operators. Raises `ValueError` where there is none.

    It takes the arguments of each operator, whether to use channels-last images internally, and the kept constants.
    """
    function = _function(targets, composition)
    if function is None:
        raise ValueError(f"{' + '.join(targets)} has no composition '{composition}'")
    return function


def _function(targets: tuple[str, ...], composition: Composition) -> Chained | None:
    first, *middle, last = targets
    if composition == "merged":
        return _merged_convolutions if set(targets) == {CONVOLUTION} else None
    if composition == "joined" and set(targets) == {SUM} and 1 < len(targets) <= MAX_SUMS:
        return _sum_of_all
    if composition == "fused" and targets == SGD:
        return _sgd
    if composition == "fused":
        ends = last in RELUS and (not middle or (len(middle) == 1 and middle[0] in NORMS))
        return _convolution_relu if first == CONVOLUTION and ends else None
    if composition != "joined" or middle:
        return None
    if last in RELUS:
        by_first: dict[str, Chained] = {CONVOLUTION: _convolution_then_bias_relu}
        by_first |= dict.fromkeys(NORMS, _norm_relu) | dict.fromkeys(SUMS, _sum_relu)
        return by_first.get(first)
    return _sum_masked if last == RELU_BACKWARD and first in SUMS else None


def _convolution_relu(calls: list[Call], channels_last: bool, kept: Kept) -> Results:
    """Run [batch norm and] ReLU within a convolution of cuDNN."""
    image, weight, bias, stride, padding, dilation, _, _, groups = calls[0][0]

    def folded() -> tuple[Any, Any]:
        factor, summand = (None, bias) if len(calls) == 2 else _factor_and_summand(calls[1][0], bias)
        wide = weight if factor is None else weight * factor.view(-1, 1, 1, 1).to(weight.dtype)
        wide = wide.contiguous(memory_format=torch.channels_last) if channels_last else wide
        return wide, (weight.new_zeros(weight.shape[0]) if summand is None else summand.to(weight.dtype))

    weight, bias = _keep(kept, "convolution", folded)
    image = image.contiguous(memory_format=torch.channels_last) if channels_last else image
    if image.is_cuda:
        function = torch.ops.aten.cudnn_convolution_relu.default
        result = function(image, weight, bias, stride, padding, dilation, groups)
    else:
        result = torch.relu(torch.conv2d(image, weight, bias, stride, padding, dilation, groups))
    unneeded: Results = [[None], [None, *[image.new_empty(0)] * 3]]
    return [*unneeded[: len(calls) - 1], [result]]


def _merged_convolutions(calls: list[Call], _layout: bool, kept: Kept) -> Results:
    """Run convolutions of one input as one: filters padded to one size and joined, results split.

    The joined filters are kept. For one contiguous image the results are views; otherwise they are copied, as part of
    the variant. Raises `ValueError` for convolutions that differ in more than their filters.
    """
    image, weight, _, stride, _, dilation, *transposed = calls[0][0]
    for arguments, _ in calls[1:]:
        alike = arguments[0] is image and arguments[3] == stride and arguments[5] == dilation
        if not alike or arguments[6:] != transposed or arguments[1].dtype != weight.dtype:
            raise ValueError("convolutions that differ in more than their filters cannot be merged")
    paddings = [max(arguments[4][axis] for arguments, _ in calls) for axis in (0, 1)]

    def joined() -> tuple[Any, Any]:
        weights = [arguments[1] for arguments, _ in calls]
        biases = [arguments[2] for arguments, _ in calls]
        height, width = (max(each.shape[axis] for each in weights) for axis in (2, 3))
        padded = []
        for each in weights:
            down, across = (height - each.shape[2]) // 2, (width - each.shape[3]) // 2
            padded.append(torch.nn.functional.pad(each, (across, across, down, down)))
        if all(bias is None for bias in biases):
            return torch.cat(padded), None
        shifts = (
            each.new_zeros(each.shape[0]) if bias is None else bias for each, bias in zip(weights, biases, strict=True)
        )
        return torch.cat(padded), torch.cat(list(shifts))

    weight, bias = _keep(kept, "merged", joined)
    result = torch.ops.aten.convolution.default(image, weight, bias, stride, paddings, dilation, *transposed)
    channels = [arguments[1].shape[0] for arguments, _ in calls]
    if len(result) == 1:
        return [[part.unsqueeze(0)] for part in result[0].split(channels)]
    return [[part] for part in result.split(channels, 1)]


def _convolution_then_bias_relu(calls: list[Call], _: bool, _kept: Kept) -> Results:
    """Run a convolution, then its bias and ReLU in one kernel."""
    image, weight, bias, *rest = calls[0][0]
    product = torch.ops.aten.convolution.default(image, weight, None, *rest)
    return [[None], [_elementwise("shifted_relu", product, bias.view(-1, 1, 1))]]


def _norm_relu(calls: list[Call], _: bool, kept: Kept) -> Results:
    """Run batch norm with the ReLU behind it; in training with statistics sample by sample (`by_sample`)."""
    image, weight, bias, mean, variance, training, momentum, eps = calls[0][0]
    if not training:
        factor, summand = _keep(kept, "norm", lambda: _factor_and_summand(calls[0][0], None))
        factor, summand = (part.view(-1, *[1] * (image.dim() - 2)) for part in (factor, summand))
        return [[None, *[image.new_empty(0)] * 3], [_elementwise("scaled_relu", image, factor, summand)]]
    image = image.contiguous()
    saved = statistics_by_sample(image, mean, variance, momentum, eps)
    of_channel = (part.view(-1, 1, 1) for part in (*saved, weight, bias))
    result = _elementwise("normed_relu", image, *of_channel)
    return [[None, *saved, image.new_empty(0, dtype=torch.uint8)], [result]]


def _sum_relu(calls: list[Call], _: bool, _kept: Kept) -> Results:
    return [[None], [_elementwise("sum_relu", *calls[0][0])]]


def _sum_masked(calls: list[Call], _: bool, _kept: Kept) -> Results:
    """Return the sum of two gradients where the ReLU's result, the second argument of its backward, is positive."""
    return [[None], [_elementwise("masked_sum", *calls[0][0], calls[1][0][1])]]


def _sum_of_all(calls: list[Call], _: bool, _kept: Kept) -> Results:
    """Return the sum of all addends in one kernel; the partial sums are the absent arguments."""
    tensors = [tensor for arguments, _ in calls for tensor in arguments if tensor is not None]
    return [*([None] for _ in calls[1:]), [_elementwise(f"sum_of_{len(tensors)}", *tensors)]]


def _sgd(calls: list[Call], _: bool, _kept: Kept) -> Results:
    """Run torch's own fused SGD kernel; parameters and momenta change in place."""
    (momenta, momentum), (_, gradients), (parameters, _) = (arguments for arguments, _ in calls)
    torch.ops.aten._fused_sgd_.default(
        parameters,
        gradients,
        momenta,
        weight_decay=0.0,
        momentum=momentum,
        lr=-calls[2][1]["alpha"],
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )
    return [[], [], []]


def _factor_and_summand(norm: list[Any], bias: Any) -> tuple[Any, Any]:
    """Return inference batch norm as a factor and a summand per channel, behind a convolution with this bias."""
    _, weight, shift, mean, variance, *_, eps = norm
    factor = torch.rsqrt(variance + eps) * (1 if weight is None else weight)
    before = -mean if bias is None else bias - mean
    return factor, before * factor + (0 if shift is None else shift)


def _keep(kept: Kept, name: str, make: Callable[[], Any]) -> Any:
    """Return the result of `make`, kept from the first call; not kept in a recording, which frees its memory."""
    if name in kept:
        return kept[name]
    value = make()
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        kept[name] = value
    return value


#: Kernels per element: GPU source, and the same with torch's operators.
_KERNELS: Final[dict[str, tuple[str, Callable[..., Any]]]] = {
    "shifted_relu": ("(T x, T b) { T y = x + b; return y < T(0) ? T(0) : y; }", lambda x, b: torch.relu(x + b)),
    "scaled_relu": (
        "(T x, T f, T b) { T y = x * f + b; return y < T(0) ? T(0) : y; }",
        lambda x, f, b: torch.relu(x * f + b),
    ),
    "normed_relu": (
        "(T x, T m, T s, T w, T b) { T y = (x - m) * s * w + b; return y < T(0) ? T(0) : y; }",
        lambda x, m, s, w, b: torch.relu((x - m) * s * w + b),
    ),
    "sum_relu": ("(T x, T z) { T y = x + z; return y < T(0) ? T(0) : y; }", lambda x, z: torch.relu(x + z)),
    "masked_sum": (
        "(T x, T z, T y) { return y <= T(0) ? T(0) : x + z; }",
        lambda x, z, y: torch.where(y <= 0, torch.zeros_like(x), x + z),
    ),
}


def _kernel(name: str) -> tuple[str, Callable[..., Any]]:
    """Return one of `_KERNELS`, or `sum_of_N` tensors."""
    if not name.startswith("sum_of_"):
        return _KERNELS[name]
    names = [f"x{place}" for place in range(int(name.removeprefix("sum_of_")))]
    text = f"({', '.join(f'T {each}' for each in names)}) {{ return {' + '.join(names)}; }}"
    return text, lambda *tensors: functools.reduce(torch.add, tensors)


def _elementwise(name: str, *tensors: Any) -> Any:
    """Apply one of `_KERNELS` to each element of tensors, broadcast to one shape."""
    return _compiled(name)(*tensors) if tensors[0].is_cuda else _kernel(name)[1](*tensors)


@functools.cache
def _compiled(name: str) -> Callable[..., Any]:
    """Return the jiterator function, kept for the life of the process; compiled at the first call per argument type."""
    function: Callable[..., Any] = torch.cuda.jiterator._create_jit_fn(
        f"template <typename T> T {name}{_kernel(name)[0]}"
    )
    return function
