"""A lower bound from SM area, contention and dependencies together, by energetic reasoning.

Two rules limit the work of the GPU in an interval of L ns, for any schedule. With one pool of SMs
(`gpusim.engine.pool`):

1. The shares of the running kernels add up to at most the GPU, for each of the four resources.
2. Only the oldest kernel runs undisturbed. Let e be the part of a kernel's `dur_ns` done as the oldest kernel. The rest
   is done next to an older one and takes 1 + a x cover times as long, on the same share of the GPU.

At any time at most one kernel is the oldest, so the e of all kernels add up to at most L. The area of kernels with
demand d, the sum of d (dur_ns + a cover (dur_ns - e)), is at most L as well. `least_ns` is the smallest L for which
some e satisfy both: the oldest should be the kernels whose slowdown would take the most area, d x cover, a fractional
knapsack.

With placement SM by SM (`gpusim.engine.placement`), a block that takes the share f of an SM's resource adds l to the
load and runs at rate 1 / load^p, p <= 1; f is at most l, since l is one over the number of blocks that fit. Let c be
any number above 1 and l' = min(l, c f), which is at most l. Then all blocks of an SM with load x together do at most 1
of the sum of (u l' + (1 - u) f) x rate per ns, with u = (c^p - 1) / (c - 1). For x > 1, the sum of l' lies between 0
and c, the sum of f is at most 1, and u x + (1 - u) <= x^p holds at both ends of 1 to c and so between them, since the
right side is concave. For x <= 1, both sums are at most x, and x / x^p is at most 1. GEMM-like kernels have a p of
their own; with the smaller one as p, no rate above load 1 is larger. So kernels take at least that much, each block for
its time at load 1. `_CROWDS` has the values of c that are tried; c = 1 is the plain area.

With a cross load w below 1, rates depend on loads in which the other kind counts w times. If both kinds run on an SM,
they then do up to C > 1 together; a kind by itself still does 1, since its own load counts in full. So kernels take at
least the area of either kind, and at least the area of both over C. More generally, the two kinds may have any weights,
with a C for these weights: if there is little of one kind, it counts somewhat less and the other in full.
`gpusim.bounds.cross_load` has the proof and the numbers; one C serves all c. Each interval takes the largest of these
bounds, so an interval with a single kind loses nothing, and with w = 1 all kernels count in full.

The kernels that must run in an interval follow from their heads and tails (the longest chains before and after them,
with the gaps between kernels): those with a head of at least h and a tail of at least q run between h and T - q, so T
is at least h + q + their least time. This is energetic reasoning (Erschler, Lopez, Thuriot, "Raisonnement temporel sous
contraintes de ressource et problemes d'ordonnancement", 1991), as applied to multiprocessors by Fernandez and Bussell
("Bounds on the number of processors and time for multiprocessor optimal schedules", IEEE Trans. Comput. 22(8), 1973).
It holds for the kernels of the trace on the whole GPU, launched as one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from gpusim.bounds.cross_load import IN_FULL, Weights, weights
from gpusim.engine.budget import blocks_to_place
from gpusim.engine.placement import waves
from gpusim.formats.hardware import HardwareModel
from gpusim.plan.graph import OpGraph
from gpusim.plan.tasks import Task
from gpusim.rules.contention import block_load, exponents
from gpusim.rules.dram import moved_bytes
from gpusim.rules.launch import least_gap_ns
from gpusim.rules.occupancy import NO_FOOTPRINT
from gpusim.rules.oldest_first import slowed_part

Floats = npt.NDArray[np.float64]

#: Maximum number of pairs (h, q) x kernels per resource: about 0.1 s for all four.
_CELLS = 2_000_000
#: Maximum and minimum number of values of h and of q. Any subset of the heads and tails gives a bound.
_MOST_CUTS, _FEWEST_CUTS = 48, 3
#: Values of c, the load up to which a bound counts contention.
_CROWDS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0, 32.0)


@dataclass(frozen=True)
class Kernels:
    """The kernels of a step as arrays: times in ns, the others of shape (kernels, resources)."""

    head_ns: Floats
    """Least time from the start of the step to the start of each kernel."""
    tail_ns: Floats
    """Least time from the end of each kernel to the end of the step."""
    dur_ns: Floats
    area_ns: Floats
    """Share of the GPU that each kernel takes, times its time alone."""
    costs: Floats
    """With one pool of SMs: additional area per ns in which a kernel is not the oldest."""
    crowding: Floats
    """With placement SM by SM: load of a block over its share of the resource."""
    traffic_bytes: Floats
    """DRAM traffic of each kernel, in bytes."""
    exponent: float
    """Smaller p of the two kinds; 0 with one pool of SMs."""
    matrix: npt.NDArray[np.bool_]
    """True for GEMM-like kernels."""
    weights: tuple[Weights, ...]
    """Weights of the areas of both kinds with which an SM does at most 1 per ns."""

    @classmethod
    def of(cls, graph: OpGraph) -> Kernels:
        """Return the kernels of an op graph, with heads and tails along its dependencies."""
        tasks = list(chain.from_iterable(graph.tasks))
        heads, tails = _heads_and_tails(graph)
        contention = graph.hardware.contention
        exponent = min(exponents(contention))
        matrix = np.fromiter(map(attrgetter("matrix"), tasks), np.bool_, len(tasks))
        both = bool(exponent) and bool(matrix.any()) and not matrix.all()
        area, extra, traffic = _uses(tasks, graph.hardware, _use_by_block if exponent else _use_of_pool)
        none = np.zeros((len(tasks), 4))
        return cls(
            head_ns=heads,
            tail_ns=tails,
            dur_ns=np.fromiter(map(attrgetter("dur_ns"), tasks), np.float64, len(tasks)),
            area_ns=area,
            costs=none if exponent else extra,
            crowding=extra if exponent else none,
            traffic_bytes=traffic,
            exponent=exponent,
            matrix=matrix,
            weights=weights(exponents(contention), contention.cross_load) if both else IN_FULL,
        )

    def __len__(self) -> int:
        return len(self.dur_ns)


def _heads_and_tails(graph: OpGraph) -> tuple[Floats, Floats]:
    """Return the longest chains before the start and after the end of each kernel, in ns."""
    heads: list[float] = []
    tails: list[float] = []
    ends = [0.0] * len(graph)
    costs = graph.hardware.graph
    for op, (preds, tasks, behind) in enumerate(zip(graph.preds, graph.tasks, graph.bottom_ns, strict=True)):
        now = max(map(ends.__getitem__, preds), default=0.0)
        for task in tasks:
            gap_ns = least_gap_ns(costs, task.extra_ns)
            if now > 0.0:  # a kernel that waits for nothing has no gap before it
                now += gap_ns
            behind -= gap_ns + task.dur_ns
            heads.append(now)
            tails.append(behind if behind > 0.0 else 0.0)
            now += task.dur_ns
        ends[op] = now
    return np.array(heads), np.array(tails)


_numbers = attrgetter("dur_ns", "dram_bytes", "blocks", "blocks_per_sm", "matrix", "partition_sms")
"""Key of distinct kernels, together with demand and footprint."""
_Use = tuple[Sequence[float], Sequence[float], float]
"""Area of a kernel per resource; its `costs` or `crowding`; its DRAM traffic."""


def _uses(
    tasks: Sequence[Task], hardware: HardwareModel, use: Callable[[Task, HardwareModel], _Use]
) -> tuple[Floats, Floats, Floats]:
    """Return the three parts of `_Use` for each task; each distinct kernel is computed once."""
    demands, footprints = (map(id, map(attrgetter(name), tasks)) for name in ("demand", "footprint"))
    kernels = list(zip(demands, footprints, map(_numbers, tasks), strict=True))
    distinct = dict(zip(kernels, tasks, strict=True))
    place = dict(zip(distinct, range(len(distinct)), strict=True))
    which = np.fromiter(map(place.__getitem__, kernels), np.int64, len(tasks))
    uses = [use(task, hardware) for task in distinct.values()]
    area, extra = (np.array([kernel_use[part] for kernel_use in uses], np.float64).reshape(-1, 4) for part in (0, 1))
    return area[which], extra[which], np.array([kernel_use[2] for kernel_use in uses], np.float64)[which]


def _use_of_pool(task: Task, hardware: HardwareModel) -> _Use:
    demand, slowdown = task.demand.resources, slowed_part(hardware.contention, task.demand.cover)
    traffic = moved_bytes(hardware.memory, task.dram_bytes, task.dur_ns)
    return [part * task.dur_ns for part in demand], [part * slowdown for part in demand], traffic


def _use_by_block(task: Task, hardware: HardwareModel) -> _Use:
    limits, need = hardware.limits, task.footprint
    traffic = moved_bytes(hardware.memory, task.dram_bytes, task.dur_ns)
    if need == NO_FOOTPRINT or not task.blocks:
        return (0.0,) * 4, (1.0,) * 4, traffic
    at_once = limits.sms * task.blocks_per_sm
    blocks, full_waves = blocks_to_place(task, limits.sms), waves(task, limits.sms, hardware)
    load = block_load(task.blocks_per_sm)
    largest_smem = max(limits.smem_per_sm_bytes, *limits.smem_splits_bytes, 0)
    parts = (
        need.threads / limits.threads_per_sm,
        need.regs / limits.regs_per_sm,
        need.smem_bytes / largest_smem,
        1.0 / limits.blocks_per_sm,
    )
    # Blocks of a partial last wave move less than the kernel's traffic, since traffic rates are per block.
    moved = traffic * blocks * min(1.0, full_waves) / (min(task.blocks, at_once) * full_waves)
    area = [blocks * task.dur_ns / full_waves * part / limits.sms for part in parts]
    return area, [load / part if part else 1.0 for part in parts], moved


def area_ns(kernels: Kernels) -> float:
    """Return the SM time that the kernels take of the scarcest resource, in ns."""
    others_ns, matrix_ns = (kernels.area_ns[kind].sum(axis=0) for kind in (~kernels.matrix, kernels.matrix))
    return float(_counted_ns(kernels, others_ns, matrix_ns).max(initial=0.0))


def _counted_ns(kernels: Kernels, others_ns: Floats, matrix_ns: Floats) -> Floats:
    """Return the least time for the given areas of both kinds, the largest over all weights."""
    counted: Floats = np.max([others * others_ns + matrix * matrix_ns for others, matrix in kernels.weights], axis=0)
    return counted


def crowded_area_ns(kernels: Kernels) -> float:
    """Return the bound from SM area and contention, without heads and tails, in ns."""
    return _largest_ns(kernels, np.zeros(1), np.zeros(1))


def contention_ns(kernels: Kernels) -> float:
    """Return the largest bound over resources and the sampled heads and tails, in ns."""
    if not len(kernels):
        return 0.0
    cuts = int(np.clip((_CELLS / len(kernels)) ** 0.5, _FEWEST_CUTS, _MOST_CUTS))
    return _largest_ns(kernels, _cuts(kernels.head_ns, cuts), _cuts(kernels.tail_ns, cuts))


def _largest_ns(kernels: Kernels, heads: Floats, tails: Floats) -> float:
    """Return the largest bound over resources, `heads` and `tails`."""
    used = [resource for resource in range(4) if kernels.area_ns[:, resource].any()]
    largest = _largest_by_block_ns if kernels.exponent else _largest_of_pool_ns
    return max((largest(kernels, resource, heads, tails) for resource in used), default=0.0)


def _largest_of_pool_ns(kernels: Kernels, resource: int, heads: Floats, tails: Floats) -> float:
    order = np.argsort(-kernels.costs[:, resource], kind="stable")
    costs, dur_ns = kernels.costs[order, resource], kernels.dur_ns[order]
    needed_ns = kernels.area_ns[order, resource] + costs * dur_ns
    behind = kernels.tail_ns[order][None, :] >= tails[:, None]
    best_ns = 0.0
    for head_ns in heads:
        inside = behind & (kernels.head_ns[order] >= head_ns)[None, :]
        spans = least_ns(np.where(inside, dur_ns, 0.0), costs, np.where(inside, needed_ns, 0.0).sum(axis=1))
        best_ns = max(best_ns, float(np.max(np.where(inside.any(axis=1), head_ns + tails + spans, 0.0))))
    return best_ns


def _largest_by_block_ns(kernels: Kernels, resource: int, heads: Floats, tails: Floats) -> float:
    # Number of `heads` and of `tails` up to those of each kernel: it lies in their intervals.
    after = np.searchsorted(heads, kernels.head_ns, "right")
    before = np.searchsorted(tails, kernels.tail_ns, "right")
    cells, shape = after * (len(tails) + 1) + before, (len(heads) + 1, len(tails) + 1)

    def inside(numbers: Floats, cells: npt.NDArray[np.int64]) -> Floats:
        """Return the sum of a number over the kernels in each interval."""
        sums = np.bincount(cells, numbers, shape[0] * shape[1]).reshape(shape)
        added: Floats = sums[::-1, ::-1].cumsum(axis=0).cumsum(axis=1)[::-1, ::-1][1:, 1:]
        return added

    some = inside(np.ones(len(kernels)), cells) > 0.5
    kinds = [
        (cells[kind], kernels.area_ns[kind, resource], kernels.crowding[kind, resource])
        for kind in (~kernels.matrix, kernels.matrix)
    ]
    best_ns = 0.0
    for crowd in _CROWDS:
        loaded = (crowd**kernels.exponent - 1.0) / (crowd - 1.0) if crowd > 1.0 else 0.0
        others_ns, matrix_ns = (
            inside(area_ns * (1.0 + loaded * (np.minimum(crowding, crowd) - 1.0)), cells_of_kind)
            for cells_of_kind, area_ns, crowding in kinds
        )
        spans = _counted_ns(kernels, others_ns, matrix_ns)
        best_ns = max(best_ns, float(np.max(np.where(some, heads[:, None] + tails[None, :] + spans, 0.0))))
    return best_ns


def least_ns(dur_ns: Floats, costs: Floats, area_ns: Floats) -> Floats:
    """Return the least time of each set of kernels, a row of `dur_ns` with 0 for kernels outside.

    `costs`, descending, is the additional area of a kernel per ns in which it is not the oldest; `area_ns` is the area
    of a set if none of its kernels is ever the oldest.
    """
    oldest_ns = np.cumsum(dur_ns, axis=1)
    reached = oldest_ns + np.cumsum(dur_ns * costs, axis=1)  # area that fits if the first ones are the oldest in turn
    place = np.argmax(reached >= area_ns[:, None] * (1.0 - 1e-12), axis=1)
    rows = np.arange(len(area_ns))
    before = np.where(place > 0, place - 1, 0)
    time_ns = np.where(place > 0, oldest_ns[rows, before], 0.0)
    fits_ns = np.where(place > 0, reached[rows, before], 0.0)
    sets_ns: Floats = time_ns + np.maximum(0.0, area_ns - fits_ns) / (1.0 + costs[place])
    return sets_ns


def _cuts(times_ns: Floats, count: int) -> Floats:
    """Return at most `count` of the times, evenly spaced, including the least."""
    return np.unique(np.quantile(times_ns, np.linspace(0.0, 1.0, count, endpoint=False), method="lower"))
