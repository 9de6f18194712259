"""Storages of a step: category, lifetime, and the ops that need, make and change each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal

from gpusim.formats.trace import Op, Role, Trace
from gpusim.memplan.again import draws, states_of
from gpusim.notebook import ShortRepr
from gpusim.plan.graph import OpGraph
from gpusim.plan.sync import kept_storages, storages_touched, through_views, works
from gpusim.trace.dependencies import dependencies, reads_writes_storages
from gpusim.trace.store import structure_hash

Category = Literal[
    "parameter", "gradient", "optimizer_state", "activation", "activation_gradient", "input", "buffer", "workspace"
]
CATEGORIES: Final[tuple[Category, ...]] = (
    "parameter",
    "gradient",
    "optimizer_state",
    "activation",
    "activation_gradient",
    "input",
    "buffer",
    "workspace",
)
_OF_ROLE: Final[dict[Role, Category]] = {
    "input": "input",
    "target": "input",
    "constant": "input",
    "parameter": "parameter",
    "buffer": "buffer",
    "activation": "activation",
    "gradient": "gradient",
    "optimizer_state": "optimizer_state",
    "output": "activation",
}


_CONVOLUTION_BACKWARD: Final = "aten.convolution_backward.default"
#: Argument positions of a convolution's backward: the mask of requested gradients, and the input.
_MASK, _INPUT = 10, 1


def size_only(op: Op) -> int | None:
    """Return the tensor whose size alone an op needs: the input of a convolution's input gradient.

    `torch.nn.grad.conv2d_input` calls it with an expanded element instead.
    """
    if op.target != _CONVOLUTION_BACKWARD or len(op.args) <= _MASK or op.args[_MASK] != [True, False, False]:
        return None
    argument = op.args[_INPUT]
    tensor = argument.get("tensor") if isinstance(argument, dict) else None
    return tensor if isinstance(tensor, int) else None


def _for_its_size(trace: Trace, op: Op) -> frozenset[int]:
    """Return the storage that an op needs only for its size."""
    tensor = size_only(op)
    if tensor is None:
        return frozenset()
    storage = trace.tensors[tensor].storage
    others = {trace.tensors[t].storage for t in (*op.reads, *op.writes) if t != tensor}
    return frozenset((storage,)) - others


@dataclass(frozen=True, slots=True)
class Recipe:
    """Recomputation of a storage: all ops of the forward pass that write it, and their inputs."""

    ops: tuple[int, ...]
    sources: tuple[tuple[int, bool], ...]
    """Storages of the step that are read, and whether each still has that value when the forward pass ends."""
    changed: frozenset[int]
    """Other storages that these ops change in place, which must be recomputed, too."""


@dataclass(frozen=True, repr=False)
class Storages(ShortRepr):
    """Storages of a trace, by index, and their uses by ops."""

    trace: Trace
    bytes: tuple[int, ...]
    category: tuple[Category, ...]
    """Category of each storage; an activation that the backward pass makes is an `activation_gradient`."""
    initial: frozenset[int]
    """Storages that exist before the step and throughout."""
    results: frozenset[int]
    """Storages that the step makes and that outlive it."""
    touched: tuple[frozenset[int], ...]
    """Storages that must be live during each op: read, written, or referenced by a view."""
    reads: tuple[frozenset[int], ...]
    writes: tuple[frozenset[int], ...]
    workspace_bytes: tuple[int, ...]
    """Workspace of each op while it runs, in bytes."""

    @classmethod
    def of(cls, trace: Trace) -> Storages:
        """Analyse a trace."""
        initial = frozenset(t.storage for t in trace.tensors if t.init is not None)
        elements = reads_writes_storages(trace)
        first_phase: dict[int, str] = {}
        for op, (_, written) in zip(trace.ops, elements, strict=True):
            for storage in written:
                first_phase.setdefault(storage, op.phase)
        categories: list[Category] = ["activation"] * len(trace.storages)
        for tensor in reversed(trace.tensors):  # the first tensor of a storage decides, unless it is a result
            categories[tensor.storage] = _OF_ROLE[tensor.role]
        for tensor in trace.tensors:
            if tensor.role == "gradient":
                categories[tensor.storage] = "gradient"
        for storage, category in enumerate(categories):
            if category == "activation" and first_phase.get(storage, "forward") != "forward":
                categories[storage] = "activation_gradient"
        return cls(
            trace=trace,
            bytes=tuple(storage.bytes for storage in trace.storages),
            category=tuple(categories),
            initial=initial,
            results=kept_storages(trace) - initial,
            touched=tuple(
                touched - _for_its_size(trace, op)
                for op, touched in zip(trace.ops, storages_touched(trace), strict=True)
            ),
            reads=tuple(read - _for_its_size(trace, op) for op, (read, _) in zip(trace.ops, elements, strict=True)),
            writes=tuple(written for _, written in elements),
            workspace_bytes=tuple(op.workspace_bytes for op in trace.ops),
        )

    def __len__(self) -> int:
        return len(self.bytes)

    def running(self, graph: OpGraph) -> Storages:
        """Return the same storages with the workspaces of this step's `graph`, which may have chosen variants."""
        return replace(self, workspace_bytes=tuple(op.workspace_bytes for op in graph.trace.ops))

    def touched_by(self, ops: tuple[int, ...]) -> frozenset[int]:
        """Return the storages that any of these ops touches; what planners ask again is computed once."""
        if ops not in self._touched_by:
            self._touched_by[ops] = frozenset().union(*map(self.touched.__getitem__, ops))
        return self._touched_by[ops]

    @cached_property
    def trace_hash(self) -> str:
        """Hash of the trace, to which plans are tied."""
        return structure_hash(self.trace)

    @cached_property
    def _touched_by(self) -> dict[tuple[int, ...], frozenset[int]]:
        return {}

    @cached_property
    def preds(self) -> Sequence[Sequence[int]]:
        """Ops that each op depends on."""
        return dependencies(self.trace)

    @cached_property
    def working_preds(self) -> Sequence[tuple[int, ...]]:
        """Ops with GPU work that each op depends on, also through views."""
        return through_views(self.trace, self.preds)

    @cached_property
    def working(self) -> tuple[bool, ...]:
        """Whether each op does anything on the GPU; a view does not."""
        return tuple(works(op) for op in self.trace.ops)

    @cached_property
    def states(self) -> tuple[frozenset[int], ...]:
        """Storages that each op changes as states, and leaves alone when it runs again."""
        return tuple(states_of(op, self.trace.tensors) for op in self.trace.ops)

    @cached_property
    def may_run_again(self) -> tuple[bool, ...]:
        """Whether each op can run again without changing the step's results, given its inputs."""
        return tuple(
            not draws(op) and not (written & self.initial) - states
            for op, written, states in zip(self.trace.ops, self.writes, self.states, strict=True)
        )

    @cached_property
    def inputs(self) -> tuple[frozenset[int], ...]:
        """Storages that must exist before each op, except states."""
        return tuple(
            touched - frozenset(made) - states
            for touched, made, states in zip(self.touched, self.makes, self.states, strict=True)
        )

    @cached_property
    def working_before(self) -> tuple[int, ...]:
        """Nearest earlier op that works on the GPU, for each op; the op itself where there is none."""
        nearest: list[int] = []
        last = -1
        for op, working in enumerate(self.working):
            nearest.append(last if last >= 0 else op)
            last = op if working else last
        return tuple(nearest)

    @cached_property
    def working_after(self) -> tuple[int, ...]:
        """Nearest later op that works on the GPU, for each op; the last op where there is none."""
        nearest: list[int] = []
        following = len(self.working) - 1
        for op in reversed(range(len(self.working))):
            nearest.append(following)
            following = op if self.working[op] else following
        return tuple(reversed(nearest))

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """Ops that need each storage, in recorded order."""
        users: list[list[int]] = [[] for _ in self.bytes]
        for op, storages in enumerate(self.touched):
            for storage in storages:
                users[storage].append(op)
        return tuple(map(tuple, users))

    @cached_property
    def writers(self) -> tuple[tuple[int, ...], ...]:
        """Ops that write each storage, in recorded order."""
        writers: list[list[int]] = [[] for _ in self.bytes]
        for op, storages in enumerate(self.writes):
            for storage in storages:
                writers[storage].append(op)
        return tuple(map(tuple, writers))

    @cached_property
    def makes(self) -> tuple[tuple[int, ...], ...]:
        """Storages that each op allocates, in the order of its results."""
        made: set[int] = set(self.initial)
        makes: list[tuple[int, ...]] = []
        for op, touched in zip(self.trace.ops, self.touched, strict=True):
            order = [self.trace.tensors[tensor].storage for tensor in op.outputs if tensor is not None]
            new = [storage for storage in dict.fromkeys((*order, *sorted(touched))) if storage not in made]
            made.update(new)
            makes.append(tuple(new))
        return tuple(makes)

    @cached_property
    def version_read(self) -> tuple[dict[int, int], ...]:
        """For each op: touched storage -> the op that last wrote it before (-1: none)."""
        last: dict[int, int] = {}
        versions: list[dict[int, int]] = []
        for op, touched in enumerate(self.touched):
            versions.append({storage: last.get(storage, -1) for storage in touched})
            for storage in self.writes[op]:
                last[storage] = op
        return tuple(versions)

    @cached_property
    def recipes(self) -> tuple[Recipe | None, ...]:
        """Recomputation of each storage; None where impossible."""
        return tuple(self._recipe(storage) for storage in range(len(self)))

    def _recipe(self, storage: int) -> Recipe | None:
        ops = tuple(op for op in self.writers[storage] if op < self.first_backward)
        if not ops or storage in self.initial or not all(self.may_run_again[op] for op in ops):
            return None
        sources: dict[int, bool] = {}
        changed: set[int] = set()
        for op in ops:
            changed |= self.writes[op] - frozenset(self.makes[op]) - self.states[op]
            for each in self.inputs[op]:
                writers = [w for w in self.writers[each] if w < self.first_backward]
                unchanged = self.version_read[op].get(each, -1) == (writers[-1] if writers else -1)
                if each not in self.initial:
                    sources[each] = unchanged and sources.get(each, True)
                elif not unchanged:
                    return None
        sources.pop(storage, None)
        return Recipe(ops, tuple(sources.items()), frozenset(changed - {storage}))

    @cached_property
    def first_backward(self) -> int:
        """Index of the first op after the forward pass; the number of ops where there is none."""
        return next((i for i, op in enumerate(self.trace.ops) if op.phase != "forward"), len(self.trace.ops))

    @cached_property
    def saved(self) -> tuple[int, ...]:
        """Storages that the forward pass makes and later phases need, in the order of their making.

        A memory plan can act on these. Storages from before the step stay, and so do its results.
        """
        turn = self.first_backward
        return tuple(
            storage
            for op in range(turn)
            for storage in self.makes[op]
            if storage not in self.results and self.bytes[storage] and self.users[storage][-1] >= turn
        )

    def last_forward_use(self, storage: int) -> int:
        """Return the last op before the backward pass that needs a storage."""
        return max(op for op in self.users[storage] if op < self.first_backward)

    def first_backward_use(self, storage: int) -> int:
        """Return the first op after the forward pass that needs a storage."""
        return min(op for op in self.users[storage] if op >= self.first_backward)
