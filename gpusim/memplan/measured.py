"""Memory snapshot of a real run: its allocations, for comparison with predictions.

`torch.cuda.memory._dump_snapshot` writes a pickle, which can run code when loaded. Here only plain values are read
(`gpusim.io.plain_pickle`), each checked for its type. Format: the docstring of `torch.cuda.memory._snapshot`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from gpusim.errors import MeasurementError
from gpusim.io.file_limits import MAX_STORAGE_BYTES
from gpusim.io.files import read_bytes
from gpusim.io.plain_pickle import PickleProblemError, read_plain_pickle
from gpusim.memplan.snapshot import ALLOC, FREE
from gpusim.plan.allocator import Block, CachingAllocator

#: Most events, and blocks, read from a snapshot: ten times torch's default record.
MAX_EVENTS: Final = 1_000_000
#: Bound of the address arithmetic; addresses of a GPU have 49 bits.
MAX_ADDRESS: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """A block allocated (positive `bytes`) or freed (negative). Sizes are requested ones, before rounding."""

    address: int
    bytes: int


@dataclass(frozen=True)
class MemorySnapshot:
    """One device's part of a memory snapshot."""

    device: int
    events: tuple[MemoryEvent, ...]
    before: dict[int, int]
    """Address and bytes of the blocks from before the first event."""
    reserved_bytes: int
    """Bytes of all segments at its end."""

    @cached_property
    def requested_peak_bytes(self) -> int:
        """Peak of the requested bytes."""
        level = peak = sum(self.before.values())
        for event in self.events:
            level += event.bytes
            peak = max(peak, level)
        return peak

    @cached_property
    def simulated(self) -> CachingAllocator:
        """Same requests on the simulated allocator, as of one stream; its peak counts rounded blocks."""
        pool = CachingAllocator()
        blocks: dict[int, Block | None] = {
            address: pool.allocate(size) for address, size in sorted(self.before.items())
        }
        for event in self.events:
            if event.bytes > 0:
                blocks[event.address] = pool.allocate(event.bytes)
            else:
                pool.release(blocks.pop(event.address, None))
        return pool

    @property
    def peak_bytes(self) -> int:
        """Peak allocation, in blocks of the simulated allocator, in bytes."""
        return self.simulated.peak_allocated_bytes


def read_snapshot(path: Path) -> MemorySnapshot:
    """Read a memory snapshot: of several devices the one with most events. Nothing in it runs. Raises
    `MeasurementError`.

    A freed block without allocation event existed from the beginning, and so did a block at the end without one.
    """
    try:
        document = read_plain_pickle(read_bytes(path, MeasurementError))
    except PickleProblemError as cause:
        raise MeasurementError(str(path), f"is no memory snapshot: {cause}") from cause
    return _Reader(str(path)).snapshot(document)


class _Reader:
    """Reader that checks every value's type: a snapshot is an untrusted file."""

    def __init__(self, file: str) -> None:
        self.file = file
        self._blocks_left = MAX_EVENTS
        """Blocks left over all segments: many of them may be one list."""

    def snapshot(self, document: Any) -> MemorySnapshot:
        traces = self._list(document, "device_traces", "$")
        if not traces:
            raise MeasurementError(self.file, "has no device", place="$.device_traces")
        device = max(range(len(traces)), key=lambda n: len(traces[n]) if type(traces[n]) is list else -1)
        events = tuple(self._events(traces, device))
        if not events:
            problem = "has no events: call torch.cuda.memory._record_memory_history() before the step"
            raise MeasurementError(self.file, problem, place=f"$.device_traces[{device}]")
        before, there = self._before(events)
        reserved = 0
        for number, segment in enumerate(self._list(document, "segments", "$")):
            where = f"$.segments[{number}]"
            if self._number(segment, "device", where) != device:
                continue
            reserved += self._number(segment, "total_size", where)
            for address, size in self._blocks(segment, where):
                if address not in there:
                    before[address] = size
        return MemorySnapshot(device, events, before, reserved)

    def _events(self, traces: list[Any], device: int) -> Iterator[MemoryEvent]:
        for number, entry in enumerate(self._list(traces, device, "$.device_traces")):
            place = f"$.device_traces[{device}][{number}]"
            action = self._get(entry, "action", place)
            if action in (ALLOC, FREE):
                size = self._number(entry, "size", place)
                address = self._number(entry, "addr", place, MAX_ADDRESS)
                if size:
                    yield MemoryEvent(address, size if action == ALLOC else -size)

    def _before(self, events: tuple[MemoryEvent, ...]) -> tuple[dict[int, int], set[int]]:
        """Return the blocks that existed before these events, and the addresses that occur in them."""
        before: dict[int, int] = {}
        live: dict[int, int] = {}
        for number, event in enumerate(events):
            if event.bytes > 0:
                if event.address in live:
                    raise MeasurementError(self.file, f"event {number} takes a block that is in use")
                live[event.address] = event.bytes
                continue
            size = live.pop(event.address, None)
            if size is None:
                before.setdefault(event.address, -event.bytes)
            elif size != -event.bytes:
                problem = f"event {number} frees {-event.bytes:,} bytes of a block of {size:,}"
                raise MeasurementError(self.file, problem)
        return before, live.keys() | before.keys()

    def _blocks(self, segment: Any, where: str) -> Iterator[tuple[int, int]]:
        """Address and size of the blocks in use of a segment, one behind the other."""
        address = self._number(segment, "address", where, MAX_ADDRESS)
        blocks = self._list(segment, "blocks", where)
        self._blocks_left -= len(blocks)
        if self._blocks_left < 0:
            raise MeasurementError(self.file, f"has more than {MAX_EVENTS:,} blocks", place=f"{where}.blocks")
        for number, block in enumerate(blocks):
            place = f"{where}.blocks[{number}]"
            size = self._number(block, "size", place)
            if self._get(block, "state", place) == "active_allocated":
                asked = self._number(block, "requested_size", place) if "requested_size" in block else size
                yield address, asked
            address += size

    def _get(self, value: Any, key: str, place: str) -> Any:
        if type(value) is not dict or key not in value:
            raise MeasurementError(self.file, f"is no memory snapshot: no '{key}'", place=place)
        return value[key]

    def _list(self, value: Any, key: str | int, place: str) -> list[Any]:
        parts = value[key] if type(value) is list and type(key) is int else self._get(value, str(key), place)
        where = f"{place}[{key}]" if type(key) is int else f"{place}.{key}"
        if type(parts) is not list:
            raise MeasurementError(self.file, "is no list", place=where)
        if len(parts) > MAX_EVENTS:
            raise MeasurementError(self.file, f"has {len(parts):,} parts; the limit is {MAX_EVENTS:,}", place=where)
        return parts

    def _number(self, value: Any, key: str, place: str, most: int = MAX_STORAGE_BYTES) -> int:
        number = self._get(value, key, place)
        if type(number) is not int or not 0 <= number <= most:
            raise MeasurementError(self.file, f"is no whole number up to {most:,}", place=f"{place}.{key}")
        return number
