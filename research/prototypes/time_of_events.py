"""Share of the processor time of a search that counting events takes.

python research/prototypes/time_of_events.py EVALUATIONS TRACE...
"""

from __future__ import annotations

import sys
import time
from typing import Any

import gpusim
from gpusim.engine.batch import BatchEngine
from gpusim.engine.compiled.warm import warm_up
from gpusim.search.explore import explore

SPENT_S = [0.0]
usual = BatchEngine.events


def events(*arguments: Any, **options: Any) -> Any:
    """`BatchEngine.events`, with its processor time added up."""
    begin = time.process_time()
    found = usual(*arguments, **options)
    SPENT_S[0] += time.process_time() - begin
    return found


def main() -> None:
    """Print the share for each step."""
    evaluations, *names = sys.argv[1:]
    BatchEngine.events = events  # type: ignore[method-assign]
    for name in names:
        graph = gpusim.load(name).graph
        warm_up(graph.hardware)
        SPENT_S[0], begin = 0.0, time.process_time()
        explore(graph, budget_s=1e6, evaluations=int(evaluations))
        whole_s = time.process_time() - begin
        print(f"{name}: {SPENT_S[0]:.2f} of {whole_s:.1f} s, {SPENT_S[0] / whole_s:.1%}", flush=True)


if __name__ == "__main__":
    main()
