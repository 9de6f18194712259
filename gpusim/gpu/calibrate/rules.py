"""`gpusim calibrate --rules`: check the engines' rules on the current GPU."""

from __future__ import annotations

import datetime
from collections.abc import Callable

import torch

from gpusim.formats.hardware import HardwareModel
from gpusim.formats.rules import SCHEMA, Rules
from gpusim.gpu.calibrate.block_kernels import BlockBench
from gpusim.gpu.calibrate.dispatcher_rules import rules
from gpusim.gpu.calibrate.hyper_q import measure_hyper_q
from gpusim.gpu.calibrate.microbench import clock_mhz
from gpusim.gpu.calibrate.start_interference import check_interference
from gpusim.gpu.device import gpu_facts, require_gpu
from gpusim.version import code_version


def check_rules(hardware: HardwareModel, command: str, say: Callable[[str], None] = lambda _: None) -> Rules:
    """Run all experiments on the current GPU; `hardware` has its limits. Raises `GpuError` without a GPU."""
    require_gpu()
    facts = gpu_facts(lambda: torch.cuda._sleep(2_000_000))
    checked = list(rules(BlockBench(clock_mhz(facts)), hardware.limits, say))
    say("start interference")
    checked.append(check_interference())
    return Rules(
        schema=SCHEMA,
        gpu=facts,
        date=datetime.date.today().isoformat(),
        command=command,
        gpusim=code_version(),
        rules=tuple(checked),
        hyper_q=measure_hyper_q(command, say),
    )
