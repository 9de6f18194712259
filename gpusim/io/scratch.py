"""Temporary folders of a run, removed after it, even after a killed one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_PREFIX: Final = "gpusim-scratch-"


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Provide an empty folder that is removed at the end; first remove those of this user's killed processes.

    A folder is locked while its process lives; the system releases the lock of a killed process.
    """
    top = Path(tempfile.gettempdir())
    _remove_leftovers(top)
    folder, handle = _make(top)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _make(top: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=top))
        with contextlib.suppress(FileNotFoundError):  # removed as a leftover before it was locked
            handle = _open(folder)
            with contextlib.suppress(OSError):  # no locks on this file system, so leftovers are not removed either
                fcntl.flock(handle, fcntl.LOCK_EX)
            if folder.is_dir():
                return folder, handle
            os.close(handle)


def _remove_leftovers(top: Path) -> None:
    for folder in top.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            handle = _open(folder)
            try:
                if os.fstat(handle).st_uid == os.getuid():
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
            finally:
                os.close(handle)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
