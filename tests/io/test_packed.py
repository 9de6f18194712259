"""A folder of documents kept as one file: read like the folder, within the limits on archives."""

from __future__ import annotations

import importlib.util
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from gpusim.errors import FileError, TraceError
from gpusim.io import packed
from gpusim.io.files import read_file
from gpusim.io.packed import files_in, is_file, is_folder
from gpusim.trace.store import bundled_traces, read_trace

ROOT = Path(__file__).parents[2]
NAME = "vgg16-infer-b1.json.gz"
SMALL = bundled_traces()["vgg16-infer-b1"]


def pack(folders: list[str]) -> None:
    """Run `scripts/pack_traces.py`, which is not in a package."""
    spec = importlib.util.spec_from_file_location("pack_traces", ROOT / "scripts" / "pack_traces.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main(folders) == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder that exists only as a set."""
    made = tmp_path / "kinds"
    made.mkdir()
    (made / NAME).write_bytes(SMALL.read_bytes())
    (made / "a.json.gz").write_bytes(b"a")
    pack([str(made)])
    assert not made.exists()
    return made


def test_files_of_a_set_are_read_under_the_names_that_they_had(folder: Path) -> None:
    assert read_trace(folder / NAME) == read_trace(SMALL)
    assert read_file(folder / NAME, FileError) == SMALL.read_bytes()
    assert files_in(folder, ".json.gz") == [folder / "a.json.gz", folder / NAME]
    assert is_folder(folder)
    assert is_file(folder / NAME)
    assert not is_file(folder / "b.json.gz")


def test_a_file_of_the_folder_comes_before_that_of_the_set_and_packing_again_takes_it(folder: Path) -> None:
    folder.mkdir()
    (folder / "a.json.gz").write_bytes(b"newer")
    assert read_file(folder / "a.json.gz", FileError) == b"newer"
    before = folder.with_suffix(".zip").read_bytes()
    pack([str(folder)])
    assert folder.with_suffix(".zip").read_bytes() != before
    assert read_file(folder / "a.json.gz", FileError) == b"newer"
    assert read_file(folder / NAME, FileError) == SMALL.read_bytes()


def test_same_files_make_the_same_set(folder: Path) -> None:
    before = folder.with_suffix(".zip").read_bytes()
    pack([str(folder)])
    assert folder.with_suffix(".zip").read_bytes() == before


def test_file_that_neither_folder_nor_set_has_is_missing_as_ever(folder: Path) -> None:
    with pytest.raises(TraceError, match=r"b\.json\.gz: cannot be read: No such file or directory"):
        read_trace(folder / "b.json.gz")


def compressed(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(NAME, bytes(10_000_000))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def changed(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)


def too_many(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(packed.MAX_MEMBERS):
            archive.writestr(f"{number}", b"")
        archive.writestr(NAME, b"")


def long_list(path: Path) -> None:
    """Write an end record that claims a list of members of 1 GB."""
    data = path.read_bytes()
    path.write_bytes(data[:-10] + (2**30).to_bytes(4, "little") + data[-6:])


def list_elsewhere(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-22] + b"PK\x06\x07" + bytes(16) + data[-22:])


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (compressed, "is compressed or encrypted"),
        (cut, "it has no list of members"),
        (changed, "is a damaged archive: Bad CRC-32"),
        (too_many, "has more than 4096 members"),
        (long_list, r"has a list of members of more than 4 MiB"),
        (list_elsewhere, "is a zip archive for more than 4 GB"),
        (lambda path: path.write_bytes(b""), "it has no list of members"),
    ],
    ids=["compressed", "cut", "changed", "too many", "long list", "list elsewhere", "empty"],
)
def test_damaged_set_is_one_line(folder: Path, harm: Callable[[Path], None], problem: str) -> None:
    harm(folder.with_suffix(".zip"))
    with pytest.raises(TraceError, match=problem) as caught:
        read_trace(folder / NAME)
    assert str(caught.value).startswith(str(folder.with_suffix(".zip")))
    assert "\n" not in str(caught.value)


def test_member_is_read_no_further_than_the_limit(folder: Path) -> None:
    with pytest.raises(FileError, match="is larger than 10 B"):
        packed.read_packed(folder / NAME, 10, FileError)
