"""A memory plan of a step: the result of memory policies, by op and storage index; and its file, by op name.

policy, file --> MemoryPlan --> `gpusim.memplan.program.program_of` --> allocator, engines, replay
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

from gpusim.defaults import MEMORY_ACTIONS
from gpusim.errors import ScheduleError
from gpusim.formats.memory_plan import SCHEMA, MemoryPlanDocument, OffloadEntry, RedoEntry, VariantEntry
from gpusim.formats.trace import Trace
from gpusim.io.files import read_document, write_document
from gpusim.notebook import html_table, short_name, short_repr
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import variant_number
from gpusim.trace.store import of_another_step, structure_hash
from gpusim.units import counted, format_bytes, format_ns


@dataclass(frozen=True, slots=True)
class Offload:
    """A storage that moves to pinned host memory and back.

    The copy out starts once the work launched up to op `after` has ended. Before op `free` the ops wait for that copy,
    and the GPU's memory is freed. Before op `back` new memory is allocated and the copy back is launched; the next op
    that needs the storage waits for it.
    """

    storage: int
    after: int
    free: int
    back: int


@dataclass(frozen=True, slots=True)
class Redo:
    """Storages that are freed after their last use and recomputed by running `ops` again before op `before`."""

    before: int
    ops: tuple[int, ...]
    """Op indices in recorded order."""
    storages: tuple[int, ...]
    """Storages that these ops bring back; their other results are freed at once."""


@dataclass(frozen=True, slots=True, repr=False)
class MemoryPlan:
    """Actions on the storages of a step; all others stay from their first use to their last.

    Plans are equal where they run the same, whatever their origin.
    """

    offloads: tuple[Offload, ...] = ()
    redos: tuple[Redo, ...] = ()
    held: tuple[int, ...] = ()
    """Storages that stay to the end of the step without further use."""
    barriers: tuple[int, ...] = ()
    """Ops after which the following ops wait for all copies so far (vDNN and Layrub: after each layer)."""
    order: tuple[int, ...] = ()
    """Op indices in launch order; empty: as recorded."""
    op_streams: tuple[int, ...] = ()
    """Stream of each op, by op index; empty: all on one. Recomputation runs on the stream of the op after it."""
    variants: tuple[int, ...] = ()
    """Variant of each op, by op index, counted from 1; 0: as captured. Empty: all as captured."""
    policy: str = field(default="", compare=False)
    made_by: str = field(default="", compare=False)
    """Version of gpusim and hardware model."""
    predicted_ns: int = field(default=0, compare=False)
    predicted_peak_bytes: int = field(default=0, compare=False)
    trace_hash: str = field(default="", compare=False)
    """Hash of the trace that its numbers are of (`structure_hash`); empty while a policy makes it."""

    def made(
        self, policy: str, by: str = "", predicted_ns: int = 0, predicted_peak_bytes: int = 0, trace_hash: str = ""
    ) -> MemoryPlan:
        """Return the same plan with its origin and its predictions."""
        return dataclasses.replace(
            self,
            policy=policy,
            made_by=by,
            predicted_ns=predicted_ns,
            predicted_peak_bytes=predicted_peak_bytes,
            trace_hash=trace_hash or self.trace_hash,
        )

    @property
    def has_copies(self) -> bool:
        """Whether anything moves to the host."""
        return bool(self.offloads)

    @property
    def has_variants(self) -> bool:
        """Whether any op runs other than its captured kernels."""
        return any(self.variants)

    @property
    def streams(self) -> int:
        """Streams that it runs on: those of its ops, and one for each direction of its copies."""
        return 1 + max(self.op_streams, default=0) + 2 * self.has_copies

    def interval_ns(self, graph: OpGraph, predicted_ns: int) -> tuple[int, int]:
        """Return the prediction interval of its time in ns, as `OpGraph.interval_ns`."""
        return graph.interval_ns(
            predicted_ns, self.streams, other_kernels=self.has_variants, searched=self.policy == MEMORY_ACTIONS
        )

    def __repr__(self) -> str:
        parts = f"{counted(len(self.offloads), 'offload')}, {counted(len(self.redos), 'recomputation')}"
        return short_repr("MemoryPlan", f"{short_name(self.policy)}: {parts}" if self.policy else parts)

    def _repr_html_(self) -> str:
        rows = [
            ("copied to the host and back", counted(len(self.offloads), "storage")),
            ("recomputed", counted(sum(len(redo.storages) for redo in self.redos), "storage")),
            ("ops that run again", counted(sum(len(redo.ops) for redo in self.redos), "op")),
            ("ops with other kernels", counted(sum(map(bool, self.variants)), "op")),
            ("predicted time", format_ns(self.predicted_ns) if self.predicted_ns else "not simulated"),
            ("predicted peak", format_bytes(self.predicted_peak_bytes) if self.predicted_peak_bytes else ""),
        ]
        return html_table(f"Memory plan {self.policy}".strip(), ("", ""), rows)

    def to_document(self, trace: Trace) -> MemoryPlanDocument:
        """Return the plan's document. `trace` is the plan's trace."""
        names = [op.name for op in trace.ops]
        return MemoryPlanDocument(
            schema=SCHEMA,
            trace=trace.name,
            trace_hash=structure_hash(trace),
            policy=self.policy,
            made_by=self.made_by,
            predicted_ns=self.predicted_ns,
            predicted_peak_bytes=self.predicted_peak_bytes,
            offloads=tuple(
                OffloadEntry(storage=o.storage, after=names[o.after], free=names[o.free], back=names[o.back])
                for o in self.offloads
            ),
            redos=tuple(
                RedoEntry(before=names[r.before], ops=tuple(names[op] for op in r.ops), storages=r.storages)
                for r in self.redos
            ),
            held=self.held,
            barriers=tuple(names[op] for op in self.barriers),
            order=tuple(names[op] for op in self.order),
            op_streams=self.op_streams,
            variants=tuple(
                VariantEntry(op=op.name, variant=op.variants[number - 1].name)
                for op, number in zip(trace.ops, self.variants, strict=False)
                if number
            ),
        )

    @classmethod
    def from_document(cls, document: MemoryPlanDocument, trace: Trace, file: str = "memory plan") -> MemoryPlan:
        """Return the plan of a document; `gpusim.memplan.checks` decides whether it can run.

        Raises `ScheduleError` for a plan of another trace, and for an op, a variant or a storage that the trace lacks.
        """
        if document.trace_hash != structure_hash(trace):
            problem = of_another_step("a memory plan", document.trace, trace)
            raise ScheduleError(file, problem, place="$.trace_hash")
        index_of = {op.name: index for index, op in enumerate(trace.ops)}

        def op(name: str, place: str) -> int:
            if name not in index_of:
                raise ScheduleError(file, f"the trace has no op '{name}'", place=place)
            return index_of[name]

        def storage(number: int, place: str) -> int:
            if number >= len(trace.storages):
                problem = f"the trace has no storage {number}, of {len(trace.storages)}"
                raise ScheduleError(file, problem, place=place)
            return number

        variants = [0] * len(trace.ops)
        for n, each in enumerate(document.variants):
            place = f"$.variants[{n}]"
            index = op(each.op, f"{place}.op")
            if variants[index]:
                raise ScheduleError(file, f"op '{each.op}' has a variant already", place=f"{place}.op")
            if not each.variant:
                raise ScheduleError(file, "a variant without a name", place=f"{place}.variant")
            variants[index] = variant_number(trace.ops[index], each.variant, file, f"{place}.variant")
        return cls(
            offloads=tuple(
                Offload(
                    storage(entry.storage, f"$.offloads[{n}].storage"),
                    *(op(getattr(entry, key), f"$.offloads[{n}].{key}") for key in ("after", "free", "back")),
                )
                for n, entry in enumerate(document.offloads)
            ),
            redos=tuple(
                Redo(
                    op(entry.before, f"$.redos[{n}].before"),
                    tuple(op(name, f"$.redos[{n}].ops") for name in entry.ops),
                    tuple(storage(number, f"$.redos[{n}].storages") for number in entry.storages),
                )
                for n, entry in enumerate(document.redos)
            ),
            held=tuple(storage(number, "$.held") for number in document.held),
            barriers=tuple(op(name, "$.barriers") for name in document.barriers),
            order=tuple(op(name, "$.order") for name in document.order),
            op_streams=document.op_streams,
            variants=tuple(variants) if any(variants) else (),
            policy=document.policy,
            made_by=document.made_by,
            predicted_ns=document.predicted_ns,
            predicted_peak_bytes=document.predicted_peak_bytes,
            trace_hash=document.trace_hash,
        )


def read_memory_plan(path: Path, trace: Trace) -> MemoryPlan:
    """Read a memory plan of `trace`. Raises `ScheduleError`."""
    return MemoryPlan.from_document(read_document(path, MemoryPlanDocument, SCHEMA, ScheduleError), trace, str(path))


def write_memory_plan(plan: MemoryPlan, trace: Trace, path: Path) -> None:
    """Write a memory plan of `trace` as JSON; all or nothing. Raises `OutputError`."""
    write_document(path, plan.to_document(trace), indent=1)
