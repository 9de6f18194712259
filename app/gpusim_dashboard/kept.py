"""Explorations cached on disk, so that a page opens without the engine once it has been computed.

Stored as JSON in the user's cache folder and checked on reading. The key covers the trace, the hardware model, the
question and gpusim's own code, so a cached result equals a new one. Uploads are never stored. Unreadable and unwritable
files are ignored silently.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Literal, get_type_hints

import msgspec
import streamlit as st

import gpusim
from gpusim.api.dashboard import Concurrency
from gpusim.defaults import QUICK_BUDGET_S, QUICK_EVALUATIONS
from gpusim.errors import GpusimError, TraceError
from gpusim.io.decoding import decode_json
from gpusim.io.files import Document, decode_document, encode_json, write_bytes
from gpusim.report.breakdown import Breakdown
from gpusim.report.summary import Summary, summarize
from gpusim_dashboard.cache import cached
from gpusim_dashboard.choice import Choice

SCHEMA: Final = "gpusim-kept/2"
#: The sources in the package that an exploration depends on.
SOURCES = (
    "analysis/side_by_side.py", "api", "bounds", "defaults.py", "engine", "formats", "plan", "policies",
    "report/breakdown.py", "report/summary.py", "rules", "search", "step.py", "trace",
)  # fmt: skip
#: Most files kept; each has a few hundred KiB.
MOST_FILES = 48
#: The question that the short exploration is stored under.
QUICK = (QUICK_EVALUATIONS, QUICK_BUDGET_S)
#: Fields of an exploration that are not stored, as they come from the question.
ASKED = ("graph",)


class Kept(Document, frozen=True, kw_only=True):
    """The content of one file."""

    schema: Literal["gpusim-kept/2"]
    key: str
    summary: Summary
    breakdown: Breakdown
    concurrency: Concurrency
    explored: msgspec.Raw
    """Decoded only by pages that show schedules, as their classes need the engine."""


def exploration_key(choice: Choice) -> tuple[str, str, int]:
    """The key of this session's explorations in its state."""
    return choice.content, choice.hardware.name, choice.streams


def _harvest() -> None:
    """Store the result of this session's search, whichever page is open when it ends."""
    state = st.session_state
    job = state.get("job")
    if job is not None and not job.running and job.result is not None:
        state.explorations[state.job_key] = job.result
        state.search_words[state.job_key] = state.job_words


def own(choice: Choice) -> gpusim.Explored | None:
    """The newest exploration of this session for this trace, hardware and streams."""
    _harvest()
    explored: gpusim.Explored | None = st.session_state.explorations.get(exploration_key(choice))
    return explored


def search_words(choice: Choice) -> list[str]:
    """The options of `gpusim explore` that give what the pages show."""
    words: list[str] = st.session_state.search_words.get(exploration_key(choice), [])
    return words or ["--evaluations", str(QUICK_EVALUATIONS), "--budget", str(round(QUICK_BUDGET_S))]


def verdict_of(choice: Choice) -> Kept | None:
    """The stored data of the verdict; None if this session has its own exploration or the disk has none."""
    return load(choice, *QUICK) if own(choice) is None else None


def load(choice: Choice, *question: object) -> Kept | None:
    """Return the stored entry for the trace and hardware of `choice` and a question; None if there is none."""
    if choice.uploaded:
        return None
    try:
        return _read(_key(choice, question))
    except (GpusimError, OSError):
        return None


def save(
    choice: Choice,
    explored: gpusim.Explored,
    breakdown: Breakdown,
    concurrency: Concurrency,
    *question: object,
) -> None:
    """Store a complete exploration; interrupted ones are skipped."""
    if choice.uploaded or explored.interrupted:
        return
    key = _key(choice, question)
    fields = {
        name: getattr(explored, name) for name in explored.__dataclass_fields__ if name not in (*ASKED, "best")
    } | {"best_row": next(place for place, row in enumerate(explored.rows) if row is explored.best)}
    document = Kept(
        schema=SCHEMA,
        key=key,
        summary=summarize(explored),
        breakdown=breakdown,
        concurrency=concurrency,
        explored=msgspec.Raw(msgspec.json.encode(fields)),
    )
    with contextlib.suppress(GpusimError, OSError):
        folder = _folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_bytes(folder / f"{key}.json", encode_json(document))
        files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for old in files[:-MOST_FILES]:
            old.unlink(missing_ok=True)


def restore(kept: Kept, step: gpusim.Step) -> gpusim.Explored | None:
    """Return the stored exploration; None if the file is not valid for the step."""
    graph = step.graph
    names, kind = _stored()
    try:
        decoded: Any = decode_json(kept.explored, kind)
        ops = set(range(len(graph)))
        if any(set(row.schedule.order) != ops or len(row.schedule.streams) != len(ops) for row in decoded.rows):
            return None
        best = decoded.rows[decoded.best_row]
    except (msgspec.MsgspecError, IndexError):
        return None
    return gpusim.Explored(graph=graph, best=best, **{name: getattr(decoded, name) for name in names})


@functools.cache
def _stored() -> tuple[list[str], type[msgspec.Struct]]:
    """Return the fields of an exploration that are stored, and their type."""
    hints = get_type_hints(gpusim.Explored)
    types = {name: hints[name] for name in gpusim.Explored.__dataclass_fields__ if name not in (*ASKED, "best")}
    kind = msgspec.defstruct("KeptExplored", [*types.items(), ("best_row", int)], forbid_unknown_fields=True)
    return list(types), kind


@cached
def _read(key: str) -> Kept:
    """Raises `TraceError` or `OSError` if there is no valid file; neither is cached."""
    path = _folder() / f"{key}.json"
    entry = decode_document(path.read_bytes(), Kept, SCHEMA, str(path), TraceError)
    if entry.key != key:
        raise TraceError(str(path), "was kept for something else")
    return entry


def _key(choice: Choice, question: tuple[object, ...]) -> str:
    parts = (_code(), choice.content, encode_json(choice.hardware), repr((choice.streams, *question)).encode())
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:40]


@functools.cache
def _code() -> str:
    """Hash of all code that an exploration depends on, and of the versions of Python, NumPy and Numba."""
    package = Path(gpusim.__file__).parent
    digest = hashlib.sha256(repr((gpusim.__version__, sys.version, version("numpy"), version("numba"))).encode())
    for source in SOURCES:
        path = package / source
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(f"\n{file.relative_to(package)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def _folder() -> Path:
    """`$XDG_CACHE_HOME/gpusim/dashboard`, by default under `~/.cache`. Raises `OSError` where there is no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    except RuntimeError as cause:
        raise OSError("no home") from cause
    return root / "gpusim" / "dashboard"
