"""Robust makespans: the mean over copies of the step whose kernel times are perturbed a little.

Where blocks go depends on times by the nanosecond, so a predicted makespan has a scatter of about 1 % that no GPU
shares (research/2026-11-23-fidelity.md). A search that minimises it finds what the scatter favours: schedules that it
found on an H200 were predicted 2 to 5 % too fast where policies were not, and the mean takes 1 to 2 % of that back
(research/2026-11-23-search.md).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from gpusim.engine.batch import BatchEngine

#: How many steps with other times, and by how much each kernel's time is off in them at most.
STEPS: Final = 4
OFF_FRAC: Final = 0.02
#: What the times are drawn from. Fixed, so that all searches of a step judge alike.
SEED: Final = 20261122


class RobustEngine:
    """The steps with other times. What `mean_ns` gives depends on the schedule alone."""

    def __init__(self, engine: BatchEngine) -> None:
        random = np.random.Generator(np.random.PCG64(SEED))
        count = len(engine.arrays.tasks)
        self.engines = [engine.with_times(1.0 + random.uniform(-OFF_FRAC, OFF_FRAC, count)) for _ in range(STEPS)]

    def mean_ns(
        self,
        orders: npt.NDArray[np.int32],
        streams: npt.NDArray[np.int32],
        variants: npt.NDArray[np.int32] | None,
        threads: int | None,
    ) -> npt.NDArray[np.int64]:
        """The mean makespan of each schedule, arguments as for `BatchEngine.evaluate`."""
        total = np.zeros(len(orders))
        for engine in self.engines:
            total += engine.evaluate(orders, streams, variants, threads=threads).makespan_ns
        return np.rint(total / STEPS).astype(np.int64)
