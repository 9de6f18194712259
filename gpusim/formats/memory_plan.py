"""The memory plan file: storages that a step moves or recomputes, and variants it runs, by op name and storage."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta

from gpusim.io.files import Count, Document, Nanoseconds

SCHEMA: Final = "gpusim-memory-plan/1"
#: Maximum number of streams of a plan's ops: two fewer than `gpusim.plan.schedule.MAX_STREAMS`, which copies use.
MAX_OP_STREAMS: Final = 126


class OffloadEntry(Document, frozen=True, kw_only=True):
    """A storage offloaded to the host and brought back."""

    storage: Count
    """Index into the trace's `storages`."""
    after: str
    """The op after which it is copied out."""
    free: str
    """The op before which its GPU memory is freed; later ops wait for the copy out."""
    back: str
    """The op before which it is allocated again and copied back."""


class RedoEntry(Document, frozen=True, kw_only=True):
    """Storages that are freed and recomputed."""

    before: str
    """The op before which they are recomputed."""
    ops: tuple[str, ...]
    """Ops that run again, in order."""
    storages: tuple[Count, ...]
    """Storages that the ops restore."""


class VariantEntry(Document, frozen=True, kw_only=True):
    """An op that runs one of its variants."""

    op: str
    """Name of the op."""
    variant: str
    """Name of its variant."""


class MemoryPlanDocument(Document, frozen=True, kw_only=True, omit_defaults=False):
    """A memory plan of one trace, tied to it by the hash of its structure."""

    schema: Literal["gpusim-memory-plan/1"]
    """`gpusim-memory-plan/1`."""
    trace: str
    """Name of the trace."""
    trace_hash: str
    """Structure hash of the trace."""
    policy: str
    """Policy or program that made the plan."""
    made_by: str = ""
    """Version of gpusim, and hardware model."""
    predicted_ns: Nanoseconds = 0
    """Predicted time of the step."""
    predicted_peak_bytes: Count = 0
    """Predicted peak of allocated memory."""
    offloads: tuple[OffloadEntry, ...] = ()
    """Storages offloaded to the host."""
    redos: tuple[RedoEntry, ...] = ()
    """Storages recomputed."""
    held: tuple[Count, ...] = ()
    """Storages kept until the end of the step."""
    barriers: tuple[str, ...] = ()
    """Ops after which the step waits for all earlier copies."""
    order: tuple[str, ...] = ()
    """Launch order; empty for the recorded order."""
    op_streams: tuple[Annotated[int, Meta(ge=0, lt=MAX_OP_STREAMS)], ...] = ()
    """Stream of each op, in the trace's order; empty if all run on one."""
    variants: tuple[VariantEntry, ...] = ()
    """Ops that run a variant, in the trace's order; all others run as captured."""
