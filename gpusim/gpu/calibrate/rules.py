"""`gpusim calibrate --rules`: check the engines' rules on the current GPU."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Collection

import torch

from gpusim.analysis.concurrent_chains import judge
from gpusim.engine.reference import ReferenceEngine
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.rules import EXPERIMENTS, LAUNCHES, SCHEMA, START_INTERFERENCE, Rule, Rules
from gpusim.gpu.calibrate import concurrent_chains
from gpusim.gpu.calibrate.block_kernels import BlockBench
from gpusim.gpu.calibrate.dispatcher_rules import JUDGES, MEASUREMENTS, rules
from gpusim.gpu.calibrate.hyper_q import measure_hyper_q
from gpusim.gpu.calibrate.microbench import clock_mhz
from gpusim.gpu.calibrate.start_interference import check_interference
from gpusim.gpu.device import gpu_facts, require_gpu
from gpusim.version import code_version


def check_rules(
    hardware: HardwareModel,
    command: str,
    say: Callable[[str], None] = lambda _: None,
    only: Collection[str] = (),
) -> Rules:
    """Run all experiments on the current GPU, or those named in `only`; `hardware` has its limits, and predicts chains.

    Raises `GpuError` without a GPU.
    """
    require_gpu()
    only = only or EXPERIMENTS
    facts = gpu_facts(lambda: torch.cuda._sleep(2_000_000))
    checked: list[Rule] = []
    if not {*JUDGES, *MEASUREMENTS}.isdisjoint(only):
        checked += rules(BlockBench(clock_mhz(facts)), hardware.limits, say, only)
    if START_INTERFERENCE in only:
        say(START_INTERFERENCE)
        checked.append(check_interference())
    chains = []
    for experiment in concurrent_chains.EXPERIMENTS:
        if experiment.name in only:
            say(f"{experiment.name} side by side")
            chains.append(concurrent_chains.run(experiment))
            # The reference engine: compiling the fast one would take longer than all of these few predictions.
            checked.append(judge(chains[-1], hardware, ReferenceEngine()))
    return Rules(
        schema=SCHEMA,
        gpu=facts,
        date=datetime.date.today().isoformat(),
        command=command,
        gpusim=code_version(),
        rules=tuple(checked),
        chains=tuple(chains),
        hyper_q=measure_hyper_q(command, say) if LAUNCHES in only else None,
    )
