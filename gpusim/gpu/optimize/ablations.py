"""One step optimized in full and with one freedom less each time, for `gpusim validate`: in one process, in turns."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Final

from gpusim.formats.results import Ablation, Baseline
from gpusim.formats.trace import Timing
from gpusim.gpu.device import gpu_facts
from gpusim.gpu.isolate import stopwatch
from gpusim.gpu.optimize.fronts import CANNOT_RUN
from gpusim.gpu.optimize.measure import (
    Asked,
    Keep,
    Optimized,
    batches_of,
    ended_after,
    errors_of_the_gpu,
    loaded,
    said,
    timed_optimize,
    times_in_turns,
)
from gpusim.gpu.optimize.peers import Call, make, tensors_of
from gpusim.text import first_line

#: Time to make a step ready, in s, which none needs: the first compiles kernels that the others find in caches, and
#: with the limit of its mode it would try fewer styles than they.
LIMIT_S: Final = 600.0
EAGER: Final[Baseline] = "eager"
#: Name of the step in full among the peers of its ablations.
FULL: Final = "optimize"


def ablate(asked: Asked, keep: Keep) -> None:
    """Optimize a step in full, and without each of `asked.ablations`. Call it in a process of its own.

    `keep` gets the measurements of each once it is made, timed in turns with the step in full, and at the end those of
    all in turns. One that cannot be made is left out. Raises as `measure`.
    """
    say = stopwatch()
    with errors_of_the_gpu(), ended_after(asked.within_s, say):
        _ablate(asked, keep, say)


def _ablate(asked: Asked, keep: Keep, say: Callable[[str], None]) -> None:
    step, sensitive = loaded(asked, say)
    batches = batches_of(step)
    eager = make(EAGER, step)
    made: dict[Ablation | None, Optimized] = {None: timed_optimize(step, asked, say, limit_s=LIMIT_S)}
    full = made[None]
    gpu = gpu_facts(lambda: full.fast(*tensors_of(step)))

    def keep_in_turns(which: Collection[Ablation | None]) -> None:
        """Time these in turns with eager and the step in full."""
        say(f"timing in turns: {', '.join(each or FULL for each in which)}")
        calls: dict[str, Call] = {EAGER: eager.call, FULL: full.fast}
        calls |= {each: made[each].fast for each in which if each is not None}
        times = times_in_turns(calls, batches)
        for each in which:
            peers: dict[str, Timing] = {EAGER: times[EAGER]}
            if each is not None:
                peers[FULL] = times[FULL]
            keep(replace(made[each].measured(gpu, times[each or FULL], peers, sensitive), ablation=each))

    say(said(full.gain))
    keep_in_turns([None])
    for ablation in asked.ablations:
        say(f"optimizing it again: {ablation}")
        try:
            made[ablation] = timed_optimize(step, asked, say, ablation, LIMIT_S)
        except CANNOT_RUN as cause:
            say(f"left out {ablation}: {first_line(cause)}")
            continue
        say(said(made[ablation].gain))
        keep_in_turns([ablation])
    if len(made) > 2:
        keep_in_turns(made)
    say("measured")
