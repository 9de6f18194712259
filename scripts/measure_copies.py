"""Measure copies on this machine's GPU: python scripts/measure_copies.py OUT.json (nothing else on the GPU)."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path

import msgspec
import torch

from gpusim.gpu.calibrate.copies import measure
from gpusim.gpu.device import gpu_facts, require_gpu
from gpusim.version import code_version


def main() -> None:
    """Write the results of `measure`, with the GPU's name."""
    require_gpu()
    facts = gpu_facts(lambda: torch.cuda._sleep(2_000_000))
    result = {
        "gpu": facts.name,
        "date": datetime.date.today().isoformat(),
        "command": "python scripts/measure_copies.py",
        "versions": {"driver": facts.driver, "cuda": facts.cuda, "torch": facts.torch, "cudnn": facts.cudnn},
        "sm_clock_mhz": facts.sm_clock_mhz,
        "gpusim": code_version(),
        **measure(),
    }
    Path(sys.argv[1]).write_text(json.dumps(msgspec.to_builtins(result), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
