"""The op graph, the input of policies and bounds: a trace's dependencies with times and demands on one GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import msgspec

from gpusim.errors import PlanError
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.trace import Op, Trace
from gpusim.io.file_limits import FREE_DEPENDENCIES, MAX_DEPENDENCIES_PER_OP
from gpusim.notebook import short_name, short_repr
from gpusim.plan.anchor import anchor, anchored
from gpusim.plan.kernels import kernel_tasks, variant_tasks
from gpusim.plan.kinds import mostly_convolutional
from gpusim.plan.l2_cache import Touched, touched
from gpusim.plan.tasks import Task
from gpusim.plan.traffic import Arithmetic, arithmetic
from gpusim.text import short_value
from gpusim.trace.dependencies import dependencies
from gpusim.trace.fusion import canonical_variants, covered_by
from gpusim.units import counted

#: Number of ops from which compiled code is worth the time to load it, or to compile it on a first start.
COMPILED_FROM_OPS = 10_000


@dataclass(frozen=True, repr=False)
class OpGraph:
    """Ops by index, in recorded (legal) order; `tasks[i]` are the GPU tasks of op i, in launch order.

    `hardware` is anchored to the trace (`gpusim.plan.anchor`); simulate with it.
    """

    trace: Trace
    hardware: HardwareModel
    preds: tuple[tuple[int, ...], ...]
    tasks: tuple[tuple[Task, ...], ...]
    variants: tuple[tuple[tuple[Task, ...], ...], ...] = ()
    """Tasks of each variant, by op; empty if no op has variants."""
    covered: Mapping[int, int] = field(default_factory=dict)
    """Ops fused into a chosen variant, and the op with that variant."""

    @classmethod
    def build(cls, trace: Trace, hardware: HardwareModel) -> OpGraph:
        """Build the op graph of a trace on a GPU.

        Raises `PlanError` if a kernel breaks a limit of that GPU, and for far more dependencies than ops.
        """
        fitted = anchor(trace, hardware)
        tasks = kernel_tasks(trace, hardware, fitted.scale)
        any_variants = any(op.variants for op in trace.ops)
        variants = variant_tasks(trace, hardware, fitted.scale) if any_variants else ()
        graph = cls(trace, anchored(trace, hardware, fitted.chain_ns), dependencies(trace), tasks, variants)
        graph.work_preds  # noqa: B018  (needed by all else, and it names the op with too many dependencies)
        return graph

    def choosing(self, variants: Sequence[int]) -> OpGraph:
        """Return the graph with op `op` running its variant number `variants[op]`, from 1; 0: the captured kernels.

        An empty sequence chooses nothing. The chosen kernels, and their workspaces where known, count as captured in
        the returned graph and its trace, which have no variants. An op fused into a variant has no kernels; if it
        follows the op with that variant, it depends on that op alone.
        """
        if not any(variants):
            return self
        variants = tuple(variants)
        # A schedule is checked, lowered and reported one after the other, and others of its step choose the same.
        newest: tuple[tuple[int, ...], OpGraph] | None = self.encoded.get("chosen")
        if newest is None or newest[0] != variants:
            newest = self.encoded["chosen"] = (variants, self._choosing(variants))
        return newest[1]

    def _choosing(self, variants: Sequence[int]) -> OpGraph:
        covered = covered_by(self.trace, variants)
        variants = canonical_variants(self.trace, variants)
        waits = (
            (covered[op], *(p for p in preds if covered.get(p) == covered[op])) if covered.get(op, op) < op else preds
            for op, preds in enumerate(self.preds)
        )
        tasks = (self.variants[op][variants[op] - 1] if variants[op] else own for op, own in enumerate(self.tasks))
        return replace(
            self,
            trace=_with_kernels(self.trace, variants, covered),
            preds=tuple(waits),
            tasks=tuple(() if op in covered else chosen for op, chosen in enumerate(tasks)),
            variants=(),
            covered=covered,
        )

    def with_tasks(self, hardware: HardwareModel, tasks: tuple[tuple[Task, ...], ...]) -> OpGraph:
        """Return the same ops and dependencies on another GPU, with new tasks, equally many per op.

        Values derived from ops and dependencies alone are reused.
        """
        if list(map(len, tasks)) != list(map(len, self.tasks)):
            raise ValueError("another number of tasks of an op")
        other = self._like_this(hardware=hardware, tasks=tasks)
        vars(other).update(work_preds=self.work_preds)
        return other

    def without_dependencies(self) -> OpGraph:
        """Return the same ops without dependencies."""
        return self._like_this(preds=((),) * len(self))

    def _like_this(self, **changes: Any) -> OpGraph:
        other = replace(self, **changes)
        other.encoded["alike"] = self
        return other

    def __len__(self) -> int:
        return len(self.preds)

    def __repr__(self) -> str:
        where = f"{short_name(self.trace.name)} on {short_name(self.hardware.label)}"
        return short_repr("OpGraph", f"{where}: {counted(len(self), 'op')}")

    @property
    def chain_ns(self) -> float:
        """Gap between the end of a kernel and the start of its successor in a chain, in ns."""
        return self.hardware.graph.chain_ns

    @cached_property
    def encoded(self) -> dict[str, Any]:
        """Cache of engines' encodings of the graph, by name; it lives as long as the graph."""
        return {}

    @cached_property
    def may_lose_cache(self) -> bool:
        """True if schedules on several streams may lose the L2 cache; `predicts_misses` says if that is predicted."""
        return self.memory_touched.may_lose_cache(self.hardware.memory)

    @property
    def predicts_misses(self) -> bool:
        """True if plans on several streams include losses to L2 cache misses (`gpusim.plan.cache_misses`)."""
        return self.hardware.memory.l2_bytes_per_ns > 0.0 and self.may_lose_cache

    @cached_property
    def memory_touched(self) -> Touched:
        """Memory that a replay of the step touches."""
        alike: OpGraph | None = self.encoded.get("alike")
        return touched(self.trace) if alike is None else alike.memory_touched

    @cached_property
    def work(self) -> tuple[list[Arithmetic], ...]:
        """The arithmetic of each op's kernels, by which times are scaled to another GPU."""
        return tuple(arithmetic(self.trace, op, op.kernels) for op in self.trace.ops)

    @cached_property
    def less_known(self) -> bool:
        """True if the step is not mostly convolutional, so that its prediction is less sure (`gpusim.plan.kinds`)."""
        return not mostly_convolutional(self.trace, self.tasks)

    @cached_property
    def sequential_ns(self) -> float:
        """Time of the captured kernels one after the other with their gaps, in ns; 0 without kernels."""
        tasks = [task for of_op in self.tasks for task in of_op]
        return sum(task.dur_ns + task.extra_ns for task in tasks) + self.chain_ns * max(0, len(tasks) - 1)

    def interval_ns(
        self, predicted_ns: int, streams: int, *, other_kernels: bool = False, searched: bool = False
    ) -> tuple[int, int]:
        """Return the prediction interval of a schedule of this step in ns, which held 90 % of past measurements."""
        return self.hardware.interval_ns(
            predicted_ns,
            self.sequential_ns,
            streams,
            other_kernels=other_kernels,
            searched=searched,
            less_known=self.less_known,
        )

    @cached_property
    def succs(self) -> tuple[tuple[int, ...], ...]:
        """Successors of each op."""
        successors: list[list[int]] = [[] for _ in self.preds]
        for op, preds in enumerate(self.preds):
            for before in preds:
                successors[before].append(op)
        return tuple(map(tuple, successors))

    @cached_property
    def work_preds(self) -> dict[int, tuple[int, ...]]:
        """Predecessors with kernels of each op with kernels, ascending; views pass theirs on."""
        works = list(map(bool, self.tasks))
        reach: list[tuple[int, ...]] = []
        preds: dict[int, tuple[int, ...]] = {}
        left = max(FREE_DEPENDENCIES, MAX_DEPENDENCIES_PER_OP * len(self))
        for op, before in enumerate(self.preds):
            if len(before) == 1 and not works[before[0]]:
                needed = reach[before[0]]
            else:
                views = [p for p in before if not works[p]]
                reached = set(before).difference(views).union(*[reach[p] for p in views]) if views else before
                needed = tuple(sorted(reached))
                if needed == before:  # the usual case: share one tuple
                    needed = before
                left -= len(needed)
            reach.append(needed)
            if works[op]:
                left -= len(needed)
                preds[op] = needed
            if left < 0:
                most, name = max(FREE_DEPENDENCIES, MAX_DEPENDENCIES_PER_OP * len(self)), self.trace.ops[op].name
                problem = f"there are more than {most:,} dependencies between the ops up to '{short_value(name)}'"
                raise PlanError(f"{problem}: an op without kernels hands on all that it needs itself")
        return preds

    @cached_property
    def work_succs(self) -> dict[int, list[int]]:
        """Successors with kernels of each op with kernels, ascending."""
        succs: dict[int, list[int]] = {op: [] for op in self.work_preds}
        for op, preds in self.work_preds.items():
            for before in preds:
                succs[before].append(op)
        return succs

    @cached_property
    def solo_ns(self) -> tuple[float, ...]:
        """Time of each op alone on the GPU, in ns: its kernels and the gap before each."""
        chain_ns = self.chain_ns
        return tuple([sum([task.dur_ns + chain_ns + task.extra_ns for task in tasks]) for tasks in self.tasks])

    @cached_property
    def bottom_ns(self) -> tuple[float, ...]:
        """Bottom level of each op, in ns: the longest chain of solo times from its start to the end of the step."""
        level, behind = [0.0] * len(self), [0.0] * len(self)
        for op, solo_ns in zip(reversed(range(len(self))), reversed(self.solo_ns), strict=True):
            level[op] = now = solo_ns + behind[op]
            for before in self.preds[op]:
                if behind[before] < now:
                    behind[before] = now
        return tuple(level)

    @cached_property
    def level(self) -> tuple[int, ...]:
        """Wavefront number of each op: number of ops with GPU work on the longest chain before it."""
        levels = [0] * len(self)
        for op, preds in enumerate(self.preds):
            levels[op] = max((levels[p] + (1 if self.tasks[p] else 0) for p in preds), default=0)
        return tuple(levels)


def _with_kernels(trace: Trace, variants: Sequence[int], covered: Mapping[int, int]) -> Trace:
    """Return the trace with kernels and workspaces of the chosen variants as captured ones."""

    def running(index: int, op: Op) -> Op:
        if index in covered:
            return msgspec.structs.replace(op, kernels=(), variants=())
        if not variants[index]:
            return msgspec.structs.replace(op, variants=()) if op.variants else op
        chosen = op.variants[variants[index] - 1]
        workspace_bytes = op.workspace_bytes if chosen.workspace_bytes is None else chosen.workspace_bytes
        return msgspec.structs.replace(op, kernels=chosen.kernels, workspace_bytes=workspace_bytes, variants=())

    return msgspec.structs.replace(trace, ops=tuple(running(index, op) for index, op in enumerate(trace.ops)))


def is_legal_order(order: Sequence[int], preds: Sequence[Sequence[int]]) -> bool:
    """Return True if `order` has every op once, after its predecessors."""
    position = {op: place for place, op in enumerate(order)}
    return len(position) == len(order) == len(preds) and all(
        position[before] < position[op] for op in range(len(preds)) for before in preds[op]
    )
