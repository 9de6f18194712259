"""Share of its predicted saving that each step realises, and errors with other exponents of contention.

python research/prototypes/realised_saving.py validate/results/kinds_h200_20261123.json ...
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from set_uncertainty import kind_of

from gpusim.engine.fast import FastEngine
from gpusim.plan.lower import lower
from gpusim.validation.again import replayed_schedules

SETTINGS: dict[str, dict[str, float]] = {
    "now": {},
    "matrix 0.75": {"matrix_exponent": 0.75},
    "matrix 0.9": {"matrix_exponent": 0.9},
    "other 0.45": {"sharing_exponent": 0.45},
    "other 0.6": {"sharing_exponent": 0.6},
}
#: Least predicted saving of a schedule whose realised share is counted.
LEAST_SAVING = 0.03


def main() -> None:
    """Print a line for each kind, and one for each of its steps."""
    engine = FastEngine()
    errors: dict[tuple[bool, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    realised: dict[tuple[bool, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for file in map(Path, sys.argv[1:]):
        for case, graph, schedule in replayed_schedules(file):
            if case.streams < 2 or case.fitted or schedule.has_variants or schedule.partitions:
                continue
            key = (graph.less_known, kind_of(case.network))
            plan = lower(graph, schedule)
            for name, values in SETTINGS.items():
                contention = msgspec.structs.replace(graph.hardware.contention, **values)
                hardware = msgspec.structs.replace(graph.hardware, contention=contention)
                predicted_ns = engine.run(plan, hardware).makespan_ns
                errors[key][name].append(predicted_ns / case.measured_ns - 1)
                saved_ns = graph.sequential_ns - predicted_ns
                if name == "now" and saved_ns > LEAST_SAVING * graph.sequential_ns:
                    realised[key][case.trace].append((graph.sequential_ns - case.measured_ns) / saved_ns)
    for key, settings in sorted(errors.items()):
        cells = (
            f"{name} {statistics.fmean(each):+.1%} {statistics.median(map(abs, each)):.1%}"
            for name, each in settings.items()
        )
        print(f"{'other' if key[0] else 'convolutional'} {key[1]} ({len(settings['now'])}): {' | '.join(cells)}")
        for trace, each in sorted(realised[key].items()):
            print(f"    {trace}: {statistics.median(each):.2f} of the saving ({min(each):.2f} to {max(each):.2f})")


if __name__ == "__main__":
    main()
