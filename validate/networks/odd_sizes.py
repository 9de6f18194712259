"""Networks of torchvision and timm on images of odd sizes, neither square nor a multiple of their strides."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def inception_v3_237x211(batch: int) -> tuple[nn.Module, torch.Tensor]:
    """torchvision's Inception-v3 without auxiliary logits, on images of 237 x 211."""
    from torchvision.models import inception_v3

    network: Any = inception_v3(weights=None, aux_logits=False, init_weights=False)
    return network, torch.randn(batch, 3, 237, 211)


def res2net50_175x201(batch: int) -> tuple[nn.Module, torch.Tensor]:
    """timm's Res2Net-50 of 4 scales, on images of 175 x 201."""
    from timm import create_model

    return create_model("res2net50_26w_4s"), torch.randn(batch, 3, 175, 201)
