"""Standard output and error of the command line, with handling of failed writes."""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, TextIO

from gpusim.errors import OutputError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

STANDARD_OUTPUT: Final = "standard output"


class ReaderGoneError(Exception):
    """The reader of standard output is gone (`gpusim ... | head -1`), which is no error."""


@contextmanager
def checked_output() -> Iterator[None]:
    """Within the context, every failed write to standard output raises `OutputError` or `ReaderGoneError`."""
    before = sys.stdout
    sys.stdout = _checked(before, _Output)
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    finally:
        mine, sys.stdout = sys.stdout, before
        _close(mine, before)


@contextmanager
def quiet_errors() -> Iterator[None]:
    """Within the context, failed writes to standard error are ignored, since there is no place to report them."""
    before = sys.stderr
    sys.stderr = _checked(before, _Errors)
    try:
        yield
    finally:
        mine, sys.stderr = sys.stderr, before
        _close(mine, before)


class _Output(io.FileIO):
    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as cause:
            if cause.errno == errno.EPIPE:
                raise ReaderGoneError from cause
            raise OutputError(STANDARD_OUTPUT, f"cannot be written: {cause.strerror or cause}") from cause


class _Errors(io.FileIO):
    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def _checked(stream: TextIO, kind: type[io.FileIO]) -> TextIO:
    """Return a stream to the same file with checked writes; a stream without a file is returned as it is."""
    buffer = getattr(stream, "buffer", None)
    if not isinstance(getattr(buffer, "raw", buffer), io.FileIO) or not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    raw = kind(stream.fileno(), "w", closefd=False)
    # Characters outside the terminal's encoding are written as escapes.
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _close(mine: TextIO, before: TextIO) -> None:
    """Close a stream but not its file; pending output that cannot be written is dropped."""
    if mine is not before:
        with suppress(ReaderGoneError, OutputError):
            mine.close()
