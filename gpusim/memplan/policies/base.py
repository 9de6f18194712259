"""Interface of a memory policy: a function from a step on a GPU, with or without budget, to a memory plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from gpusim.memplan.layers import Layers
from gpusim.memplan.memory import levels_of, peak_bytes_of, pool_before
from gpusim.memplan.plan import MemoryPlan, Offload
from gpusim.memplan.program import Program, program_of
from gpusim.memplan.rebuild import Chain, SeparateRedos, Uses, chain
from gpusim.memplan.storages import Storages
from gpusim.memplan.times import Link, OpTimes, place_copies
from gpusim.plan.graph import OpGraph


class StepFacts:
    """Facts that plans of one step share at any budget, computed on first use."""

    def __init__(self, graph: OpGraph, storages: Storages) -> None:
        self.graph = graph
        self.storages = storages

    @cached_property
    def layers(self) -> Layers:
        return Layers.of(self.storages)

    @cached_property
    def times(self) -> OpTimes:
        return OpTimes.of(self.graph)

    @cached_property
    def uses(self) -> Uses:
        return Uses.of(self.storages, self.times.place)

    @cached_property
    def link(self) -> Link:
        return Link.of(self.graph)

    @cached_property
    def initial_bytes(self) -> int:
        return pool_before(self.storages).allocated_bytes

    @cached_property
    def keep_all_bytes(self) -> int:
        return peak_bytes_of(self.storages, program_of(self.storages, MemoryPlan()), self.initial_bytes)

    @cached_property
    def chains(self) -> dict[int, Chain]:
        saved = frozenset(self.storages.saved)
        chains_of = {s: chain(self.storages, (s,), saved.__contains__) for s in self.storages.saved}
        return {s: each for s, each in chains_of.items() if each is not None}

    @cached_property
    def separate_redos(self) -> SeparateRedos:
        return SeparateRedos(self.storages, self.uses)

    @cached_property
    def sources(self) -> dict[int, frozenset[int]]:
        touched = self.storages.touched
        return {s: frozenset().union(*(touched[op] for op in each.ops)) - {s} for s, each in self.chains.items()}

    @cached_property
    def recompute_ns(self) -> dict[int, float]:
        return {s: sum(self.graph.solo_ns[op] for op in again.ops) for s, again in self.chains.items()}


@dataclass(frozen=True)
class Setting:
    """Input of a policy."""

    graph: OpGraph
    storages: Storages
    budget_bytes: int | None = None
    """Most bytes that may be allocated; None without a budget."""
    pinned_bytes: int | None = None
    """Most bytes of pinned host memory; None without limit."""
    synchronous: bool | None = None
    """Whether ops and copies wait for each other after each layer; None: as in the published system."""
    known: StepFacts | None = field(default=None, compare=False, repr=False)
    """Shared facts, which `dataclasses.replace` passes on to settings with other budgets."""

    def __post_init__(self) -> None:
        if self.known is None:
            object.__setattr__(self, "known", StepFacts(self.graph, self.storages))

    @classmethod
    def of(cls, graph: OpGraph, budget_bytes: int | None = None, pinned_bytes: int | None = None) -> Setting:
        """Make the setting of a step."""
        return cls(graph, Storages.of(graph.trace), budget_bytes, pinned_bytes)

    @property
    def facts(self) -> StepFacts:
        """Facts that plans of this step share."""
        assert self.known is not None
        return self.known

    @property
    def layers(self) -> Layers:
        """The step's layers."""
        return self.facts.layers

    @property
    def times(self) -> OpTimes:
        """Times of the ops, in recorded order without concurrency."""
        return self.facts.times

    @property
    def uses(self) -> Uses:
        """Uses of saved storages, in recorded order."""
        return self.facts.uses

    @property
    def link(self) -> Link:
        """Cost of copies on this GPU."""
        return self.facts.link

    @property
    def keep_all_bytes(self) -> int:
        """Peak of the step that keeps all, in bytes."""
        return self.facts.keep_all_bytes

    @property
    def budget_or_half(self) -> int:
        """The budget in bytes; without one, half the peak of keeping all."""
        return self.keep_all_bytes // 2 if self.budget_bytes is None else self.budget_bytes

    def peak_bytes(self, plan: MemoryPlan) -> int:
        """Return the peak of a valid plan, in bytes."""
        storages = self.storages
        if plan.has_variants:
            storages = storages.running(self.graph.choosing(plan.variants))
        return peak_bytes_of(storages, program_of(storages, plan), self.facts.initial_bytes)

    def levels_bytes(self, program: Program) -> list[int]:
        """Return the bytes allocated during each instruction of a valid program."""
        return levels_of(self.storages, program, self.facts.initial_bytes)

    @property
    def chains(self) -> dict[int, Chain]:
        """Recomputation of each saved storage, with all others kept."""
        return self.facts.chains

    def recompute_ns(self, storage: int) -> float:
        """Return the time to recompute a storage with all others kept, in ns; infinite where impossible."""
        return self.facts.recompute_ns.get(storage, math.inf)


MemoryPolicy = Callable[[Setting], MemoryPlan]
"""Function from a setting to a plan."""


def offload_plan(
    setting: Setting, backs: Mapping[int, int], *, synchronous: bool, behind: Iterable[int] = ()
) -> MemoryPlan:
    """Return a plan that moves storages, each with the op before which it comes back, in that order.

    A copy out runs during the last layer of the forward pass that reads the storage; for those in `behind`, after it.
    Synchronous: ops and copies wait for each other at the end of each layer, where memory is freed. Otherwise memory is
    freed once the copy has ended, by the times of ops and copies, at the latest when the backward pass begins.
    """
    storages = setting.storages
    serial = frozenset(behind)
    offloads: list[Offload] = []
    for storage, back in backs.items():
        last = storages.last_forward_use(storage)
        written = max(op for op in storages.writers[storage] if op < storages.first_backward)
        after = last if storage in serial else max(written, storages.working_before[last])
        offloads.append(Offload(storage, after=after, free=storages.working_after[last], back=back))
    if not synchronous:
        needs = {storage: setting.times.place[back] for storage, back in backs.items()}
        placed = place_copies(storages, setting.times, setting.link, list(backs), needs)
        free = {each.storage: each.free for each in placed}
        offloads = [replace(each, free=min(free[each.storage], each.back)) for each in offloads]
    return MemoryPlan(
        offloads=tuple(sorted(offloads, key=lambda o: (o.after, o.storage))),
        barriers=layer_ends(setting) if synchronous else (),
    )


def layer_ends(setting: Setting) -> tuple[int, ...]:
    """Return the last op of the forward and of the backward part of each layer, where vDNN and Layrub wait twice."""
    layers = setting.layers.layers
    return tuple(sorted([layer.op for layer in layers] + [layer.backward[-1] for layer in layers if layer.backward]))
