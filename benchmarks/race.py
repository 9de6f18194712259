"""The race check of ten steps: random schedules, and schedules with one event removed. On a GPU, else on the CPU.

    python benchmarks/race.py -o race.json --schedules 100 --seconds 1500

Freed bytes are poisoned on the stream of their next owner, and results are compared with the recorded order: bit for
bit, but for those behind a kernel that adds atomically, or within a replay's limit where two runs in that order differ.
On a GPU each schedule is a CUDA graph on 2 to 8 streams, and a spin kernel holds streams back; on a CPU ops run one by
one. Of each step, one necessary event is removed from each of `--events` schedules, and the wrong result must show. The
output is written as it grows; the same command goes on where an earlier one has ended. The exit status is 0 where all
was checked, no result was wrong, and nine of ten removed events showed in each step.

With `--deterministic` torch uses deterministic algorithms only, and no kernel of Inductor's adds atomically.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Literal

import msgspec
import torch

from gpusim.defaults import DEFAULT_SEED
from gpusim.errors import FileError, GpusimError, OptionError
from gpusim.formats.hardware import default_hardware
from gpusim.formats.trace import Kernel
from gpusim.gpu.capture.capture import build_step
from gpusim.gpu.capture.joint_graph import joint_graph
from gpusim.gpu.capture.options import CaptureOptions
from gpusim.gpu.capture.rebuild import bare_trace
from gpusim.gpu.capture.record import record
from gpusim.gpu.device import gpu_facts, set_precision
from gpusim.gpu.inductor.kernels import start_compiling
from gpusim.gpu.inductor.step import inductor_step
from gpusim.gpu.optimize.race_check import Reference, StepCheck
from gpusim.gpu.replay.cudagraph import SMALL_WORKSPACES, WORKSPACE_VARIABLE
from gpusim.gpu.replay.execute import InitialState
from gpusim.io.files import check_writable, read_document, write_document
from gpusim.plan.graph import OpGraph
from gpusim.version import code_version

ROOT = Path(__file__).parents[1]
SCHEMA = "gpusim-race-1"
FRONTENDS = ("aten", "inductor")
#: SPEC, mode and batch: branches, views, changes in place, random numbers, recurrence, many small tables, experts.
STEPS = (
    ("tests/support/networks.py:branches", "train", 2),
    ("tests/support/networks.py:views", "train", 2),
    ("tests/support/networks.py:dropouts", "train", 2),
    ("tests/support/networks.py:attention", "train", 2),
    ("tests/support/networks.py:recurrent", "train", 2),
    ("tests/support/networks.py:heads", "infer", 2),
    ("validate/networks/recommendation.py:recommendation_small", "train", 4),
    ("validate/networks/transformer.py:transformer_small", "infer", 1),
    ("validate/networks/unet.py:unet_small", "infer", 1),
    ("validate/networks/heads.py:heads_small", "train", 1),
)
MOST_BATCH = 1 << 20
#: Settings of cuBLAS's workspaces that torch takes for deterministic: eight for each stream, of 4 MiB or of 16 KiB.
DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")
#: Share of the removed events of a step that must show. Some change no result, by their values: a copy of numbers that
#: are there already, or a mask of elements beyond a bound that none reaches.
LEAST_CAUGHT = 0.9
#: Seconds between two writes of the output.
WRITE_S = 5.0
BEGIN = time.monotonic()


class RaceFileError(FileError):
    """Broken output of an earlier run, or one of another run."""


def say(*words: object) -> None:
    print(f"[{time.monotonic() - BEGIN:6.1f}]", *words, file=sys.stderr, flush=True)


class Event(msgspec.Struct):
    """A necessary event that was removed from a random schedule."""

    schedule: int
    op: str
    waited_for: str
    late: str
    """Op that was held back, as in `gpusim.gpu.optimize.race_check.Removed`; the following, too."""
    caught_by: Literal["delay", "haste", ""]
    right_with_it: bool
    unneeded: int


class Row(msgspec.Struct):
    """A step and what was found."""

    spec: str
    mode: Literal["train", "infer"]
    batch: int
    frontend: Literal["aten", "inductor"]
    ops: int = 0
    compared: str = ""
    """How results were compared with the recorded order."""
    largest_error: float = 0.0
    """Largest error of a right result that was not equal bit for bit, over its scale; 0 where all were."""
    schedules: int = 0
    wrong: list[int] = []
    """Numbers of schedules with wrong results."""
    removed: list[Event] = []
    seconds: float = 0.0
    problem: str = ""
    """Why the step could not be checked."""

    @property
    def identity(self) -> tuple[str, str, int, str]:
        return self.spec, self.mode, self.batch, self.frontend

    @property
    def caught(self) -> int:
        return sum(bool(event.caught_by) for event in self.removed)


class Found(msgspec.Struct):
    """The output: what was run where, and a row for each step."""

    schema: str
    command: str
    date: str
    commit: str
    gpusim: str
    device: str
    versions: dict[str, str]
    runs: str
    dtype: Literal["fp32", "tf32", "bf16"]
    seed: int
    schedules: int
    """Random schedules asked for, of each step."""
    events: int
    """Events to remove, of each step."""
    totals: dict[str, int]
    steps: list[Row]
    deterministic: bool = False
    """Whether torch used deterministic algorithms only."""

    def count(self) -> dict[str, int]:
        """Return the totals."""
        removed = [event for row in self.steps for event in row.removed]
        return {
            "steps": sum(self.is_done(row) for row in self.steps),
            "schedules": sum(row.schedules for row in self.steps),
            "wrong": sum(len(row.wrong) for row in self.steps),
            "removed": len(removed),
            "caught": sum(row.caught for row in self.steps),
            "wrong_with_the_event": sum(not event.right_with_it for event in removed),
        }

    def is_done(self, row: Row) -> bool:
        """Whether all that is asked for was checked."""
        return row.schedules >= self.schedules and len(row.removed) >= self.events

    @property
    def passed(self) -> bool:
        """Whether all was checked and right."""
        totals = self.count()
        right = not totals["wrong"] and not totals["wrong_with_the_event"]
        seen = all(row.caught >= LEAST_CAUGHT * len(row.removed) for row in self.steps)
        return right and seen and totals["steps"] == len(self.steps)


def new(asked: argparse.Namespace, device: torch.device) -> Found:
    """Return an output without findings."""
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if device.type == "cuda":
        gpu = gpu_facts()
        versions |= {"cuda": gpu.cuda, "driver": gpu.driver, "cudnn": gpu.cudnn}
    steps = [(spec, mode, _batch(batch)) for spec, mode, batch in asked.step or STEPS]
    if bad := [mode for _, mode, _ in steps if mode not in ("train", "infer")]:
        raise OptionError(f"--step: mode '{bad[0][:80]}' is neither train nor infer")
    for name in ("schedules", "events"):
        if getattr(asked, name) < 0:
            raise OptionError(f"--{name}: {getattr(asked, name)} is below 0")
    workspaces = os.environ.get(WORKSPACE_VARIABLE, "")
    if asked.deterministic and device.type == "cuda" and workspaces not in DETERMINISTIC_WORKSPACES:
        allowed = " or ".join(DETERMINISTIC_WORKSPACES)
        raise OptionError(f"--deterministic: {WORKSPACE_VARIABLE} is '{workspaces[:80]}'; torch asks for {allowed}")
    rows = [Row(spec, mode, batch, frontend) for frontend in asked.frontends for spec, mode, batch in steps]
    if len({row.identity for row in rows}) < len(rows):
        raise OptionError("--step, --frontends: a step is named twice")
    return Found(
        schema=SCHEMA,
        command=" ".join(["python", "benchmarks/race.py", *sys.argv[1:]]),
        date=datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d"),
        commit=commit(),
        gpusim=code_version(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        versions=versions,
        runs="CUDA graphs on streams" if device.type == "cuda" else "ops one by one, in orders that the events allow",
        dtype=asked.dtype,
        seed=asked.seed,
        schedules=asked.schedules,
        events=asked.events,
        totals={},
        steps=rows,
        deterministic=asked.deterministic,
    )


def _batch(value: str | int) -> int:
    if not str(value).isdecimal() or not 1 <= int(value) <= MOST_BATCH:
        raise OptionError(f"--step: batch '{str(value)[:80]}' is no number from 1 to {MOST_BATCH}")
    return int(value)


def commit() -> str:
    """Return the commit of the checkout, with a `+` where files have changed; empty outside a checkout."""
    try:
        said = [
            subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout.strip()
            for words in (["rev-parse", "--short=8", "HEAD"], ["status", "--porcelain", "-uno"])
        ]
    except (OSError, subprocess.SubprocessError):
        return ""
    return said[0] + "+" * bool(said[1])


def continued(path: Path, found: Found) -> Found:
    """Take over what an earlier run has found of the same steps. Raises `RaceFileError` for a run of anything else."""
    earlier = read_document(path, Found, SCHEMA, RaceFileError)
    for name in ("device", "versions", "gpusim", "dtype", "deterministic", "seed", "schedules", "events"):
        before, now = getattr(earlier, name), getattr(found, name)
        if before != now:
            raise RaceFileError(
                str(path), f"is of another run: {name} was {before}, and is {now} now; name another file"
            )
    known = {row.identity: row for row in earlier.steps}
    if known.keys() != {row.identity for row in found.steps}:
        raise RaceFileError(str(path), "is of another run, of other steps; name another file")
    found.steps = [known[row.identity] for row in found.steps]
    for row in found.steps:
        row.problem = ""
    return found


def check_of(row: Row, found: Found, device: torch.device) -> StepCheck:
    """Capture a step without times, and return its check. Each op that writes has a kernel of nominal length."""
    file, colon, function = row.spec.rpartition(":")
    spec = f"{ROOT / file}{colon}{function}" if (ROOT / file).is_file() else row.spec
    options = CaptureOptions(spec, row.mode, row.batch, found.dtype, frontend=row.frontend, seed=found.seed)
    set_precision(options.dtype)
    if options.frontend == "inductor":
        start_compiling(device)
    torch.backends.cudnn.deterministic = True
    step = build_step(options, device)
    graph = joint_graph(step)
    torch.manual_seed(options.seed)
    recorded = record(graph)
    if options.frontend == "inductor":
        recorded = inductor_step(graph, recorded, options.mode == "train")
    trace = bare_trace(options, step, recorded)
    nominal = Kernel(name="nominal", dur_ns=1_000, grid=(1, 1, 1))
    ops = (msgspec.structs.replace(op, kernels=(nominal,) if op.writes else ()) for op in trace.ops)
    graph_of_ops = OpGraph.build(msgspec.structs.replace(trace, ops=tuple(ops)), default_hardware(""))
    return StepCheck(graph_of_ops, InitialState.copy_of(recorded.initial), device, found.seed)


def how_compared(reference: Reference) -> str:
    """Return how results are compared with the recorded order."""
    within, rounded, all_results = f"within {reference.tolerance:.2g}", len(reference.rounded), len(reference.wanted)
    if reference.bit_for_bit:
        return "bit for bit"
    if reference.rounded == reference.behind:
        return f"bit for bit, but for {rounded} of {all_results} results behind atomic additions, {within}"
    return f"{within}, as a replay's outputs"


def checked(row: Row, found: Found, device: torch.device) -> Iterator[str]:
    """Continue a step's row in place; yields what to say after each schedule."""
    begin, before_s = time.monotonic(), row.seconds
    check = check_of(row, found, device)
    gc.collect()
    gc.freeze()  # each recording collects garbage, which then is only its own
    row.ops = len(check.graph)
    row.compared = how_compared(check.reference)
    for number in range(row.schedules, found.schedules):
        if not check.schedule_is_right(number):
            row.wrong.append(number)
        row.schedules = number + 1
        row.largest_error = max(row.largest_error, check.largest_error)
        row.seconds = round(before_s + time.monotonic() - begin, 1)
        yield f"schedule {number + 1} of {found.schedules}, {len(row.wrong)} wrong"
    first = row.removed[-1].schedule + 1 if row.removed else 0
    names = [op.name for op in check.graph.trace.ops]
    for each in islice(check.without_events(first), found.events - len(row.removed)):
        fields = {**asdict(each), "op": names[each.op], "waited_for": names[each.waited_for], "late": names[each.late]}
        row.removed.append(Event(**fields))
        row.largest_error = max(row.largest_error, check.largest_error)
        row.seconds = round(before_s + time.monotonic() - begin, 1)
        yield f"event {len(row.removed)} of {found.events} removed, {row.caught} caught"
    if len(row.removed) < found.events:
        row.problem = f"has only {len(row.removed)} schedules with a necessary event"


def run(found: Found, output: Path | None, device: torch.device, seconds: float | None) -> bool:
    """Check all steps, and write the output as it grows; False where the time was over before."""
    written_s = 0.0

    def write(least_s: float = 0.0) -> None:
        nonlocal written_s
        if time.monotonic() - written_s >= least_s:
            found.totals = found.count()
            written_s = time.monotonic()
            if output is not None:
                write_document(output, found, indent=1)

    for place, row in enumerate(found.steps, 1):
        if found.is_done(row):
            continue
        label = f"{place} of {len(found.steps)}, {row.frontend}, {Path(row.spec).name} {row.mode} {row.batch}"
        say(f"{label}: capturing")
        gc.unfreeze()
        try:
            for told in checked(row, found, device):
                say(f"{label}: {told}")
                write(WRITE_S)
                if seconds is not None and time.monotonic() - BEGIN > seconds:
                    write()
                    return False
        except GpusimError as cause:
            row.problem = str(cause)
            say(f"{label}: {cause}")
        write()
    return True


@contextmanager
def algorithms(deterministic: bool) -> Iterator[None]:
    """Within this context, torch uses deterministic algorithms only, if asked. New memory is not filled: that would be
    kernels which are no ops of the step, and would hide what an op leaves out.
    """
    if not deterministic:
        yield
        return
    memory = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled


def table(found: Found) -> str:
    """Return the rows and totals as text."""
    lines = []
    for row in found.steps:
        counts = (
            f"{len(row.wrong)} of {row.schedules} schedules wrong, {row.caught} of {len(row.removed)} events caught"
        )
        how = row.problem or row.compared or "not begun"
        how += f" (largest error {row.largest_error:.2g})" * bool(row.largest_error)
        lines.append(f"{row.frontend:9}{Path(row.spec).name} {row.mode} {row.batch}: {counts}; {how}")
    totals = found.count()
    where = found.device + ", by deterministic algorithms" * found.deterministic
    lines.append(
        f"{totals['steps']} of {len(found.steps)} steps on {where}: {totals['wrong']} of {totals['schedules']} "
        f"schedules wrong; {totals['caught']} of {totals['removed']} removed events caught, and "
        f"{totals['wrong_with_the_event']} results wrong with them"
    )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", dest="output", metavar="OUT.json", help="write what is found here, or continue it")
    parser.add_argument("--schedules", type=int, default=100, help="random schedules of each step")
    parser.add_argument("--events", type=int, default=10, help="events to remove, of each step")
    parser.add_argument(
        "--step", nargs=3, action="append", metavar=("SPEC", "MODE", "BATCH"), help="instead of the ten"
    )
    parser.add_argument("--frontends", nargs="+", choices=FRONTENDS, default=list(FRONTENDS))
    parser.add_argument("--dtype", choices=("fp32", "tf32", "bf16"), default="tf32")
    parser.add_argument("--deterministic", action="store_true", help="use torch's deterministic algorithms only")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    parser.add_argument("--seconds", type=float, help="stop after so many seconds")
    parser.add_argument("--cpu", action="store_true", help="run on the CPU although there is a GPU")
    asked = parser.parse_args()
    # One size for graphs of one stream and of several: cuBLAS chooses kernels by it.
    os.environ.setdefault(WORKSPACE_VARIABLE, DETERMINISTIC_WORKSPACES[0] if asked.deterministic else SMALL_WORKSPACES)
    device = torch.device("cuda" if torch.cuda.is_available() and not asked.cpu else "cpu")
    try:
        found = new(asked, device)
        output = Path(asked.output) if asked.output else None
        if output is not None:
            check_writable(output)
            found = continued(output, found) if output.exists() else found
    except GpusimError as cause:
        print(f"error: {cause}", file=sys.stderr)
        return 2
    if device.type == "cpu":
        say("no GPU is used: ops run one by one on the CPU, in orders that the events allow")
    with algorithms(asked.deterministic):
        ended = run(found, output, device, asked.seconds)
    print(table(found))
    if not ended:
        print(
            f"stopped after {asked.seconds:g} s; " + ("the same command continues" if output else "nothing was written")
        )
    return 0 if found.passed else 1


if __name__ == "__main__":
    sys.exit(main())
