"""Reading of untrusted files in a separate process, with limits on memory and time.

A file that exceeds the limits ends that process and gives a one-line error here; this process waits without blocking
its other threads. Results return as bytes, piece by piece, and are decoded by type: nothing is unpickled. The process
is started, not forked, since the calling server has threads.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Generator, Iterable
from typing import IO, Final

import msgspec

from gpusim.errors import FileError
from gpusim.io.decoding import decode_json
from gpusim.io.file_limits import MAX_APART_BYTES, MAX_APART_S
from gpusim.units import GIB

_PROGRAM: Final = "import sys; sys.path[:] = sys.argv[1:]; from gpusim.io.sandbox import serve; serve()"
_LENGTH: Final = struct.Struct("<cQ")
_PIECE, _ERROR, _END, _MEMORY, _DEFECT = b"p", b"e", b".", b"m", b"d"


#: Message for a file over the memory limit.
_OVER_MEMORY: Final = f"needs more than {MAX_APART_BYTES / GIB:.0f} GiB of memory to be read"


class _Question(msgspec.Struct):
    function: str
    name: str
    options: dict[str, int]


class _Problem(msgspec.Struct):
    problem: str
    place: str


def read_apart(
    function: str, data: bytes, name: str, error: type[FileError], **options: int
) -> Generator[bytes, None, None]:
    """Yield the pieces that `function` (`module:name`) returns for a file's content in a separate process.

    It is called as `function(data, name, **options)`. Its `FileError` is raised here as `error`, and so is exceeding
    the memory (`MAX_APART_BYTES`) or time (`MAX_APART_S`). Any other failure is a `RuntimeError` with its traceback,
    since it is a defect of gpusim, not of the file.
    """
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, *sys.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    late = threading.Event()

    def stop() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(MAX_APART_S, stop)
    timer.start()
    try:
        with contextlib.suppress(BrokenPipeError):  # it has ended; its message is read below
            _send(process.stdin, _PIECE, msgspec.json.encode(_Question(function, name, options)))
            _send(process.stdin, _PIECE, data)
            process.stdin.close()
        while True:
            kind, piece = _receive(process.stdout)
            if kind == _END:
                return
            if kind == _ERROR:
                refusal = decode_json(piece, _Problem)
                raise error(name, refusal.problem, place=refusal.place)
            if kind == _MEMORY:
                raise error(name, _OVER_MEMORY)
            if kind == _DEFECT:
                raise RuntimeError(f"{function} failed in its process:\n{piece.decode()}")
            yield piece
    except EOFError:
        status = process.wait()
        if late.is_set() or status == -signal.SIGXCPU:
            raise error(name, f"needs more than {MAX_APART_S} s to be read") from None
        # SIGKILL: the kernel, out of memory. SIGSEGV, SIGABRT: a failed allocation in a C library.
        if status in (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGABRT):
            raise error(name, _OVER_MEMORY) from None
        raise RuntimeError(f"{function}: its process ended with status {status}") from None
    finally:
        timer.cancel()
        process.kill()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        process.wait()


def serve() -> None:
    """Run in the separate process: read one question from standard input and write its answer to standard output."""
    with contextlib.suppress(OSError, ValueError):  # a lower limit stays
        resource.setrlimit(resource.RLIMIT_AS, (MAX_APART_BYTES, MAX_APART_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_APART_S, MAX_APART_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "wb")
    question = decode_json(_receive(sys.stdin.buffer)[1], _Question)
    data = _receive(sys.stdin.buffer)[1]
    module, _, name = question.function.partition(":")
    try:
        pieces: Iterable[bytes] = getattr(importlib.import_module(module), name)(
            data, question.name, **question.options
        )
        del data
        for piece in pieces:
            _send(answers, _PIECE, piece)
        _send(answers, _END, b"")
    except FileError as error:
        _send(answers, _ERROR, msgspec.json.encode(_Problem(error.problem, error.place)))
    except MemoryError:
        _send(answers, _MEMORY, b"")
    except Exception:
        _send(answers, _DEFECT, traceback.format_exc().encode(errors="replace"))


def _send(pipe: IO[bytes], kind: bytes, data: bytes) -> None:
    pipe.write(_LENGTH.pack(kind, len(data)))
    pipe.write(data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> tuple[bytes, bytes]:
    """Receive one message. Raises `EOFError` if the other side has ended."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    kind, length = _LENGTH.unpack(head)
    data = pipe.read(length)
    if len(data) < length:
        raise EOFError
    return kind, data
