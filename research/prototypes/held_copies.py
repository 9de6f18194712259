"""Peaks of replayed memory plans, as simulated, and where the tensor of the newest copy stays to the next copy.

    python research/prototypes/held_copies.py [TRACE ...]

Prints a row for each replayed plan of a step that there is a trace of: measured peak less the simulated one, both ways,
in bytes. TRACE are steps as `gpusim capture --estimate` gives them, for steps whose captured trace is missing. They
have no workspaces but `WORKSPACES`, so mostly `added` alone says something there: what the copied tensor adds to the
simulated peak.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from gpusim.formats.memory_plan import MemoryPlanDocument
from gpusim.formats.trace import Trace
from gpusim.memplan.memory import peak_bytes_of, pool_before
from gpusim.memplan.plan import MemoryPlan, read_memory_plan
from gpusim.memplan.program import Program, op_streams_of, program_of
from gpusim.memplan.storages import Storages
from gpusim.plan.allocator import Block, CachingAllocator
from gpusim.trace.store import read_trace, structure_hash
from gpusim.validation.again import trace_files
from gpusim.validation.memory_again import plans_path, read_replayed_plans

ROOT = Path(__file__).parents[2]
RESULTS = [ROOT / f"validate/results/memory_h200_{date}.json" for date in ("20261123", "20261124", "20261126")]
#: Plans on several streams, each next to its measurement.
ON_STREAMS = sorted((ROOT / "research" / "data").glob("memory_half_*/*.measured.json"))

#: Steps whose estimate numbers its storages otherwise than its capture did -> a captured step of the same network.
CAPTURED = {"resnet50-train-b64": "resnet50-train-b16"}
#: Step -> ops and their workspace, in bytes: what the predicted peak of VGG-16's `least_time` has at the second op
#: beyond its tensors. The first is the same convolution.
WORKSPACES = {"vgg16-train-b64": (("convolution_backward_3", "convolution_backward_4"), 213_910_016)}

Held = tuple[CachingAllocator, Block | None]


def peak_with_held_copies(storages: Storages, program: Program) -> int:
    """Return the peak of the step's own memory, as `peak_bytes_of`, where a copy's tensor stays to the next copy."""
    pools = [CachingAllocator() for _ in range(op_streams_of(program))]
    blocks: dict[int, Held] = {}
    newest: Held | None = None
    freed: list[Held] = []
    peak = 0
    for each in program:
        pool = pools[each.stream]
        passing: list[Held] = []
        if each.kind == "free":
            held = blocks.pop(each.storage)
            (freed if held is newest else passing).append(held)
        elif each.kind in ("run", "again"):
            for storage in storages.makes[each.op]:
                held = (pool, pool.allocate(storages.bytes[storage]))
                if each.kind == "run" or storage in each.bring:
                    blocks[storage] = held
                else:
                    passing.append(held)
            passing.append((pool, pool.allocate(storages.workspace_bytes[each.op])))
        elif each.kind in ("out", "back"):
            if each.kind == "back":
                blocks[each.storage] = (pool, pool.allocate(storages.bytes[each.storage]))
            passing, freed, newest = freed, [], blocks[each.storage]
        peak = max(peak, sum(one.allocated_bytes for one in pools))
        for owner, block in reversed(passing):
            owner.release(block)
    return peak


def resized(trace: Trace, other: Trace) -> Trace:
    """Return a captured step with the sizes of the same network at another batch, without workspaces.

    Captures number storages otherwise than estimates; ops and their results are in the same order.
    """
    pairs = [(x, y) for x, y in zip(trace.tensors, other.tensors, strict=False) if x.init is not None]
    for mine, its in zip(trace.ops, other.ops, strict=True):
        for x, y in zip(mine.outputs, its.outputs, strict=False):
            if x is not None and y is not None:
                pairs.append((trace.tensors[x], other.tensors[y]))
    size = {x.storage: other.storages[y.storage].bytes for x, y in pairs}
    storages = [msgspec.structs.replace(s, bytes=size.get(i, 0)) for i, s in enumerate(trace.storages)]
    ops = [msgspec.structs.replace(op, workspace_bytes=0) for op in trace.ops]
    return msgspec.structs.replace(trace, storages=tuple(storages), ops=tuple(ops))


def with_workspace(trace: Trace, ops: Collection[str], workspace_bytes: int) -> Trace:
    """Return the step with this workspace for these ops."""
    replaced = (
        msgspec.structs.replace(op, workspace_bytes=workspace_bytes) if op.name in ops else op for op in trace.ops
    )
    return msgspec.structs.replace(trace, ops=tuple(replaced))


class Steps:
    """Steps by name, each analysed once."""

    def __init__(self, files: dict[str, Path]) -> None:
        self.files = files
        self._known: dict[str, Storages] = {}

    def of(self, document: MemoryPlanDocument) -> Storages:
        """Return the step of a plan."""
        name = document.trace
        if name not in self._known:
            trace = read_trace(self.files[name])
            if name in CAPTURED and trace.provenance.estimated:
                trace = resized(read_trace(self.files[CAPTURED[name]]), trace)
            ops, workspace_bytes = WORKSPACES.get(name, ((), 0))
            if ops and trace.provenance.estimated:
                trace = with_workspace(trace, ops, workspace_bytes)
            self._known[name] = Storages.of(trace)
        return self._known[name]


def rows(files: dict[str, Path]) -> Iterator[tuple[str, Storages, Program, int]]:
    """Yield what names each replayed plan, its step, its program, and its measured peak in bytes."""
    for results in RESULTS:
        steps = Steps({**trace_files(results), **files})
        cases = json.loads(results.read_text(encoding="utf-8"))["cases"]
        for case, replayed in zip(cases, read_replayed_plans(plans_path(results)), strict=True):
            if case["trace"] not in steps.files:
                continue
            storages = steps.of(replayed.plan)
            document = msgspec.structs.replace(replayed.plan, trace_hash=structure_hash(storages.trace))
            plan = MemoryPlan.from_document(document, storages.trace)
            program = program_of(storages, plan, barriers_first=replayed.barriers_first)
            name = f"{case['trace']} {case['policy']} {case['memory_budget_bytes'] or ''}"
            yield name, storages, program, case["measured_peak_bytes"]
    for file in ON_STREAMS:
        name = file.name.removesuffix(".measured.json")
        trace = read_trace(trace_files(RESULTS[0])[name])
        storages = Storages.of(trace)
        plan = read_memory_plan(file.with_name(f"{name}.json"), trace)
        peak_bytes = json.loads(file.read_text(encoding="utf-8"))["peak_bytes"]
        yield f"{name} on {plan.streams} streams", storages, program_of(storages, plan), peak_bytes


def main() -> None:
    """Print the rows."""
    files = {trace.name: Path(name) for name in sys.argv[1:] for trace in (read_trace(Path(name)),)}
    print(f"{'plan':56} {'measured':>13} {'- simulated':>13} {'- held':>13} {'added':>13}")
    for name, storages, program, measured_bytes in rows(files):
        before = pool_before(storages).allocated_bytes
        peak = peak_bytes_of(storages, program, before)
        held = before + peak_with_held_copies(storages, program)
        known = sum(map(bool, storages.workspace_bytes))
        print(
            f"{name:56} {measured_bytes:>13,} {measured_bytes - peak:>13,} {measured_bytes - held:>13,} "
            f"{held - peak:>13,}  {known} workspaces"
        )


if __name__ == "__main__":
    main()
