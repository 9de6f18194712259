"""Predict measured pairs and triples of kernels with the current model, and compare their state with the step's.

    python scripts/predict_pairs_again.py validate/results/pairs_h200_20261122.pairs.json ...

For each step: the state of the L2 cache, times of ops alone over those in the step (5 %, median, 95 %), and the errors
of the stored and the new predictions of concurrent times (research/2026-11-23-fidelity.md). Needs torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from gpusim.formats.pairs import PairCase
from gpusim.formats.trace import Trace
from gpusim.gpu.calibrate.pairs import predict
from gpusim.plan.kernels import kernel_tasks
from gpusim.quantiles import quantile
from gpusim.trace.store import read_trace
from gpusim.validation.again import trace_files
from gpusim.validation.chosen import hardware_of
from gpusim.validation.pair_results import SUFFIX, pair_errors, read_pairs


def again(cases: list[PairCase], trace: Trace) -> list[PairCase]:
    """Return the cases of one step with new predictions."""
    hardware = hardware_of(trace)
    tasks = dict(zip((op.name for op in trace.ops), kernel_tasks(trace, hardware), strict=True))
    return [
        msgspec.structs.replace(
            case,
            predicted_ns=round(
                predict([tasks[op][0] for op in case.ops], case.alone_ns, float(case.empty_ns), hardware)
            ),
        )
        for case in cases
    ]


def unlike(cases: list[PairCase], trace: Trace) -> list[float]:
    """Return, for each op once, its time alone over that in the step, ascending."""
    took_ns = {op.name: op.kernels[0].dur_ns for op in trace.ops if op.kernels}
    ratios = {
        op: (alone_ns - case.empty_ns) / took_ns[op]
        for case in cases
        for op, alone_ns in zip(case.ops, case.alone_ns, strict=True)
    }
    return sorted(ratios.values())


def main(*files: str) -> None:
    """Print the table of each file."""
    for file in map(Path, files):
        cases = read_pairs(file).cases
        traces = trace_files(file.with_name(file.name.removesuffix(SUFFIX) + ".json"))
        print(f"{file.name}\n\n| step | cache | n | alone / in the step | then: median, 95 % within, bias | now |")
        print("|---|---|--:|--:|--:|--:|")
        for name in dict.fromkeys(case.trace for case in cases):
            mine, trace = [case for case in cases if case.trace == name], read_trace(traces[name])
            ratios = ", ".join(f"{quantile(unlike(mine, trace), part):.2f}" for part in (0.05, 0.5, 0.95))
            errors = " | ".join(
                "{:.1%}, {:.1%}, {:+.1%}".format(*pair_errors(each)) for each in (mine, again(mine, trace))
            )
            print(f"| {name} | {'cold' if mine[0].cold else 'warm'} | {len(mine)} | {ratios} | {errors} |")
        print()


if __name__ == "__main__":
    main(*sys.argv[1:])
