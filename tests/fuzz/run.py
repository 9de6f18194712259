"""Runner of cases in worker processes under a watchdog, with stored outcomes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

from tests.fuzz.cases import Answer, Case
from tests.fuzz.classes import CLASSES, GOOD, HANG_S, MEMORY_BYTES, classify
from tests.fuzz.families import make_case, split

ROOT = Path(__file__).parent.parent.parent
POLL_S, START_S = 0.05, 400.0
#: Growth at which a worker is killed: well above the limit, so that slight excess is measured.
KILL_BYTES = 2 * MEMORY_BYTES
#: Growth by caches at which a worker is replaced.
OLD_BYTES = 900_000_000
STACK_S = 0.3


class Worker:
    """A process of `tests.fuzz.worker` and its pipe, restarted after a kill."""

    def __init__(self, stand_in: str = "", hang_s: float = HANG_S) -> None:
        self.stand_in, self.hang_s = stand_in, hang_s
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch = Path(tempfile.mkdtemp(prefix="fuzz-run-"))

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def ask(self, case: Case) -> Answer:
        """Return the answer of the process, or the reason for none."""
        if self._process is None:
            self._start()
        assert self._process is not None
        try:
            self._pipe.send(case)
            return self._wait()
        except (EOFError, OSError):
            return self._dead("crash", 0.0, 0)

    def _wait(self) -> Answer:
        start, before = time.monotonic(), 0
        while True:
            if self._pipe.poll(POLL_S):
                found = self._pipe.recv()
                if found[0] == "answer":
                    if found[2] > OLD_BYTES:
                        self._end()
                    answer: Answer = found[1]
                    return answer
                start, before = time.monotonic(), self._memory()
                continue
            seconds, grown = time.monotonic() - start, self._memory() - before if before else 0
            if grown > KILL_BYTES:
                return self._dead("memory", seconds, grown)
            if seconds > self.hang_s:
                return self._dead("hang", seconds, grown)

    def _memory(self) -> int:
        """Return the resident memory of the process and its children, in bytes."""
        assert self._process is not None
        total, todo = 0, [self._process.pid]
        while todo:
            place = Path(f"/proc/{todo.pop()}")
            with contextlib.suppress(OSError, IndexError, ValueError):
                total += int((place / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                todo += [int(pid) for pid in (place / "task" / place.name / "children").read_text().split()]
        return total

    def _dead(self, why: str, seconds: float, grown: int) -> Answer:
        assert self._process is not None
        if why == "hang":  # its stack goes to its log
            with contextlib.suppress(OSError):
                os.kill(self._process.pid, signal.SIGUSR1)
            time.sleep(STACK_S)
        code = self._end()
        stack = self._log.read_text(errors="replace")[-3000:]
        return Answer(seconds=seconds, grown_bytes=max(0, grown), ended=why, stack=f"{stack}\nexit code {code}")

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self._log = self._scratch / "log"
        command = [sys.executable, "-m", "tests.fuzz.worker", str(theirs.fileno()), self.stand_in]
        environment = os.environ | {"TMPDIR": str(self._scratch), "COLUMNS": "200", "PYTHONPATH": str(ROOT)}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        theirs.close()
        self._pipe = Connection(ours.detach())
        if not self._pipe.poll(START_S):
            raise RuntimeError(f"no worker: {self._log.read_text(errors='replace')[-2000:]}")
        try:
            self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"no worker: {self._log.read_text(errors='replace')[-2000:]}") from None

    def _end(self) -> int | None:
        if self._process is None:
            return None
        self._pipe.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # with its children
        code, self._process = self._process.wait(), None
        for path in self._scratch.glob("fuzz-*"):
            shutil.rmtree(path, ignore_errors=True)
        return code


@dataclass(frozen=True)
class Done:
    """A finished case: its class and cost."""

    name: str
    seconds: float
    grown_bytes: int


@dataclass
class Table:
    """Number of cases by family and class."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    slowest_s: float = 0.0
    most_grown_bytes: int = 0

    def add(self, family: str, done: Done) -> None:
        self.counts.setdefault(family, Counter())[done.name] += 1
        self.slowest_s = max(self.slowest_s, done.seconds)
        self.most_grown_bytes = max(self.most_grown_bytes, done.grown_bytes)

    @property
    def most(self) -> str:
        """Summarize the costs of the worst cases in a sentence."""
        grown = f"{self.most_grown_bytes / 1e6:.0f} MB more than the process had before"
        return f"The slowest case took {self.slowest_s:.1f} s; the largest, {grown}."

    @property
    def bad(self) -> int:
        return sum(count for row in self.counts.values() for name, count in row.items() if name not in GOOD)

    def __str__(self) -> str:
        """A Markdown table."""
        rows = [*self.counts.items(), ("all", sum(self.counts.values(), Counter()))]
        lines = [f"| family | tried | {' | '.join(CLASSES)} |", f"|---|--:|{'--:|' * len(CLASSES)}"]
        lines += [
            f"| {family} | {row.total()} | {' | '.join(str(row[name]) for name in CLASSES)} |" for family, row in rows
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class Failure:
    """A case in a bad class."""

    case: Case
    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.case.command[:300]} ({self.case.what[:300]})\n  {self.reason[-600:]}"


def run_cases(cases: Iterable[Case], worker: Worker) -> Iterator[tuple[Case, str, str]]:
    """Yield each case with its class and the reason."""
    for case in cases:
        yield (case, *classify(case, worker.ask(case)))


class Campaign:
    """A run of many cases; its folder has a line per case in `done.jsonl`, and a folder per failure."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.log = folder / "done.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        self.done: dict[tuple[str, int], Done] = {}
        if self.log.exists():
            for line in self.log.read_text().splitlines():
                with contextlib.suppress(ValueError):  # the last line of a killed run may be incomplete
                    row = json.loads(line)
                    if row["seed"] == seed:
                        done = Done(row["class"], row["seconds"], row["grown_bytes"])
                        self.done[row["family"], row["index"]] = done

    def run(self, cases: int, families: tuple[str, ...], say: Callable[[str], None]) -> Table:
        """Run the cases that are not done yet."""
        counts = split(cases, families)
        table = Table()
        started, fresh = time.monotonic(), 0
        with Worker() as worker, self.log.open("a") as log:
            for family, count in counts.items():
                for index in range(count):
                    done = self.done.get((family, index))
                    if done is None:
                        done = self._one(worker, family, index, say)
                        fresh += 1
                        row = {
                            "seed": self.seed,
                            "family": family,
                            "index": index,
                            "class": done.name,
                            "seconds": round(done.seconds, 3),
                            "grown_bytes": done.grown_bytes,
                        }
                        log.write("\n" * (log.tell() > 0 and fresh == 1) + json.dumps(row) + "\n")
                        log.flush()
                    table.add(family, done)
                say(
                    f"{family}: {dict(table.counts[family])}, {fresh / (time.monotonic() - started):.0f} cases/s so far"
                )
        return table

    def _one(self, worker: Worker, family: str, index: int, say: Callable[[str], None]) -> Done:
        case = make_case(family, self.seed, index)
        answer = worker.ask(case)
        name, reason = classify(case, answer)
        if name not in GOOD:
            place = self.folder / f"{name.replace(',', '').replace(' ', '-')}-{family}-{self.seed}-{index}"
            case.write(place)
            (place / "RUN.txt").write_text(
                f"cd here; {case.command}\n\n{case.what}\n\n{name}: {reason}\n",
                encoding="utf-8",
                errors="backslashreplace",
            )
            say(f"  {name}: {place.name}: {case.what[:120]!r}")
        return Done(name, answer.seconds, answer.grown_bytes)
