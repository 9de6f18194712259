"""Order of a captured step's calls on different streams of the user's: all use the same memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Turns:
    """Calls of a step on these tensors; each waits for the one before, whichever streams they are on."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        devices = [tensor.device for tensor in tensors if tensor.device.type == "cuda"]
        self._device = devices[0] if devices else None
        self._number: int | None = None
        self._last: torch.cuda.Stream | None = None

    def take(self) -> None:
        """Let the current stream wait for the last call's."""
        if self._device is None:
            return
        number = torch._C._cuda_getCurrentRawStream(self._device.index or 0)
        if number != self._number:
            stream = torch.cuda.current_stream(self._device)
            if self._last is not None:
                stream.wait_stream(self._last)
            self._number, self._last = number, stream
