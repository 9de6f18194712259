"""Memory snapshots of PyTorch: a plan's memory over time out, for its viewer, and a snapshot of a real run in.

`torch.cuda.memory._dump_snapshot` writes a pickle, and a pickle can run anything when it is loaded. The reader here
takes containers, text and numbers, and refuses everything else without looking at it. Format: the notes on the memory
snapshot of PyTorch 2.x ("Understanding CUDA Memory Usage").
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpusim.errors import MeasurementError
from gpusim.io.files import read_bytes, write_bytes
from gpusim.memplan.allocator import Block, CachingAllocator
from gpusim.memplan.evaluate import Outcome
from gpusim.memplan.storages import Storages
from gpusim.text import shortened

#: Where the first made-up address lies; the viewer shows addresses as they are.
BASE_ADDRESS: Final = 0x7F0000000000
#: Most events of a snapshot that are read.
MAX_EVENTS: Final = 5_000_000
_ALLOC, _FREE = "alloc", "free_completed"


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """A block taken (positive `bytes`) or given back (negative), on one stream."""

    address: int
    bytes: int
    stream: int
    frame: str = ""
    """The innermost line of Python that did it, where the snapshot has it."""


@dataclass(frozen=True)
class Snapshot:
    """What a memory snapshot of one device shows."""

    events: tuple[MemoryEvent, ...]
    reserved_bytes: int
    """Of all segments at its end."""
    allocated_bytes: int
    """Of all blocks in use at its end."""

    @property
    def peak_bytes(self) -> int:
        """Most that was allocated while the events were recorded, over what was there before."""
        level = peak = 0
        for event in self.events:
            level += event.bytes
            peak = max(peak, level)
        return peak

    def simulated(self) -> CachingAllocator:
        """The same requests, given to the simulated allocator, as one stream's."""
        pool = CachingAllocator()
        blocks: dict[int, Block | None] = {}
        for event in self.events:
            if event.bytes > 0:
                blocks[event.address] = pool.allocate(event.bytes)
            elif event.address in blocks:
                pool.release(blocks.pop(event.address))
        return pool


def write_snapshot(storages: Storages, outcome: Outcome, path: Path) -> None:
    """Write a plan's memory over its instructions as a snapshot that memory_viz shows. Raises `OutputError`.

    Times are the numbers of the instructions: what is allocated follows the host, not the GPU's clock.
    """
    write_bytes(path, pickle.dumps(snapshot_document(storages, outcome), protocol=4))


def snapshot_document(storages: Storages, outcome: Outcome) -> dict[str, Any]:
    """The snapshot as plain dictionaries and lists."""
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
        note(_ALLOC, blocks[storage], storages.bytes[storage], storages.category[storage], 0)
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
            note(_ALLOC, blocks[storage], storages.bytes[storage], frame, time)
        if instruction.kind in ("run", "again") and storages.workspace_bytes[instruction.op]:
            size = storages.workspace_bytes[instruction.op]
            workspace = pool.allocate(size)
            note(_ALLOC, workspace, size, f"workspace of {trace.ops[instruction.op].name}", time)
            note("free_requested", workspace, size, "", time)
            note(_FREE, workspace, size, "", time)
            pool.release(workspace)
        if instruction.kind == "free":
            block = blocks.pop(instruction.storage)
            note("free_requested", block, storages.bytes[instruction.storage], "", time)
            note(_FREE, block, storages.bytes[instruction.storage], "", time)
            pool.release(block)
    live = {block.address: storage for storage, block in blocks.items() if block is not None}
    return {"segments": list(_segments(pool, live, storages)), "device_traces": [entries], "allocator_settings": {}}


def _segments(pool: CachingAllocator, live: Mapping[int, int], storages: Storages) -> Iterator[dict[str, Any]]:
    """The segments at the end, with their blocks."""
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


class _PlainUnpickler(pickle.Unpickler):
    """Containers, text and numbers; nothing is imported and nothing called."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"asks for '{shortened(f'{module}.{name}')}', which is no plain value")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("refers to objects outside of the file")


def read_snapshot(path: Path, device: int = 0) -> Snapshot:
    """Read a memory snapshot of one device. Nothing in it runs. Raises `MeasurementError`."""
    data = read_bytes(path, MeasurementError)
    try:
        document = _PlainUnpickler(io.BytesIO(data)).load()
    except pickle.UnpicklingError as cause:
        raise MeasurementError(str(path), f"is no memory snapshot: {cause}") from cause
    except (EOFError, ValueError, TypeError, AttributeError, IndexError, KeyError, OverflowError, MemoryError) as cause:
        raise MeasurementError(str(path), f"is no memory snapshot: a broken pickle ({type(cause).__name__})") from cause
    return _Reader(str(path)).snapshot(document, device)


class _Reader:
    """Holds every value to its type: a snapshot is anybody's file."""

    def __init__(self, file: str) -> None:
        self.file = file

    def snapshot(self, document: Any, device: int) -> Snapshot:
        traces = self._list(self._get(document, "device_traces", "$"), "$.device_traces")
        if not 0 <= device < len(traces):
            raise MeasurementError(self.file, f"has no device {device}, of {len(traces)}", place="$.device_traces")
        place = f"$.device_traces[{device}]"
        entries = self._list(traces[device], place)
        if len(entries) > MAX_EVENTS:
            raise MeasurementError(self.file, f"has {len(entries):,} events; the limit is {MAX_EVENTS:,}", place=place)
        events = tuple(
            event
            for number, entry in enumerate(entries)
            if (event := self._event(entry, f"{place}[{number}]")) is not None
        )
        reserved = allocated = 0
        for number, segment in enumerate(self._list(self._get(document, "segments", "$"), "$.segments")):
            where = f"$.segments[{number}]"
            if self._number(segment, "device", where) == device:
                reserved += self._number(segment, "total_size", where)
                allocated += self._number(segment, "allocated_size", where)
        return Snapshot(events, reserved, allocated)

    def _event(self, entry: Any, place: str) -> MemoryEvent | None:
        action = self._get(entry, "action", place)
        if action not in (_ALLOC, _FREE):
            return None
        size = self._number(entry, "size", place)
        frames = entry.get("frames", [])
        frame = ""
        if isinstance(frames, list) and frames and isinstance(frames[0], dict):
            first = frames[0]
            frame = shortened(f"{first.get('filename', '')}:{first.get('line', '')} {first.get('name', '')}")
        return MemoryEvent(
            self._number(entry, "addr", place),
            size if action == _ALLOC else -size,
            self._number(entry, "stream", place),
            frame,
        )

    def _get(self, value: Any, key: str, place: str) -> Any:
        if not isinstance(value, dict) or key not in value:
            raise MeasurementError(self.file, f"is no memory snapshot: no '{key}'", place=place)
        return value[key]

    def _list(self, value: Any, place: str) -> list[Any]:
        if not isinstance(value, list):
            raise MeasurementError(self.file, "is no list", place=place)
        return value

    def _number(self, value: Any, key: str, place: str) -> int:
        number = self._get(value, key, place)
        if type(number) is not int or not 0 <= number < 1 << 63:
            raise MeasurementError(self.file, "is no whole number of 63 bits", place=f"{place}.{key}")
        return number
