"""Start the ranks of a plan on this machine, watch them, and end all as soon as one fails.

Like `torchrun`, but without a port (ranks meet at a file), and with errors of one line. A rank's standard input is a
pipe from here, which ends with this process: then the rank ends too (`end_with_starter`).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gpusim.errors import GpuError
from gpusim.text import shortened

#: Time between checks of the ranks, and for a rank to end on request.
_LOOK_S: Final = 0.05
_END_S: Final = 5.0
#: Most characters kept of a failed rank's last line.
_WORDS: Final = 300
#: First line of a warning; the source line below it is indented.
_WARNING: Final = re.compile(r"\S+:\d+: \w*Warning: ")


def launch(gpus: int, module: str, arguments: Sequence[str], *, timeout_s: float) -> str:
    """Run `python -m MODULE ARGUMENTS` as `gpus` ranks; returns the standard output of rank 0.

    Raises `GpuError` with rank, exit status and last line if one fails, or if they take longer than `timeout_s`. No
    process is left in either case.
    """
    with tempfile.TemporaryDirectory(prefix="gpusim-ranks-") as folder:
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(gpus):
                ranks.append(_start(rank, gpus, module, arguments, Path(folder)))
            _watch(ranks, Path(folder), time.monotonic() + timeout_s, timeout_s)
        finally:
            _end(ranks)
        return (Path(folder) / "0.out").read_text(errors="replace")


def _start(rank: int, gpus: int, module: str, arguments: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(gpus),
        "GPUSIM_RANKS_FILE": str(folder / "store"),
    }
    with (folder / f"{rank}.out").open("wb") as output, (folder / f"{rank}.err").open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
            env=environment,
            start_new_session=True,  # a session of its own: what a rank started ends with it
        )


def _watch(ranks: Sequence[subprocess.Popen[bytes]], folder: Path, until: float, timeout_s: float) -> None:
    """Wait for all ranks. Raises `GpuError` as soon as one fails, or at the deadline."""
    while True:
        states = [rank.poll() for rank in ranks]
        failed = next((number for number, state in enumerate(states) if state not in (None, 0)), None)
        if failed is not None:
            raise GpuError(f"rank {failed} of {len(ranks)} {_ended(states[failed])}: {_last_words(folder, failed)}")
        if all(state == 0 for state in states):
            return
        if time.monotonic() > until:
            waiting = [str(number) for number, state in enumerate(states) if state is None]
            raise GpuError(f"ranks {', '.join(waiting)} of {len(ranks)} did not end within {timeout_s:g} s")
        time.sleep(_LOOK_S)


def _ended(state: int | None) -> str:
    assert state is not None
    if state < 0:
        return f"was ended by signal {-state} ({signal.Signals(-state).name})"
    return f"failed with exit status {state}"


def _last_words(folder: Path, rank: int) -> str:
    """Return the last line that a rank wrote to standard error and that is no warning, which is no reason."""
    lines = (folder / f"{rank}.err").read_text(errors="replace").splitlines()
    said = [line for line in lines if line and not line[0].isspace() and not _WARNING.match(line)]
    return shortened(said[-1].strip(), _WORDS) if said else "without a word"


def end_with_starter() -> None:
    """End this rank once the process that started it is gone, however it ended."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the ranks that still run."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        left = [rank for rank in ranks if rank.poll() is None]
        for rank in left:
            _signal(rank, number)
        until = time.monotonic() + _END_S
        while any(rank.poll() is None for rank in left) and time.monotonic() < until:
            time.sleep(_LOOK_S)
    for rank in ranks:
        if rank.stdin is not None:
            rank.stdin.close()


def _signal(rank: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(rank.pid, number)
