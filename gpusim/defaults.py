"""Defaults of the command line, the library and the dashboard, each defined once."""

from __future__ import annotations

from typing import Final, Literal

#: Maximum number of streams of a schedule.
DEFAULT_STREAMS: Final = 8
#: Stream counts of a sweep.
DEFAULT_SWEEP_STREAMS: Final = (2, 4, 8)
#: Policy if neither a policy nor a schedule is given.
DEFAULT_POLICY: Final = "critical_path"
#: Name of the schedule recommended by an exploration, in place of a policy.
RECOMMENDED: Final = "recommended"
#: Name of searched schedules, in place of a policy.
SEARCH: Final = "search"
#: Names of searched schedules with variants, and with SM partitions.
VARIANTS: Final = "with variants"
PARTITIONS: Final = "with partitions"
#: Names of all searched schedules.
SEARCHED: Final = (SEARCH, VARIANTS, PARTITIONS)
#: Name of searched schedules with memory actions, in place of a policy.
MEMORY_ACTIONS: Final = "memory_actions"
#: Name of the schedule with the streams and the order of a profile, in place of a policy.
AS_OBSERVED: Final = "as observed"
#: Name of the hardware model for a step whose GPU has none.
DEFAULT_HARDWARE: Final = "h200"
#: Bundled step if none is given.
DEFAULT_TRACE: Final = "googlenet-train-b8"
#: Engine that simulates one schedule.
DEFAULT_ENGINE: Final = "fast"
#: Seed of searches and of random inputs.
DEFAULT_SEED: Final = 0
#: Default and maximum time for the search of an exploration, in s.
DEFAULT_BUDGET_S: Final = 9.0
MAX_BUDGET_S: Final = 86_400.0
#: Maximum number of simulations of a search.
MAX_EVALUATIONS: Final = 10**9
#: Limits of the short exploration for a page or a figure: it ends by the number of simulations, and so gives the same
#: on every machine; the time limit is far above.
QUICK_EVALUATIONS: Final = 512
QUICK_BUDGET_S: Final = 60.0
#: Largest limit on memory: beyond any machine, and sums of a few stay whole numbers of 64 bits.
MAX_MEMORY_BYTES: Final = 2**60
#: Launch modes of a schedule: in one CUDA graph, or kernel by kernel from the host.
LAUNCH_MODES: Final = ("graph", "stream")
DEFAULT_LAUNCH: Final = "graph"
#: Statistics of BatchNorm on several GPUs: of each part of the batch, or of the whole batch.
BatchNorm = Literal["local", "synchronised"]
BATCH_NORMS: Final[tuple[BatchNorm, ...]] = ("local", "synchronised")
DEFAULT_BATCH_NORM: Final[BatchNorm] = "local"
