"""Time and memory of `gpusim simulate` and `gpusim explore` over steps of 1,000 to 1,000,000 kernels.

    python benchmarks/scale.py [--sizes 1000,10000,100000] [--note "a quiet machine"] [--rows FILE]

Writes the table between the markers of benchmarks/scale.md and draws docs/images/scale.png (matplotlib), both after
each size. Each command is a process of its own on a synthetic step: ops with kernels of a bundled trace, each waiting
for one or two of the 50 before it. A command over `--limit` seconds is killed, and skipped for larger steps. With
`--rows`, each row is appended to that file once measured, and an interrupted run resumes from there.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from gpusim.formats.trace import Op, Storage, Tensor, Trace
from gpusim.io.files import write_document
from gpusim.trace.store import load_trace

BASE = "squeezenet1_1-infer-b1"
SIZES = (1_000, 10_000, 100_000, 1_000_000)
BUDGET_S = 5
ROOT = Path(__file__).parent.parent
TABLE, FIGURE = ROOT / "benchmarks" / "scale.md", ROOT / "docs" / "images" / "scale.png"
BEGIN, END = "<!-- scale: begin -->", "<!-- scale: end -->"
COLORS = {"read": "#009E73", "simulate": "#0072B2", "explore": "#D55E00"}
COMMANDS = {
    "read": ("-c", "import sys; from pathlib import Path; from gpusim.trace.store import read_trace; "
             "read_trace(Path(sys.argv[1]))"),
    "simulate": ("-m", "gpusim", "simulate", "--json"),
    "explore": ("-m", "gpusim", "explore", "--json", "--budget", str(BUDGET_S)),
}  # fmt: skip


def made_trace(kernels: int) -> Trace:
    """Make a step of `kernels` ops with one kernel each."""
    base, draw = load_trace(BASE), random.Random(1)
    base_kernels = [kernel for op in base.ops for kernel in op.kernels]
    first = msgspec.convert(
        {
            "shape": [1024],
            "stride": [1],
            "dtype": "float32",
            "storage": 0,
            "role": "input",
            "init": {"kind": "constant", "a": 0.0},
        },
        Tensor,
    )
    tensors, ops = [first], []
    for index in range(kernels):
        sources = [max(0, index - draw.randrange(8))]
        if index % 3 == 0:
            sources.append(max(0, index - draw.randrange(50)))
        role = "activation" if index < kernels - 1 else "output"
        tensors.append(msgspec.structs.replace(first, storage=index + 1, role=role, init=None))
        op = {
            "name": f"op_{index}",
            "target": "aten.add.Tensor",
            "args": [{"tensor": source} for source in sources],
            "outputs": [index + 1],
            "reads": sources,
            "writes": [index + 1],
            "host_ns": 5000,
            "kernels": [msgspec.to_builtins(base_kernels[index % len(base_kernels)])],
        }
        ops.append(msgspec.convert(op, Op))
    storages = (msgspec.convert({"bytes": 4096}, Storage),) * (kernels + 1)
    return msgspec.structs.replace(base, ops=tuple(ops), tensors=tuple(tensors), storages=storages, ground_truth=None)


def measure(command: str, file: Path, limit_s: float) -> dict[str, float] | None:
    """Return wall and CPU seconds and the peak memory in MB of one command; None where it hit the limit.

    The command is a process of its own; a helper that it starts to compile on a first start is not counted.
    """
    begin = time.perf_counter()
    arguments = [sys.executable, *COMMANDS[command], str(file)]
    with tempfile.TemporaryFile() as problems:
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=problems)
        watch = threading.Timer(limit_s, process.kill)
        watch.start()
        _, status, usage = os.wait4(process.pid, 0)
        watch.cancel()
        wall_s = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode == -signal.SIGKILL and wall_s >= limit_s:
            return None
        if status:
            problems.seek(0)
            raise SystemExit(f"{command}: {problems.read().decode()[-500:]}")
    return {"wall_s": wall_s, "cpu_s": usage.ru_utime + usage.ru_stime, "rss_mb": usage.ru_maxrss / 1024}


def known_rows(file: Path | None) -> dict[tuple[int, str], dict[str, Any]]:
    """Return the rows of an earlier run, by size and command; the last line of a killed run may be incomplete."""
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    if file is not None and file.exists():
        for text in file.read_text().splitlines():
            with contextlib.suppress(ValueError):
                row = json.loads(text)
                rows[row["kernels"], row["command"]] = row
    return rows


def keep_row(file: Path | None, row: dict[str, Any]) -> None:
    """Append a row to the file."""
    if file is not None:
        with file.open("a") as log:
            log.write(("\n" if log.tell() else "") + json.dumps(row) + "\n")


def line(row: dict[str, Any]) -> str:
    """Return one row of the table."""
    if "cpu_s" not in row:
        return f"| {row['kernels']:,} | {row['command']} | {row['problem']} | | |"
    times = f"{row['wall_s']:.1f} | {row['cpu_s']:.1f} | {row['rss_mb']:,.0f}"
    return f"| {row['kernels']:,} | {row['command']} | {times} |"


def write(rows: list[dict[str, Any]], note: str) -> None:
    """Write the table into `TABLE`, between its markers."""
    load = os.getloadavg()[2]
    where = (
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, {platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, load over the last 15 minutes {load:.1f} (includes the benchmark's own 1){note}."
    )
    table = [where, "", "| kernels | command | wall s | CPU s | peak MB |", "|--:|---|--:|--:|--:|", *map(line, rows)]
    text = TABLE.read_text()
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    TABLE.write_text("\n".join((before, "", *table, "", after)))


def draw(rows: list[dict[str, Any]]) -> None:
    """Draw CPU time and memory over kernels, with logarithmic axes."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, field, label in zip(axes, ("cpu_s", "rss_mb"), ("CPU time (s)", "peak memory (MB)"), strict=True):
        for command, color in COLORS.items():
            points = [row for row in rows if row["command"] == command and field in row]
            x, y = ([row[name] for row in points] for name in ("kernels", field))
            axis.loglog(x, y, "o-", label=command, color=color)
        axis.set(xlabel="kernels in the step", ylabel=label)
        axis.grid(alpha=0.3, which="major")
    axes[0].legend(frameon=False)
    figure.savefig(FIGURE, dpi=110)
    plt.close(figure)


def main() -> None:
    """Measure, print, write, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--note", default="", help="What else the machine was doing.")
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="Wall time of one command.")
    parser.add_argument(
        "--rows", type=Path, metavar="FILE", help="Rows measured before; those that are missing follow."
    )
    options = parser.parse_args()
    note = f"; {options.note}" if options.note else ""
    rows: list[dict[str, Any]] = []
    known = known_rows(options.rows)
    late: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "small.json"
        write_document(small, made_trace(100))
        for command in COMMANDS:  # to compile first where needed
            measure(command, small, options.limit)
        for kernels in map(int, options.sizes.split(",")):
            file = Path(folder) / f"made-{kernels}.json"
            for command in COMMANDS:
                row = known.get((kernels, command))
                if row is None:
                    if not file.exists():
                        write_document(file, made_trace(kernels))
                    measured = None if command in late else measure(command, file, options.limit)
                    row = {"kernels": kernels, "command": command}
                    row |= {"problem": f"more than {options.limit:.0f} s"} if measured is None else measured
                    keep_row(options.rows, row)
                if "problem" in row:
                    late.add(command)
                rows.append(row)
                print(line(row), flush=True)
            file.unlink(missing_ok=True)
            write(rows, note)
            draw(rows)


if __name__ == "__main__":
    main()
