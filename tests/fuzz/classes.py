"""Classes of outcomes, and classification of an outcome."""

from __future__ import annotations

import re
from typing import Final

from tests.fuzz.cases import Answer, Case

ACCEPTED: Final = "accepted"
REFUSED: Final = "refused well"
TOO_LONG: Final = "refused too long"
NOT_NAMED: Final = "refused, file not named"
CONTROL: Final = "control characters"
MARKUP: Final = "markup"
TRACEBACK: Final = "traceback"
CRASH: Final = "crash"
HANG: Final = "hang"
MEMORY: Final = "over memory"
WRONG: Final = "wrong result"
#: Classes in the order of the table.
CLASSES: Final = (
    ACCEPTED, REFUSED, TOO_LONG, NOT_NAMED, CONTROL, MARKUP, TRACEBACK, CRASH, HANG, MEMORY, WRONG,
)  # fmt: skip
GOOD: Final = frozenset((ACCEPTED, REFUSED))

HANG_S: Final = 20.0
#: 1 GB for the whole process: a new one has about 150 MB.
MEMORY_BYTES: Final = 850_000_000

MAX_MESSAGE: Final = 2000
#: Values are cut to 200 characters; quotes and a field's name may adjoin them without a blank.
MAX_WORD: Final = 240
#: Longest name of a file, in bytes.
MAX_FILE_NAME: Final = 255
#: C0 and C1 except line feed and tab, delete, and characters that change the direction of text.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_LONG_WORD = re.compile(rf"\S{{{MAX_WORD},}}")
#: Refusals for reasons other than the files: missing parts of the machine, and actions that need an option.
_NOT_THE_FILES = ("no GPU", "--trust-code", "torch", "unknown op")
#: Mark of hostile names that contain Rich markup; printed text with it but without `bold` was taken as markup.
MARKED: Final = "mk0"


def classify(case: Case, answer: Answer) -> tuple[str, str]:
    """Return the worst class that fits an outcome, and the reason."""
    if answer.ended or answer.grown_bytes > MEMORY_BYTES or answer.error == "MemoryError":
        name = {"hang": HANG, "crash": CRASH}.get(answer.ended, MEMORY)
        return name, f"{answer.seconds:.1f} s, {answer.grown_bytes / 1e6:.0f} MB more\n{answer.stack}"
    if answer.seconds > HANG_S:
        return HANG, f"{answer.seconds:.1f} s"
    if answer.error == "MarkupError":
        return MARKUP, answer.stack
    if answer.error:
        return TRACEBACK, answer.stack
    if answer.code not in (*case.good_codes, 2):
        return WRONG, f"exit code {answer.code}: {answer.err}"
    if answer.nonsense:
        return WRONG, answer.nonsense
    if found := _CONTROL.search(answer.out + answer.err):
        return CONTROL, f"U+{ord(found[0]):04X} in {(answer.out + answer.err)[:500]!r}"
    if answer.markup or _taken_as_markup(answer.out + answer.err):
        return MARKUP, answer.markup or answer.out + answer.err
    became = "accepted" if answer.code in case.good_codes else "refused"
    if case.expected not in ("", became):
        return WRONG, f"{became}, but is to be {case.expected}: {answer.err}"
    return (ACCEPTED, "") if became == "accepted" else _refusal(case, answer.err)


def _refusal(case: Case, err: str) -> tuple[str, str]:
    lines = err.rstrip("\n").splitlines()
    if not lines or not lines[-1].startswith("gpusim: "):
        return WRONG, f"exit code 2 without a line that says why: {err!r}"
    if len(err) > MAX_MESSAGE or _LONG_WORD.search(_without_files(err, case)):
        return TOO_LONG, f"{len(err)} characters: {err[:500]}"
    named = any(name in err for name in case.at_fault)
    if case.at_fault and not named and not any(words in err for words in _NOT_THE_FILES):
        return NOT_NAMED, err
    return REFUSED, err


def _without_files(err: str, case: Case) -> str:
    """Remove file names, as given, from the message: they may be as long as a file system allows."""
    given = {word.rpartition("=")[2] if word.startswith("--") else word for word in case.argv}
    for word in sorted(
        (word for word in given if MAX_WORD // 2 < len(word.encode("utf-8", "replace")) <= MAX_FILE_NAME), key=len
    ):
        err = err.replace(word, "FILE")
    return err


def _taken_as_markup(text: str) -> bool:
    return MARKED in text and "bold" not in text
