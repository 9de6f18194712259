"""One step of ATen calls and Inductor's kernels: each region runs those of one of them.

The ops stay single ops, each with its own dependencies, so a schedule may spread a region over streams. Views are no
ops here: a runner of Inductor's kernels makes them where an op takes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from heapq import heapify, heappop, heappush
from typing import Literal

import msgspec

from gpusim.errors import CaptureError
from gpusim.formats.trace import Op, Storage, Tensor
from gpusim.gpu.capture.record import Recorded, set_roles
from gpusim.gpu.inductor.own_step import Shape, place_of, with_own_names, with_tensors
from gpusim.gpu.inductor.regions import Place, Regions, Side, Step, touched
from gpusim.plan.sync import through_views
from gpusim.trace.dependencies import dependencies

_Memory = tuple[Side | Literal["state"], int]
"""A storage of one of the two steps, or from before both, numbered as in the calls."""


@dataclass(frozen=True)
class Mixed:
    """A step with ops of both kinds, and the origin of each of its ops."""

    recorded: Recorded
    origins: list[Place]


class Mixer:
    """Maker of mixed steps from the regions of one step."""

    def __init__(self, regions: Regions) -> None:
        self.regions = regions
        self.steps: dict[Side, Step] = {"calls": regions.calls, "kernels": regions.kernels}

    @cached_property
    def _preds(self) -> dict[Side, Sequence[Sequence[int]]]:
        """Predecessors with work of the ops with work of either step."""
        traces = ((side, step.trace) for side, step in self.steps.items())
        return {side: through_views(trace, dependencies(trace)) for side, trace in traces}

    def mixed(self, fused: Collection[int]) -> Mixed:
        """Return the step with Inductor's kernels in the regions of these numbers, and ATen's calls in the others.

        Raises `CaptureError` where some of these would wait for each other.
        """
        origins = self._ordered(self._chosen(fused))
        made = _Made(self, set(fused))
        ops = with_own_names([with_tensors(self._op(place), partial(made.tensor, place[0])) for place in origins])
        recorded = made.finished(ops)
        return Mixed(recorded, origins)

    def _op(self, place: Place) -> Op:
        return self.steps[place[0]].trace.ops[place[1]]

    def _chosen(self, fused: Collection[int]) -> list[Place]:
        chosen: list[Place] = []
        for number, region in enumerate(self.regions.regions):
            calls, kernels = self.regions.calls, self.regions.kernels
            chosen += kernels.places(region.kernels) if number in fused else calls.places(region.calls)
        return chosen

    # --- Order ---

    def _ordered(self, chosen: Sequence[Place]) -> list[Place]:
        """Return ops in an order that keeps all dependencies, near the recorded one."""
        rank = {place: self._rank(place) for place in chosen}
        before: dict[Place, set[Place]] = {place: set() for place in chosen}
        for earlier, later in self._edges(set(chosen)):
            before[later].add(earlier)
        after: dict[Place, list[Place]] = {}
        waiting = {}
        for place, needed in before.items():
            needed.discard(place)
            waiting[place] = len(needed)
            for each in needed:
                after.setdefault(each, []).append(place)
        ready = [(rank[place], place) for place, count in waiting.items() if not count]
        heapify(ready)
        order: list[Place] = []
        while ready:
            _, place = heappop(ready)
            order.append(place)
            for later in after.get(place, ()):
                waiting[later] -= 1
                if not waiting[later]:
                    heappush(ready, (rank[later], later))
        if len(order) < len(chosen):
            raise CaptureError("these regions would wait for each other")
        return order

    def _rank(self, place: Place) -> tuple[int, int]:
        """Return an op's place among the others: kernels stand where the last call of their region stood."""
        side, index = place
        return (index if side == "calls" else self.regions.regions[self.regions.of[place]].calls[-1], index)

    def _edges(self, chosen: set[Place]) -> Iterator[tuple[Place, Place]]:
        """Yield pairs of an op and one that must follow it."""
        for side, step in self.steps.items():
            for index in step.working:
                if (side, index) in chosen:
                    yield from (((side, p), (side, index)) for p in self._preds[side][index] if (side, p) in chosen)
        for mine, theirs in self.regions.borders.items():
            kernels, calls = self.regions.kernels, self.regions.calls
            for maker, storage, taker, other in ((kernels, mine, calls, theirs), (calls, theirs, kernels, mine)):
                makers = [place for place in maker.places(maker.writers[storage]) if place in chosen]
                takers = [place for place in taker.places(taker.users.get(other, ())) if place in chosen]
                yield from ((one, two) for one in makers for two in takers)
        users: dict[_Memory, tuple[list[Place], list[Place]]] = {}
        for place in chosen:
            step = self.steps[place[0]]
            op = step.trace.ops[place[1]]
            written = {step.trace.tensors[t].storage for t in op.writes}
            for storage in touched(step.trace, op):
                if storage in self.regions.states[place[0]]:
                    users.setdefault(self.memory(place[0], storage), ([], []))[storage in written].append(place)
        for readers, writers in users.values():  # `Regions` has joined what reads a new state with what writes it
            yield from ((r, w) for r in readers for w in writers if self.regions.of[r] != self.regions.of[w])

    # --- Memory ---

    def memory(self, side: Side, storage: int) -> _Memory:
        """Return the memory of a storage of either step."""
        if storage in self.regions.states[side]:
            return "state", self.regions.states[side][storage]
        if side == "kernels" and storage in self.regions.borders:
            return "calls", self.regions.borders[storage]
        return side, storage


@dataclass
class _Made:
    """Tensors of a mixed step, added as its ops use them."""

    mixer: Mixer
    fused: set[int]
    tensors: list[Tensor] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    named: dict[int, str] = field(default_factory=dict)
    _storages: dict[_Memory, int] = field(default_factory=dict)
    _places: dict[Shape, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for side, step in self.mixer.steps.items():
            for index, name in step.recorded.named.items():
                self.named.setdefault(self.tensor(side, index), name)

    def tensor(self, side: Side, index: int) -> int:
        """Return the tensor here for one of either step; a new one is added."""
        step = self.mixer.steps[side]
        theirs = step.trace.tensors[index]
        storage = self._storage(step, theirs.storage)
        role = theirs.role if theirs.init is not None or theirs.role not in ("output", "gradient") else "activation"
        tensor = msgspec.structs.replace(theirs, storage=storage, role=role)
        place = place_of(tensor)
        if place not in self._places:
            self._places[place] = len(self.tensors)
            self.tensors.append(tensor)
        return self._places[place]

    def _storage(self, step: Step, storage: int) -> int:
        memory = self.mixer.memory(step.side, storage)
        if memory not in self._storages:
            self._storages[memory] = len(self.storages)
            self.storages.append(step.trace.storages[storage])
        mine = self._storages[memory]
        if step.trace.storages[storage].bytes > self.storages[mine].bytes:
            self.storages[mine] = step.trace.storages[storage]
        return mine

    def finished(self, ops: list[Op]) -> Recorded:
        """Return the step of these ops, with the results of the step."""
        calls, kernels = self.mixer.regions.calls.recorded, self.mixer.regions.kernels.recorded
        outputs, gradients = (
            [self._result(mine, theirs) for mine, theirs in zip(*pair, strict=True)]
            for pair in ((kernels.outputs, calls.outputs), (kernels.gradients, calls.gradients))
        )
        returned = [
            None if mine is None or theirs is None else self._result(mine, theirs)
            for mine, theirs in zip(kernels.returned, calls.returned, strict=True)
        ]
        set_roles(self.tensors, outputs, "output")
        set_roles(self.tensors, gradients, "gradient")
        constants = {self.tensor("kernels", index): value for index, value in kernels.initial.items()}
        used = {op.source for op in ops}
        return replace(
            kernels,
            ops=ops,
            tensors=self.tensors,
            storages=self.storages,
            outputs=outputs,
            gradients=gradients,
            initial=constants,
            named=self.named,
            sources=[source for source in kernels.sources if source.sha256 in used],
            returned=returned,
            results={},
            alike=[],
        )

    def _result(self, mine: int, theirs: int) -> int:
        """Return the tensor here for a result of the step: where the region that makes it leaves it."""
        regions = self.mixer.regions
        storage = regions.kernels.trace.tensors[mine].storage
        writers = regions.kernels.writers.get(storage, ())
        by_kernels = any(regions.of["kernels", op] in self.fused for op in writers)
        return self.tensor("kernels", mine) if by_kernels else self.tensor("calls", theirs)
