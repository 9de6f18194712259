"""Errors of stored schedules if launches begin to miss the L2 cache by a ramp, in place of a limit.

    python research/prototypes/launch_ramp.py 0.55 0.75 validate/results/fidelity_h200_20261122.json ...

The two shares of the cache are where the loss begins, and where all of it is there. Prints each step that moves.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gpusim.plan.cache_misses as lowering
from gpusim.formats.hardware import Memory
from gpusim.formats.results import ResultCase
from gpusim.validation.again import predict_again
from gpusim.validation.statistics import by_step, fidelity


def predicted(file: Path) -> dict[str, list[ResultCase]]:
    """Return the cases of each step, predicted now."""
    return by_step(predict_again(file)[1].cases)


def main() -> None:
    """Print median error and bias of each step, by the limit and by the ramp."""
    begin, end = map(float, sys.argv[1:3])

    def ramp(memory: Memory, touched_bytes: float) -> float:
        share = (touched_bytes / memory.l2_bytes - begin) / (end - begin)
        return memory.launch_miss_ns * min(1.0, max(0.0, share)) if memory.l2_bytes_per_ns else 0.0

    limit = lowering.launch_lost_ns
    for name in sys.argv[3:]:
        both = []
        for rule in (limit, ramp):
            lowering.launch_lost_ns = rule  # type: ignore[assignment]
            both.append(predicted(Path(name)))
        for step, cases in both[0].items():
            if [case.predicted_ns for case in cases] == [case.predicted_ns for case in both[1][step]]:
                continue
            found = [fidelity(each) for each in (cases, both[1][step])]
            texts = [f"{each.median:.1%}, {each.bias:+.1%}" for each in found if each is not None]
            print(f"{Path(name).stem} {step}: limit {texts[0]}; ramp {texts[1]}")


if __name__ == "__main__":
    main()
