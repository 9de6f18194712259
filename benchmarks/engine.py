"""Speed and scaling of the engines: research/2026-11-23-engine-speed.md and its figure.

    python benchmarks/engine.py [--seconds 1.0] [--largest 1000000] [-o PAGE] [--figure FILE.png]

Rates of both engines are measured in turns within one run (`gpusim bench`), so their ratio hardly depends on other load
of the machine; by both rules for SMs: block by block, and as one pool. Each size of the scaling table runs in a process
of its own, for its peak memory. The figure needs matplotlib, which is not a dependency of gpusim.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpusim.analysis.engine_benchmark import Bench, bench
from gpusim.engine.batch import BatchEngine
from gpusim.engine.compiled.arrays import Room, encode_hardware
from gpusim.engine.compiled.encode import encode_plan
from gpusim.engine.compiled.link import link_plans
from gpusim.engine.compiled.simulate import simulate_plans
from gpusim.engine.compiled.warm import warm_up
from gpusim.engine.fast import FastEngine
from gpusim.engine.reference import ReferenceEngine
from gpusim.formats.hardware import HardwareModel, load_hardware
from gpusim.plan.graph import OpGraph
from gpusim.plan.tasks import Plan, Task
from gpusim.policies.ios import one_pool
from gpusim.report.bench_table import ROWS
from gpusim.rules.occupancy import Demand, Footprint
from gpusim.trace.store import load_trace

TRACES = (
    "squeezenet1_1-infer-b1",
    "googlenet-infer-b1",
    "googlenet-train-b8",
    "resnet50-train-b8",
    "densenet121-train-b8",
)
SIZES = (1_000, 10_000, 100_000, 1_000_000)
STREAMS = 32
HARDWARE = "h200"
#: Rules for sharing SMs.
BLOCKS, POOL = "block by block", "one pool"
RULES = (BLOCKS, POOL)
#: Largest plans for the reference engine; larger ones take minutes.
LARGEST_REFERENCE = {BLOCKS: 1_000, POOL: 10_000}
#: Blocks of a synthetic kernel that an SM holds.
BLOCKS_PER_SM = 8
#: Largest distance of a dependency, in tasks.
REACH = 200
#: Simulations per plan, and per largest plan.
ROUNDS, FEW_ROUNDS = 3, 1
#: Kernels above which a plan counts as large.
MANY = 100_000
#: Command started with an empty cache of compiled code, and again.
STARTED = ("explore", "googlenet-train-b8")


def synthetic_plan(tasks: int, streams: int) -> Plan:
    """Make a plan of kernels of 1 to 20 us and many sizes; half of them wait for one of another stream."""
    dice = random.Random(tasks)
    limits = load_hardware(HARDWARE).limits
    threads = limits.threads_per_sm // BLOCKS_PER_SM
    regs, smem = limits.regs_per_sm // BLOCKS_PER_SM, limits.smem_reserved_bytes
    split = max(limits.smem_splits_bytes, default=limits.smem_per_sm_bytes)
    footprint = Footprint(threads, regs, smem, BLOCKS_PER_SM * smem, split)
    sizes = [(max(1, round(part * limits.sms * BLOCKS_PER_SM)), part) for part in (0.02, 0.05, 0.1, 0.3, 1.0)]
    kernels = [(blocks, Demand(part, part, 0.0, part, part, 1.0)) for blocks, part in sizes]

    def task(index: int) -> Task:
        queue = dice.randrange(streams)
        deps = (dice.randrange(max(0, index - REACH), index),) if index and dice.random() < 0.5 else ()
        dur_ns = dice.uniform(1e3, 2e4)
        blocks, demand = dice.choice(kernels)
        return Task(
            name="kernel",
            queue=queue,
            deps=deps,
            dur_ns=dur_ns,
            demand=demand,
            dram_bytes=1e5,
            blocks=blocks,
            blocks_per_sm=BLOCKS_PER_SM,
            footprint=footprint,
        )

    return Plan(tuple(map(task, range(tasks))))


def hardware_by(rule: str) -> HardwareModel:
    """Return the GPU with one of `RULES`."""
    hardware = load_hardware(HARDWARE)
    return one_pool(hardware) if rule == POOL else hardware


def measure_size(tasks: int, streams: int, rule: str) -> dict[str, Any]:
    """Return the seconds of each step for one plan, and this process's peak memory in bytes."""
    hardware, fast = hardware_by(rule), FastEngine()
    fast.run(synthetic_plan(10, 2), hardware)  # to compile before the timing
    plan = synthetic_plan(tasks, streams)
    begin = time.perf_counter()
    timeline = fast.run(plan, hardware)
    run_s = time.perf_counter() - begin
    encoded = encode_plan(plan, hardware)
    assert encoded is not None
    rows, plans, devices, queues = encoded
    record = encode_hardware(hardware)
    room = Room.for_plans(plans, devices, queues, hardware)
    simulate_s = []
    for _ in range(ROUNDS if tasks < MANY else FEW_ROUNDS):
        begin = time.thread_time()
        link_plans(record, rows, plans, 0, 1)
        simulate_plans(record, rows, plans, None, room, 0, 1)
        simulate_s.append(time.thread_time() - begin)
    assert plans.makespan_ns[0] == timeline.makespan_ns
    rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    reference_s = None
    if tasks <= LARGEST_REFERENCE[rule]:
        begin = time.perf_counter()
        assert ReferenceEngine().run(plan, hardware, record=False).makespan_ns == timeline.makespan_ns
        reference_s = time.perf_counter() - begin
    return {
        "tasks": tasks,
        "streams": streams,
        "rule": rule,
        "run_s": run_s,
        "simulate_s": min(simulate_s),
        "reference_s": reference_s,
        "rss_bytes": rss_bytes,
    }


def measure_in_process(tasks: int, streams: int, rule: str) -> dict[str, Any]:
    """Run `measure_size` in a new process."""
    command = [sys.executable, __file__, "--size", str(tasks), "--streams", str(streams), "--rule", rule]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    measured: dict[str, Any] = json.loads(done.stdout)
    print(f"  {tasks} kernels on {streams} streams, {rule}: {measured['simulate_s']:.4f} s", file=sys.stderr)
    return measured


def measure_read() -> dict[str, float]:
    """Return the seconds until a search's code is compiled or loaded, and those of the next two evaluations."""
    graph = OpGraph.build(load_trace(STARTED[1]), load_hardware(HARDWARE))
    ready_s = warm_up(graph.hardware)
    engine, orders, streams = BatchEngine(graph), [list(range(len(graph)))], [[0] * len(graph)]
    evaluate_s = []
    for _ in range(2):
        begin = time.perf_counter()
        engine.evaluate(orders, streams, peak=True)
        evaluate_s.append(time.perf_counter() - begin)
    return {"ready_s": ready_s, "first_s": evaluate_s[0], "second_s": evaluate_s[1]}


def measure_starts() -> list[dict[str, Any]]:
    """Start a command with default options three times, first with an empty cache; then run `measure_read`."""
    starts = []
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "NUMBA_CACHE_DIR": folder}
        for _ in range(3):
            before, begin = os.times(), time.perf_counter()
            command = [sys.executable, "-m", "gpusim", *STARTED, "--json"]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            wall_s, after = time.perf_counter() - begin, os.times()
            cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
            read = subprocess.run(
                [sys.executable, __file__, "--read"], capture_output=True, text=True, check=True, env=environment
            )
            starts.append(
                {
                    "wall_s": wall_s,
                    "cpu_s": cpu_s,
                    "evaluations": json.loads(done.stdout)["search"]["evaluations"],
                    "load": os.getloadavg()[0],
                    **json.loads(read.stdout),
                }
            )
            print(f"  start: {wall_s:.1f} s", file=sys.stderr)
    return starts


def start_lines(starts: list[dict[str, Any]]) -> list[str]:
    """Return the table of starts."""
    lines = [
        "## The first start and the next",
        "",
        f"`gpusim {' '.join(STARTED)}` with its default budget, with nothing compiled before the first start. A second",
        "process compiles a part, and compiling counts as search, up to two thirds of the budget.",
        "",
        "| start | wall time | CPU time | schedules searched | load of the machine |",
        "|---|---:|---:|---:|---:|",
    ]
    for number, each in enumerate(starts):
        times = f"{each['wall_s']:.1f} s | {each['cpu_s']:.1f} s"
        lines.append(f"| {number + 1} | {times} | {each['evaluations']:,} | {each['load']:.1f} |")
    last = min(starts, key=lambda each: each["ready_s"])
    ready = ", ".join(f"{each['ready_s']:.2f} s" for each in starts)
    first, second = (f"{last[name] * 1e3:.1f} ms" for name in ("first_s", "second_s"))
    return [
        *lines,
        "",
        f"What is compiled is kept on disk. A process that reads all that a search needs takes {ready} for that",
        f"(after each of the starts above); its first evaluation then takes {first}, the next {second}.",
    ]


def rate_lines(rates: list[Bench]) -> list[str]:
    """Return the table of rates, with one row per engine and use, and one column per trace."""
    lines = ["| schedules a second | " + " | ".join(f"{each.trace} ({each.kernels} kernels)" for each in rates) + " |"]
    lines.append("|---" * (len(rates) + 1) + "|")
    for name, title in ROWS:
        cells = [f"{getattr(each, name).schedules_per_s:,.0f}" for each in rates]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    lines.append("| **fast over reference** | " + " | ".join(f"**{each.ratio:,.0f}x**" for each in rates) + " |")
    both = [each.fast_with_lowering.schedules_per_s / each.reference.schedules_per_s for each in rates]
    lines.append("| fast with lowering over reference without | " + " | ".join(f"{each:,.0f}x" for each in both) + " |")
    return lines


def size_lines(sizes: list[dict[str, Any]]) -> list[str]:
    """Return the table of sizes."""
    lines = [
        "| SMs | kernels | streams | simulate | a kernel | run, with Python objects | reference engine | memory |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for each in sizes:
        reference = "" if each["reference_s"] is None else f"{each['reference_s']:.2f} s"
        lines.append(
            f"| {each['rule']} | {each['tasks']:,} | {each['streams']:,} | {each['simulate_s'] * 1e3:,.2f} ms "
            f"| {each['simulate_s'] / each['tasks'] * 1e9:,.0f} ns | {each['run_s']:.3f} s | {reference} "
            f"| {each['rss_bytes'] / 2**20:,.0f} MiB |"
        )
    return lines


def page(
    rates: dict[str, list[Bench]],
    sizes: list[dict[str, Any]],
    starts: list[dict[str, Any]],
    figure: str | None,
    loads: list[float],
) -> str:
    """Return the generated page."""
    versions = ", ".join(f"{name} {__import__(name).__version__}" for name in ("numba", "numpy"))
    lines = [
        "# How fast the engines are",
        "",
        "Generated by `python benchmarks/engine.py`. Everything here is one run on one machine: "
        f"{rates[BLOCKS][0].cores} cores ({platform.machine()}),",
        f"Python {platform.python_version()}, {versions}. `gpusim bench` measures the first table's rates on yours.",
        "",
        f"Blocks go to SMs one by one, as on `{HARDWARE}`:",
        "",
        *rate_lines(rates[BLOCKS]),
        "",
        "The same with the SMs shared out as one pool (`sharing_exponent` 0):",
        "",
        *rate_lines(rates[POOL]),
        "",
        "A second is one of CPU time on one core, for all cores one of wall time; medians of rounds in which all take",
        "turns, on the same 16 schedules. The engines agree on every makespan. The first two rows simulate plans that",
        "are ready: Python objects for the reference engine, arrays for the fast one. A search needs the fourth and",
        "fifth. The list schedulers share SMs out as one pool in both tables. The machine had other work at the same",
        f"time (load before, between and after: {', '.join(f'{load:.1f}' for load in loads)}): the ratios are sounder",
        "than the rates.",
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
    lines += ["", *start_lines(starts)]
    if figure is not None:
        lines += ["", f"![Time and memory by the number of kernels]({figure})"]
    return "\n".join(lines) + "\n"


def draw(sizes: list[dict[str, Any]], target: Path) -> bool:
    """Draw the scaling figure; False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 4.2), constrained_layout=True)
    kinds = [(rule, wide) for rule in RULES for wide in (False, True)]
    for rule, wide in kinds:
        name = f"{rule}, {'a stream for 10 kernels' if wide else f'{STREAMS} streams'}"
        rows = [each for each in sizes if (each["streams"] != STREAMS) == wide and each["rule"] == rule]
        counts = [each["tasks"] for each in rows]
        left.loglog(counts, [each["simulate_s"] for each in rows], "o-", label=f"fast engine, {name}")
        right.semilogx(counts, [each["rss_bytes"] / 2**20 for each in rows], "o-", label=name)
    for rule in RULES:
        slow = [each for each in sizes if each["reference_s"] and each["streams"] == STREAMS and each["rule"] == rule]
        times = [each["reference_s"] for each in slow]
        if times:
            left.loglog([each["tasks"] for each in slow], times, "s--", label=f"reference engine, {rule}")
    left.set(xlabel="kernels", ylabel="seconds", title="time to simulate a plan")
    right.set(xlabel="kernels", ylabel="MiB", title="memory of the process")
    right.set_ylim(bottom=0)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(target, dpi=150)
    return True


def main() -> None:
    """Measure, write, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each measurement of a round")
    parser.add_argument("--trace", action="append", help="only these bundled traces")
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="kernels of the largest synthetic plan")
    parser.add_argument("-o", dest="output", type=Path, help="write the page here; without it, print it")
    parser.add_argument("--figure", type=Path, help="write the figure here")
    parser.add_argument("--raw", type=Path, help="write the numbers here, too (.json)")
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--read", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--streams", type=int, default=STREAMS, help=argparse.SUPPRESS)
    parser.add_argument("--rule", default=BLOCKS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.size is not None:
        print(json.dumps(measure_size(options.size, options.streams, options.rule)))
        return
    if options.read:
        print(json.dumps(measure_read()))
        return
    rates_of: dict[str, list[Bench]] = {rule: [] for rule in RULES}
    loads = [os.getloadavg()[0]]
    for name in options.trace or TRACES:
        for rule in RULES:
            print(f"  {name}, {rule}", file=sys.stderr)
            rates_of[rule].append(bench(load_trace(name), hardware_by(rule), round_s=options.seconds))
            assert rates_of[rule][-1].makespans_equal
    loads.append(os.getloadavg()[0])
    shapes = [(size, streams) for size in SIZES for streams in (STREAMS, size // 10)]
    sizes = [
        measure_in_process(size, streams, rule) for rule in RULES for size, streams in shapes if size <= options.largest
    ]
    starts = measure_starts()
    loads.append(os.getloadavg()[0])
    drawn = options.figure is not None and draw(sizes, options.figure)
    text = page(rates_of, sizes, starts, f"../docs/images/{options.figure.name}" if drawn else None, loads)
    if options.raw is not None:
        rates = {rule: [asdict(each) for each in of_rule] for rule, of_rule in rates_of.items()}
        raw = {"rates": rates, "sizes": sizes, "starts": starts, "load": loads}
        options.raw.write_text(json.dumps(raw, indent=1))
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
