"""A merged convolution computes what the convolutions of one input do, whatever the size of their filters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpusim.gpu.calibrate.stage_times import merged_convolution


@pytest.mark.parametrize("with_bias", [True, False])
def test_merged_convolution_has_the_results_of_each_one_behind_the_other(with_bias: bool) -> None:
    torch.manual_seed(0)
    image = torch.randn(1, 4, 6, 6)
    filters = [torch.randn(3, 4, 1, 1), torch.randn(5, 4, 3, 3), torch.randn(2, 4, 1, 1)]
    biases = [torch.randn(len(each)) if with_bias else None for each in filters]
    tensors: list[Any] = [image, *filters, *biases]
    ops, wanted = [], []
    for number, (weight, bias) in enumerate(zip(filters, biases, strict=True), start=1):
        padding = [weight.shape[2] // 2] * 2
        shift = {"tensor": number + len(filters)} if with_bias else None
        arguments = ({"tensor": 0}, {"tensor": number}, shift, [1, 1], padding, [1, 1], False, [0, 0], 1)
        ops.append(SimpleNamespace(args=arguments))
        wanted.append(torch.conv2d(image, weight, bias, padding=padding))
    runner: Any = SimpleNamespace(tensors=tensors, trace=SimpleNamespace(ops=ops))
    torch.testing.assert_close(merged_convolution(runner, (0, 1, 2))(), torch.cat(wanted, dim=1))
