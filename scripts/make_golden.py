"""Write tests/data/predicted_ns.json: current predictions of every schedule in validate/results.

    python scripts/make_golden.py

A refactoring leaves the file unchanged, to the nanosecond. A change of a rule rewrites it and reports the effect.
"""

from __future__ import annotations

import json
from pathlib import Path

from gpusim.validation.again import predict_again
from gpusim.validation.replayed import SUFFIX

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "data" / "predicted_ns.json"


def main() -> None:
    """Predict all schedules, in a few minutes."""
    predicted = {}
    for schedules in sorted((ROOT / "validate" / "results").glob(f"*{SUFFIX}")):
        results = schedules.with_name(schedules.name.removesuffix(SUFFIX) + ".json")
        if not results.name.startswith("pairs_"):
            predicted[results.stem] = [case.predicted_ns for case in predict_again(results)[1].cases]
    lines = [f"{json.dumps(name)}: {json.dumps(times)}" for name, times in predicted.items()]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{sum(map(len, predicted.values()))} predictions of {len(predicted)} files")


if __name__ == "__main__":
    main()
