"""DistributedDataParallel simulated against measured times: python validate/layerwise/ddp.py [TRACES] [-o FILE].

The measured times are eager forward and backward passes of torchvision's networks on one, two and four H200s. No number
here was fitted to those of two and four. With a folder of traces (`alexnet-train-b32.json.gz` ..., from `gpusim capture
torchvision:alexnet --mode train --batch 32` on one GPU), layers take their captured kernels. Without, they share the
measured time of one GPU by a roofline.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import networks

from gpusim.formats.hardware import load_hardware
from gpusim.formats.topology import load_topology
from gpusim.layerwise.compute import Roofline, TraceTimes
from gpusim.layerwise.costs import Problem
from gpusim.layerwise.ddp import ddp_step_ns
from gpusim.layerwise.from_trace import layers_of
from gpusim.step import load
from gpusim.version import code_version

MEASURED_ON = "2026-11-20"
#: Network, batch of a GPU -> us on one GPU, and under DistributedDataParallel on 4 and 2. TF32.
MEASURED_US = {
    ("alexnet", 32): (2239, {4: 3312, 2: 3157}),
    ("alexnet", 128): (5926, {4: 6547, 2: 6416}),
    ("vgg16", 32): (23933, {4: 25374, 2: 25078}),
    ("inception_v3", 32): (32759, {4: 35573, 2: 35374}),
}


def cases(traces: Path | None) -> list[dict[str, object]]:
    """A row for each measured time."""
    hardware, topology = load_hardware("h200"), load_topology("h200")
    rows: list[dict[str, object]] = []
    for (name, batch), (alone_us, measured) in MEASURED_US.items():
        file = None if traces is None else traces / f"{name}-train-b{batch}.json.gz"
        if file is not None and file.exists():
            step = load(file)
            graph = layers_of(step.trace)
            times, model, basis = TraceTimes(step.graph, graph), step.graph.hardware, "trace"
        else:
            whole = name == "inception_v3"  # in training torchvision's has its auxiliary classifier
            graph = networks.inception_v3(batch, auxiliary=True) if whole else networks.NETWORKS[name](batch)
            model, basis = hardware, "roofline"
            times = Roofline(hardware).scaled_to(graph, alone_us * 1e3)
        one = Problem(graph, 1, topology, times, model)
        for gpus, measured_us in measured.items():
            several = Problem(graph.for_gpus(gpus), gpus, topology, times, model)
            predicted_ns = ddp_step_ns(several, one, alone_us * 1e3)
            rows.append(
                {
                    "network": name,
                    "mode": "train",
                    "batch": batch,
                    "dtype": "tf32",
                    "policy": "ddp",
                    "gpus": gpus,
                    "plan": "data",
                    "communication": "measured",
                    "computation": basis,
                    "alone_ns": alone_us * 1000,
                    "predicted_ns": round(predicted_ns),
                    "measured_ns": measured_us * 1000,
                    "fitted": False,
                }
            )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; write the rows where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="?", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)
    rows = cases(options.traces)
    errors = []
    print("| network | batch | GPUs | layers' times | alone, us | DDP measured | simulated | error |")
    print("|---|--:|--:|---|--:|--:|--:|--:|")
    for row in rows:
        error = row["predicted_ns"] / row["measured_ns"] - 1  # type: ignore[operator]
        errors.append(abs(error))
        times = [f"{row[key] / 1e3:,.0f}" for key in ("alone_ns", "measured_ns", "predicted_ns")]  # type: ignore[operator]
        cells = [str(row[key]) for key in ("network", "batch", "gpus", "computation")]
        print(f"| {' | '.join([*cells, *times])} | {error:+.1%} |")
    print(f"\nmedian {statistics.median(errors):.1%}, largest {max(errors):.1%}")
    if options.output is not None:
        document = {
            "recipe": "parallel_ddp",
            "gpu": "NVIDIA H200",
            "date": MEASURED_ON,
            "command": "python validate/layerwise/ddp.py",
            "gpusim": code_version(),
            "cases": rows,
        }
        options.output.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
