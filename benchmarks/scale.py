"""Time and memory of `gpusim simulate` and `gpusim explore` over steps of 1,000 to 1,000,000 kernels.

    python benchmarks/scale.py [--sizes 1000,10000,100000] [--figure docs/images/scale.png]

Prints a table; with `--figure` draws it (matplotlib). Each command is a process of its own on a made step: ops of the
kernels of a bundled trace, each waiting for one or two of the 50 before it.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from gpusim.files import write_document
from gpusim.trace.schema import Op, Storage, Tensor, Trace
from gpusim.trace.store import load_trace

BASE = "squeezenet1_1-infer-b1"
SIZES = (1_000, 10_000, 100_000, 1_000_000)
BUDGET_S = 5
COMMANDS = {
    "read": ("-c", "import sys; from pathlib import Path; from gpusim.trace.store import read_trace; "
             "read_trace(Path(sys.argv[1]))"),
    "simulate": ("-m", "gpusim", "simulate", "--json"),
    "explore": ("-m", "gpusim", "explore", "--json", "--budget", str(BUDGET_S)),
}  # fmt: skip


def made_trace(kernels: int) -> Trace:
    """A step of so many ops of one kernel each."""
    base, draw = load_trace(BASE), random.Random(1)
    found = [kernel for op in base.ops for kernel in op.kernels]
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
            "kernels": [msgspec.to_builtins(found[index % len(found)])],
        }
        ops.append(msgspec.convert(op, Op))
    storages = (msgspec.convert({"bytes": 4096}, Storage),) * (kernels + 1)
    return msgspec.structs.replace(base, ops=tuple(ops), tensors=tuple(tensors), storages=storages, ground_truth=None)


def measure(command: str, file: Path) -> dict[str, float]:
    """Wall and CPU seconds and the largest resident memory in MB of one command in a process of its own."""
    begin = time.perf_counter()
    arguments = [sys.executable, *COMMANDS[command], str(file)]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, status, usage = os.wait4(process.pid, 0)
    assert process.stderr is not None
    if status:
        raise SystemExit(f"{command}: {process.stderr.read().decode()[-500:]}")
    cpu_s = usage.ru_utime + usage.ru_stime
    return {"wall_s": time.perf_counter() - begin, "cpu_s": cpu_s, "rss_mb": usage.ru_maxrss / 1024}


def draw(rows: list[dict[str, Any]], target: Path) -> None:
    """CPU time and memory over kernels, both axes logarithmic."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, field, label in zip(axes, ("cpu_s", "rss_mb"), ("CPU time (s)", "peak memory (MB)"), strict=True):
        for command in COMMANDS:
            points = [row for row in rows if row["command"] == command]
            axis.loglog([row["kernels"] for row in points], [row[field] for row in points], "o-", label=command)
        axis.set(xlabel="kernels", ylabel=label)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(target, dpi=110)


def main() -> None:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print("| kernels | command | wall s | CPU s | peak MB |\n|--:|---|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as folder:
        for kernels in map(int, options.sizes.split(",")):
            file = Path(folder) / f"made-{kernels}.json"
            write_document(file, made_trace(kernels))
            for command in COMMANDS:
                row = measure(command, file)
                rows.append({"kernels": kernels, "command": command, **row})
                times = f"{row['wall_s']:.1f} | {row['cpu_s']:.1f} | {row['rss_mb']:,.0f}"
                print(f"| {kernels:,} | {command} | {times} |", flush=True)
            file.unlink()
    if options.figure is not None:
        draw(rows, options.figure)


if __name__ == "__main__":
    main()
