"""A plan's memory over time as a memory snapshot of PyTorch, for its viewer.

Format: the notes on the memory snapshot of PyTorch 2.x ("Understanding CUDA Memory Usage"). `measured.py` reads them.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from gpusim.io.files import write_bytes
from gpusim.memplan.evaluate import Outcome
from gpusim.memplan.storages import Storages
from gpusim.plan.allocator import Block, CachingAllocator

#: Base of the synthetic addresses, which the viewer shows unchanged.
BASE_ADDRESS: Final = 0x7F0000000000
#: Actions of a block: allocation and release.
ALLOC, FREE = "alloc", "free_completed"


def write_snapshot(storages: Storages, outcome: Outcome, path: Path) -> None:
    """Write a plan's memory over its instructions as a snapshot for memory_viz. Raises `OutputError`.

    Times are instruction numbers: allocation follows the host, not the GPU's clock.
    """
    write_bytes(path, pickle.dumps(snapshot_document(storages, outcome), protocol=4))


def snapshot_document(storages: Storages, outcome: Outcome) -> dict[str, Any]:
    """Return the snapshot as plain dictionaries and lists."""
    pool = CachingAllocator()
    blocks: dict[int, Block | None] = {}
    trace = storages.trace
    maker = {s: op for op, made in enumerate(storages.makes) for s in made}
    entries: list[dict[str, Any]] = []

    def note(action: str, block: Block | None, size: int, frame: str, time: int) -> None:
        if block is not None:
            entries.append(
                {
                    "action": action,
                    "addr": BASE_ADDRESS + block.address,
                    "size": size,
                    "stream": 0,
                    "time_us": time,
                    "frames": [{"filename": frame, "line": 0, "name": trace.name}],
                }
            )

    for storage in sorted(storages.initial):
        blocks[storage] = pool.allocate(storages.bytes[storage])
        note(ALLOC, blocks[storage], storages.bytes[storage], storages.category[storage], 0)
    for time, instruction in enumerate(outcome.program, start=1):
        taken: list[int] = []
        if instruction.kind == "run":
            taken = list(storages.makes[instruction.op])
        elif instruction.kind == "again":
            taken = [s for s in storages.makes[instruction.op] if s in instruction.bring]
        elif instruction.kind == "back":
            taken = [instruction.storage]
        for storage in taken:
            blocks[storage] = pool.allocate(storages.bytes[storage])
            frame = f"{trace.ops[maker[storage]].name} {trace.ops[maker[storage]].layer} ({instruction.kind})"
            note(ALLOC, blocks[storage], storages.bytes[storage], frame, time)
        if instruction.kind in ("run", "again") and storages.workspace_bytes[instruction.op]:
            size = storages.workspace_bytes[instruction.op]
            workspace = pool.allocate(size)
            note(ALLOC, workspace, size, f"workspace of {trace.ops[instruction.op].name}", time)
            note("free_requested", workspace, size, "", time)
            note(FREE, workspace, size, "", time)
            pool.release(workspace)
        if instruction.kind == "free":
            block = blocks.pop(instruction.storage)
            note("free_requested", block, storages.bytes[instruction.storage], "", time)
            note(FREE, block, storages.bytes[instruction.storage], "", time)
            pool.release(block)
    live = {block.address: storage for storage, block in blocks.items() if block is not None}
    return {"segments": list(_segments(pool, live, storages)), "device_traces": [entries], "allocator_settings": {}}


def _segments(pool: CachingAllocator, live: Mapping[int, int], storages: Storages) -> Iterator[dict[str, Any]]:
    """Yield the segments at the end, with their blocks."""
    for first in pool.segments():
        blocks: list[dict[str, Any]] = []
        block: Block | None = first
        while block is not None:
            asked = storages.bytes[live[block.address]] if block.address in live else 0
            blocks.append(
                {
                    "address": BASE_ADDRESS + block.address,
                    "size": block.bytes,
                    "requested_size": asked,
                    "state": "inactive" if block.free else "active_allocated",
                    "frames": [],
                }
            )
            block = block.after
        used = sum(each["size"] for each in blocks if each["state"] != "inactive")
        yield {
            "device": 0,
            "address": BASE_ADDRESS + first.address,
            "total_size": sum(each["size"] for each in blocks),
            "stream": 0,
            "segment_type": "small" if first.small else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "allocated_size": used,
            "active_size": used,
            "requested_size": sum(each["requested_size"] for each in blocks),
            "frames": [],
            "blocks": blocks,
        }
