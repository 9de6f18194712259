"""What a step would gain if each parameter's update were a kernel of its own.

    python research/prototypes/split_updates.py research/data/recommendation_large_inductor_h200_20261130.json.gz

Inductor updates many parameters by one kernel, which waits for all their gradients. Here each parameter of 1 MiB or
more gets a kernel with its share of the time. Which gradient belongs to which parameter of the same size is not known
to the trace; they are paired in order. Prints the fastest schedules of a search for both.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from math import prod
from pathlib import Path

import msgspec

import gpusim
from gpusim.formats.hardware import load_hardware
from gpusim.formats.trace import Op, Trace
from gpusim.step import Step
from gpusim.trace.store import read_trace

LEAST_ELEMENTS, BLOCK_ELEMENTS = 1 << 18, 1024
#: Shortest kernel with a single parameter, in ns.
SHORTEST_NS = 1500


def split(trace: Trace) -> Trace:
    """Return the trace with updates of single parameters."""
    ops: list[Op] = []
    for op in trace.ops:
        ops += _parts(trace, op) if any("for_fused" in kernel.name for kernel in op.kernels) else [op]
    return msgspec.structs.replace(trace, ops=tuple(ops))


def _parts(trace: Trace, op: Op) -> list[Op]:
    changed, read = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for index in op.writes:
        changed[prod(trace.tensors[index].shape)].append(index)
    for index in set(op.reads) - set(op.writes):
        read[prod(trace.tensors[index].shape)].append(index)
    total = sum(size * len(gradients) for size, gradients in read.items())

    def part(name: str, gradients: list[int], states: list[int], elements: int) -> Op:
        (kernel,) = op.kernels
        kernel = msgspec.structs.replace(
            kernel,
            dur_ns=max(SHORTEST_NS, kernel.dur_ns * elements // total),
            grid=(max(1, elements // BLOCK_ELEMENTS), 1, 1),
        )
        return msgspec.structs.replace(
            op, name=name, reads=(*states, *gradients), writes=tuple(states), args=(), kwargs={}, kernels=(kernel,)
        )

    parts, rest, states = [], list[int](), list[int]()
    for size, gradients in sorted(read.items()):
        if size < LEAST_ELEMENTS:
            rest += gradients
            states += changed[size]
            continue
        for number, gradient in enumerate(sorted(gradients)):
            mine = [changed[size][number], changed[size][number + len(gradients)]]
            parts.append(part(f"{op.name}_{number}", [gradient], mine, size))
    if rest:
        parts.append(part(op.name, rest, states, sum(prod(trace.tensors[index].shape) for index in rest)))
    return parts


def main() -> None:
    """Print both."""
    trace = read_trace(Path(sys.argv[1]))
    for name, each in (("joined", trace), ("split", split(trace))):
        explored = gpusim.explore(Step(each, load_hardware("h200")), evaluations=4000)
        rows = sorted(explored.rows, key=lambda row: row.makespan_ns)[:3]
        print(
            name, len(each.ops), "ops:", *(f"{row.policy} {row.streams} {row.makespan_ns / 1e3:.1f} us" for row in rows)
        )


if __name__ == "__main__":
    main()
