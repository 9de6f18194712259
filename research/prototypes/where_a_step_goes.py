"""Where the time of AlexNet's layer-wise plan goes, simulated from shares that were timed alone.

    python research/prototypes/where_a_step_goes.py SHARES GPUS [TOPOLOGY [direct]]

Prints the tasks of GPU 0 in order, in us, and the parts of its step: shares, collectives that nothing hides, copies,
the slow-down of kernels beside collectives, and gaps. The plan is searched by today's rules. `direct`: GPUs read each
other's memory, whose curves TOPOLOGY then has.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "validate" / "layerwise"))

import networks
from measured_shares import pass_times

from gpusim.formats.hardware import load_hardware
from gpusim.formats.topology import load_topology
from gpusim.layerwise.compute import MeasuredTimes, Roofline, share_key
from gpusim.layerwise.configs import layer_configs
from gpusim.layerwise.costs import Problem
from gpusim.layerwise.explore import explore_problem
from gpusim.layerwise.lowering import COMPUTE
from gpusim.layerwise.makespan import simulate_plan
from gpusim.layerwise.shares import shares_of

NETWORK, BATCH = "alexnet", 32


def main() -> None:
    """Print the step."""
    file, gpus = sys.argv[1], int(sys.argv[2])
    known = {key: pass_times(*times) for key, times in json.loads(Path(file).read_text()).items()}
    hardware, topology = load_hardware("h200"), load_topology(sys.argv[3] if len(sys.argv) > 3 else "h200")
    graph = networks.NETWORKS[NETWORK](BATCH).for_gpus(gpus)
    seen = {
        index: tuple(
            dict.fromkeys(
                share
                for config in layer_configs(layer, gpus)
                for share in shares_of(layer, config, range(gpus))
                if share_key(layer, share) in known
            )
        )
        for index, layer in enumerate(graph.layers)
    }
    times = MeasuredTimes(known, seen, Roofline(hardware, optimizer=False))
    problem = Problem(graph, gpus, topology, times, hardware, direct="direct" in sys.argv[4:])
    choice = explore_problem(problem).best.choice
    print("; ".join(f"{layer.name} {config}" for layer, config in zip(graph.layers, choice, strict=True)))
    found = simulate_plan(problem, choice)
    lowered, timeline = found.lowered, found.timeline
    parts: Counter[str] = Counter()
    reached = 0
    for index, task in enumerate(lowered.plan.tasks):
        start, end, purpose = timeline.start_ns[index], timeline.end_ns[index], lowered.purposes[index]
        if task.device:
            continue
        layer = graph.layers[lowered.layers[index]].name if lowered.layers[index] >= 0 else ""
        print(f"{start / 1e3:8.1f} {(end - start) / 1e3:7.1f} {purpose:9} {layer}")
        if task.queue != COMPUTE:
            continue
        last = max(task.deps, key=lambda dep: timeline.end_ns[dep], default=-1)
        if last >= 0 and lowered.purposes[last] in ("transfer", "sync") and timeline.end_ns[last] > reached:
            parts["exchanges" if lowered.purposes[last] == "transfer" else "sums"] += timeline.end_ns[last] - reached
            reached = timeline.end_ns[last]
        parts["gaps"] += start - reached
        kind = "copies" if purpose == "copy" else "shares"
        parts[kind] += round(lowered.solo_ns[index])
        parts["slowed"] += end - start - round(lowered.solo_ns[index])
        reached = end
    parts["sums"] += timeline.makespan_ns - reached
    print({name: round(time / 1e3) for name, time in parts.items()}, round(timeline.makespan_ns / 1e3))


if __name__ == "__main__":
    main()
