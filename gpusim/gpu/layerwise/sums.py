"""Sums of the gradients of weights that several ranks hold, during the backward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpusim.gpu.layerwise.transport import Transport
from gpusim.layerwise.buckets import is_alone


class GradientSums:
    """The sums of a step that have begun. Large gradients are summed in place, the others of a bucket in one tensor."""

    def __init__(self, transport: Transport, bucket_bytes: int) -> None:
        self._transport, self._bucket_bytes = transport, bucket_bytes
        self._copied: list[tuple[torch.Tensor, list[torch.Tensor]]] = []

    def begin(self, gradients: Sequence[torch.Tensor], ranks: tuple[int, ...]) -> None:
        """Begin to sum the gradients of a bucket over the ranks that hold the same weights."""
        together: list[torch.Tensor] = []
        for gradient in gradients:
            if gradient.is_contiguous() and is_alone(gradient.nbytes, self._bucket_bytes):
                self._transport.begin_sum(gradient, ranks)
            else:
                together.append(gradient)
        if together:
            flat = torch.cat([gradient.flatten() for gradient in together])
            self._transport.begin_sum(flat, ranks)
            self._copied.append((flat, together))

    def finish(self) -> None:
        """Wait for all sums and copy them back."""
        self._transport.finish()
        for flat, gradients in self._copied:
            parts = flat.split([gradient.numel() for gradient in gradients])
            summed = [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]
            torch._foreach_copy_(gradients, summed)
        self._copied.clear()
