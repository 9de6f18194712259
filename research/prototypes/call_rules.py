"""Rules with one constant that could lower the prediction error of a call of an optimized step.

    python research/prototypes/call_rules.py [RESULTS.json]

Each rule adds a constant times a quantity of the row to the predicted call. The constant is the one of least summed
relative error over all rows but those of the row's own network (both sizes of a kind are one network), so each
prediction is held out. Rules are forms, not causes: what a quantity stands for is in the research note.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from gpusim.formats.results import ResultCase, read_results

RESULTS = Path(__file__).parents[2] / "validate" / "results" / "compile_h200_20261126.json"


def saving_ns(case: ResultCase) -> int:
    """Return the predicted saving of the call over the sequential graph, in ns."""
    return case.predicted_sequential_ns - case.predicted_ns


#: Quantity that a rule's constant is multiplied by.
QUANTITIES: Final[dict[str, Callable[[ResultCase], float]]] = {
    "a call": lambda case: 1.0,
    "a stream": lambda case: float(case.streams),
    "the predicted saving": lambda case: float(saving_ns(case)),
    "the sequential graph's own error": lambda case: float(case.sequential_ns - case.predicted_sequential_ns),
    "the predicted call": lambda case: float(case.predicted_ns),
}


def kind(case: ResultCase) -> str:
    """Return the network of a row, whatever its size."""
    return case.network.removesuffix("_small").removesuffix("_large")


def constant(cases: Sequence[ResultCase], quantity: Callable[[ResultCase], float]) -> float:
    """Return the constant of least summed relative error: a weighted median."""
    ratios = []
    for case in cases:
        if size := quantity(case):
            ratios.append(((case.measured_ns - case.predicted_ns) / size, abs(size) / case.measured_ns))
    half = sum(weight for _, weight in ratios) / 2
    for ratio, weight in sorted(ratios):
        half -= weight
        if half <= 0:
            return ratio
    return 0.0


def held_out(cases: Sequence[ResultCase], quantity: Callable[[ResultCase], float]) -> list[float]:
    """Return each row's relative error with the constant of the other networks."""
    errors = []
    for case in cases:
        others = [other for other in cases if kind(other) != kind(case)]
        predicted_ns = case.predicted_ns + constant(others, quantity) * quantity(case)
        errors.append(predicted_ns / case.measured_ns - 1)
    return errors


def summary(errors: Sequence[float]) -> str:
    """Return the median, largest and mean error, and how many are within 5 %."""
    sizes = sorted(map(abs, errors))
    within = sum(size <= 0.05 for size in sizes)
    return (
        f"median {statistics.median(sizes):5.1%}, within 5 % {within:2} of {len(sizes)}, largest {sizes[-1]:5.1%}, "
        f"bias {statistics.fmean(errors):+5.1%}"
    )


def main() -> None:
    """Print the errors as predicted and by each rule, for all rows and by mode."""
    cases = read_results(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS).cases
    parts = {
        "all": cases,
        "inference": [case for case in cases if case.mode == "infer"],
        "training": [case for case in cases if case.mode == "train"],
    }
    for name, rows in parts.items():
        print(f"{name:12} {'as predicted':34}            {summary([c.predicted_ns / c.measured_ns - 1 for c in rows])}")
        for rule, quantity in QUANTITIES.items():
            value = constant(rows, quantity)
            shown = f"{value / 1e3:6.2f} us" if value > 100 else f"{value:9.3f}"
            print(f"{name:12} {shown} times {rule:34} {summary(held_out(rows, quantity))}")


if __name__ == "__main__":
    main()
