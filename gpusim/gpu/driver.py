"""Calls of the CUDA driver that torch has no function for (cuda.h of CUDA 13.0)."""

from __future__ import annotations

import ctypes
from typing import Any, Final

from gpusim.errors import GpuError

LIBRARY: Final = "libcuda.so.1"


class Driver:
    """The driver's library. Its calls act on the current context, torch's. Raises `GpuError` where there is none."""

    def __init__(self) -> None:
        try:
            self._library: Any = ctypes.CDLL(LIBRARY)
        except OSError as cause:
            raise GpuError(f"no CUDA driver: {cause}") from cause

    def has(self, name: str) -> bool:
        """Whether the driver has a call of that name."""
        return hasattr(self._library, name)

    def function(self, name: str) -> Any:
        """Return a call of the driver that is made often; it returns 0 or the number of an error."""
        return getattr(self._library, name)

    def call(self, name: str, *arguments: object) -> None:
        """Call the driver. Raises `GpuError` with the driver's name of the error."""
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(ctypes.c_int(status), ctypes.byref(text))
            reason = (text.value or b"").decode() or f"error {status}"
            raise GpuError(f"{name} says {reason}")
