"""Sums of the gradients of weights that several ranks hold, during the backward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpusim.gpu.layerwise.transport import Transport
from gpusim.layerwise.buckets import is_alone


class GradientSums:
    """The sums of a step that have begun. Large gradients are summed in place, the others of a bucket in one tensor.

    Those become views of that tensor, so that nothing is copied back.
    """

    def __init__(self, transport: Transport, bucket_bytes: int) -> None:
        self._transport, self._bucket_bytes = transport, bucket_bytes

    def begin(self, parameters: Sequence[torch.Tensor], ranks: tuple[int, ...], *, reads: bool) -> None:
        """Begin to sum the gradients of a bucket's parameters over the ranks that hold the same weights.

        `reads` allows to read those of all ranks at once (`sums_by_reading`).
        """
        if not parameters:  # of layers whose results nothing uses
            return
        together: list[torch.Tensor] = []
        if reads:
            flat = self._transport.sum_by_reading([each.grad for each in parameters if each.grad is not None])
            if flat is not None:
                _replace(parameters, flat)
                return
        for parameter in parameters:
            assert parameter.grad is not None
            if parameter.grad.is_contiguous() and is_alone(parameter.grad.nbytes, self._bucket_bytes):
                self._transport.begin_sum(parameter.grad, ranks)
            else:
                together.append(parameter)
        if together:
            flat = torch.cat([parameter.grad.flatten() for parameter in together if parameter.grad is not None])
            self._transport.begin_sum(flat, ranks)
            _replace(together, flat)

    def finish(self) -> None:
        """Wait for all sums."""
        self._transport.finish()


def _replace(parameters: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Make the gradients of parameters views of one tensor."""
    parts = flat.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)
