"""What is taken where a user does not say: each default of the command line, the library and the dashboard, once."""

from __future__ import annotations

from typing import Final

#: Streams that a schedule may use.
DEFAULT_STREAMS: Final = 8
#: The policy where neither a policy nor a schedule is named.
DEFAULT_POLICY: Final = "critical_path"
#: In place of a policy's name: the schedule that an exploration recommends.
RECOMMENDED: Final = "recommended"
#: In place of a policy's name: what the search found. It is the name of its rows.
SEARCH: Final = "search"
#: The hardware model of a step whose GPU has none, by name.
DEFAULT_HARDWARE: Final = "h200"
#: The bundled step where none is named.
DEFAULT_TRACE: Final = "googlenet-train-b8"
#: The engine that simulates one schedule.
DEFAULT_ENGINE: Final = "fast"
#: The seed of searches and of random inputs.
DEFAULT_SEED: Final = 0
#: Time for the search of an exploration, and the most that it may be given, in seconds.
DEFAULT_BUDGET_S: Final = 9.0
MAX_BUDGET_S: Final = 86_400.0
#: The most schedules that a search may be asked for.
MAX_EVALUATIONS: Final = 10**9
#: The short exploration behind a page or a figure: it ends after this many schedules, which is the same on every
#: machine. The time is far above what they take.
QUICK_EVALUATIONS: Final = 512
QUICK_BUDGET_S: Final = 60.0
#: How a schedule may be launched: in one CUDA graph, or kernel by kernel from the host.
LAUNCH_MODES: Final = ("graph", "stream")
DEFAULT_LAUNCH: Final = "graph"
