"""Regions of a step: groups of ATen calls, and of Inductor's kernels that do the same work, exchangeable one by one.

A value is a border where both steps have it in memory of its own in the same form, written by one region and only read
by others. All ops that share any other value are of one region, so nothing has to be known of what a kernel computes: a
region takes borders and states, and makes borders, results and new states. Where both steps agree on little, there are
few regions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import prod
from typing import Final, Literal

from gpusim.errors import CaptureError
from gpusim.formats.trace import Op, Tensor, Trace
from gpusim.gpu.capture.record import Recorded
from gpusim.gpu.replay.size_rules import is_dense
from gpusim.trace.dependencies import handles
from gpusim.trace.element_sizes import DTYPE_BYTES
from gpusim.trace.overlap import may_overlap

Side = Literal["calls", "kernels"]
Place = tuple[Side, int]
"""An op of one of the two steps, by index."""
#: More writes of one buffer than this are not compared pair by pair: the buffer is no border.
MAX_WRITES: Final = 64


@dataclass(frozen=True)
class Region:
    """Ops of either step, in recorded order; those of one step do the work of the other's."""

    calls: tuple[int, ...]
    kernels: tuple[int, ...]


class Step:
    """One of the two steps: its ops with work, and the use of each storage."""

    def __init__(self, side: Side, trace: Trace, recorded: Recorded) -> None:
        self.side, self.trace, self.recorded = side, trace, recorded
        self.working = [index for index, op in enumerate(trace.ops) if op.writes]
        self.kept = {tensor.storage for tensor in trace.tensors if tensor.init is not None}
        """Storages from before the step: states, and Inductor's constants."""
        self.users: dict[int, list[int]] = {}
        self.writers: dict[int, list[int]] = {}
        for index in self.working:
            for storage in touched(trace, trace.ops[index]):
                self.users.setdefault(storage, []).append(index)
            for storage in dict.fromkeys(trace.tensors[t].storage for t in trace.ops[index].writes):
                self.writers.setdefault(storage, []).append(index)

    @cached_property
    def at(self) -> dict[str, int]:
        """Index of each op by name."""
        return {op.name: index for index, op in enumerate(self.trace.ops)}

    def places(self, ops: Iterable[int]) -> list[Place]:
        """Return ops of this step as places."""
        return [(self.side, op) for op in ops]

    def states(self) -> Iterator[tuple[int, str]]:
        """Yield storage and name of each tensor from before the step."""
        return ((self.trace.tensors[index].storage, name) for index, name in self.recorded.named.items())

    def is_whole(self, tensor: Tensor) -> bool:
        """Whether a tensor fills its storage without gaps."""
        size = prod(tensor.shape) * DTYPE_BYTES.get(tensor.dtype, 0)
        fills = tensor.offset == 0 and size == self.trace.storages[tensor.storage].bytes
        return fills and is_dense(tensor.shape, tensor.stride)

    def is_made(self, storage: int) -> bool:
        """Whether the step makes a storage's elements."""
        return storage in self.writers and storage not in self.kept

    def is_written_once(self, storage: int) -> bool:
        """Whether no element of a storage is written twice."""
        tensors = [
            self.trace.tensors[t]
            for op in self.writers.get(storage, ())
            for t in self.trace.ops[op].writes
            if self.trace.tensors[t].storage == storage
        ]
        if len(tensors) > MAX_WRITES:
            return False
        return not any(may_overlap(one, other) for one, other in combinations(tensors, 2))


class Regions:
    """Regions of a step that `calls` has as ATen calls and `kernels` as Inductor's kernels, with `Recorded.alike`.

    Raises `CaptureError` where a region would have ops of one step only.
    """

    def __init__(self, calls: Step, kernels: Step) -> None:
        self.calls, self.kernels = calls, kernels
        of_name = {name: storage for storage, name in calls.states()}
        self.states: dict[Side, dict[int, int]] = {
            "calls": {storage: storage for storage, _ in calls.states()},
            "kernels": {storage: of_name[name] for storage, name in kernels.states()},
        }
        """Storage from before the step -> that of the calls."""
        self.borders = dict(self._borders())
        """Storage of the kernels -> storage of the calls with the same value."""
        self._parent: dict[Place, Place] = {}
        self._join_values()
        self._join_states()
        self._join(
            place
            for step in self._steps
            for place in step.places(index for index in step.working if step.trace.ops[index].random)
        )
        groups: dict[Place, tuple[list[int], list[int]]] = {}
        for step in self._steps:
            for index in step.working:
                group = groups.setdefault(self._find((step.side, index)), ([], []))
                group[step is kernels].append(index)
        if not all(mine and theirs for mine, theirs in groups.values()):
            raise CaptureError("a part of the step has ops of one front end only")
        self.regions = [Region(tuple(mine), tuple(theirs)) for mine, theirs in groups.values()]

    @property
    def _steps(self) -> tuple[Step, Step]:
        return self.calls, self.kernels

    @cached_property
    def of(self) -> dict[Place, int]:
        """Region of each op with work, by number."""
        numbers: dict[Place, int] = {}
        for number, region in enumerate(self.regions):
            numbers.update(dict.fromkeys(self.calls.places(region.calls), number))
            numbers.update(dict.fromkeys(self.kernels.places(region.kernels), number))
        return numbers

    # --- Borders ---

    def _borders(self) -> Iterator[tuple[int, int]]:
        """Yield pairs of storages, of the kernels and of the calls, with the same final value in the same form."""
        theirs = self.calls
        seen: tuple[set[int], set[int]] = set(), set()
        for mine_id, theirs_id, call in [*_results(theirs, self.kernels), *self.kernels.recorded.alike]:
            mine, other = self.kernels.trace.tensors[mine_id], theirs.trace.tensors[theirs_id]
            taken = mine.storage in seen[0] or other.storage in seen[1]
            if taken or not self._alike(mine, other):
                continue
            until = theirs.at.get(call, -1) if call else len(theirs.trace.ops)
            if max(theirs.writers[other.storage]) <= until and self.kernels.is_written_once(mine.storage):
                seen[0].add(mine.storage)
                seen[1].add(other.storage)
                yield mine.storage, other.storage

    def _alike(self, mine: Tensor, other: Tensor) -> bool:
        """Whether two tensors have the same form, and memory of their own that the step writes."""
        return (
            mine.dtype == other.dtype
            and _in_memory(mine) == _in_memory(other)
            and self.kernels.is_whole(mine)
            and self.calls.is_whole(other)
            and self.kernels.is_made(mine.storage)
            and self.calls.is_made(other.storage)
        )

    # --- Joining ---

    def _join_values(self) -> None:
        borders: tuple[set[int], set[int]] = set(self.borders.values()), set(self.borders)
        for step, of_step in zip(self._steps, borders, strict=True):
            for storage, users in step.users.items():
                if storage in step.kept:
                    continue
                writers = step.writers.get(storage, [])
                early = [user for user in users if writers and user < writers[-1]]
                self._join(step.places([*writers, *early] if storage in of_step else users))
        for mine, other in self.borders.items():
            self._join_writers(mine, other)
        for mine_id, theirs_id, _ in _results(self.calls, self.kernels):
            mine, other = self.kernels.trace.tensors[mine_id].storage, self.calls.trace.tensors[theirs_id].storage
            self._join_writers(mine, other)

    def _join_writers(self, mine: int, other: int) -> None:
        self._join(
            place
            for step, storage in ((self.kernels, mine), (self.calls, other))
            for place in step.places(step.writers.get(storage, ()))
        )

    def _join_states(self) -> None:
        """Join the ops that change a state, with those that read it later; earlier readers stay apart."""
        together: dict[int, list[Place]] = {}
        for step in self._steps:
            for storage, state in self.states[step.side].items():
                writers = step.writers.get(storage, [])
                late = [user for user in step.users.get(storage, ()) if writers and user > writers[0]]
                together.setdefault(state, []).extend(step.places([*writers, *late]))
        for places in together.values():
            self._join(places)

    def _join(self, places: Iterable[Place]) -> None:
        first: Place | None = None
        for place in places:
            root = self._find(place)
            if first is None:
                first = root
            elif root != first:
                self._parent[root] = first

    def _find(self, place: Place) -> Place:
        root = place
        while (parent := self._parent.get(root, root)) != root:
            root = parent
        while (parent := self._parent.get(place, place)) != root:
            self._parent[place] = root
            place = parent
        return root


def touched(trace: Trace, op: Op) -> dict[int, None]:
    """Return the storages that an op reads, writes, takes or returns."""
    tensors = (*op.reads, *op.writes, *handles(op), *(t for t in op.outputs if t is not None))
    return dict.fromkeys(trace.tensors[t].storage for t in tensors)


def _in_memory(tensor: Tensor) -> tuple[tuple[int, int], ...]:
    """Return sizes and strides of a tensor, with dimensions joined where memory has their elements in sequence.

    Tensors with the same elements in the same sequence, and with the same result here, have the same memory.
    """
    joined: list[tuple[int, int]] = []
    for size, step in zip(tensor.shape, tensor.stride, strict=True):
        if size == 1:
            continue
        if joined and joined[-1][1] == size * step:
            joined[-1] = (joined[-1][0] * size, step)
        else:
            joined.append((size, step))
    return tuple(joined)


def _results(calls: Step, kernels: Step) -> list[tuple[int, int, str]]:
    """Return the results of the step: tensor of the kernels, tensor of the calls; at the end of the step."""
    pairs = [
        *zip(kernels.recorded.outputs, calls.recorded.outputs, strict=True),
        *zip(kernels.recorded.gradients, calls.recorded.gradients, strict=True),
        *zip(kernels.recorded.returned, calls.recorded.returned, strict=True),
    ]
    return [(mine, theirs, "") for mine, theirs in dict.fromkeys(pairs) if mine is not None and theirs is not None]
