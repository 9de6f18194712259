"""Measure what a branch adds to each gap of a step: python scripts/measure_branches.py OUT.json TRACE.json.gz...

The sequential CUDA graph of each step is timed with and without one tiny kernel on a second stream, as the calibration
does for its own steps (`gpusim.gpu.calibrate.linear_graph`). Steps that the output file has are left out, so an
interrupted run goes on.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from gpusim.gpu.calibrate.linear_graph import branch_cost_ns
from gpusim.gpu.device import require_gpu
from gpusim.plan.anchor import anchor
from gpusim.trace.store import read_trace
from gpusim.validation.chosen import hardware_of
from gpusim.version import code_version


def main() -> None:
    """Write each step's gap and what a branch adds to it, both in ns."""
    require_gpu()
    out = Path(sys.argv[1])
    found: dict[str, Any] = {"gpusim": code_version(), "steps": {}}
    if out.is_file():
        found = json.loads(out.read_text(encoding="utf-8"))
    for file in sys.argv[2:]:
        trace = read_trace(Path(file))
        if trace.name not in found["steps"]:
            hardware = hardware_of(trace)
            gap_ns, branch_ns = anchor(trace, hardware).chain_ns, branch_cost_ns(trace, hardware)
            found["steps"][trace.name] = {"gap_ns": gap_ns, "branch_ns": branch_ns}
            print(f"{trace.name}: gap {gap_ns:.0f} ns, a branch adds {branch_ns:.0f} ns")
            out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
