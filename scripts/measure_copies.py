"""Measure copies on this machine's GPU: python scripts/measure_copies.py OUT.json (nothing else on the GPU)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import torch

from gpusim.gpu.calibrate.copies import measure
from gpusim.gpu.device import provenance, require_gpu


def main() -> None:
    """Write the results of `measure`, with the GPU's name."""
    require_gpu()
    result = provenance("python scripts/measure_copies.py", lambda: torch.cuda._sleep(2_000_000)) | measure()
    Path(sys.argv[1]).write_text(json.dumps(msgspec.to_builtins(result), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
