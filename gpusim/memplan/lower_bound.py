"""A lower bound on the step time of any memory plan within a budget, from copies and recomputation.

While op t of the forward pass runs, or the first op after it, each storage that later ops need and op t does not is on
the GPU, on the host, or gone and to be computed again. What is over the budget then, D bytes, is one of the last two:

1. *Copies.* What is on the host was copied out before op t starts. So m bytes take at least m / bandwidth, and as far
   as that is longer than the ops before t, op t starts later.
2. *Recomputation.* What is gone is written again by every op of the forward pass that wrote it. An op that wrote
   several such storages runs once for all: each is charged the share of its bytes.

The bound takes storages by parts, the cheapest for their bytes first, and for each op t chooses the best m:

    step >= keep_all + min over m of (cheapest recomputation of D - m bytes) + max(0, m / bandwidth - start of t)

It leaves out latencies, copies back, what recomputation needs in turn, and the time at which a storage is made. It
holds for plans that keep the forward pass in recorded order.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpusim.memplan.evaluate import MemoryEvaluator
from gpusim.memplan.lowering import lower_program
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.profile import BytesProfile
from gpusim.memplan.program import program_of
from gpusim.memplan.storages import Storages
from gpusim.memplan.times import OpTimes
from gpusim.rules import copies


class LowerBound:
    """Bounds of one step on one GPU, for any budget."""

    def __init__(self, evaluator: MemoryEvaluator) -> None:
        self._storages = evaluator.storages
        self._bandwidth = copies.full_bytes_per_ns(evaluator.graph.hardware.copies, to_device=False)
        self.keep_all_ns = evaluator.keep_all_ns
        self._profile = BytesProfile(self._storages, OpTimes.of(evaluator.graph))
        self._start_ns = _starts(evaluator)
        self._by_price = sorted(prices(self._storages, evaluator.graph.solo_ns).items(), key=lambda each: each[1])
        """Saved storages with ns a byte of recomputation, infinite where nothing computes them again."""

    def holds_for(self, plan: MemoryPlan) -> bool:
        """Return whether a plan keeps the forward pass in recorded order."""
        turn = self._storages.first_backward
        return tuple(plan.order[:turn]) == tuple(range(turn)) if plan.order else True

    def step_ns(self, budget_bytes: int) -> int | None:
        """Return what a step takes at least within this budget, in ns; None where no plan can keep it."""
        latest = min(self._storages.first_backward, len(self._start_ns) - 1)
        most = 0.0
        for op in range(latest + 1):
            over_bytes = int(self._profile.level[op]) - budget_bytes
            if over_bytes > 0:
                extra_ns = self._extra_ns(op, over_bytes)
                if extra_ns is None:
                    return None
                most = max(most, extra_ns)
        return self.keep_all_ns + int(most)

    def _extra_ns(self, op: int, over_bytes: int) -> float | None:
        """Return the least cost of freeing this many bytes while an op runs; None if fewer could be freed."""
        storages, size = self._storages, self._profile.size
        there = [
            (size[storage], price)
            for storage, price in self._by_price
            if storages.users[storage][0] < op and storage not in storages.touched[op]
        ]
        if sum(each for each, _ in there) < over_bytes:
            return None
        return cheapest_ns(there, over_bytes, self._bandwidth, self._start_ns[op])


def cheapest_ns(there: Sequence[tuple[int, float]], over_bytes: float, bandwidth: float, before_ns: float) -> float:
    """Return the least time that `over_bytes` cost.

    `there` are bytes and ns a byte of recomputation, the cheapest first. Copies reach `bandwidth` in bytes a ns, and
    cost nothing in the first `before_ns`.
    """
    left = over_bytes - bandwidth * before_ns
    cost_ns = 0.0
    for size, price in there:
        if left <= 0 or price >= 1.0 / bandwidth:
            break
        part = min(size, left)
        cost_ns += part * price
        left -= part
    return cost_ns + max(0.0, left) / bandwidth


def prices(storages: Storages, solo_ns: Sequence[float]) -> dict[int, float]:
    """Return for each saved storage what recomputing a byte of it takes at least, in ns; see rule 2."""
    saved = frozenset(storages.saved)
    turn = storages.first_backward
    writers = {s: [op for op in storages.writers[s] if op < turn] for s in saved}
    written_bytes: dict[int, int] = {}
    for storage, ops in writers.items():
        for op in ops:
            written_bytes[op] = written_bytes.get(op, 0) + storages.bytes[storage]
    return {
        storage: sum(solo_ns[op] / written_bytes[op] for op in ops)
        if ops and all(storages.may_run_again[op] for op in ops)
        else float("inf")
        for storage, ops in writers.items()
    }


def _starts(evaluator: MemoryEvaluator) -> list[float]:
    """Return when each op of the step that keeps all starts, in ns; one without kernels when the next one does."""
    program = program_of(evaluator.storages, MemoryPlan())
    lowered = lower_program(evaluator.graph, evaluator.storages, program)
    timeline = evaluator.engine.run(lowered.plan, evaluator.graph.hardware)
    starts = [0.0] * len(evaluator.storages.trace.ops)
    upcoming = float(timeline.makespan_ns)
    for instruction, tasks in zip(reversed(program), reversed(lowered.tasks_of), strict=True):
        if tasks:
            upcoming = float(min(timeline.start_ns[task] for task in tasks))
        if instruction.kind == "run":
            starts[instruction.op] = upcoming
    return starts
