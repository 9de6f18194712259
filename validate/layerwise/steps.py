"""Plans and DistributedDataParallel on several GPUs: torchrun --nproc-per-node 4 validate/layerwise/steps.py [-o FILE].

For each network and batch: the plans `data`, `owt`, `layer` with real collectives, and torch's DistributedDataParallel
of the same network, forward and backward, timed in turns; loss and gradients of each plan against one device first.
The plan `layer` is that of `gpusim.layerwise` with a roofline. Eager launches; with `--graph` steps are recorded in
CUDA graphs, where NCCL allows it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import networks
import torch
import torch.distributed as dist

from gpusim.formats.hardware import load_hardware
from gpusim.formats.topology import load_topology
from gpusim.gpu.layerwise.__main__ import join, leave
from gpusim.gpu.layerwise.check import compare_plan
from gpusim.gpu.layerwise.operations import Surroundings, parameters_of, run_layer
from gpusim.gpu.layerwise.rank import Data, Rank, groups_of, make_data
from gpusim.gpu.layerwise.transport import Distributed
from gpusim.layerwise.compute import Roofline
from gpusim.layerwise.costs import Problem
from gpusim.layerwise.explore import explore_problem
from gpusim.layerwise.layers import BATCH, LayerGraph

NETWORKS, BATCHES, PLANS = ("alexnet", "vgg16", "resnet50", "inception_v3"), (32, 128), ("data", "owt", "layer")
ROUNDS, STEPS = 9, 10


class OneDevice(torch.nn.Module):
    """The whole network as a module: what DistributedDataParallel wraps."""

    def __init__(self, graph: LayerGraph) -> None:
        super().__init__()
        self.graph = graph
        self.named = []
        for index, layer in enumerate(graph.layers):
            made = parameters_of(layer, torch.Generator().manual_seed(index), torch.float32)
            for number, named in enumerate(made):
                for name, value in named.items():
                    self.register_parameter(f"p{index}_{number}_{name}", torch.nn.Parameter(value))
            self.named.append([list(named) for named in made])

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss."""
        values: list[torch.Tensor] = []
        for index, layer in enumerate(self.graph.layers):
            named = [
                {name: getattr(self, f"p{index}_{number}_{name}") for name in names}
                for number, names in enumerate(self.named[index])
            ]
            given = [inputs if edge.source == BATCH else values[edge.source] for edge in layer.inputs]
            where = Surroundings((0, layer.output[1]), (0, layer.output[0]), layer.output[0], None, targets)
            values.append(run_layer(layer, given, named, where))
        return values[-1]


def timed(contenders: dict[str, Callable[[], object]], device: torch.device) -> dict[str, int]:
    """Median wall time of a step of each, in turns, the slowest rank's."""
    samples: dict[str, list[int]] = {name: [] for name in contenders}
    for run in contenders.values():
        for _ in range(3):
            run()
    for _ in range(ROUNDS):
        for name, run in contenders.items():
            dist.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(device)
            begin.record()
            for _ in range(STEPS):
                run()
            end.record()
            end.synchronize()
            samples[name].append(round(begin.elapsed_time(end) * 1e6 / STEPS))
    slowest = torch.tensor([statistics.median(times) for times in samples.values()], device=device, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return dict(zip(samples, map(round, slowest.tolist()), strict=True))


def recorded(run: Callable[[], object]) -> Callable[[], object]:
    """A step in a CUDA graph, or as it is where that cannot be recorded."""
    try:
        for _ in range(3):
            run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay
    except RuntimeError:
        return run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases; rank 0 writes rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("parallel_steps.json"))
    parser.add_argument("--graph", action="store_true", help="record steps in CUDA graphs")
    options = parser.parse_args(arguments)
    device, gpus = join(), dist.get_world_size()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    hardware, topology = load_hardware("h200"), load_topology("h200")
    rows = []
    for name in NETWORKS:
        for batch in BATCHES:
            one = networks.NETWORKS[name](batch)
            graph = one.for_gpus(gpus)
            found = explore_problem(Problem(graph, gpus, topology, Roofline(hardware), hardware))
            data = make_data(graph, 0, torch.float32, device)
            mine = slice(dist.get_rank() * batch, (dist.get_rank() + 1) * batch)
            part = Data(data.inputs[mine].contiguous(), data.targets[mine].contiguous())
            module = torch.nn.parallel.DistributedDataParallel(OneDevice(one).to(device), device_ids=[device.index])

            def ddp(module: torch.nn.Module = module, part: Data = part) -> None:
                module.zero_grad(set_to_none=True)
                module(part.inputs, part.targets).backward()

            contenders: dict[str, Callable[[], object]] = {"ddp": ddp}
            equal = {}
            for plan in PLANS:
                choice = found.plan(plan).choice
                small = networks.NETWORKS[name](2).for_gpus(gpus)
                equal[plan] = compare_plan(small, choice, gpus, device=device, dtype=torch.float64).equal
                transport = Distributed(groups_of(graph, choice, gpus, "local"))
                rank = Rank(graph, choice, gpus, transport, device=device, batch_norm="local")

                def step(rank: Rank = rank, data: Data = data) -> None:
                    rank.clear()
                    rank.step(data)

                contenders[plan] = recorded(step) if options.graph else step
            times = timed(contenders, device)
            for plan in PLANS:
                rows.append(
                    {
                        "network": name,
                        "mode": "train",
                        "batch": batch,
                        "dtype": "tf32",
                        "policy": f"parallel_{plan}",
                        "gpus": gpus,
                        "plan": plan,
                        "communication": "measured",
                        "predicted_ns": round(found.plan(plan).step_ns),
                        "measured_ns": times[plan],
                        "outputs_equal": equal[plan],
                        "baselines": {"ddp": times["ddp"]},
                        "fitted": False,
                    }
                )
                if dist.get_rank() == 0:
                    ddp_ns = times["ddp"]
                    print(f"{name} b{batch} {plan}: {times[plan] / 1e3:,.0f} us, {ddp_ns / times[plan]:.2f}x over DDP")
    if dist.get_rank() == 0:
        options.output.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    leave(main())
