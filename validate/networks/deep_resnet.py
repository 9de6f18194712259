"""A ResNet as deep as SuperNeurons has them (PPoPP 2018): 6, 32, n and 6 blocks of three layers, and two more."""

from __future__ import annotations

import torch
from torch import nn
from torchvision.models.resnet import Bottleneck, ResNet


def resnet1502(batch: int) -> tuple[nn.Module, torch.Tensor]:
    """500 bottleneck blocks, 1,502 layers, images of 224 x 224."""
    return ResNet(Bottleneck, [6, 32, 456, 6]), torch.randn(batch, 3, 224, 224)
