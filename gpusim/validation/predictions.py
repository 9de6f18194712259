"""Stored predictions of a step's schedules, made before any of them ran: they make a test of the model blind.

The file has the schedules themselves, the hash of their trace, and the hash of the predicting code. A replay uses these
numbers and makes no new ones.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Final, Literal

from gpusim.errors import RecipeError
from gpusim.formats.schedule import ScheduleDocument
from gpusim.formats.trace import Trace
from gpusim.io.files import Count, Document, Nanoseconds, read_document, write_document
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.trace.store import trace_sha256
from gpusim.validation.chosen import Chosen
from gpusim.version import code_version

SCHEMA: Final = "gpusim-predictions/1"
SUFFIX: Final = ".predicted.json.gz"


class Predictions(Document, frozen=True, kw_only=True, omit_defaults=False):
    """Schedules that a recipe replays for one step, in that order, with their predictions."""

    schema: Literal["gpusim-predictions/1"]
    recipe: str
    trace: str
    trace_sha256: str
    """Hash of the text in the trace's file."""
    code: str
    """Version and hash of the predicting code."""
    date: str
    hardware: str
    sequential_ns: Nanoseconds
    worth_it: bool
    bounds_ns: dict[str, Nanoseconds]
    schedules: tuple[ScheduleDocument, ...]
    intervals_ns: tuple[tuple[Nanoseconds, Nanoseconds], ...]
    """Predicted interval of each schedule, in ns, for 90 % of measurements."""
    peaks_bytes: tuple[Count, ...]

    def chosen(self, graph: OpGraph, file: str) -> Chosen:
        """Return the schedules as recipes replay them; `file` is theirs, for messages.

        Raises `ScheduleError` for an illegal one.
        """
        return Chosen(
            schedules=tuple(
                Schedule.from_document(document, graph, f"{file}: $.schedules[{number}]")
                for number, document in enumerate(self.schedules)
            ),
            peaks=self.peaks_bytes,
            contenders=(),
            contender_peaks=(),
            worth_it=self.worth_it,
            bounds_ns=self.bounds_ns,
            hardware=self.hardware,
            sequential_ns=self.sequential_ns,
            intervals_ns=self.intervals_ns,
        )


def predictions_path(trace: Path) -> Path:
    """Return the path next to the trace's file: `NAME.predicted.json.gz`."""
    return trace.with_name(trace.name.removesuffix(".gz").removesuffix(".json") + SUFFIX)


def predictions_of(path: Path, trace: Trace, chosen: Chosen, recipe: str) -> Predictions:
    """Return the document with the choice and the predictions for the trace in a file."""
    return Predictions(
        schema=SCHEMA,
        recipe=recipe,
        trace=trace.name,
        trace_sha256=trace_sha256(path),
        code=code_version(),
        date=datetime.date.today().isoformat(),
        hardware=chosen.hardware,
        sequential_ns=chosen.sequential_ns,
        worth_it=chosen.worth_it,
        bounds_ns=chosen.bounds_ns,
        schedules=tuple(schedule.to_document(trace) for schedule in chosen.schedules),
        intervals_ns=chosen.intervals_ns,
        peaks_bytes=chosen.peaks,
    )


def write_predictions(predictions: Predictions, path: Path) -> None:
    """Write the predictions. Raises `OutputError`."""
    write_document(path, predictions)


def read_predictions(path: Path, trace: Path) -> Predictions:
    """Read the predictions of the trace in a file. Raises `RecipeError`, also where they are of another trace."""
    predictions = read_document(path, Predictions, SCHEMA, RecipeError)
    if predictions.trace_sha256 != trace_sha256(trace):
        problem = f"predictions of another capture of '{predictions.trace}' than the trace next to them"
        raise RecipeError(str(path), problem, place="$.trace_sha256")
    counts = {len(predictions.schedules), len(predictions.intervals_ns), len(predictions.peaks_bytes)}
    if len(counts) != 1:
        raise RecipeError(str(path), "schedules, intervals_ns and peaks_bytes differ in length", place="$")
    return predictions
