"""Steps of plans on four GPUs by the size of the buckets of gradients and of the last one, simulated, in us.

    python research/prototypes/last_bucket.py

Shares were timed alone on an H200. 0 MiB: no bucket ends before it is full.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "validate" / "layerwise"))

import networks
from measured_shares import pass_times

from gpusim.formats.hardware import load_hardware
from gpusim.formats.topology import load_topology
from gpusim.layerwise import buckets
from gpusim.layerwise.compute import MeasuredTimes, Roofline
from gpusim.layerwise.costs import Problem
from gpusim.layerwise.fixed_plans import FIXED_PLANS
from gpusim.layerwise.makespan import simulate_plan
from gpusim.units import MIB

DATA = Path(__file__).parents[1] / "data"
SHARES = {name: DATA / f"shares_of_four_{name}h200_20261126.json" for name in ("", "first_")}
STEPS = (
    ("alexnet", 32, ""),
    ("alexnet", 128, ""),
    ("vgg16", 32, "first_"),
    ("resnet50", 32, "first_"),
    ("resnet50", 128, "first_"),
    ("inception_v3", 32, "first_"),
)
GPUS, BUCKETS_MIB, LAST_MIB = 4, (8, 25), (0.0, 0.5, 1.0, 2.0, 4.0)


def main() -> None:
    """Print a row for each step, plan and size of buckets: columns are sizes of the last one."""
    hardware, topology = load_hardware("h200"), load_topology("h200")
    print("MiB", *LAST_MIB)
    for network, batch, file in STEPS:
        known = {key: pass_times(*each) for key, each in json.loads(SHARES[file].read_text()).items()}
        graph = networks.NETWORKS[network](batch).for_gpus(GPUS)
        times = MeasuredTimes(known, {}, Roofline(hardware, optimizer=False))
        problem = Problem(graph, GPUS, topology, times, hardware)
        for plan in ("data", "owt"):
            for bucket_mib in BUCKETS_MIB:
                row = []
                for last_mib in LAST_MIB:
                    buckets.LAST_BUCKET_BYTES = round(last_mib * MIB)  # type: ignore[misc]
                    sized = replace(problem, bucket_bytes=bucket_mib * MIB, _costs={})
                    step_ns = simulate_plan(sized, FIXED_PLANS[plan](graph, GPUS)).makespan.step_ns
                    row.append(f"{step_ns / 1e3:,.0f}")
                print(network, batch, plan, f"{bucket_mib} MiB:", *row)


if __name__ == "__main__":
    main()
