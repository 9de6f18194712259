"""Alternative lowerings: the result of an op from other operators of torch, on more SMs or in fewer steps.

Batch norm's kernels have one block per channel: the first layers of a CNN, with 32 or 64 channels of large images,
leave most SMs idle. `by_sample` treats each channel of each sample as a channel of its own, with the operators that
torch has for batch norm over several GPUs (`torch.nn.SyncBatchNorm`), where each sample plays the part of one GPU. The
backward of a max pool searches the windows of each place; `by_index` adds each gradient at the place of its maximum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from gpusim.formats.trace import Composition, Op, Trace, VariantSettings

Composed = Callable[..., Any]

#: Shortest op worth trying: an alternative has up to nine launches of about 2 us each.
MIN_OP_NS: Final = 12_000


def composed(target: str, composition: Composition) -> Composed:
    """Return the function that replaces the operator `target`, with its arguments. Raises `ValueError` if there is
    none.
    """
    if (target, composition) not in _COMPOSED:
        raise ValueError(f"{target} has no composition '{composition}'")
    return _COMPOSED[target, composition]


def compositions_for(op: Op, trace: Trace) -> dict[str, VariantSettings]:
    """Return the alternatives to try for an op, by name; empty for ops shorter than `MIN_OP_NS`."""
    if sum(kernel.dur_ns for kernel in op.kernels) < MIN_OP_NS:
        return {}
    names = [name for target, name in _COMPOSED if target == op.target and _applies(name, op, trace)]
    return {name: VariantSettings(composition=name) for name in names}


def _applies(name: Composition, op: Op, trace: Trace) -> bool:
    if op.kwargs or len(op.args) != _ARGUMENTS[op.target]:
        return False
    if name == "forward_pool":
        _, _, size, stride, padding, ceil_mode, include_pad, divisor = op.args
        centred = list(padding) == [k // 2 for k in size] and all(k % 2 for k in size)
        return centred and all(step == 1 for step in stride or size) and not ceil_mode and bool(include_pad or divisor)
    if op.target in _TRAINING and not op.args[_TRAINING[op.target]]:
        return False
    image = trace.tensors[op.args[_IMAGE.get(op.target, 0)]["tensor"]]
    return name != "by_sample" or (len(image.shape) > 2 and image.shape[0] > 1)


def _native_forward(
    image: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float
) -> list[Any]:
    """Run torch's own batch norm; cuDNN's has a fourth, empty result for its backward."""
    normed = torch.ops.aten.native_batch_norm.default(image, weight, bias, mean, variance, training, momentum, eps)
    return [*normed, image.new_empty(0, dtype=torch.uint8)]


def _native_backward(
    image: Any, grad: Any, weight: Any, mean: Any, variance: Any, saved_mean: Any, saved_invstd: Any, eps: float, _: Any
) -> Any:
    """Run torch's own backward; cuDNN's saved variance is also the inverse standard deviation."""
    return torch.ops.aten.native_batch_norm_backward.default(
        grad, image, weight, mean, variance, saved_mean, saved_invstd, True, eps, [True, True, True]
    )


def _forward_by_sample(
    image: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float
) -> list[Any]:
    """Return result, mean and inverse standard deviation of each channel; running statistics change in place."""
    image = image.contiguous()
    saved = statistics_by_sample(image, mean, variance, momentum, eps)
    return [torch.ops.aten.batch_norm_elemt.default(image, weight, bias, *saved, eps), *saved]


def statistics_by_sample(image: Any, mean: Any, variance: Any, momentum: float, eps: float) -> Any:
    """Return mean and inverse standard deviation of each channel of a contiguous image; running statistics change in
    place.
    """
    samples, channels = image.shape[:2]
    of_sample = torch.ops.aten.batch_norm_stats.default(_channels_of_samples(image), eps)
    dtype = image.dtype if mean is None else mean.dtype
    counts = torch.full((samples,), image.numel() // (samples * channels), dtype=dtype, device=image.device)
    return torch.ops.aten.batch_norm_gather_stats_with_counts.default(
        image, *(part.view(samples, channels) for part in of_sample), mean, variance, momentum, eps, counts
    )


def _cudnn_forward_by_sample(image: Any, *rest: Any) -> list[Any]:
    return [*_forward_by_sample(image, *rest), image.new_empty(0, dtype=torch.uint8)]


def _backward_by_sample(
    grad: Any,
    image: Any,
    weight: Any,
    mean: Any,
    variance: Any,
    saved_mean: Any,
    saved_invstd: Any,
    train: bool,
    eps: float,
    mask: list[bool],
) -> list[Any]:
    """Return the gradients of image, weight and bias; None where `mask` leaves one out."""
    grad, image = grad.contiguous(), image.contiguous()
    samples, channels = image.shape[:2]
    sums = torch.ops.aten.batch_norm_backward_reduce.default(
        _channels_of_samples(grad),
        _channels_of_samples(image),
        saved_mean.repeat(samples),
        saved_invstd.repeat(samples),
        None,
        True,
        False,
        False,
    )[:2]
    sum_dy, sum_dy_xmu = (part.view(samples, channels).sum(0) for part in sums)
    result: list[Any] = [None, None, None]
    dtype = image.dtype if weight is None else weight.dtype
    if mask[0]:
        wide = None if weight is None else weight.to(saved_mean.dtype)  # that operator does not mix types
        count = torch.full((1,), image.numel() // channels, dtype=torch.int32, device=image.device)
        result[0] = torch.ops.aten.batch_norm_backward_elemt.default(
            grad, image, saved_mean, saved_invstd, wide, sum_dy, sum_dy_xmu, count
        )
    if mask[1]:
        result[1] = (sum_dy_xmu * saved_invstd).to(dtype)
    if mask[2]:
        result[2] = sum_dy.to(dtype)
    return result


def _cudnn_backward_by_sample(
    image: Any, grad: Any, weight: Any, mean: Any, variance: Any, saved_mean: Any, saved_invstd: Any, eps: float, _: Any
) -> list[Any]:
    every = [True, True, True]
    return _backward_by_sample(grad, image, weight, mean, variance, saved_mean, saved_invstd, True, eps, every)


def _channels_of_samples(image: Any) -> Any:
    """View [N, C, ...] as [1, N C, ...]."""
    return image.view(1, image.shape[0] * image.shape[1], -1)


def _pool_backward(
    grad: Any, _image: Any, size: Any, stride: Any, padding: Any, ceil_mode: bool, include_pad: bool, divisor: Any
) -> Any:
    """Run the adjoint of an average pool: with odd windows, stride 1 and one divisor, the pool is its own adjoint."""
    return torch.ops.aten.avg_pool2d.default(grad, size, stride, padding, ceil_mode, True, divisor)


def _pool_backward_by_index(
    grad: Any, image: Any, size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool, indices: Any
) -> Any:
    """Add each gradient at the place of its window's maximum; the order varies, so results differ by rounding."""
    layout = torch.contiguous_format if image.is_contiguous() else torch.channels_last
    result = torch.zeros_like(image, dtype=grad.dtype, memory_format=layout)
    indices, grad = indices.contiguous(memory_format=layout), grad.contiguous(memory_format=layout)
    if layout == torch.contiguous_format:
        result.flatten(-2).scatter_add_(-1, indices.flatten(-2), grad.flatten(-2))
    else:
        places, of_windows, values = (part.permute(0, 2, 3, 1).flatten(1, 2) for part in (result, indices, grad))
        places.scatter_add_(1, of_windows, values)
    return result


_ARGUMENTS: Final = {
    "aten.cudnn_batch_norm.default": 8,
    "aten.cudnn_batch_norm_backward.default": 9,
    "aten.native_batch_norm.default": 8,
    "aten.native_batch_norm_backward.default": 10,
    "aten.avg_pool2d_backward.default": 8,
    "aten.max_pool2d_with_indices_backward.default": 8,
}
"""Number of positional arguments."""
_TRAINING: Final = {
    "aten.cudnn_batch_norm.default": 5,
    "aten.native_batch_norm.default": 5,
    "aten.native_batch_norm_backward.default": 7,
}
"""Position of the argument that selects batch statistics; without it, statistics are always those of the batch."""
_IMAGE: Final = {"aten.native_batch_norm_backward.default": 1}
"""Position of the image among the arguments, where it is not the first."""
_COMPOSED: Final[dict[tuple[str, Composition], Composed]] = {
    ("aten.cudnn_batch_norm.default", "native"): _native_forward,
    ("aten.cudnn_batch_norm.default", "by_sample"): _cudnn_forward_by_sample,
    ("aten.cudnn_batch_norm_backward.default", "native"): _native_backward,
    ("aten.cudnn_batch_norm_backward.default", "by_sample"): _cudnn_backward_by_sample,
    ("aten.native_batch_norm.default", "by_sample"): _forward_by_sample,
    ("aten.native_batch_norm_backward.default", "by_sample"): _backward_by_sample,
    ("aten.avg_pool2d_backward.default", "forward_pool"): _pool_backward,
    ("aten.max_pool2d_with_indices_backward.default", "by_index"): _pool_backward_by_index,
}
