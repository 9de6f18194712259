"""The two states of a GPU's launches, and the way into each.

In the fast state each kernel of a CUDA graph begins 0.18 us earlier than in the slow one, 0.34 us where launches miss
the L2 cache, and all graphs of a process are in the same state. A process begins in the fast state. The seventh or
eighth stream that runs a kernel ends it, as does the fourth recorded graph. A context that this process makes brings it
back, and so does another process of the host that makes or destroys one. Measured on H200s with driver 580
(`research/2026-11-29-launch-states.md`); the reason lies in the driver, and is not known.
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch

from gpusim.errors import GpuError
from gpusim.gpu.driver import Driver
from gpusim.units import MIB

#: Streams that bring the slow state: twice the number that was measured to bring it. torch's pool has 32.
STREAMS: Final = 16
#: Memory that must be free for a second context: an H200's takes 524 MiB, for 0.2 s.
CONTEXT_BYTES: Final = 1024 * MIB


def make_launches_slow() -> None:
    """Bring launches into the slow state, in which stored captures are.

    It is done before graphs are timed, so that times of different days can be compared. It takes less than 1 ms: 64
    streams took 1.7 ms. Nothing happens without a GPU.
    """
    if not torch.cuda.is_available():
        return
    for _ in range(STREAMS):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(1)
    torch.cuda.synchronize()


def make_launches_fast() -> bool:
    """Bring launches into the fast state by a context that is made and destroyed at once; return whether it was made.

    It is not without a GPU, with too little memory, or where the driver refuses.
    """
    if not torch.cuda.is_available():
        return False
    torch.cuda.synchronize()
    if torch.cuda.mem_get_info()[0] < CONTEXT_BYTES:
        return False
    context, device = ctypes.c_void_p(), ctypes.c_int()
    try:
        driver = Driver()
        driver.call("cuCtxGetDevice", ctypes.byref(device))
        driver.call("cuCtxCreate_v2", ctypes.byref(context), ctypes.c_uint(0), device)
        driver.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))  # torch's is the current one again
        driver.call("cuCtxDestroy_v2", context)
    except (GpuError, AttributeError):  # a driver without a call of that name
        return False
    return True
