"""Constants of launches in a CUDA graph, with slow and with fast launches, in turns.

    python research/prototypes/launch_constants.py OUT.json

Each round makes launches slow, then fast, before every timing of `gpusim calibrate`, and measures `graph.chain_ns` of
small kernels, `front_end_ns`, `memory_node_ns`, `fork_ns`, `busy_ns`, `busy_starts` and `memory.launch_miss_ns`.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from gpusim.formats.hardware import load_hardware
from gpusim.gpu.calibrate import block_kernels, calibrate, microbench, stamps
from gpusim.gpu.calibrate.cache import launch_miss_ns
from gpusim.gpu.device import provenance, require_gpu
from gpusim.gpu.launch_state import make_launches_fast, make_launches_slow

ROUNDS = 2
STATES = {"slow": make_launches_slow, "fast": make_launches_fast}


def main() -> None:
    """Write the constants of each round and state."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("out", type=Path)
    out: Path = arguments.parse_args().out
    require_gpu()
    command = "python research/prototypes/launch_constants.py OUT.json"
    result: dict[str, Any] = provenance(command, partial(torch.cuda._sleep, 2_000_000)) | {"rounds": []}
    l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    for number in range(ROUNDS):
        for state, make in STATES.items():
            for module in (microbench, block_kernels, stamps):
                vars(module)["make_launches_slow"] = make
            make()
            costs, _ = calibrate.graph_costs(load_hardware("h200").graph)
            row = {"state": state, **msgspec.to_builtins(costs), "launch_miss_ns": launch_miss_ns(l2_bytes)}
            result["rounds"].append(row)
            print(number, row, flush=True)
            out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
