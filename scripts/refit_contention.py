"""Fit the contention constants to the stored schedules of a calibration, without a GPU.

    python scripts/refit_contention.py [research/data/calibration [CROSS_LOAD [BUSY_NS]]]

The folder has the calibration's traces and one file of its schedules with their times. Prints the constants fitted with
the current engine and the bundled hardware model, and the residuals of each step. `contention.cross_load` and
`graph.busy_ns` are not fitted: they come from the model, or from the arguments. Needs torch.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import msgspec

from gpusim.formats.hardware import load_hardware
from gpusim.gpu.calibrate.contention import Point, by_block, errors, fit, points_of
from gpusim.io.packed import files_in
from gpusim.plan.anchor import anchor
from gpusim.trace.store import read_trace
from gpusim.validation.replayed import SUFFIX, ReplayedSchedule, read_replayed

HARDWARE = "h200"


def main(folder: str = "research/data/calibration", cross_load: str = "", busy_ns: str = "") -> None:
    """Print constants and residuals."""
    model = load_hardware(HARDWARE)
    if cross_load:
        contention = msgspec.structs.replace(model.contention, cross_load=float(cross_load))
        model = msgspec.structs.replace(model, contention=contention)
    if busy_ns:
        model = msgspec.structs.replace(model, graph=msgspec.structs.replace(model.graph, busy_ns=float(busy_ns)))
    (file,) = files_in(Path(folder), SUFFIX)
    steps: dict[str, list[ReplayedSchedule]] = {}
    for schedule in read_replayed(file):
        steps.setdefault(schedule.trace, []).append(schedule)
    points: dict[str, list[Point]] = {}
    gaps = []
    for step, schedules in steps.items():
        trace = read_trace(Path(folder) / f"{step}.json.gz")
        gaps.append(anchor(trace, model).chain_ns)
        took_ns = [schedule.measured_ns for schedule in schedules]
        points[step] = points_of(
            trace, model, schedules[0].sequential_ns, [each.schedule for each in schedules], took_ns
        )
    best_fit = fit([point for of_step in points.values() for point in of_step], gaps)
    print(
        f"sharing exponent {best_fit.sharing_exponent:g}, of matrix kernels {best_fit.matrix_exponent:g}, "
        f"one pool {best_fit.younger_slowdown:g}"
    )
    print(f"residual: median {best_fit.median:.1%}, 90 % within {best_fit.p90:.1%}")
    for step, of_step in points.items():
        left = errors(of_step, by_block, (best_fit.sharing_exponent, best_fit.matrix_exponent))
        rms = math.sqrt(sum(error**2 for error in left) / len(left))
        print(f"{step}: root mean square {rms:.1%}, mean {sum(left) / len(left):+.1%}")


if __name__ == "__main__":
    main(*sys.argv[1:])
