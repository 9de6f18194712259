"""Trial of predicted schedules on the GPU: the best few are timed, and the fastest is the result.

Shared by `gpusim explore --measure` and recipes with `measure`. A search tends to pick schedules that the model
overrates; a trial of a few schedules takes seconds and finds the fastest of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpusim.errors import OptionError
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.search.explored import Explored
from gpusim.search.trial import Trial, contenders

SEQUENTIAL = "sequential"


def fastest(
    graph: OpGraph, schedules: Sequence[Schedule], seed: int, *, trust_code: bool = False
) -> tuple[list[int], int]:
    """Return a quick measurement of each schedule on this GPU, in ns, and the index of the first fastest.

    Raises as `gpusim.gpu.replay.replay.replay` does.
    """
    from gpusim.gpu.replay.replay import trial_ns

    times_ns = trial_ns(graph, schedules, seed=seed, trust_code=trust_code)
    return times_ns, times_ns.index(min(times_ns))


def try_best(
    explored: Explored,
    count: int,
    *,
    command: str,
    say: Callable[[str], None] = lambda _: None,
    trust_code: bool = False,
) -> tuple[Explored, Trial]:
    """Try the `count` schedules predicted best; the fastest, replayed and checked, becomes the exploration's best.

    The sequential schedule stays best unless another was faster. Raises as `gpusim.gpu.replay.replay.replay` does, and
    `ReplayError` where outputs differ.
    """
    from gpusim.gpu.replay.replay import replay, require_equal

    if explored.memory_plan is not None:
        raise OptionError(
            "the schedule within the memory limit has memory actions: write it with -o and measure it with "
            "gpusim replay --memory-plan FILE",
            argument="measure",
            value=count,
        )
    rows = contenders(explored, count)
    schedules = [row.schedule for row in rows]
    say(f"trying {len(rows)} schedules")
    times_ns, number = fastest(explored.graph, schedules, explored.seed, trust_code=trust_code)
    best, measurement = rows[number], None
    if best.policy != SEQUENTIAL:
        (measurement,) = replay(
            explored.graph,
            [schedules[number]],
            command=command,
            seed=explored.seed,
            say=say,
            trust_code=trust_code,
        )
        require_equal(measurement)
        if measurement.schedule.median_ns >= measurement.sequential.median_ns:
            best = explored.best_of(SEQUENTIAL)
    return explored.with_best(best), Trial(tuple(rows), tuple(times_ns), rows[number], measurement, best)
