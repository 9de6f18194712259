"""Schedules and memory plans found earlier, on disk: the second start of a program does not search or plan.

An entry holds a schedule, its memory plan if it has one, its kernels' origin and choice, and measured times; never
kernels or code. Those of Inductor come from torch's own cache, or are compiled again, and must be the same. It is keyed
by the step's structure, the GPU, the versions of the libraries and of gpusim, and the options. An entry that cannot be
read, or is illegal for the step, is skipped with a message; each step is verified against eager in any case.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from gpusim.errors import CaptureError, GpusimError, ScheduleError
from gpusim.formats.memory_plan import MemoryPlanDocument
from gpusim.formats.trace import Frontend, Trace, Variant
from gpusim.gpu.inductor.styles import DEFAULT_STYLE
from gpusim.gpu.optimize.captured import MIXED
from gpusim.gpu.optimize.kept_step import KeptStep
from gpusim.io.file_limits import MAX_PARTS, MAX_STREAMS
from gpusim.io.files import Count, Document, Nanoseconds, read_document, write_document
from gpusim.memplan.plan import MemoryPlan
from gpusim.plan.graph import is_legal_order
from gpusim.plan.schedule import Schedule
from gpusim.trace.dependencies import dependencies
from gpusim.trace.store import structure_hash
from gpusim.version import code_version

SCHEMA: Final = "gpusim-optimized/1"
#: Environment variable for the folder of entries; empty: no cache.
VARIABLE: Final = "GPUSIM_CACHE_DIR"
#: Most entries; the least recently used ones are removed first.
MOST_ENTRIES: Final = 500


class Entry(Document, frozen=True, kw_only=True):
    """One schedule of one step on one GPU."""

    schema: Literal["gpusim-optimized/1"]
    """`gpusim-optimized/1`."""
    made_for: dict[str, str]
    """Structure of the step, GPU, versions, and options."""
    frontend: Frontend
    """Front end of the schedule's kernels."""
    style: str = DEFAULT_STYLE
    """Inductor's compile style, or `mixed`."""
    kernels: str
    """Structure of the step with these kernels."""
    policy: str
    """Policy or search that made the schedule."""
    order: tuple[Count, ...]
    """Ops by index, in launch order."""
    streams: tuple[Count, ...]
    """Stream of each op."""
    chosen: dict[str, Variant]
    """Index of an op, as text -> kernels that it runs instead of the captured ones."""
    plan: MemoryPlanDocument | None = None
    """Memory plan that runs instead of the schedule, where no schedule keeps the memory limit."""
    eager_ns: Nanoseconds
    """Measured times: the user's own step, the sequential graph, and this schedule."""
    sequential_ns: Nanoseconds
    optimized_ns: Nanoseconds
    predicted_ns: Nanoseconds
    interval_ns: tuple[Nanoseconds, Nanoseconds]
    """Interval of the prediction."""
    predicted_sequential_ns: Nanoseconds
    step: KeptStep | None = None
    """The step with Inductor's kernels, where they are Inductor's."""


def folder() -> Path | None:
    """Return the folder of entries, or None where the user wants none."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named else None
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "gpusim" / "optimized"


def made_for(trace: Trace, facts: Mapping[str, str]) -> dict[str, str]:
    """Return the key of an entry. `facts` are the GPU, the libraries' versions, and the options."""
    return {"step": structure_hash(trace), "gpusim": code_version(), **facts}


def find(
    trace: Trace,
    facts: Mapping[str, str],
    fused: Callable[[Entry, str], Trace],
    say: Callable[[str], None],
) -> tuple[Entry, Trace, Schedule, MemoryPlan | None] | None:
    """Return a step's entry, the trace with its chosen variants, its schedule and its memory plan, or None without one.

    `trace` is the step as ATen calls, and `fused` returns it as Inductor's kernels, for entries of these; it takes the
    entry and its file.
    """
    wanted = made_for(trace, facts)
    path = _path(wanted)
    if path is None:
        return None
    try:
        if not path.is_file():
            return None
        entry = read_document(path, Entry, SCHEMA, ScheduleError)
        if entry.made_for != wanted:
            raise ScheduleError(str(path), "is of another step, GPU or version", place="$.made_for")
        of_kernels = trace if entry.frontend == "aten" else fused(entry, str(path))
        if entry.kernels != structure_hash(of_kernels):
            raise ScheduleError(str(path), "is for other kernels than torch makes now", place="$.kernels")
        with_chosen, schedule = _checked(entry, of_kernels, str(path))
        plan = None if entry.plan is None else MemoryPlan.from_document(entry.plan, with_chosen, str(path))
    except (GpusimError, OSError) as cause:  # also a folder that may not be searched
        say(f"passed over in the cache: {cause}")
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return entry, with_chosen, schedule, plan


def keep(
    recorded: Trace,
    facts: Mapping[str, str],
    trace: Trace,
    style: str,
    schedule: Schedule,
    plan: MemoryPlan | None,
    measured: Mapping[str, Any],
    say: Callable[[str], None],
    step: Callable[[], KeptStep | None] = lambda: None,
) -> None:
    """Write an entry. A failure is reported and ignored.

    `recorded` is the step as ATen calls, `trace` the schedule's step with its chosen variants. `step` stores the text
    of Inductor's kernels, too.
    """
    wanted = made_for(recorded, facts)
    path = _path(wanted)
    if path is None:
        return
    chosen = {str(op): trace.ops[op].variants[number - 1] for op, number in enumerate(schedule.variants) if number}
    try:
        kept = step()
        if kept is None and style == MIXED:
            raise CaptureError("Inductor has computed constants for its kernels")
        entry = Entry(
            schema=SCHEMA,
            made_for=wanted,
            frontend=trace.model.frontend,
            style=style,
            kernels=structure_hash(trace),
            policy=schedule.policy,
            order=schedule.order,
            streams=schedule.streams,
            chosen=chosen,
            plan=None if plan is None else plan.to_document(trace),
            step=kept,
            **measured,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_document(path, entry)
        _forget_oldest(path.parent)
    except (GpusimError, OSError) as cause:
        say(f"not kept in the cache: {cause}")


def _checked(entry: Entry, trace: Trace, file: str) -> tuple[Trace, Schedule]:
    """Return the trace with one variant where the entry chooses one, and the schedule. Raises `ScheduleError`."""
    count = len(trace.ops)
    legal = len(entry.streams) == count <= MAX_PARTS and is_legal_order(entry.order, dependencies(trace))
    if not legal or any(stream >= MAX_STREAMS for stream in entry.streams):
        raise ScheduleError(file, "its order or streams are not legal for this step", place="$.order")
    ops, variants = list(trace.ops), [0] * count
    for text, variant in entry.chosen.items():
        op = int(text) if text.isdecimal() and len(text) < 10 else count
        if op >= count or any(covered >= count for covered in variant.covers):
            raise ScheduleError(file, f"op {text[:20]} is not one of the {count} of this step", place="$.chosen")
        ops[op] = msgspec.structs.replace(ops[op], variants=(variant,))
        variants[op] = 1
    schedule = Schedule(
        entry.order,
        entry.streams,
        tuple(variants) if any(variants) else (),
        policy=entry.policy,
        predicted_ns=entry.predicted_ns,
    )
    return msgspec.structs.replace(trace, ops=tuple(ops)), schedule


def _path(wanted: Mapping[str, str]) -> Path | None:
    top = folder()
    if top is None:
        return None
    name = hashlib.sha256(msgspec.json.encode(sorted(wanted.items()))).hexdigest()[:32]
    return top / f"{name}.json"


def _forget_oldest(top: Path) -> None:
    """Remove the least recently used entries beyond the limit."""
    ages: list[tuple[float, Path]] = []
    for path in top.glob("*.json"):
        with contextlib.suppress(OSError):  # another process may remove some, too
            ages.append((path.stat().st_mtime, path))
    for _, path in sorted(ages)[: max(0, len(ages) - MOST_ENTRIES)]:
        with contextlib.suppress(OSError):
            path.unlink()
