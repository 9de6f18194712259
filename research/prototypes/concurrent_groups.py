"""Kernels that a schedule runs at once, measured apart from it: each group, its pairs, and each kernel alone.

    python research/prototypes/concurrent_groups.py OUT.json TRACE [POLICY] [--trust-code]

The groups are those of the simulated timeline: each kernel that starts while others run, and the last two of them.
OUT has a row for each group and each pair in it: times alone and together, and the prediction from the former, in ns.
With a profiled replay of the whole schedule it says whether a loss comes from the company or from the rest of the step.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

import gpusim
from gpusim.formats.trace import Trace
from gpusim.gpu.calibrate.pairs import apart, measure_groups
from gpusim.gpu.device import provenance

SEED = 0
MOST_GROUPS = 60


def running_together(trace: Trace, runs: Sequence[tuple[int, int, int]]) -> list[tuple[int, ...]]:
    """Return the triples of ops of one kernel that run at once; `runs` has op, start and end of each, in ns.

    The op that starts last comes last.
    """
    triples: dict[tuple[int, ...], None] = {}
    for op, start, _ in sorted(runs, key=lambda run: run[1]):
        others = [run for run in runs if run[0] != op and run[1] <= start < run[2]]
        if len(others) >= 2:
            ops = (*(run[0] for run in sorted(others, key=lambda run: run[1])[-2:]), op)
            if apart(trace, ops) and all(len(trace.ops[each].kernels) == 1 for each in ops):
                triples[ops] = None
    return list(triples)


def main() -> None:
    """Write the groups' times."""
    trust_code = "--trust-code" in sys.argv
    out, path, *rest = [each for each in sys.argv[1:] if each != "--trust-code"]
    step = gpusim.load(path)
    best = gpusim.explore(step).best.schedule if not rest else rest[0]
    timeline = gpusim.simulate(step, best).timeline
    starts_and_ends = zip(timeline.plan.tasks, timeline.start_ns, timeline.end_ns, strict=True)
    runs = [(task.op, start_ns, end_ns) for task, start_ns, end_ns in starts_and_ends if task.op is not None]
    triples = running_together(step.trace, runs)[:MOST_GROUPS]
    pairs = sorted({pair for triple in triples for pair in itertools.combinations(triple, 2)})
    cases = measure_groups(
        step.trace, step.hardware, [*triples, *pairs], random.Random(SEED), SEED, trust_code=trust_code
    )
    ones = torch.ones(2**24, device="cuda")
    head = provenance(f"python research/prototypes/concurrent_groups.py OUT {Path(path).name}", lambda: ones.add_(1))
    Path(out).write_text(json.dumps({**head, "cases": msgspec.to_builtins(cases)}, indent=1))


if __name__ == "__main__":
    main()
