"""Measure copies on this machine's GPU: python scripts/measure_copies.py OUT.json (nothing else on the GPU)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gpusim.gpu.calibrate.copies import measure
from gpusim.gpu.device import gpu_facts, require_gpu


def main() -> None:
    """Write everything that `measure` gives, with the GPU that it is of."""
    require_gpu()
    facts = gpu_facts()
    result = {"gpu": facts.name, "driver": facts.driver, "torch": facts.torch, **measure()}
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
