"""The setting of Jia et al. 2018 beside its figures: python validate/layerwise/paper.py [-o FILE].

Four nodes of four P100s, NVLink at 15 GiB/s, InfiniBand at 4.5 GiB/s, a parameter server, 32 images a GPU. Computation
is a roofline scaled to the paper's throughput on one GPU; nothing else is taken from its results. Throughputs and
volumes of the paper are read off its figures 7 and 8.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import networks

from gpusim.formats.hardware import load_hardware
from gpusim.formats.topology import load_topology
from gpusim.layerwise.compute import Roofline
from gpusim.layerwise.costs import Problem
from gpusim.layerwise.explore import Parallel, explore_problem
from gpusim.layerwise.layers import LayerGraph

BATCH, GPUS = 32, (1, 2, 4, 8, 16)
#: Images a second at 1, 2, 4, 8, 16 GPUs.
PAPER_IMAGES = {
    "alexnet": {
        "model": (745, 1304, 1825, 2461, 3305),
        "data": (745, 1182, 1761, 2485, 3232),
        "owt": (745, 1401, 2030, 3045, 4262),
        "layer": (745, 1493, 2743, 4937, 9050),
    },
    "vgg16": {
        "model": (184, 313, 502, 778, 1049),
        "data": (184, 343, 632, 1081, 1661),
        "owt": (184, 360, 700, 1217, 1991),
        "layer": (184, 364, 727, 1418, 2717),
    },
    "inception_v3": {
        "model": (157, 220, 264, 224, 160),
        "data": (157, 305, 503, 967, 1691),
        "owt": (157, 310, 522, 993, 1746),
        "layer": (157, 316, 632, 1249, 2431),
    },
}
#: GiB moved in a step at 2, 4, 8, 16 GPUs.
PAPER_GIB = {
    "alexnet": {
        "data": (1.114, 2.228, 4.456, 8.91),
        "owt": (0.049, 0.121, 0.339, 1.06),
        "layer": (0.049, 0.098, 0.195, 0.390),
    },
    "vgg16": {
        "data": (2.06, 4.12, 8.23, 16.5),
        "owt": (0.239, 0.541, 1.34, 3.69),
        "layer": (0.208, 0.336, 0.687, 1.63),
    },
    "inception_v3": {
        "data": (0.355, 0.710, 1.42, 2.84),
        "owt": (0.326, 0.656, 1.33, 2.72),
        "layer": (0.282, 0.563, 1.13, 2.25),
    },
}


def network(name: str) -> LayerGraph:
    """The layers of one GPU's batch; AlexNet with the paper's 74.7 M weights."""
    return networks.alexnet(BATCH, wide=True) if name == "alexnet" else networks.NETWORKS[name](BATCH)


def explored(name: str, gpus: int) -> Parallel:
    """Plans by the sum of costs, as the paper's search has it."""
    hardware, topology = load_hardware("p100"), load_topology("p100")
    graph = network(name)
    step_ns = BATCH / PAPER_IMAGES[name]["data"][0] * 1e9
    times = Roofline(hardware, "fp32", optimizer=False).scaled_to(graph, step_ns)
    problem = Problem(graph.for_gpus(gpus), gpus, topology, times, hardware, repeated=False)
    return explore_problem(problem, objective="additive")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print tables; write rows where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)
    rows = []
    print("Speed-up over one GPU: sum of costs / simulated / paper; GiB a step: here / paper\n")
    for name in PAPER_IMAGES:
        print(f"| {name} | " + " | ".join(f"{gpus} GPUs | GiB" for gpus in GPUS[1:]) + " |")
        print("|---|" + "--:|--:|" * len(GPUS[1:]))
        found = {gpus: explored(name, gpus) for gpus in GPUS[1:]}
        for plan in ("model", "data", "owt", "layer"):
            cells = []
            for column, gpus in enumerate(GPUS[1:]):
                one_ns = BATCH / PAPER_IMAGES[name]["data"][0] * 1e9
                result = found[gpus].plan(plan)
                paper = PAPER_IMAGES[name][plan][column + 1] / PAPER_IMAGES[name][plan][0]
                ours = [gpus * one_ns / time for time in (result.additive_ns, result.step_ns)]
                gib = PAPER_GIB[name].get(plan, (0.0,) * 4)[column]
                cells += [f"{ours[0]:.1f} / {ours[1]:.1f} / {paper:.1f}", f"{result.bytes / 2**30:.3g} / {gib or '-'}"]
                rows.append(
                    {
                        "network": name,
                        "gpus": gpus,
                        "plan": plan,
                        "additive_speedup": ours[0],
                        "simulated_speedup": ours[1],
                        "paper_speedup": paper,
                        "gib": result.bytes / 2**30,
                        "paper_gib": gib,
                    }
                )
            print(f"| {plan} | " + " | ".join(cells) + " |")
        print()
    four = explored("vgg16", 4)
    print("VGG-16 on 4 GPUs: " + "; ".join(f"{row.name} {row.config}" for row in four.rows()))
    if options.output is not None:
        options.output.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
