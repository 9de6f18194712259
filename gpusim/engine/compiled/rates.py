"""`gpusim.rules.contention` compiled, with the rates of the loads that occur kept."""

from __future__ import annotations

from typing import Any, Final

from gpusim.engine.compiled.jit import int64, jit, rule
from gpusim.rules import contention

load_of, rate, waves = rule(contention.load), rule(contention.rate), rule(contention.waves)
#: Loads whose rates are kept: a power of 2, of loads up to 2 each another place.
LOADS: Final = 512


@jit
def forget_loads(device: Any) -> None:
    """No rate of any load is known."""
    device.loads[:] = 0.0


@jit
def known_rates(hw: Any, device: Any, load: float) -> tuple[float, float]:
    """The rates at this load of kernels that are not GEMM-like, and of those that are; powers take long.

    They are looked up where they were of the same load the last time.
    """
    if load <= 0.0:
        return 1.0, 1.0
    place = int64(int(load * 256.0)) & (LOADS - 1)
    if device.loads[place] != load:
        device.loads[place] = load
        device.load_rates[place] = rate(hw.contention, load, int64(0))
        device.load_matrix_rates[place] = rate(hw.contention, load, int64(1))
    return float(device.load_rates[place]), float(device.load_matrix_rates[place])
