"""Alternative lowerings of batch norm and pooling: same results, and tried only where they apply."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from gpusim.formats.trace import Op, Trace, VariantSettings
from gpusim.gpu.replay.decompositions import MIN_OP_NS, composed, compositions_for
from gpusim.gpu.replay.variants import call_variant
from gpusim.trace.store import load_trace

aten = torch.ops.aten


@pytest.fixture(scope="module", autouse=True)
def _cpu_operators() -> Iterator[None]:
    """torch has batch norm over several GPUs only for GPUs: plain arithmetic replaces its five operators here."""
    library = torch.library.Library("aten", "IMPL")

    def over(x: Any) -> tuple[int, ...]:
        return (0, *range(2, x.dim()))

    def wide(part: Any, x: Any) -> Any:
        return part.reshape(1, -1, *[1] * (x.dim() - 2))

    def stats(x: Any, eps: float) -> Any:
        return x.mean(over(x)), (x.var(over(x), unbiased=False) + eps).rsqrt()

    def gather(x: Any, mean: Any, invstd: Any, run_mean: Any, run_var: Any, momentum: float, eps: float, n: Any) -> Any:
        total = mean.mean(0)
        var = (invstd**-2 - eps + (mean - total) ** 2).mean(0)
        every = n.sum()
        if run_mean is not None:
            run_mean.mul_(1 - momentum).add_(total, alpha=momentum)
            run_var.mul_(1 - momentum).add_(var * every / (every - 1), alpha=momentum)
        return total, (var + eps).rsqrt()

    def elemt(x: Any, weight: Any, bias: Any, mean: Any, invstd: Any, eps: float) -> Any:
        scale = invstd if weight is None else invstd * weight
        shift = 0 if bias is None else wide(bias, x)
        return (x - wide(mean, x)) * wide(scale, x) + shift

    def reduce(grad: Any, x: Any, mean: Any, invstd: Any, weight: Any, image_g: bool, _w: bool, _b: bool) -> Any:
        assert image_g
        none = torch.empty(0)
        return grad.sum(over(x)), (grad * (x - wide(mean, x))).sum(over(x)), none, none

    def back(grad: Any, x: Any, mean: Any, invstd: Any, weight: Any, sum_dy: Any, sum_xmu: Any, count: Any) -> Any:
        n = int(count.sum())
        centred = grad - wide(sum_dy, x) / n - (x - wide(mean, x)) * wide(sum_xmu * invstd**2, x) / n
        return centred * wide(invstd if weight is None else invstd * weight, x)

    for name, function in {
        "batch_norm_stats": stats,
        "batch_norm_gather_stats_with_counts": gather,
        "batch_norm_elemt": elemt,
        "batch_norm_backward_reduce": reduce,
        "batch_norm_backward_elemt": back,
    }.items():
        library.impl(name, function, "CPU")
    yield
    library._destroy()


def norm_arguments(weighted: bool) -> tuple[Any, ...]:
    """Return image, weight, bias and running statistics of 3 samples and 4 channels; channels last where weighted."""
    torch.manual_seed(0)
    image = torch.randn(3, 4, 5, 6) * 2 + 1
    image = image.contiguous(memory_format=torch.channels_last) if weighted else image
    weight, bias = (torch.randn(4), torch.randn(4)) if weighted else (None, None)
    return image, weight, bias, torch.zeros(4), torch.ones(4)


def near(found: Any, expected: Any) -> bool:
    return all(torch.allclose(a, b, atol=1e-5, rtol=1e-4) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("weighted", [True, False])
def test_batch_norm_by_sample_is_batch_norm(weighted: bool) -> None:
    """Compares result, saved statistics, and the running statistics changed in place."""
    target = "aten.native_batch_norm.default"
    mine, theirs = norm_arguments(weighted), norm_arguments(weighted)
    found = composed(target, "by_sample")(*mine, True, 0.1, 1e-3)
    expected = aten.native_batch_norm.default(*theirs, True, 0.1, 1e-3)
    assert near(found, expected)
    assert near(mine[3:], theirs[3:])
    assert not torch.equal(mine[3], torch.zeros(4))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("mask", [[True, True, True], [True, False, True], [False, True, False]])
def test_batch_norm_backward_by_sample_is_its_backward(weighted: bool, mask: list[bool]) -> None:
    image, weight, *_ = norm_arguments(weighted)
    grad = torch.randn_like(image)
    _, mean, invstd = aten.native_batch_norm.default(image, weight, None, None, None, True, 0.1, 1e-3)
    arguments = (grad, image, weight, None, None, mean, invstd, True, 1e-3, mask)
    found = composed("aten.native_batch_norm_backward.default", "by_sample")(*arguments)
    expected = aten.native_batch_norm_backward.default(*arguments)
    assert [part is not None for part in found] == mask
    wanted = [number for number in range(3) if mask[number]]
    assert near([found[number] for number in wanted], [expected[number] for number in wanted])


@pytest.mark.parametrize("name", ["native", "by_sample"])
def test_cudnn_batch_norm_has_the_same_arguments_and_results_in_other_places(name: Any) -> None:
    """Four results with an empty last one; its backward takes image before gradient, and memory that it does not
    need.
    """
    image, weight, bias, *running = norm_arguments(True)
    found = composed("aten.cudnn_batch_norm.default", name)(image, weight, bias, *running, True, 0.1, 1e-3)
    expected = aten.native_batch_norm.default(image, weight, bias, None, None, True, 0.1, 1e-3)
    assert near(found[:3], expected)
    assert (found[3].numel(), found[3].dtype) == (0, torch.uint8)
    grad = torch.randn_like(image)
    backward = composed("aten.cudnn_batch_norm_backward.default", name)
    mask = [True, True, True]
    assert near(
        backward(image, grad, weight, *running, expected[1], expected[2], 1e-3, found[3]),
        aten.native_batch_norm_backward.default(
            grad, image, weight, None, None, expected[1], expected[2], True, 1e-3, mask
        ),
    )


@pytest.mark.parametrize(("size", "padding", "divisor"), [([3, 3], [1, 1], None), ([5, 3], [2, 1], 7)])
def test_average_pool_is_its_own_backward(size: list[int], padding: list[int], divisor: int | None) -> None:
    """Called through a variant's settings, as in replay."""
    image, grad = torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 8)
    function = aten.avg_pool2d_backward.default
    arguments = [grad, image, size, [1, 1], padding, False, True, divisor]
    (found,) = call_variant(function, arguments, {}, VariantSettings(composition="forward_pool"), [None])
    assert torch.allclose(found, function(*arguments), atol=1e-6)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_max_pool_backward_by_index_is_its_backward(layout: torch.memory_format) -> None:
    """Windows overlap: a place that is the maximum of several gets all their gradients."""
    image = torch.randn(2, 3, 9, 8).contiguous(memory_format=layout)
    window = ([3, 3], [2, 2], [1, 1], [1, 1], True)
    out, indices = aten.max_pool2d_with_indices.default(image, *window)
    grad = torch.randn(out.shape).contiguous(memory_format=layout)
    target = "aten.max_pool2d_with_indices_backward.default"
    found = composed(target, "by_index")(grad, image, *window, indices)
    assert torch.allclose(found, aten.max_pool2d_with_indices_backward.default(grad, image, *window, indices))
    assert found.is_contiguous(memory_format=layout)


def changed(op: Op, **fields: Any) -> Op:
    return msgspec.structs.replace(op, **fields)


def first(trace: Trace, target: str, index: int) -> Op:
    """Return the longest op of this operator, or all after the longest."""
    having = [op for op in trace.ops if op.target == target]
    return sorted(having, key=lambda op: -sum(kernel.dur_ns for kernel in op.kernels))[index]


def test_compositions_are_tried_of_long_ops_whose_arguments_allow_them() -> None:
    """By sample only for several samples; nothing for short ops, evaluation, or arguments given by name."""
    step = load_trace("inception_v3-train-b8")
    norm = first(step, "aten.cudnn_batch_norm.default", 0)
    assert list(compositions_for(norm, step)) == ["native", "by_sample"]
    backward = first(step, "aten.cudnn_batch_norm_backward.default", 0)
    assert list(compositions_for(backward, step)) == ["native", "by_sample"]
    short = first(step, "aten.cudnn_batch_norm.default", -1)
    assert sum(kernel.dur_ns for kernel in short.kernels) < MIN_OP_NS
    assert compositions_for(short, step) == {}
    evaluated = changed(norm, args=(*norm.args[:5], False, *norm.args[6:]))
    assert compositions_for(evaluated, step) == {}
    assert compositions_for(changed(norm, args=norm.args[:7], kwargs={"epsilon": 1e-3}), step) == {}
    image = norm.args[0]["tensor"]
    tensor = step.tensors[image]
    for shape in (1, *tensor.shape[1:]), tensor.shape[:2]:
        tensors = list(step.tensors)
        tensors[image] = msgspec.structs.replace(tensor, shape=shape)
        assert list(compositions_for(norm, msgspec.structs.replace(step, tensors=tuple(tensors)))) == ["native"]
    pool = first(step, "aten.max_pool2d_with_indices_backward.default", 0)
    assert list(compositions_for(pool, step)) == ["by_index"]


@pytest.mark.parametrize(
    ("place", "value"),
    [(2, [2, 2]), (3, [2, 2]), (4, [0, 0]), (4, [1]), (5, True), (6, False)],
    ids=["size", "stride", "pad", "one pad", "ceil", "count"],
)
def test_pools_that_are_not_their_own_backward_are_left_alone(place: int, value: Any) -> None:
    step = load_trace("inception_v3-train-b8")
    pool = first(step, "aten.avg_pool2d_backward.default", 0)
    assert list(compositions_for(pool, step)) == ["forward_pool"]
    assert compositions_for(changed(pool, args=(*pool.args[:place], value, *pool.args[place + 1 :])), step) == {}
