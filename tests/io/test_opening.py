"""Names of pipes, devices and sparse files neither hang a command nor exhaust its memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpusim.errors import FileError, OutputError, TraceError
from gpusim.formats.hardware import load_hardware
from gpusim.formats.topology import load_topology
from gpusim.importers import examine
from gpusim.importers.recognise import is_foreign
from gpusim.io import opening
from gpusim.io.files import read_bytes, read_toml, write_bytes
from gpusim.io.opening import TooLargeError, UnreadableError, names_a_file, open_file, read_limited
from gpusim.trace.store import bundled_traces, load_trace, read_trace
from gpusim.units import GIB, MIB


@pytest.fixture
def short_silence(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give up on pipes after a tenth of a second."""
    monkeypatch.setattr(opening, "SILENCE_S", 0.1)
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < 30  # of a test that would otherwise never end


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "t.json"
    os.mkfifo(path)
    return path


def fill(path: Path, *pieces: bytes) -> threading.Thread:
    """Write into a pipe, with pauses, in a thread."""

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            for piece in pieces:
                file.write(piece)
                time.sleep(0.02)

    thread = threading.Thread(target=write)
    thread.start()
    return thread


@pytest.mark.parametrize("load", [load_trace, load_hardware, load_topology])
def test_a_bundled_name_is_no_file_in_the_working_folder(
    load: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file `h200` there would replace the model of the default GPU without a word."""
    name = next(iter(bundled_traces())) if load is load_trace else "h200"
    before = load(name)
    (tmp_path / name).write_text("no JSON")
    monkeypatch.chdir(tmp_path)
    assert load(name) == before
    with pytest.raises(FileError, match="JSON"):
        load(f"./{name}")


def test_name_of_what_is_there_is_no_bundled_name_unless_it_is_a_folder(tmp_path: Path) -> None:
    """Otherwise a pipe or a broken link without a suffix would be an unknown trace, with a list of the known ones."""
    pipe, link, folder = tmp_path / "pipe", tmp_path / "link", tmp_path / "h200"
    os.mkfifo(pipe)
    link.symlink_to(link)
    folder.mkdir()
    assert [names_a_file(str(path), ".json") for path in (pipe, link, folder)] == [True, True, False]
    assert [names_a_file(name, ".json") for name in ("no.json", "h200", "x" * 5000, "\0")] == [
        True,
        False,
        False,
        False,
    ]
    with pytest.raises(TraceError, match="link: cannot be read: Too many levels of symbolic links"):
        load_trace(str(link))


@pytest.mark.usefixtures("short_silence")
def test_pipe_that_nobody_fills_is_given_up(pipe: Path) -> None:
    with pytest.raises(TraceError, match=r"t\.json: has given nothing for"):
        read_trace(pipe)
    with pytest.raises(FileError, match="has given nothing for"):
        read_toml(pipe, dict, FileError)


@pytest.mark.usefixtures("short_silence")
def test_terminal_at_which_nobody_types_is_given_up() -> None:
    main, side = os.openpty()
    try:
        with pytest.raises(TraceError, match="has given nothing for"):
            read_trace(Path(os.ttyname(side)))
    finally:
        os.close(main)
        os.close(side)


def test_pipe_is_read_to_its_end_however_slowly_it_is_filled(pipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "SILENCE_S", 20)
    thread = fill(pipe, b"a" * 70_000, b"b", b"c" * 70_000)
    assert read_bytes(pipe, TraceError) == b"a" * 70_000 + b"b" + b"c" * 70_000
    thread.join()


def test_pipe_that_does_not_end_is_refused_at_the_limit(pipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "SILENCE_S", 20)
    thread = fill(pipe, b"x" * 3000)
    with pytest.raises(TooLargeError):
        read_limited(pipe, 10_000, 2000)
    thread.join()


def test_sparse_file_is_refused_before_its_holes_take_memory(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with path.open("wb") as file:
        file.write(b'{"schema": "gpusim-trace/1"')
        file.truncate(2 * GIB - 1)
    with pytest.raises(TraceError, match=r"has a hole from byte \d+ on"):
        read_trace(path)


def test_file_without_holes_is_read_whatever_space_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system may compress: blocks prove nothing, holes do."""
    path = tmp_path / "t.json"
    path.write_bytes(b"x" * 3 * MIB)
    monkeypatch.setattr(os, "SEEK_HOLE", os.SEEK_END)  # as file systems without holes answer
    monkeypatch.setattr(opening, "MAX_HOLES_BYTES", -(2**40))
    assert len(read_bytes(path, TraceError)) == 3 * MIB


def test_file_without_a_size_is_read() -> None:
    assert b"\0" in read_bytes(Path("/proc/self/cmdline"), TraceError)


def test_importers_read_regular_files_alone(pipe: Path) -> None:
    assert not is_foreign(str(pipe))
    with pytest.raises(TraceError, match="is a pipe or a device: write its content to a file first"):
        examine([str(pipe)])
    with pytest.raises(UnreadableError):
        open_file(Path("/dev/zero"))


def test_output_to_a_pipe_that_nobody_reads_is_one_line(pipe: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written: No such device or address"):
        write_bytes(pipe, b"data")


def test_output_to_a_pipe_that_somebody_reads_arrives(pipe: Path) -> None:
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(pipe.read_bytes()))
    thread.start()
    for _ in range(500):
        try:
            write_bytes(pipe, b"data" * 50_000)
            break
        except OutputError:  # not open on the other side yet
            time.sleep(0.02)
    thread.join()
    assert found == [b"data" * 50_000]
