"""Optimized steps against the issue's aims: as measured, and if each call took its predicted time.

    python research/prototypes/optimize_aims.py [RESULTS.json]

Speed-ups are over the fastest torch.compile baseline of a row. *Sequential* is the graph of the chosen kernels on one
stream over that baseline, which has the copies of a call in it, too; at most 1.01 is the aim.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from gpusim.formats.results import ResultCase, read_results

RESULTS = Path(__file__).parents[2] / "validate" / "results" / "compile_h200_20261126.json"
#: Least speed-up over the fastest torch.compile baseline, by the begin of a row's trace.
AIMS: Final = {
    "googlenet-infer": 1.7,
    "inception_v3-infer": 1.55,
    "nasnetalarge-infer": 1.7,
    "googlenet-train-b8": 1.7,
    "inception_v3-train-b8": 1.5,
    "googlenet-train-b32-bf16": 1.25,
    "inception_v3-train-b32-bf16": 1.2,
    "experts": 2.3,
    "recommendation": 3.0,
    "wired": 1.95,
    "unet": 1.15,
    "transformer": 1.08,
    "decoder": 1.17,
    "resnet50": 1.03,
    "vgg16": 0.99,
    "vit": 0.99,
}


def aim(case: ResultCase) -> float:
    """Return a row's aim."""
    return next(value for begin, value in AIMS.items() if case.trace.startswith(begin))


def fastest_ns(case: ResultCase) -> int:
    """Return the time of the fastest torch.compile baseline, in ns, as measured beside the row."""
    return case.alongside_ns(case.fastest_compiled)


def main() -> None:
    """Print a line per row, those short of their aim first, and what is measured of the sequential graphs."""
    cases = read_results(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS).cases
    for case in sorted(cases, key=lambda each: fastest_ns(each) / each.measured_ns / aim(each)):
        best = fastest_ns(case)
        got, predicted = best / case.measured_ns, best / case.predicted_ns
        print(
            f"{case.trace:32} aim {aim(case):.2f}, measured {got:.3f}, as predicted {predicted:.3f}, "
            f"sequential {case.sequential_ns / best:.3f}, needs {best / aim(case) / 1e3:,.1f} us of "
            f"{case.measured_ns / 1e3:,.1f}{'' if got >= aim(case) else ', SHORT'}"
        )
    within = sum(case.sequential_ns <= 1.01 * fastest_ns(case) for case in cases)
    print(f"sequential graph at most 1 % over the fastest baseline: {within} of {len(cases)}")


if __name__ == "__main__":
    main()
