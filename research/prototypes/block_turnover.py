"""Forms of the rule for block turnover: errors of replayed schedules, and of chains side by side, under each.

    PYTHONPATH=.:scripts python research/prototypes/block_turnover.py validate/results/kinds_h200_20261123.json ...
    PYTHONPATH=.:scripts python research/prototypes/block_turnover.py research/data/block_starts_h200_20261130.json

- none: blocks of all kernels start at once, as far as there is room
- wave: a kernel that starts 0.9 blocks a ns or more counts as one wave, so that its last one leaves no SMs to others
- all: each block of any kernel holds up the next kernel start by 0.85 ns
- a number: each block of a kernel of more than one wave does, by that time in ns (`gpusim.rules.block_turnover`)

Prints, for all steps, each kind and each step: mean over steps of the mean error, the median, the error of 95 %, the
largest, and the bias, in percent. Of chains by `gpusim calibrate --rules`: the times of the longest over alone,
measured and predicted, the blocks that all start in a ns together, and 1 for kernels of more than one wave. At the end
the median time a block of these.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import msgspec
from beyond_the_cache import cells
from set_uncertainty import kind_of

from gpusim.analysis import concurrent_chains
from gpusim.engine.fast import FastEngine
from gpusim.formats.hardware import HardwareModel, load_hardware
from gpusim.formats.rules import read_rules
from gpusim.plan.kernels import Fits
from gpusim.plan.lower import lower
from gpusim.plan.tasks import Plan, Task
from gpusim.validation.again import replayed_schedules

ENGINE = FastEngine()
#: Least rate, in blocks a ns, of kernels that count as one wave.
ONE_WAVE_RATE = 0.9


@dataclass(frozen=True)
class Form:
    """One form of the rule."""

    block_ns: float = 0.0
    only_larger: bool = True
    """True for kernels of more than one wave alone."""
    one_wave: bool = False


FORMS = {
    "none": Form(),
    "wave": Form(one_wave=True),
    "all": Form(0.85, only_larger=False),
    **{f"{block_ns:.2f}": Form(block_ns) for block_ns in (0.6, 0.7, 0.85, 1.0, 1.15)},
}


def changed(task: Task, hardware: HardwareModel, form: Form) -> Task:
    """Return a kernel under a form of the rule, for a GPU without it; idle blocks stay."""
    at_once = task.blocks_per_sm * hardware.limits.sms
    blocks, idle_ns = task.blocks, task.idle_ns
    if task.blocks > at_once or not form.only_larger:
        idle_ns = max(idle_ns, form.block_ns * task.blocks)
    if form.one_wave and task.blocks >= ONE_WAVE_RATE * task.dur_ns:
        blocks = min(blocks, at_once)
    return msgspec.structs.replace(task, blocks=blocks, idle_ns=idle_ns)


def without(hardware: HardwareModel) -> HardwareModel:
    """Return the GPU without the rule."""
    return msgspec.structs.replace(hardware, graph=msgspec.structs.replace(hardware.graph, turnover_ns=0.0))


def under(plan: Plan, hardware: HardwareModel, form: Form) -> Plan:
    """Return the plan with its kernels under a form of the rule."""
    tasks = [changed(task, hardware, form) if task.kind == "kernel" else task for task in plan.tasks]
    return replace(plan, tasks=tuple(tasks))


def chains(file: Path) -> None:
    """Print a row for each run of chains in a file of `gpusim calibrate --rules`."""
    alone, hardware = concurrent_chains.Chain.alone, without(load_hardware("h200"))
    fits, times_ns = Fits(hardware), []
    print(f"| chains | streams | measured | {' | '.join(FORMS)} | blocks a ns | more than one wave |")
    for experiment in read_rules(file).chains:
        columns = []
        for form in FORMS.values():

            def ours(chain: concurrent_chains.Chain, gap_ns: float, form: Form = form) -> tuple[Task, ...]:
                return tuple(changed(task, hardware, form) for task in alone(chain, gap_ns))

            with patch.object(concurrent_chains.Chain, "alone", ours):
                columns.append(concurrent_chains.compare(experiment, hardware))
        calls = {call.name: call for call in experiment.calls}
        for of_run in zip(*columns, strict=True):
            run, rate, larger = of_run[0], "", ""
            if run.equal:
                call = calls[run.name]
                blocks = sum(math.prod(kernel.grid) for kernel in call.kernels)
                of_all = run.streams * blocks / (run.measured * call.call_ns)
                rate = f"{of_all:.2f}"
                if blocks > fits.of(call.kernels[0]).resident * hardware.limits.sms:
                    times_ns.append(1 / of_all)
                    larger = "1"
            cells_of_run = " | ".join(f"{each.predicted:.2f}" for each in of_run)
            print(f"| {run.name} | {run.streams} | {run.measured:.2f} | {cells_of_run} | {rate} | {larger} |")
    if times_ns:
        print(
            f"{len(times_ns)} runs of more than one wave: {min(times_ns):.2f} to {max(times_ns):.2f} ns a block, "
            f"median {statistics.median(times_ns):.3f}"
        )


def main() -> None:
    """Print a row for all steps, each kind and each step; or for each run of chains."""
    groups: dict[str, list[tuple[str, list[float]]]] = defaultdict(list)
    for file in map(Path, sys.argv[1:]):
        if file.parent.name == "data":
            chains(file)
            continue
        for case, graph, schedule in replayed_schedules(file):
            if case.streams < 2 or schedule.has_variants or schedule.partitions or not case.outputs_equal:
                continue
            plans = [under(lower(graph, schedule), graph.hardware, form) for form in FORMS.values()]
            errors = [ENGINE.run(each, without(graph.hardware)).makespan_ns / case.measured_ns - 1 for each in plans]
            for group in ("all", kind_of(case.network), case.trace):
                groups[group].append((case.trace, errors))
    if groups:
        print(f"| | schedules | steps | {' | '.join(FORMS)} |")
    for group, of_group in groups.items():
        print(f"| {group} | {len(of_group)} | {len({step for step, _ in of_group})} | {cells(of_group)} |")


if __name__ == "__main__":
    main()
