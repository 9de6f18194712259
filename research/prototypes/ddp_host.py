"""DistributedDataParallel with its host.

    PYTHONPATH=.:validate/layerwise python research/prototypes/ddp_host.py

Launches of the simulated step from the host, at several paces. A pace of 1 is that of the bundled training traces: host
times by operator are medians of GoogLeNet and ResNet-50 at 8 images. What DistributedDataParallel adds for a parameter,
a bucket and a buffer follows from `research/data/ddp_alone_h200_20261124.json`, one GPU with one rank. Nothing comes
from the eight times.
"""

from __future__ import annotations

from typing import Final

import msgspec
import networks
from ddp import MEASURED_US

from gpusim.engine.base import engine_by_name
from gpusim.formats.hardware import load_hardware
from gpusim.formats.topology import load_topology
from gpusim.layerwise.compute import Roofline
from gpusim.layerwise.costs import Problem
from gpusim.layerwise.ddp import lower_ddp
from gpusim.layerwise.layers import Layer, LayerGraph
from gpusim.layerwise.lowering import Lowered
from gpusim.plan.tasks import Plan, Task

PACES: Final = (0.75, 0.885, 1.0, 1.15, 1.3)
#: Operation -> us of the host for its forward and its backward pass.
HOST_US: Final = {
    "convolution": (40, 69),
    "batch_norm": (39, 22),
    "linear": (45, 76),
    "relu": (11.6, 12.7),
    "pool": (19, 24.5),
    "global_pool": (19, 24.5),
    "dropout": (26, 15),
    "loss": (70, 60),
    "concat": (18, 30),
    "flatten": (4, 4),
}
#: A parameter has two copies, into its bucket and back. A buffer is copied once.
PARAMETER_US, BUCKET_US, BUFFER_US = 17.0, 14.0, 2.6
#: No time: 0 would be the model's time of a launch.
NONE_NS: Final = 1e-3


def host_us(layer: Layer) -> tuple[float, float]:
    """The host's time for a layer's passes."""
    kinds = [op.kind for op in layer.ops] or [layer.kind]
    pairs = [HOST_US.get(kind, (12.0, 12.0)) for kind in kinds]
    return sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)


def launched(lowered: Lowered, graph: LayerGraph, pace: float) -> list[Task]:
    """The step's tasks with the host's time before each."""
    seen: set[tuple[int, str]] = set()
    tasks = []
    for task, purpose, index in zip(lowered.plan.tasks, lowered.purposes, lowered.layers, strict=True):
        host_ns = NONE_NS
        if task.name == "copy":
            host_ns = 1e3 * pace * (BUFFER_US if purpose == "forward" else PARAMETER_US / 2)
        elif purpose in ("sync", "transfer"):
            host_ns = NONE_NS if "link" in task.name else 1e3 * pace * BUCKET_US
        elif (index, purpose) not in seen:
            seen.add((index, purpose))
            host_ns = 1e3 * pace * host_us(graph.layers[index])[purpose == "backward"]
        tasks.append(msgspec.structs.replace(task, host_ns=host_ns))
    return tasks


def in_a_row(tasks: list[Task], steps: int) -> Plan:
    """Several steps, launched from the host."""
    moved = [
        msgspec.structs.replace(task, deps=tuple(dep + step * len(tasks) for dep in task.deps))
        for step in range(steps)
        for task in tasks
    ]
    return Plan(tuple(moved), mode="stream")


def simulated_us(problem: Problem, pace: float) -> tuple[float, float, float]:
    """The host's time of a step, a step from a quiet GPU, and one of several in a row."""
    lowered, run = lower_ddp(problem), engine_by_name("fast").run
    tasks = launched(lowered, problem.graph, pace)
    one, two, five = (run(in_a_row(tasks, steps), lowered.hardware).makespan_ns / 1e3 for steps in (1, 2, 5))
    return sum(task.host_ns for task in tasks) / 1e3, one, (five - two) / 3


def main() -> int:
    """Print a table."""
    hardware, topology = load_hardware("h200"), load_topology("h200")
    print("| network | batch | GPUs | pace | host, us | in a row | from a quiet GPU |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for (name, batch), (alone_us, measured) in MEASURED_US.items():
        whole = name == "inception_v3"
        graph = networks.inception_v3(batch, auxiliary=True) if whole else networks.NETWORKS[name](batch)
        times = Roofline(hardware).scaled_to(graph, alone_us * 1e3)
        for pace in PACES:
            _, quiet, row = simulated_us(Problem(graph, 1, topology, times, hardware), pace)
            for gpus, measured_us in measured.items():
                problem = Problem(graph.for_gpus(gpus), gpus, topology, times, hardware)
                host, ddp_quiet, ddp_row = simulated_us(problem, pace)
                errors = [(alone_us + more) / measured_us - 1 for more in (ddp_row - row, ddp_quiet - quiet)]
                cells = [name, str(batch), str(gpus), str(pace), f"{host:,.0f}", *(f"{each:+.1%}" for each in errors)]
                print(f"| {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
