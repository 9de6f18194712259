"""Rule 4 of `gpusim.engine.placement` compiled: how load slows blocks, and what that makes of a kernel alone."""

from __future__ import annotations

from typing import Any, Final

from gpusim.engine import budget
from gpusim.engine.compiled.jit import int64, jit

#: `gpusim.engine.budget.placed_blocks`.
placed_blocks = jit(budget.placed_blocks)
#: Loads whose rates are kept: a power of 2, of loads up to 2 each another place.
LOADS: Final = 512


@jit
def forget_loads(device: Any) -> None:
    """No rate of any load is known."""
    device.loads[:] = 0.0


@jit
def known_rates(hw: Any, device: Any, load: float) -> tuple[float, float]:
    """`shared_rates`, which take long, looked up where they were of the same load the last time."""
    if load <= 0.0:
        return 1.0, 1.0
    place = int64(int(load * 256.0)) & (LOADS - 1)
    if device.loads[place] != load:
        device.loads[place] = load
        device.load_rates[place], device.load_matrix_rates[place] = shared_rates(hw, load)
    return float(device.load_rates[place]), float(device.load_matrix_rates[place])


@jit
def shared_rates(hw: Any, load: float) -> tuple[float, float]:
    """Rule 4: the rates of blocks on an SM of that load, of kernels that multiply matrices the second."""
    return float(1.0 / load ** exponent_of(hw, int64(0))), float(1.0 / load ** exponent_of(hw, int64(1)))


@jit
def exponent_of(hw: Any, matrix: int) -> float:
    """`Contention.exponents`."""
    if matrix == 1 and hw.contention_matrix_exponent > 0.0:
        return float(hw.contention_matrix_exponent)
    return float(hw.contention_sharing_exponent)


@jit
def waves(hw: Any, count: int, blocks_per_sm: int, sms: int, matrix: int) -> float:
    """`gpusim.engine.placement.waves`."""
    at_once = sms * blocks_per_sm
    count = int64(placed_blocks(count, at_once))
    last = (count % at_once + sms - 1) // sms
    return float(count // at_once + (last / blocks_per_sm) ** exponent_of(hw, matrix))
