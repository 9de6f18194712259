"""Commands killed with SIGKILL at random moments, then run again: lost, half-written and left-over data."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from gpusim.formats.results import read_results
from gpusim.sweep.store import Store
from gpusim.trace.store import write_trace
from gpusim.validation.predictions import predictions_path, read_predictions
from tests.fuzz.sense import file_problem
from tests.support.helpers import wide_trace
from tests.support.sweeping import numbers

ROOT: Final = Path(__file__).parents[2]
#: Mark of a run's processes, for the search for orphans.
MARK: Final = "GPUSIM_KILL_TEST"
#: Time for orphans to notice that their parent has ended; limits of a run and of polling, in s.
ORPHANS_S, RUN_S, POLL_S = 5.0, 120.0, 0.0005
#: Names of the work folder and the temporary folder of a command.
WORK, TEMPORARY = "work", "tmp"


@dataclass(frozen=True)
class Job:
    """A command, the files it writes, and their invariant over a kill and a second run."""

    name: str
    argv: tuple[str, ...]
    outputs: tuple[str, ...]
    """Names, or patterns, of new entries of the folder at the end."""
    content: Callable[[Path], Any]
    """Content of the outputs without parts that differ from run to run."""
    resumes: bool = False
    """Whether a second run resumes the first one's work: then none of it may be lost."""


@dataclass
class Tally:
    """Results of the kills of one job."""

    kills: int = 0
    ended_first: int = 0
    while_writing: int = 0
    lost: list[str] = field(default_factory=list)
    half_written: list[str] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        return [*self.lost, *self.half_written, *self.left_over, *self.orphans]


def gpusim(*words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "gpusim", *words)


def rows(folder: Path) -> Any:
    with Store(folder / "s.sqlite", write=False) as store:
        return numbers(store.rows())


def _bytes(*names: str) -> Callable[[Path], Any]:
    return lambda folder: [(folder / name).read_bytes() for name in names]


def _schedule(folder: Path) -> Any:
    return msgspec.json.decode((folder / "best.json").read_bytes())


def _results(folder: Path) -> Any:
    (path,) = (path for path in folder.glob("r_*.json") if not path.name.endswith(".pairs.json"))
    return [
        (case.trace, case.policy, case.streams, case.predicted_ns, case.measured_ns)
        for case in read_results(path).cases
    ]


def _predictions(folder: Path) -> Any:
    return [
        (trace.name, read_predictions(predictions_path(trace), trace).intervals_ns)
        for trace in (folder / "wide3.json", folder / "wide5.json")
        if predictions_path(trace).exists()
    ]


RECIPE = """name = "r"
policies = ["wavefront", "critical_path"]
counts = [2, 3]
[[case]]
trace = "wide3.json"
[[case]]
trace = "wide5.json"
"""
SWEEP = (
    "sweep", "--trace", "wide3.json", "--trace", "wide5.json", "--hw", "h200", "--policy", "sequential", "--policy",
    "wavefront",
    "--policy", "round_robin", "--policy", "critical_path", "--streams", "2,3,4", "--engine", "reference", "-o",
    "s.sqlite",
)  # fmt: skip


def jobs(scheduler: str | None = None) -> tuple[Job, ...]:
    """Return all jobs; the one on a cluster only with a scheduler."""
    explore = ("explore", "wide5.json", "--budget", "60", "--evaluations", "60", "--seed", "1", "-o", "best.json")
    predict = ("validate", "r.toml", "--stage", "predict", "-o", ".")
    simulate = ("simulate", "wide5.json", "--perfetto", "out.json.gz", "--html", "out.html")
    every = [
        Job("sweep, local", gpusim(*SWEEP, "--workers", "2"), ("s.sqlite",), rows, resumes=True),
        Job("explore -o", gpusim(*explore), ("best.json",), _schedule),
        Job("simulate", gpusim(*simulate), ("out.json.gz", "out.html"), _bytes("out.json.gz")),
        Job("validate, predict", gpusim(*predict), ("*.predicted.json.gz",), _predictions, resumes=True),
        Job("validate", (sys.executable, "-m", "tests.support.killing_validate"), ("r_h200_*",), _results),
    ]
    if scheduler is not None:
        every.insert(1, Job("sweep, Dask", gpusim(*SWEEP, "--scheduler", scheduler), ("s.sqlite",), rows, resumes=True))
    return tuple(every)


class Killer:
    """Killer of one job, repeatedly; the first, complete run gives the expected result and duration."""

    def __init__(self, job: Job, folder: Path, seed: int) -> None:
        self.job, self.folder = job, folder
        self.random = random.Random(f"{seed}/{job.name}")
        self.tally = Tally()
        place = self._new_place("whole")
        start = time.monotonic()
        if problem := self._finish(place):
            raise RuntimeError(f"{job.name}, not killed: {problem}")
        self.seconds = time.monotonic() - start
        self.whole = job.content(place / WORK)
        if left := self._left(place):
            self.tally.left_over.append(f"{job.name}, not killed: {left}")

    def kill(self, number: int) -> None:
        """Kill once, and run the command again."""
        job, tally = self.job, self.tally
        place = self._new_place(f"kill{number}")
        mark = uuid.uuid4().hex
        # Half of the kills while a file is being written, which is a short time; the others at any time.
        at_write = self.random.random() < 0.5
        moment = self.random.uniform(0.0, self.seconds)
        process = self._start(place, mark)
        ended = not self._wait(process, place, moment, at_write)
        process.kill()
        process.wait()
        tally.kills += 1
        tally.ended_first += ended
        tally.while_writing += any(path.name.startswith(".") for path in self._there(place))
        case = f"{job.name}, kill {number} after {moment:.2f} s"
        if orphans := _wait_for_end(mark):
            tally.orphans.append(f"{case}: {orphans}")
        tally.half_written += [f"{case}: {problem}" for problem in self._half_written(place)]
        before = self._safe_content(place) if job.resumes else None
        problem = self._finish(place)
        after = self._safe_content(place)
        if problem or after != self.whole:
            tally.lost.append(f"{case}: {problem or 'the second run does not give what a whole run gives'}")
        elif before is not None and not set(before) <= set(after):
            tally.lost.append(f"{case}: rows are gone")
        if left := self._left(place):
            tally.left_over.append(f"{case}: {left}")
        shutil.rmtree(place)

    def _new_place(self, name: str) -> Path:
        place = self.folder / f"{self.job.name.replace(' ', '-').replace(',', '')}-{name}"
        (place / WORK).mkdir(parents=True)
        (place / TEMPORARY).mkdir()
        for width in (3, 5):
            write_trace(wide_trace(width, eager_ns=400_000, graph_ns=130_000), place / WORK / f"wide{width}.json")
        (place / WORK / "r.toml").write_text(RECIPE)
        return place

    def _start(self, place: Path, mark: str) -> subprocess.Popen[bytes]:
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(place / TEMPORARY),
            MARK: mark,
            "NUMBA_NUM_THREADS": "1",
        }
        with (place / "log").open("ab") as log:
            return subprocess.Popen(
                self.job.argv, cwd=place / WORK, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def _wait(self, process: subprocess.Popen[bytes], place: Path, moment: float, at_write: bool) -> bool:
        """Wait for the moment; False where the command ended before it."""
        deadline = time.monotonic() + moment
        while process.poll() is None:
            if at_write and any(
                path.name.startswith(".") or path.name.endswith("-journal") for path in self._there(place)
            ):
                return True
            if time.monotonic() > deadline and not at_write:
                return True
            time.sleep(POLL_S)
        return False

    def _finish(self, place: Path) -> str:
        """Run the command to its end; returns the problem."""
        mark = uuid.uuid4().hex
        process = self._start(place, mark)
        try:
            code = process.wait(RUN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"the second run did not end within {RUN_S:.0f} s"
        finally:
            _kill(mark)
        return f"exit code {code}: {(place / 'log').read_text()[-500:]}" if code else ""

    def _there(self, place: Path) -> list[Path]:
        with contextlib.suppress(OSError):
            return list((place / WORK).iterdir())
        return []

    def _half_written(self, place: Path) -> list[str]:
        """Return the problems of existing outputs; a store is complete once its journal has been played back."""
        named = [path for path in self._there(place) if any(path.match(pattern) for pattern in self.job.outputs)]
        return [
            problem
            for path in named
            if path.is_file() and path.suffix not in (".sqlite", ".md") and (problem := file_problem(path))
        ]

    def _safe_content(self, place: Path) -> Any:
        try:
            return self.job.content(place / WORK)
        except Exception as error:  # any error means missing content
            return (
                {f"unreadable: {error}": ()}
                if self.job.resumes and (place / WORK / "s.sqlite").exists() and not _empty(place)
                else {}
            )

    def _left(self, place: Path) -> list[str]:
        inputs = ("wide3.json", "wide5.json", "r.toml")
        there = [p.name for p in self._there(place) if not any(p.match(pattern) for pattern in self.job.outputs)]
        kept = sorted(name for name in there if name not in inputs)
        inside = sorted(
            str(path.relative_to(place)) for path in (place / WORK).rglob(".*") if path.parent != place / WORK
        )
        return [*kept, *inside, *sorted(f"{TEMPORARY}/{path.name}" for path in (place / TEMPORARY).iterdir())]


def _empty(place: Path) -> bool:
    """Whether the store was created but still empty: a reader then says that it is none."""
    return (place / WORK / "s.sqlite").stat().st_size == 0 or (place / WORK / "s.sqlite-journal").exists()


def _marked(mark: str) -> list[tuple[int, str]]:
    """Return the processes of a run: number and command."""
    processes = []
    for place in Path("/proc").iterdir():
        if not place.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (place / "environ").read_bytes():
                state = (place / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z":
                    processes.append(
                        (
                            int(place.name),
                            (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:160],
                        )
                    )
    return processes


def _wait_for_end(mark: str) -> list[str]:
    """Return the commands of processes that outlive their parent, after killing them."""
    deadline = time.monotonic() + ORPHANS_S
    while (processes := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    _kill(mark)
    return [command for _, command in processes]


def _kill(mark: str) -> None:
    for number, _ in _marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def kill_all(
    chosen: Sequence[Job], kills: int, folder: Path, seed: int, say: Callable[[str], None]
) -> dict[str, Tally]:
    """Distribute `kills` kills evenly over the jobs."""
    tallies: dict[str, Tally] = {}
    for place, job in enumerate(chosen):
        killer = Killer(job, folder, seed)
        for number in range(kills // len(chosen) + (place < kills % len(chosen))):
            killer.kill(number)
        tallies[job.name] = killer.tally
        say(f"{job.name}: {killer.tally.kills} kills, {len(killer.tally.problems)} problems")
    return tallies


def table(tallies: dict[str, Tally]) -> str:
    """Return a Markdown table."""
    head = ("command", "kills", "ended before", "while writing", "lost", "half written", "left over", "orphans")
    lines = [f"| {' | '.join(head)} |", "|---|" + "--:|" * (len(head) - 1)]
    for name, t in tallies.items():
        counts = (
            t.kills,
            t.ended_first,
            t.while_writing,
            len(t.lost),
            len(t.half_written),
            len(t.left_over),
            len(t.orphans),
        )
        lines.append(f"| {name} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)
