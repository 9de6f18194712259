"""All errors that gpusim raises on purpose.

    GpusimError                 a problem that a user can solve: one line, exit code 2
    ├── FileError               a problem with a file: name, place and value
    │   ├── TraceError
    │   ├── ScheduleError
    │   ├── HardwareError
    │   ├── MeasurementError
    │   ├── RecipeError
    │   ├── SweepError
    │   ├── TopologyError       several GPUs and their links
    │   ├── ParallelPlanError   a plan for several GPUs
    │   ├── TrustError          a file with code that the user has not allowed to run
    │   └── OutputError         a file could not be written
    ├── UnknownNameError        an unknown policy, trace, GPU ...; suggests the nearest
    ├── OptionError             an option out of range
    ├── OperatorError           an operator that replay does not run
    ├── PlanError               a plan that no engine can run (a cycle, a block over the GPU's limits)
    │   └── LimitError          a kernel that exceeds a limit of the GPU
    ├── CaptureError            a step that cannot be captured, or whose rebuilt copy fails a check
    │   └── StepError           the user's own code raises on these arguments
    ├── ReplayError             a replay with different outputs
    ├── WorkerError             a sweep without workers: unreachable, another version, or dying
    ├── FigureError             a figure that cannot be drawn: a package or a browser is missing
    └── GpuError                no GPU, or out of GPU memory

Any other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from gpusim.text import VALUE_CHARACTERS, message, short_value, shortened

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
#: What the command line says after Ctrl-C.
INTERRUPTED = "gpusim: interrupted"
#: Number of names listed by `UnknownNameError` if there are more than `ALL_NAMES`, or they take more than `MOST_LISTED`
#: characters in total.
NEAREST_NAMES = 5
ALL_NAMES = 32
MOST_LISTED = 1_000
#: Maximum number of names compared to find the nearest, since comparing takes time.
COMPARED_NAMES = 2_000


class GpusimError(Exception):
    """A problem that the user can solve; its text is one line with place and value (`gpusim.text.message`).

    Values are untrusted text: put those that may contain spaces in quotes, so that long ones are cut.
    """

    def __init__(self, text: str) -> None:
        super().__init__(message(text))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by text and fields: subclasses take other arguments, and errors are sent between processes."""
        return _restore, (type(self), str(self), self.__dict__)


def _restore(kind: type[GpusimError], text: str, fields: dict[str, Any]) -> GpusimError:
    error = kind.__new__(kind)
    Exception.__init__(error, text)
    error.__dict__.update(fields)
    return error


class FileError(GpusimError):
    """A problem with a file: `file`, `place` (a JSON path such as `$.ops[3]`) and `problem`."""

    def __init__(self, file: str, problem: str, *, place: str = "") -> None:
        self.file = file
        self.place = place
        self.problem = problem
        where = f"{short_value(file)}: {short_value(place)}" if place else short_value(file)
        super().__init__(f"{where}: {problem}")


class TraceError(FileError):
    """A trace that cannot be read or does not make sense."""


class ScheduleError(FileError):
    """A schedule that cannot be read, is illegal, or belongs to another trace."""


class HardwareError(FileError):
    """A hardware model that cannot be read or does not make sense."""


class MeasurementError(FileError):
    """A measurement or results file that cannot be read."""


class RecipeError(FileError):
    """A validation recipe that cannot be read."""


class SweepError(FileError):
    """A sweep file or a store of results that cannot be read, or a store in use."""


class TopologyError(FileError):
    """A topology that cannot be read, has too few GPUs, or lacks a link."""


class ParallelPlanError(FileError):
    """A plan for several GPUs that cannot be read, or does not fit its layers."""


class TrustError(FileError):
    """A file with code, which runs only with `--trust-code`."""


class OutputError(FileError):
    """An output file that could not be written (disk full, no such folder, no permission)."""


class UnknownNameError(GpusimError):
    """An unknown name; the message suggests the nearest and lists all known names, or a few."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        choices = sorted(known)
        near = _nearest(name, choices)
        hint = f"; did you mean '{short_value(near[0])}'?" if near else ""
        super().__init__(f"unknown {kind} '{short_value(name)}'{hint} (there are: {_some(choices, near) or 'none'})")


def _nearest(name: str, choices: list[str]) -> list[str]:
    """Return the names most similar to `name`, nearest first."""
    wanted = name.lower()[:VALUE_CHARACTERS]
    if len(choices) > COMPARED_NAMES:
        alike = [choice for choice in choices if choice[:2].lower() == wanted[:2]]
        choices = (alike or choices)[:COMPARED_NAMES]
    of_start = {choice[:VALUE_CHARACTERS]: choice for choice in reversed(choices)}
    starts = difflib.get_close_matches(wanted, list(of_start), n=NEAREST_NAMES, cutoff=0.4)
    begun = [start for start in of_start if wanted and start.lower().startswith(wanted)]  # cut short, not misspelt
    return [of_start[start] for start in dict.fromkeys([*sorted(begun, key=len), *starts])][:NEAREST_NAMES]


def _some(choices: list[str], near: list[str]) -> str:
    """Return all names if they are few and short, else the nearest ones and the number of others."""
    text = ", ".join(choices)
    if len(choices) <= ALL_NAMES and len(text) <= MOST_LISTED:
        return text
    listed = [shortened(name, VALUE_CHARACTERS // 2) for name in near or choices[:NEAREST_NAMES]]
    return f"{', '.join(listed)} and {len(choices) - len(listed):,} more"


class OptionError(GpusimError):
    """An argument, or option of the command line, that is out of range.

    For a single argument, `argument` is its Python name and `value` the given value: the message then starts with
    `argument=value`, and the command line writes the option in its place.
    """

    def __init__(self, problem: str, *, argument: str = "", value: object = "") -> None:
        self.argument = argument
        self.value = short_value(value)
        self.problem = problem
        super().__init__(f"{argument}={self.value}: {problem}" if argument else problem)


class MemoryLimitError(OptionError):
    """A memory limit that no schedule keeps."""


class OperatorError(GpusimError):
    """An operator outside the allow-list, which replay refuses to run."""


class PlanError(GpusimError):
    """A plan that no engine can run: a cycle, a dangling reference, a block over the GPU's limits."""


class LimitError(PlanError):
    """A kernel that exceeds a limit of the GPU: trace and hardware model do not fit together."""


class CaptureError(GpusimError):
    """A step that cannot be captured, or whose rebuilt copy failed a check."""


class StepError(CaptureError):
    """The user's own step raises on these arguments, also when called directly."""


class ReplayError(GpusimError):
    """A replay with outputs that differ from those of the sequential run."""


class WorkerError(GpusimError):
    """A sweep that cannot continue: no scheduler or workers, workers of another version, or dying workers."""


class FigureError(GpusimError):
    """A figure that cannot be drawn because a package or a browser is missing."""


class GpuError(GpusimError):
    """No usable GPU, no torch, or not enough GPU memory."""
