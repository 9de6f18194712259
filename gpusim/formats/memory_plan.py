"""The memory plan file: what of a step's memory moves to the host or is computed again, by op name and storage."""

from __future__ import annotations

from typing import Final, Literal

from gpusim.io.files import Count, Document, Nanoseconds

SCHEMA: Final = "gpusim-memory-plan/1"


class OffloadEntry(Document, frozen=True, kw_only=True):
    """A storage that moves to the host and back."""

    storage: Count
    """Index into the trace's `storages`."""
    after: str
    """The op after which it is copied out."""
    free: str
    """The op before which its GPU memory is let go; what follows waits for the copy out."""
    back: str
    """The op before which it is allocated again and copied back."""


class RedoEntry(Document, frozen=True, kw_only=True):
    """Storages that are let go and computed again."""

    before: str
    """The op before which that happens."""
    ops: tuple[str, ...]
    """What runs again, in order."""
    storages: tuple[Count, ...]
    """What that brings back."""


class MemoryPlanDocument(Document, frozen=True, kw_only=True, omit_defaults=False):
    """A memory plan of one trace, tied to it by the hash of its structure."""

    schema: Literal["gpusim-memory-plan/1"]
    """`gpusim-memory-plan/1`."""
    trace: str
    """Name of the trace."""
    trace_hash: str
    """Its structure hash."""
    policy: str
    """Who made the plan."""
    made_by: str = ""
    """Version of gpusim and hardware model."""
    predicted_ns: Nanoseconds = 0
    """Predicted time of the step."""
    predicted_peak_bytes: Count = 0
    """Predicted peak of the memory that is allocated."""
    offloads: tuple[OffloadEntry, ...] = ()
    """What moves to the host."""
    redos: tuple[RedoEntry, ...] = ()
    """What is computed again."""
    held: tuple[Count, ...] = ()
    """Storages that stay to the end of the step."""
    barriers: tuple[str, ...] = ()
    """Ops after which all copies so far are waited for."""
    order: tuple[str, ...] = ()
    """Launch order; empty: as recorded."""
