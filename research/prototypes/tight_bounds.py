"""Lower bounds whose heads and tails count the work of all ops before and behind, not only the longest chain.

    python research/prototypes/tight_bounds.py OUT.json [RECIPE]

An op starts no earlier than the least time that its ancestors with a head of at least h need, after h, for any h
(`gpusim.bounds.energetic`); likewise for tails. For the steps of a recipe with traces; `validate/fair.toml` by default.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gpusim.bounds.bounds import bounds
from gpusim.bounds.energetic import _CROWDS, Kernels, contention_ns
from gpusim.plan.graph import OpGraph
from gpusim.rules.launch import least_gap_ns
from gpusim.trace.store import read_trace
from gpusim.validation.chosen import hardware_of
from gpusim.validation.recipe import read_recipe

ROOT = Path(__file__).parents[2]
Floats = npt.NDArray[np.float64]


def ancestors(graph: OpGraph) -> npt.NDArray[np.bool_]:
    """Return for each op whether each other one is before it."""
    before = np.zeros((len(graph), len(graph)), bool)
    for op, preds in enumerate(graph.preds):
        for pred in preds:
            before[op] |= before[pred]
            before[op, pred] = True
    return before


def area_by_crowd(kernels: Kernels) -> Floats:
    """Return areas of shape (kernels, columns): a column for each crowd and resource, others first, then GEMMs."""
    columns = []
    for crowd in _CROWDS:
        loaded = (crowd**kernels.exponent - 1.0) / (crowd - 1.0) if crowd > 1.0 else 0.0
        columns.append(kernels.area_ns * (1.0 + loaded * (np.minimum(kernels.crowding, crowd) - 1.0)))
    areas = np.concatenate(columns, axis=1)
    matrix = kernels.matrix[:, None]
    return np.concatenate([np.where(matrix, 0.0, areas), np.where(matrix, areas, 0.0)], axis=1)


def tightened(graph: OpGraph, kernels: Kernels, forward: bool) -> Floats:
    """Return the head of each kernel, or its tail."""
    of_op = np.array([op for op, tasks in enumerate(graph.tasks) for _ in tasks], int)
    areas, costs = area_by_crowd(kernels), graph.hardware.graph
    half = areas.shape[1] // 2
    before = ancestors(graph) if forward else ancestors(graph).T
    neighbours = graph.preds if forward else graph.succs
    head_ns, ends_ns = np.zeros(len(kernels)), np.zeros(len(graph))
    for op in range(len(graph)) if forward else range(len(graph) - 1, -1, -1):
        now = max((float(ends_ns[each]) for each in neighbours[op]), default=0.0)
        others = np.flatnonzero(before[op][of_op])
        if len(others):
            latest = others[np.argsort(-head_ns[others], kind="stable")]
            sums = np.cumsum(areas[latest], axis=0)
            spans = [first * sums[:, :half] + second * sums[:, half:] for first, second in kernels.weights]
            now = max(now, float((head_ns[latest] + np.max(spans, axis=0).max(axis=1)).max()))
        own = list(zip(np.flatnonzero(of_op == op), graph.tasks[op], strict=True))
        for kernel, task in own if forward else own[::-1]:
            gap_ns = least_gap_ns(costs, task.extra_ns)
            if forward and now > 0.0:
                now += gap_ns
            head_ns[kernel] = now
            now += task.dur_ns + (0.0 if forward else gap_ns)
        ends_ns[op] = now
    return head_ns


def main() -> None:
    rows = []
    for case in read_recipe(Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "validate" / "fair.toml").case:
        assert case.trace is not None
        trace = read_trace(ROOT / case.trace)
        graph = OpGraph.build(trace, hardware_of(trace))
        kernels = Kernels.of(graph)
        assert kernels.exponent, "placement SM by SM"
        now_ns, name = bounds(graph).largest
        tight = replace(
            kernels,
            head_ns=np.maximum(kernels.head_ns, tightened(graph, kernels, True)),
            tail_ns=np.maximum(kernels.tail_ns, tightened(graph, kernels, False)),
        )
        through_ns = float((tight.head_ns + tight.dur_ns + tight.tail_ns).max())
        tight_ns = int(max(now_ns, contention_ns(tight), through_ns))
        rows.append({"step": trace.name, "bound_ns": now_ns, "by": name, "tightened_ns": tight_ns})
        print(f"{trace.name}: {now_ns:,} ({name}), tightened {tight_ns:,}: {tight_ns / now_ns:.3f}")
    Path(sys.argv[1]).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
