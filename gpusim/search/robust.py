"""Robust makespans: the mean over copies of the step with slightly perturbed kernel times.

Block placement depends on single nanoseconds, so a predicted makespan has a scatter of about 1 % that a GPU does not
have (research/2026-11-23-fidelity.md). A search that minimises it exploits that scatter: on an H200, searched schedules
were predicted 2 to 5 % too fast while policies were not, and the mean removes 1 to 2 % of that
(research/2026-11-23-search.md).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from gpusim.engine.batch import BatchEngine, TaskTimes

#: Number of perturbed steps, and maximum relative perturbation of a kernel's time.
STEPS: Final = 4
OFF_FRAC: Final = 0.02
#: Seed of the perturbations; fixed, so that all searches of a step use the same criterion.
SEED: Final = 20261122


class RobustEngine:
    """Engine for perturbed steps; `mean_ns` depends only on the schedule."""

    def __init__(self, engine: BatchEngine) -> None:
        random = np.random.Generator(np.random.PCG64(SEED))
        count = len(engine.arrays.tasks)
        self.engine = engine
        self.factors = [1.0 + random.uniform(-OFF_FRAC, OFF_FRAC, count) for _ in range(STEPS)]
        self.engines = [engine.with_times(factors) for factors in self.factors]

    def mean_ns(
        self,
        orders: npt.NDArray[np.int32],
        streams: npt.NDArray[np.int32],
        variants: npt.NDArray[np.int32] | None,
        threads: int | None,
        times: TaskTimes | None = None,
    ) -> npt.NDArray[np.int64]:
        """Return the mean makespan of each schedule, with the arguments of `BatchEngine.evaluate`.

        `times` replace the task times, before they are perturbed.
        """
        engines = self.engines
        if times is not None:
            engines = [self.engine.with_durations(times.scaled(factors)) for factors in self.factors]
        total = np.zeros(len(orders))
        for engine in engines:
            total += engine.evaluate(orders, streams, variants, threads=threads).makespan_ns
        return np.rint(total / STEPS).astype(np.int64)
