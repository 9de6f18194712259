"""Breakdown of a step's kernel time by phase, layer and family, each kernel alone on the GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from gpusim.formats.trace import Op
from gpusim.plan.graph import OpGraph

NO_LAYER = "no layer"
_FUSED = re.compile(r"triton_(poi|red|per|tem)")
_FUSED_NAMES = {"poi": "fused pointwise", "red": "fused reduction", "per": "fused reduction", "tem": "fused template"}


@dataclass(frozen=True, slots=True)
class Part:
    """A group of kernels."""

    name: str
    time_ns: int
    """Sum of the kernels' times alone on the GPU."""
    kernels: int


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The kernel time of a step, divided in three ways, each with the largest part first."""

    total_ns: int
    kernels: int
    phases: tuple[Part, ...]
    layers: tuple[Part, ...]
    """Parts by the first component of the module path."""
    families: tuple[Part, ...]
    """Parts by operator, whose kernels do the same kind of work."""


def breakdown(graph: OpGraph) -> Breakdown:
    """Return the kernel time of a step on its GPU, by phase, layer and family."""
    times = [sum(task.dur_ns for task in tasks) for tasks in graph.tasks]
    return Breakdown(
        total_ns=round(sum(times)),
        kernels=sum(map(len, graph.tasks)),
        phases=_parts(graph, times, lambda op: op.phase),
        layers=_parts(graph, times, lambda op: op.layer.partition(".")[0] or NO_LAYER),
        families=_parts(graph, times, family),
    )


def family(op: Op) -> str:
    """Return the operator without namespace and overload (`convolution_backward`), or the ops of a fused kernel."""
    fused = _FUSED.match(op.target)
    if fused:
        return _FUSED_NAMES[fused[1]]
    words = op.target.split(".")
    return words[1] if len(words) > 1 else op.target


def largest(parts: tuple[Part, ...], count: int) -> tuple[Part, ...]:
    """Return the `count` largest parts; if there are more, the last one sums all others."""
    if len(parts) <= count:
        return parts
    rest = parts[count - 1 :]
    others = Part(f"{len(rest)} others", sum(p.time_ns for p in rest), sum(p.kernels for p in rest))
    return (*parts[: count - 1], others)


def _parts(graph: OpGraph, times: list[float], key: Callable[[Op], str]) -> tuple[Part, ...]:
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    for op, time_ns, tasks in zip(graph.trace.ops, times, graph.tasks, strict=True):
        if tasks:
            name = key(op)
            sums[name] = sums.get(name, 0.0) + time_ns
            counts[name] = counts.get(name, 0) + len(tasks)
    return tuple(Part(name, round(sums[name]), counts[name]) for name in sorted(sums, key=lambda n: (-sums[n], n)))
