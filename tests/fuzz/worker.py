"""A worker process: it takes cases over a pipe, runs each in a new folder, and answers; `tests.fuzz.run` monitors
it.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from click.testing import CliRunner

from tests.fuzz.bases import InThisProcess, traces
from tests.fuzz.cases import Answer, Case
from tests.fuzz.mutate import to_json
from tests.fuzz.readers import run
from tests.fuzz.sense import active_markup, nonsense, step_problem
from tests.fuzz.stand_ins import STAND_INS

#: Commands before the first case, since compilation may take up to a minute.
WARM_UP = (
    ("simulate", "trace.json"),
    ("simulate", "trace.json", "--launch", "stream"),
    ("explore", "trace.json", "--budget", "0.05", "--evaluations", "2"),
    ("explore", "trace.json", "--budget", "0.05", "--evaluations", "2", "--partitions", "64+68"),
    ("limits", "trace.json"),
    ("whatif", "trace.json"),
    ("parallel", "trace.json", "--gpus", "2"),
)
#: Commands whose accepted steps are simulated again with both engines and checked against the rules.
CHECKED = ("simulate",)


def memory_bytes(field: str) -> int:
    """Return `VmRSS`, or `VmHWM` for the peak since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


def forget_peak() -> None:
    """Reset the peak; where the system does not allow that, the peak is that of the whole process."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def answer_of(case: Case, folder: Path) -> Answer:
    """Run a case in the empty folder `folder`."""
    case.write(folder)
    (folder / "folder").mkdir()
    os.chdir(folder)
    forget_peak()
    before, start = memory_bytes("VmRSS"), time.monotonic()
    code, error, stack = 0, "", ""
    runner = CliRunner()
    # With colour, as on a terminal: elsewhere click removes escape sequences from its output.
    with runner.isolation(color=True) as streams, warnings.catch_warnings(action="ignore"):
        try:
            run(case.argv)
        except SystemExit as ended:
            code = int(ended.code or 0)
        except BaseException as caught:
            error, stack = type(caught).__name__, "".join(traceback.format_exception(caught))[-3000:]
        sys.stdout.flush()
        sys.stderr.flush()
        out, err = (stream.getvalue().decode("utf-8", "replace") for stream in streams[:2])
    seconds, grown = time.monotonic() - start, memory_bytes("VmHWM") - before
    problem = markup = ""
    if not error:
        problem, markup = nonsense(case, folder, code, out), active_markup(case, folder)
    if not error and not problem and code == 0 and case.argv[0] in CHECKED and case.family != "options":
        try:
            problem = step_problem(case)
        except Exception as caught:
            error, stack = type(caught).__name__, "".join(traceback.format_exception(caught))[-3000:]
    return Answer(code, out[:20_000], err[:20_000], error, stack, problem, markup, seconds, max(0, grown))


def _warm_up(home: Path, commands: Sequence[tuple[str, ...]]) -> None:
    for number, words in enumerate(commands):
        folder = home / f"warm{number}"
        folder.mkdir()
        answer_of(Case("warm", words, {"trace.json": to_json(traces()[0])}), folder)
    os.chdir(home)


def serve(pipe: Connection, stand_in: str) -> None:
    """Answer until the other side closes."""
    home = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        _warm_up(home, WARM_UP[:1] if stand_in else WARM_UP)  # nothing else is asked of a stand-in
        if stand_in:
            STAND_INS[stand_in]()
        pipe.send(("ready", str(home)))
        while True:
            case: Case = pipe.recv()
            folder = home / "a" / "b" / "c"  # names such as ../../x stay below
            folder.mkdir(parents=True)
            pipe.send(("begin", case.argv))
            answer = answer_of(case, folder)
            os.chdir(home)
            shutil.rmtree(home / "a", ignore_errors=True)
            pipe.send(("answer", answer, memory_bytes("VmRSS")))
    except (EOFError, OSError):
        return
    finally:
        os.chdir("/")
        shutil.rmtree(home, ignore_errors=True)


def prepare() -> None:
    """Load the modules of the cases, so that the first is as fast as the others; no torch, no GPU, no further
    processes.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.modules["torch"] = None  # type: ignore[assignment]
    from gpusim.sweep import local

    local.LocalWorkers = InThisProcess  # type: ignore[assignment, misc]
    import plotly.graph_objects  # noqa: F401

    import gpusim.engine.fast
    import gpusim.engine.reference
    import gpusim.search.explore  # noqa: F401


def main() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    handle, stand_in = int(sys.argv[1]), sys.argv[2]
    prepare()
    serve(Connection(handle), stand_in)


if __name__ == "__main__":
    main()
