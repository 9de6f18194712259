"""The classes of answers, and which of them an answer belongs to."""

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
#: In the order of the table.
CLASSES: Final = (
    ACCEPTED, REFUSED, TOO_LONG, NOT_NAMED, CONTROL, MARKUP, TRACEBACK, CRASH, HANG, MEMORY, WRONG,
)  # fmt: skip
GOOD: Final = frozenset((ACCEPTED, REFUSED))

HANG_S: Final = 20.0
#: 1 GB for the whole process: one that has just started has some 150 MB.
MEMORY_BYTES: Final = 850_000_000

MAX_MESSAGE: Final = 2000
#: Values are cut to 200 characters; quotes and a field's name may stand beside them without a blank.
MAX_WORD: Final = 240
#: Longest name of a file, in bytes.
MAX_FILE_NAME: Final = 255
#: C0 and C1 but for line feed and tab, delete, and what turns the direction of text.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_LONG_WORD = re.compile(rf"\S{{{MAX_WORD},}}")
#: Refusals for reasons other than the files: what the machine lacks, and what only an option allows.
_NOT_THE_FILES = ("no GPU", "--trust-code", "torch", "unknown op")
#: The mark of hostile names that contain Rich markup; printed text that has it without `bold` was taken as markup.
MARKED: Final = "mk0"


def classify(case: Case, answer: Answer) -> tuple[str, str]:
    """The class of an answer, the worst that fits, and the reason."""
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
    # click prints how the command is used before its own errors.
    if not lines or not (lines[-1].startswith("gpusim: ") or any(line.startswith("Error: ") for line in lines)):
        return WRONG, f"exit code 2 without a line that says why: {err!r}"
    if len(err) > MAX_MESSAGE or _LONG_WORD.search(_without_files(err, case)):
        return TOO_LONG, f"{len(err)} characters: {err[:500]}"
    named = any(name in err for name in case.at_fault)
    if case.at_fault and not named and not any(words in err for words in _NOT_THE_FILES):
        return NOT_NAMED, err
    return REFUSED, err


def _without_files(err: str, case: Case) -> str:
    """The message without names of files as they were given: those may be as long as a file system allows."""
    given = {word.rpartition("=")[2] if word.startswith("--") else word for word in case.argv}
    for word in sorted(
        (word for word in given if MAX_WORD // 2 < len(word.encode("utf-8", "replace")) <= MAX_FILE_NAME), key=len
    ):
        err = err.replace(word, "FILE")
    return err


def _taken_as_markup(text: str) -> bool:
    return MARKED in text and "bold" not in text
