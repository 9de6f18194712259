"""Hardware models and the occupancy arithmetic."""

from gpusim.defaults import DEFAULT_HARDWARE

__all__ = ["DEFAULT_HARDWARE"]
