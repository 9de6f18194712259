"""Candidate rule for kernels bound by the rate at which the GPU starts blocks: errors of replayed schedules under it.

    PYTHONPATH=.:scripts python research/prototypes/block_starts.py validate/results/kinds_h200_20261123.json ...
    PYTHONPATH=.:scripts python research/prototypes/block_starts.py research/data/rows_by_index_h200_20261130.json

- waves: a kernel that needs most of the rate is bound by it, so that its last wave leaves no SMs to others; its blocks
  count as one wave
- rate: all running kernels share the rate; where they need more, all slow down alike, as with DRAM bandwidth
  (`gpusim.rules.dram`), whose place it takes here
- both

Prints, for all steps, each kind and each step: mean over steps of the mean error, the median, the error of 95 %, the
largest, and the bias, in percent. Of chains by `gpusim calibrate --rules`: the times of the longest over alone,
measured and predicted, and the blocks started per ns.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import msgspec
from beyond_the_cache import cells
from set_uncertainty import kind_of

from gpusim.analysis import concurrent_chains
from gpusim.engine.fast import FastEngine
from gpusim.formats.hardware import HardwareModel, load_hardware
from gpusim.formats.rules import read_rules
from gpusim.plan.lower import lower
from gpusim.plan.tasks import Plan, Task
from gpusim.validation.again import replayed_schedules

ENGINE = FastEngine()
#: Blocks that an H200 starts per ns: 1.17 to 1.32 in chains of gathers side by side.
BLOCKS_PER_NS = 1.2
#: Share of its time in which a kernel needs the whole rate, above which it is bound by it.
NEAR = 0.75
#: Candidate -> whether it has the rule for waves, and for the rate.
CANDIDATES = {"today": (False, False), "waves": (True, False), "rate": (False, True), "both": (True, True)}


def changed(task: Task, hardware: HardwareModel, waves: bool, rate: bool) -> Task:
    """Return a kernel under a candidate."""
    needed_ns = min(task.dur_ns, task.blocks / BLOCKS_PER_NS)
    blocks, dram_bytes = task.blocks, task.dram_bytes
    if waves and needed_ns > NEAR * task.dur_ns:
        blocks = min(blocks, task.blocks_per_sm * hardware.limits.sms)
    if rate:
        dram_bytes = max(dram_bytes, hardware.memory.dram_bytes_per_ns * needed_ns)
    return msgspec.structs.replace(task, blocks=blocks, dram_bytes=dram_bytes)


def under(plan: Plan, hardware: HardwareModel, *rules: bool) -> Plan:
    """Return the plan with its kernels under a candidate."""
    tasks = [changed(task, hardware, *rules) if task.kind == "kernel" else task for task in plan.tasks]
    return replace(plan, tasks=tuple(tasks))


def chains(file: Path) -> None:
    """Print a row for each run of chains in a file of `gpusim calibrate --rules`."""
    alone, hardware = concurrent_chains.Chain.alone, load_hardware("h200")
    for experiment in read_rules(file).chains:
        columns = []
        for rules in CANDIDATES.values():

            def ours(
                chain: concurrent_chains.Chain, gap_ns: float, rules: tuple[bool, bool] = rules
            ) -> tuple[Task, ...]:
                return tuple(changed(task, hardware, *rules) for task in alone(chain, gap_ns))

            with patch.object(concurrent_chains.Chain, "alone", ours):
                columns.append(concurrent_chains.compare(experiment, hardware))
        calls = {call.name: call for call in experiment.calls}
        print(f"| chains | streams | measured | {' | '.join(CANDIDATES)} | blocks per ns |")
        for of_run in zip(*columns, strict=True):
            run, rate = of_run[0], ""
            if run.equal:
                call = calls[run.name]
                blocks = sum(math.prod(kernel.grid) for kernel in call.kernels)
                rate = f"{run.streams * blocks / (run.measured * call.call_ns):.2f}"
            cells_of_run = " | ".join(f"{each.predicted:.2f}" for each in of_run)
            print(f"| {run.name} | {run.streams} | {run.measured:.2f} | {cells_of_run} | {rate} |")


def main() -> None:
    """Print a row for all steps, each kind and each step; or for each run of chains."""
    groups: dict[str, list[tuple[str, list[float]]]] = defaultdict(list)
    for file in map(Path, sys.argv[1:]):
        if file.name.startswith("rows_by_index"):
            chains(file)
            continue
        for case, graph, schedule in replayed_schedules(file):
            if case.streams < 2 or schedule.has_variants or schedule.partitions or not case.outputs_equal:
                continue
            plans = [under(lower(graph, schedule), graph.hardware, *rules) for rules in CANDIDATES.values()]
            errors = [ENGINE.run(each, graph.hardware).makespan_ns / case.measured_ns - 1 for each in plans]
            for group in ("all", kind_of(case.network), case.trace):
                groups[group].append((case.trace, errors))
    if groups:
        print(f"| | schedules | steps | {' | '.join(CANDIDATES)} |")
    for group, of_group in groups.items():
        print(f"| {group} | {len(of_group)} | {len({step for step, _ in of_group})} | {cells(of_group)} |")


if __name__ == "__main__":
    main()
