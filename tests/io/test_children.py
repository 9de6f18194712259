"""After a killed process no children continue, and no scratch folder remains after the next run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from gpusim.io.scratch import scratch_folder

#: Time for a child to notice that its parent has ended, in s.
NOTICE_S = 20.0
#: Endless work that first writes its process id to stdout.
WORK = """
import os

def endless(number=None):
    os.write(1, f"{os.getpid()}\\n".encode())
    while True:
        pass
"""
#: Children with this work, started in each of gpusim's ways.
PROGRAM = """
import multiprocessing, os, sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from gpusim.io.processes import end_with_parent
from gpusim.gpu.isolate import alone
from gpusim.sweep import local
from work import endless

class Endless(Connection):
    def recv(self):
        endless()

def serve(pipe):
    local._serve(Endless(os.dup(pipe.fileno())), "")

if __name__ == "__main__":
    if sys.argv[1] == "alone":
        alone(endless)
    elif sys.argv[1] == "sweep":
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        spawn.Process(target=serve, args=(theirs,), daemon=True).start()
        ours.recv(), ours.recv()
    else:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(2, mp_context=spawn, initializer=end_with_parent) as pool:
            list(pool.map(endless, range(2)))
"""


@pytest.mark.parametrize(("way", "children"), [("alone", 1), ("sweep", 1), ("pool", 2)])
def test_children_of_a_killed_process_end_though_they_compute(way: str, children: int, tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(WORK)
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    parent = subprocess.Popen([sys.executable, tmp_path / "program.py", way], stdout=subprocess.PIPE, env=environment)
    assert parent.stdout is not None
    numbers = [int(parent.stdout.readline()) for _ in range(children)]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    try:
        deadline = time.monotonic() + NOTICE_S
        while (living := [number for number in numbers if _lives(number)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not living
    finally:
        for number in numbers:
            if _lives(number):
                os.kill(number, signal.SIGKILL)


def _lives(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_scratch_folder_is_gone_afterwards_also_after_an_error(top: Path) -> None:
    def fail() -> None:
        with scratch_folder() as folder:
            (folder / "a").mkdir()
            (folder / "a" / "b").write_text("x")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not list(top.iterdir())


def test_scratch_folder_of_a_killed_process_is_removed_by_the_next_run(top: Path) -> None:
    program = (
        "import time; from gpusim.io.scratch import scratch_folder\nwith scratch_folder() as f:\n print(f, flush=True)"
    )
    command = [sys.executable, "-c", f"{program}\n (f / 'x').write_text('x')\n time.sleep(600)"]
    environment = os.environ | {"TMPDIR": str(top), "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        with scratch_folder():
            assert left.is_dir(), "its process is alive"
        process.kill()
    assert left.is_dir()
    with scratch_folder() as folder:
        assert list(top.iterdir()) == [folder]


def test_scratch_folders_spare_what_others_made(top: Path) -> None:
    (top / "else").mkdir()
    (top / "target").mkdir()
    (top / "gpusim-scratch-link").symlink_to(top / "target")
    (top / "gpusim-scratch-file").write_text("x")
    with scratch_folder():
        pass
    names = sorted(path.name for path in top.iterdir())
    assert names == ["else", "gpusim-scratch-file", "gpusim-scratch-link", "target"]
