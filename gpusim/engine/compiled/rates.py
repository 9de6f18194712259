"""`gpusim.rules.contention` compiled, with a cache of rates by load."""

from __future__ import annotations

from typing import Any, Final

from gpusim.engine.compiled.jit import int64, jit, jit_apart, rule
from gpusim.rules import contention

load_of, rate, waves = rule(contention.load), rule(contention.rate), rule(contention.waves)
#: Size of the cache, a power of 2; loads up to 2 have distinct slots.
LOADS: Final = 512


@jit
def forget_loads(device: Any) -> None:
    """Clear the cache of rates."""
    device.loads[:] = -1.0


@jit
def slot_of(load: float) -> int:
    """Return the slot of a load in the cache of rates."""
    return int64(int(load * 256.0)) & (LOADS - 1)


@jit_apart
def cache_rates(hw: Any, device: Any, load: float) -> None:
    """Cache the rates of other and of GEMM-like kernels at a load; powers are slow.

    The slot of a load holds the rates of the load that used it last.
    """
    slot = slot_of(load)
    device.loads[slot] = load
    device.load_rates[slot] = rate(hw.contention, load, int64(0)) if load > 0.0 else 1.0
    device.load_matrix_rates[slot] = rate(hw.contention, load, int64(1)) if load > 0.0 else 1.0
