"""CPU seconds of searches for layer-wise plans, by a roofline: python research/prototypes/time_of_plan_searches.py.

With `--digest`, a digest of the tables of costs of many problems instead: the same for code that changes no cost.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "validate" / "layerwise"))

import networks

from gpusim.formats.hardware import load_hardware
from gpusim.formats.topology import load_topology
from gpusim.layerwise.compute import Roofline
from gpusim.layerwise.costs import Problem, tables
from gpusim.layerwise.search import search, worth_looking_at

NAMES, BATCH, GPUS, TIMES = ("alexnet", "vgg16", "resnet50", "inception_v3", "densenet121"), 32, (16, 1024), 3


def problem(name: str, gpus: int, topology: str, *, synchronised: bool = False) -> Problem:
    """Return the problem of a network; with `synchronised`, other rules of statistics, packing and repeats, too."""
    graph, hardware = networks.NETWORKS[name](BATCH).for_gpus(gpus), load_hardware("h200")
    made = Problem(graph, gpus, load_topology(topology), Roofline(hardware), hardware)
    if not synchronised:
        return made
    return Problem(
        graph,
        gpus,
        made.topology,
        made.times,
        hardware,
        batch_norm="synchronised",
        direct=True,
        repeated=False,
    )


def digest() -> None:
    """Print a digest of the tables of problems on one and several nodes, and their number."""
    total, count = hashlib.sha256(), 0
    for topology, name, gpus, other in itertools.product(("h200", "p100"), NAMES, (2, 4, 16), (False, True)):
        asked = problem(name, gpus, topology, synchronised=other)
        costs = tables(asked, worth_looking_at(asked)[0])
        for node in costs.nodes:
            total.update(node.tobytes())
        for pair, edge in sorted(costs.edges.items()):
            total.update(repr(pair).encode() + edge.tobytes())
        count += 1
    print(f"{count} problems: {total.hexdigest()}")


def seconds() -> None:
    """Print the first time of each search and the least of several, the layers left, and whether it is exact."""
    print("| network | GPUs | first | least | layers left | exact |")
    print("|---|--:|--:|--:|--:|---|")
    for name, gpus in itertools.product(NAMES, GPUS):
        took_s = []
        for _ in range(TIMES):
            asked = problem(name, gpus, "h200")
            begin = time.process_time()
            found = search(asked)
            took_s.append(time.process_time() - begin)
        exact = "yes" if found.exact else "no"
        print(f"| {name} | {gpus} | {took_s[0]:.2f} | {min(took_s):.2f} | {found.kernel_layers} | {exact} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--digest", action="store_true", help="print a digest of tables of costs")
    digest() if parser.parse_args().digest else seconds()
