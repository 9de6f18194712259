"""Compare the choices of models among all replayed schedules, and what a trial of several on the GPU adds.

    python research/prototypes/choose_by_models.py validate/results/kinds_h200_20261123.json ...

For each step with at least eight schedules on several streams with captured kernels, of a network that no constant was
fitted on: the regret of the schedule that each model predicts best, of the best by blocks among the K best by the pool,
and of the fastest of the four best. Differences have a bootstrap over steps.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from gpusim.formats.results import ResultCase
from gpusim.validation.models import predicted_by_models
from gpusim.validation.statistics import MIN_SCHEDULES, by_step, kendall_tau

BLOCKS, POOL = "blocks", "one pool of SMs"
TRIED, DRAWS = 4, 4000


def best(cases: Sequence[ResultCase], count: int = 1) -> list[int]:
    """Return the numbers of the cases predicted fastest."""
    return sorted(range(len(cases)), key=lambda number: cases[number].predicted_ns)[:count]


def rows(files: Sequence[Path]) -> dict[str, list[dict[str, float]]]:
    """Return regrets of each way to choose, of each run of each step; `tau ...` is Kendall's tau."""
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for file in files:
        steps = {name: by_step(cases) for name, cases in predicted_by_models(file).items()}
        for step, blocks in steps[BLOCKS].items():
            if blocks[0].fitted or len(blocks) < MIN_SCHEDULES:
                continue
            measured = [case.measured_ns for case in blocks]
            chosen = {name: best(of_step[step]) for name, of_step in steps.items()}
            for count in (2, 4, 8):
                near = best(steps[POOL][step], count)
                chosen[f"blocks among the {count} best by the pool"] = [
                    min(near, key=lambda number: blocks[number].predicted_ns)
                ]
            for name in (BLOCKS, POOL):
                chosen[f"fastest of the {TRIED} best by {name}"] = best(steps[name][step], TRIED)
            row = {name: min(measured[n] for n in of) / min(measured) - 1 for name, of in chosen.items()}
            taus = {f"tau {name}": kendall_tau(of_step[step]) for name, of_step in steps.items()}
            found[step].append(row | {name: tau for name, tau in taus.items() if tau is not None})
    return found


def main(*names: str) -> None:
    """Print mean and largest regret of each way to choose, and its difference to that of the blocks."""
    found = rows([Path(name) for name in names])
    runs = [row for of_step in found.values() for row in of_step]
    print(f"{len(runs)} runs of {len(found)} steps")
    for name in runs[0]:
        values = [row[name] for row in runs if name in row]
        if name.startswith("tau"):
            print(f"{name}: mean {statistics.fmean(values):.2f}, least {min(values):.2f}")
            continue
        within = sum(value <= 0.01 for value in values) / len(values)
        gains = [statistics.fmean(row[BLOCKS] - row[name] for row in of_step) for of_step in found.values()]
        generator = random.Random(1)
        drawn = sorted(statistics.fmean(generator.choices(gains, k=len(gains))) for _ in range(DRAWS))
        print(
            f"{name}: mean {statistics.fmean(values):.2%}, largest {max(values):.1%}, within 1 % {within:.0%}; "
            f"less than blocks by {statistics.fmean(gains):.2%} ({drawn[DRAWS // 20]:.2%} to {drawn[-DRAWS // 20]:.2%})"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
