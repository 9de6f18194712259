"""Names of the lower bounds, without the code that computes them."""

from __future__ import annotations

from typing import Final

CRITICAL_PATH: Final = "critical path"
AREA: Final = "SM area"
CONTENTION: Final = "SM area with contention"
BANDWIDTH: Final = "DRAM bandwidth"
FRONT_END: Final = "front end"
