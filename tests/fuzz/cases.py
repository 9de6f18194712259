"""A case: files in a folder of their own, and the command to run there."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Case:
    """One command with its files; file names are relative to the folder of the run."""

    family: str
    argv: tuple[str, ...]
    """Words after `gpusim`; a first word with `@` names a reader of `tests.fuzz.readers`."""
    files: dict[str, bytes] = field(default_factory=dict)
    at_fault: tuple[str, ...] = ()
    """Changed files; a refusal must name one of them."""
    outputs: tuple[str, ...] = ()
    """Files that the command is asked to write."""
    what: str = ""
    """Changes, in words."""
    expected: str = ""
    """`accepted` or `refused`, where only that is right."""

    @property
    def good_codes(self) -> tuple[int, ...]:
        """Exit codes of an accepted file; `doctor` has one for findings."""
        return (0, 1) if self.argv[0] == "doctor" else (0,)

    @property
    def command(self) -> str:
        """The command to type in the case's folder."""
        words = shlex.join(self.argv)
        return f"python -m tests.fuzz.readers {words}" if self.argv[0].startswith("@") else f"gpusim {words}"

    def write(self, folder: Path) -> None:
        """Write the files into `folder`, with instructions in `RUN.txt`."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in self.files.items():
            (folder / name).write_bytes(data)


@dataclass(frozen=True)
class Answer:
    """Outcome of a case in a worker process."""

    code: int = 0
    out: str = ""
    err: str = ""
    error: str = ""
    """Type of the exception that escaped; empty where none did."""
    stack: str = ""
    nonsense: str = ""
    """Problem with a result or a file; empty where there is none."""
    markup: str = ""
    """Markup of the input that is active in a written file."""
    seconds: float = 0.0
    grown_bytes: int = 0
    """Peak memory beyond that of the worker before the case, in bytes."""
    ended: str = ""
    """Reason why the worker was killed: `hang`, `memory`, `crash`; empty where it answered."""
