"""How fast the engines are and how they scale: docs/engine_speed.md and its figure.

    python benchmarks/engine.py [--seconds 1.0] [--largest 1000000] [-o docs/engine_speed.md] [--figure FILE.png]

Rates of both engines are measured in turns within one run (`gpusim bench`), so their ratio hardly depends on what else
the machine does. Each size of the scaling table runs in a process of its own, whose largest resident memory counts.
The figure needs matplotlib, which is no dependency of gpusim.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import resource
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpusim.engine.compiled.arrays import Room, encode_hardware
from gpusim.engine.compiled.encode import encode_plan
from gpusim.engine.compiled.link import link_plans
from gpusim.engine.compiled.simulate import simulate_plans
from gpusim.engine.fast import FastEngine
from gpusim.engine.reference import ReferenceEngine
from gpusim.hardware.model import load_hardware
from gpusim.hardware.occupancy import Demand
from gpusim.plan.tasks import Plan, Task
from gpusim.report.bench_table import ROWS
from gpusim.search.bench import Bench, bench
from gpusim.trace.store import load_trace

TRACES = (
    "squeezenet1_1-infer-b1",
    "googlenet-infer-b1",
    "googlenet-train-b8",
    "resnet50-train-b8",
    "densenet121-train-b8",
)
SIZES = (1_000, 10_000, 100_000, 1_000_000)
#: Larger plans take the reference engine minutes.
LARGEST_REFERENCE = 10_000
STREAMS = 32
#: How far back a dependency reaches, in tasks.
REACH = 200
ROUNDS = 3


def synthetic_plan(tasks: int, streams: int) -> Plan:
    """A plan of kernels of 1 to 20 us and many sizes; half of them wait for one of another stream."""
    dice = random.Random(tasks)
    demands = [Demand(part, part, 0.0, part, part, 1.0) for part in (0.02, 0.05, 0.1, 0.3, 1.0)]
    return Plan(
        tuple(
            Task(
                name="kernel",
                queue=dice.randrange(streams),
                deps=(dice.randrange(max(0, index - REACH), index),) if index and dice.random() < 0.5 else (),
                dur_ns=dice.uniform(1e3, 2e4),
                demand=dice.choice(demands),
                dram_bytes=1e5,
            )
            for index in range(tasks)
        )
    )


def measure_size(tasks: int, streams: int) -> dict[str, Any]:
    """Seconds of each step for one plan, and this process's largest resident memory in bytes."""
    hardware, fast = load_hardware("h200"), FastEngine()
    fast.run(synthetic_plan(10, 2), hardware)  # so that compiling does not count
    plan = synthetic_plan(tasks, streams)
    begin = time.perf_counter()
    timeline = fast.run(plan, hardware)
    run_s = time.perf_counter() - begin
    encoded = encode_plan(plan, hardware)
    assert encoded is not None
    rows, plans, devices, queues = encoded
    record = encode_hardware(hardware)
    room = Room.for_plans(plans, devices, queues, hardware.limits.resident_grids)
    simulate_s = []
    for _ in range(ROUNDS):
        begin = time.thread_time()
        link_plans(record, rows, plans, 0, 1)
        simulate_plans(record, rows, plans, None, room, 0, 1)
        simulate_s.append(time.thread_time() - begin)
    assert plans.makespan_ns[0] == timeline.makespan_ns
    rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    reference_s = None
    if tasks <= LARGEST_REFERENCE:
        begin = time.perf_counter()
        assert ReferenceEngine().run(plan, hardware, record=False).makespan_ns == timeline.makespan_ns
        reference_s = time.perf_counter() - begin
    return {
        "tasks": tasks,
        "streams": streams,
        "run_s": run_s,
        "simulate_s": min(simulate_s),
        "reference_s": reference_s,
        "rss_bytes": rss_bytes,
    }


def measure_in_process(tasks: int, streams: int) -> dict[str, Any]:
    """`measure_size` in a new process."""
    command = [sys.executable, __file__, "--size", str(tasks), "--streams", str(streams)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    print(f"  {tasks} kernels on {streams} streams: {found['simulate_s']:.4f} s", file=sys.stderr)
    return found


def rate_lines(found: list[Bench]) -> list[str]:
    """The table of rates, one row for each engine and use, one column for each trace."""
    lines = ["| schedules a second | " + " | ".join(f"{each.trace} ({each.kernels} kernels)" for each in found) + " |"]
    lines.append("|---" * (len(found) + 1) + "|")
    for name, title in ROWS:
        cells = [f"{getattr(each, name).schedules_per_s:,.0f}" for each in found]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    lines.append("| **fast over reference** | " + " | ".join(f"**{each.ratio:,.0f}x**" for each in found) + " |")
    both = [each.fast_with_lowering.schedules_per_s / each.reference.schedules_per_s for each in found]
    lines.append("| fast with lowering over reference without | " + " | ".join(f"{each:,.0f}x" for each in both) + " |")
    lines.append(
        "| list scheduler, compiled over not | " + " | ".join(f"{each.list_ratio:,.0f}x" for each in found) + " |"
    )
    return lines


def size_lines(sizes: list[dict[str, Any]]) -> list[str]:
    """The table of sizes."""
    lines = [
        "| kernels | streams | simulate | a kernel | run, Python objects in and out | reference engine | memory |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for each in sizes:
        reference = "" if each["reference_s"] is None else f"{each['reference_s']:.2f} s"
        lines.append(
            f"| {each['tasks']:,} | {each['streams']:,} | {each['simulate_s'] * 1e3:,.2f} ms "
            f"| {each['simulate_s'] / each['tasks'] * 1e9:,.0f} ns | {each['run_s']:.3f} s | {reference} "
            f"| {each['rss_bytes'] / 2**20:,.0f} MiB |"
        )
    return lines


def page(found: list[Bench], sizes: list[dict[str, Any]], figure: str | None) -> str:
    """The page, generated."""
    versions = ", ".join(f"{name} {__import__(name).__version__}" for name in ("numba", "numpy"))
    lines = [
        "# How fast the engines are",
        "",
        "Generated by `python benchmarks/engine.py`. Everything here is one run on one machine: "
        f"{found[0].cores} cores ({platform.machine()}),",
        f"Python {platform.python_version()}, {versions}. `gpusim bench` measures the first table's rates on yours.",
        "",
        *rate_lines(found),
        "",
        "A second is one of CPU time on one core, for all cores one of wall time; medians of rounds in which all take",
        "turns, on the same 16 schedules. The engines agree on every makespan. The first two rows simulate plans that",
        "are ready: Python objects for the reference engine, arrays for the fast one. A search needs the fourth and",
        "fifth. The machine had other work at the same time: the ratios are sounder than the rates.",
        "",
        "## Large plans",
        "",
        "Synthetic plans, half of whose kernels wait for one on another stream. *Simulate* is the compiled part, in",
        "CPU time; most of *run* goes into turning Python objects into arrays. Memory is the most that the process",
        "had, the plan's Python objects included. No more than 128 kernels run at once (`resident_grids`): that bounds",
        "the time a kernel takes where there are many streams.",
        "",
        *size_lines(sizes),
    ]
    if figure is not None:
        lines += ["", f"![Time and memory by the number of kernels]({figure})"]
    return "\n".join(lines) + "\n"


def draw(sizes: list[dict[str, Any]], target: Path) -> bool:
    """The scaling figure; False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), constrained_layout=True)
    for wide, name in ((False, f"{STREAMS} streams"), (True, "a stream for 10 kernels")):
        rows = [each for each in sizes if (each["streams"] != STREAMS) == wide]
        counts = [each["tasks"] for each in rows]
        left.loglog(counts, [each["simulate_s"] for each in rows], "o-", label=f"fast engine, {name}")
        right.semilogx(counts, [each["rss_bytes"] / 2**20 for each in rows], "o-", label=name)
    slow = [each for each in sizes if each["reference_s"] is not None and each["streams"] == STREAMS]
    left.loglog(
        [each["tasks"] for each in slow], [each["reference_s"] for each in slow], "s-", label="reference engine"
    )
    left.set(xlabel="kernels", ylabel="seconds", title="time to simulate a plan")
    right.set(xlabel="kernels", ylabel="MiB", title="memory of the process")
    right.set_ylim(bottom=0)
    left.legend(fontsize=8)
    right.legend(fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(target, dpi=150)
    return True


def main() -> None:
    """Measure, write, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each measurement of a round")
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="kernels of the largest synthetic plan")
    parser.add_argument("-o", dest="output", type=Path, help="write the page here; without it, print it")
    parser.add_argument("--figure", type=Path, help="write the figure here")
    parser.add_argument("--raw", type=Path, help="write the numbers here, too (.json)")
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--streams", type=int, default=STREAMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.size is not None:
        print(json.dumps(measure_size(options.size, options.streams)))
        return
    hardware = load_hardware("h200")
    found = []
    for name in TRACES:
        print(f"  {name}", file=sys.stderr)
        found.append(bench(load_trace(name), hardware, round_s=options.seconds))
        assert found[-1].makespans_equal
    counts = [size for size in SIZES if size <= options.largest]
    sizes = [measure_in_process(size, streams) for size in counts for streams in (STREAMS, size // 10)]
    drawn = options.figure is not None and draw(sizes, options.figure)
    text = page(found, sizes, f"images/{options.figure.name}" if drawn else None)
    if options.raw is not None:
        options.raw.write_text(json.dumps({"rates": [asdict(each) for each in found], "sizes": sizes}, indent=1))
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
