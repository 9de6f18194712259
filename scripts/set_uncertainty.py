"""Set a hardware model's uncertainty from validation results.

    python scripts/set_uncertainty.py hwmodels/h200.json validate/results/loop_h200_20261120.json ...

90 % of the cases lie within the numbers written. Cases marked `fitted` are left out: a constant was fitted on their
network. The form of the model was chosen on some of the others (research/2026-11-23-fidelity.md), so the numbers are
no blind test.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import msgspec

from gpusim.formats.hardware import Uncertainty, read_hardware
from gpusim.formats.results import read_results
from gpusim.io.files import write_document
from gpusim.quantiles import quantile


def rounded_quantile_90(errors: list[float]) -> float:
    """Return the smallest error that at least 90 % of the errors do not exceed, rounded up to 0.1 %."""
    return math.ceil(quantile(sorted(errors), 0.9) * 1000) / 1000


def main(model_file: str, *results_files: str) -> None:
    """Rewrite the model's `uncertainty` section and its source."""
    results = [read_results(Path(file)) for file in results_files]
    cases = [case for result in results for case in result.cases if not case.fitted]
    concurrent = [abs(case.error) for case in cases if case.streams > 1]
    sequential = {case.trace: abs(case.sequential_prediction_error) for case in cases}
    model = read_hardware(Path(model_file))
    uncertainty = Uncertainty(
        sequential_frac=rounded_quantile_90(list(sequential.values())),
        schedule_frac=rounded_quantile_90(concurrent),
        cache_frac=model.uncertainty.cache_frac,
        products_frac=model.uncertainty.products_frac,
        variants_frac=model.uncertainty.variants_frac,
    )
    names = ", ".join(Path(file).name for file in results_files)
    source = (
        f"90 % of {len(concurrent)} replayed schedules and of {len(sequential)} sequential graphs lie within: {names}; "
        "no constant was fitted on their networks, but the model's form was chosen on some of them "
        "(research/2026-11-23-fidelity.md)"
    )
    sources = {
        key: value
        for key, value in model.sources.items()
        if key not in ("uncertainty", "uncertainty.schedule_frac", "uncertainty.sequential_frac")
    }
    model = msgspec.structs.replace(model, uncertainty=uncertainty, sources={**sources, "uncertainty": source})
    write_document(Path(model_file), model, indent=1)
    print(f"{model_file}: sequential {uncertainty.sequential_frac:.1%}, schedules {uncertainty.schedule_frac:.1%}")


if __name__ == "__main__":
    main(*sys.argv[1:])
