"""Peaks of replayed memory plans, as simulated, and where the tensor of the newest copy stays to the next copy.

    python research/prototypes/held_copies.py

Prints a row for each replayed plan that has a trace: measured peak less the simulated one, both ways, in bytes, and
what the held tensor adds to the simulated peak. Plans of `MENDED` ran without a held tensor, all others with one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from gpusim.memplan.memory import peak_bytes_of, pool_before
from gpusim.memplan.plan import MemoryPlan, read_memory_plan
from gpusim.memplan.program import Program, op_streams_of, program_of
from gpusim.memplan.storages import Storages
from gpusim.plan.allocator import Block, CachingAllocator
from gpusim.trace.store import read_trace
from gpusim.validation.again import trace_files
from gpusim.validation.memory_again import plans_path, read_replayed_plans

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "validate" / "results"
MENDED = RESULTS / "memory_h200_20261126.json"
FILES = [
    RESULTS / "memory_h200_20261123.json",
    RESULTS / "memory_h200_20261124.json",
    ROOT / "research" / "data" / "memory_held_h200_20261126.json",
    MENDED,
]
#: Plans on several streams, each next to its measurement.
ON_STREAMS = sorted((ROOT / "research" / "data").glob("memory_half_*/*.measured.json"))

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


def rows() -> Iterator[tuple[str, Storages, Program, int]]:
    """Yield what names each replayed plan, its step, its program, and its measured peak in bytes."""
    files = trace_files(MENDED)
    steps: dict[str, Storages] = {}
    for results in FILES:
        cases = json.loads(results.read_text(encoding="utf-8"))["cases"]
        for case, replayed in zip(cases, read_replayed_plans(plans_path(results)), strict=True):
            name = case["trace"]
            if name not in steps:
                steps[name] = Storages.of(read_trace(files[name]))
            plan = MemoryPlan.from_document(replayed.plan, steps[name].trace)
            program = program_of(steps[name], plan, barriers_first=replayed.barriers_first)
            row = f"{results.stem[-8:]} {name} {case['policy']} {case['memory_budget_bytes'] or ''}"
            yield row + " mended" * (results == MENDED), steps[name], program, case["measured_peak_bytes"]
    for file in ON_STREAMS:
        name = file.name.removesuffix(".measured.json")
        trace = read_trace(files[name])
        storages = Storages.of(trace)
        plan = read_memory_plan(file.with_name(f"{name}.json"), trace)
        peak_bytes = json.loads(file.read_text(encoding="utf-8"))["peak_bytes"]
        yield f"{name} on {plan.streams} streams", storages, program_of(storages, plan), peak_bytes


def main() -> None:
    """Print the rows."""
    print(f"{'plan':72} {'measured':>13} {'- simulated':>13} {'- held':>13} {'added':>13}")
    for name, storages, program, measured_bytes in rows():
        before = pool_before(storages).allocated_bytes
        peak = peak_bytes_of(storages, program, before)
        held = before + peak_with_held_copies(storages, program)
        known = sum(map(bool, storages.workspace_bytes))
        print(
            f"{name:72} {measured_bytes:>13,} {measured_bytes - peak:>13,} {measured_bytes - held:>13,} "
            f"{held - peak:>13,}  {known} workspaces"
        )


if __name__ == "__main__":
    main()
