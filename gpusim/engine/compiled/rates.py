"""`gpusim.rules.contention` compiled, with a cache of rates by load."""

from __future__ import annotations

from typing import Any, Final

from gpusim.engine.compiled.jit import int64, jit, rule
from gpusim.rules import contention

load_of, rate, waves = rule(contention.load), rule(contention.rate), rule(contention.waves)
#: Size of the cache, a power of 2; loads up to 2 have distinct slots.
LOADS: Final = 512


@jit
def forget_loads(device: Any) -> None:
    """Clear the cache of rates."""
    device.loads[:] = 0.0


@jit
def known_rates(hw: Any, device: Any, load: float) -> tuple[float, float]:
    """Return the rates of other and of GEMM-like kernels at a load; powers are slow.

    The slot of a load holds the rates of the load that used it last.
    """
    if load <= 0.0:
        return 1.0, 1.0
    place = int64(int(load * 256.0)) & (LOADS - 1)
    if device.loads[place] != load:
        device.loads[place] = load
        device.load_rates[place] = rate(hw.contention, load, int64(0))
        device.load_matrix_rates[place] = rate(hw.contention, load, int64(1))
    return float(device.load_rates[place]), float(device.load_matrix_rates[place])
