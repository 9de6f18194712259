"""Plans and DistributedDataParallel on several GPUs: torchrun --nproc-per-node 4 validate/layerwise/steps.py [-o DIR].

For each network and batch: the plans `data`, `owt`, `layer` with real collectives, and torch's DistributedDataParallel
of the same network, forward and backward, timed in turns, eager and in CUDA graphs where NCCL allows these. Loss and
gradients of each plan are compared with one device first. Rank 0 times the shares of layers alone before any step runs;
predictions rest on them and on curves of collectives, for DistributedDataParallel too. Cases are written to
`parallel_steps_<gpu>_<date>.json` once each is done; those that a results file in DIR has are left out. With exchanges
of the two kinds they are different cases, and DistributedDataParallel, which has neither, is written once.

`--curves` times collectives among these ranks first and predicts by them. `--direct` exchanges by kernels that read the
other GPUs' memory, in place of NCCL's.

`--quick` runs a small network, on CPUs with gloo too: a test of this script.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from curves import MOST_BYTES, with_own_curves
from measured_shares import Planner, Shares, network, short_name, sm_clock_mhz, splits_of

from gpusim.defaults import DEFAULT_ENGINE
from gpusim.engine.base import engine_by_name
from gpusim.formats.hardware import default_hardware
from gpusim.formats.topology import Topology, default_topology, load_topology
from gpusim.formats.trace import Timing
from gpusim.gpu.device import gpu_facts
from gpusim.gpu.layerwise.__main__ import join, leave
from gpusim.gpu.layerwise.batch import Data, make_data
from gpusim.gpu.layerwise.check import compare_plan
from gpusim.gpu.layerwise.direct import Direct, direct, spaces
from gpusim.gpu.layerwise.one_device import taken
from gpusim.gpu.layerwise.operations import Surroundings, parameters_of, run_layer
from gpusim.gpu.layerwise.rank import Rank
from gpusim.gpu.layerwise.recorded import WARM_UP, recorded
from gpusim.gpu.layerwise.sharing import groups_of
from gpusim.gpu.layerwise.transport import Distributed, Groups, Transport
from gpusim.gpu.replay.timing import median_interval
from gpusim.io.files import write_document
from gpusim.layerwise.communication import basis, members
from gpusim.layerwise.ddp import lower_ddp
from gpusim.layerwise.fixed_plans import Choice
from gpusim.layerwise.layers import BATCH, LayerGraph
from gpusim.layerwise.makespan import simulate_plan
from gpusim.version import code_version

NETWORKS, BATCHES, PLANS = ("alexnet", "vgg16", "resnet50", "inception_v3"), (32, 128), ("data", "owt", "layer")
QUICK = (("encoder",), (2,))
ROUNDS, ROUND_MS, MOST_STEPS = 9, 100.0, 10
#: Longest time that ranks wait for rank 0 to time the shares of a network.
PLANNING = datetime.timedelta(minutes=30)
#: Steps of DistributedDataParallel before one can be recorded in a CUDA graph (torch's notes on CUDA graphs).
DDP_WARM_UP = 11


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
            given = [taken(inputs if edge.source == BATCH else values[edge.source], edge) for edge in layer.inputs]
            where = Surroundings((0, layer.output[1]), (0, layer.output[0]), layer.output[0], None, targets)
            values.append(run_layer(layer, given, named, where))
        return values[-1]


def timed(contenders: dict[str, Callable[[], object]], device: torch.device) -> dict[str, Timing]:
    """Time of a step of each, in turns: of median and interval, the largest of all ranks."""
    samples: dict[str, list[int]] = {name: [] for name in contenders}

    def round_of(run: Callable[[], object], steps: int) -> float:
        dist.barrier()
        quiet(device)
        begin = time.perf_counter_ns()
        for _ in range(steps):
            run()
        quiet(device)
        return (time.perf_counter_ns() - begin) / steps

    longest = torch.tensor([round_of(run, 3) for run in contenders.values()], device=device, dtype=torch.float64)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)  # all ranks make as many steps
    steps = [max(2, min(MOST_STEPS, int(ROUND_MS * 1e6 / each_ns))) for each_ns in longest.tolist()]
    for _ in range(ROUNDS):
        for (name, run), count in zip(contenders.items(), steps, strict=True):
            samples[name].append(round(round_of(run, count)))
    timings = [median_interval(times) for times in samples.values()]
    slowest = torch.tensor([(each.median_ns, each.lo_ns, each.hi_ns) for each in timings], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return {
        name: Timing(median_ns=median_ns, lo_ns=lo_ns, hi_ns=hi_ns, rounds=ROUNDS)
        for name, (median_ns, lo_ns, hi_ns) in zip(samples, slowest.tolist(), strict=True)
    }


def quiet(device: torch.device) -> None:
    """Wait for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def from_rank_0(value: Any, hosts: Any) -> Any:
    """Rank 0's value, on every rank of a group that waits on the hosts."""
    values = [value]
    dist.broadcast_object_list(values, src=0, group=hosts)
    return values[0]


@dataclass(frozen=True)
class Predicted:
    """A step before it runs."""

    choice: Choice
    step_ns: int
    basis: str
    """Source of the times of its sums."""
    splits: dict[str, str]
    """Split of each layer."""


def predict(
    name: str, batch: int, gpus: int, kept: Shares, device: torch.device, hosts: Any, topology: Topology, reads: bool
) -> dict[str, Predicted]:
    """Each plan, and `ddp`, with its time from shares that rank 0 times now."""
    steps = {}
    if dist.get_rank() == 0:
        planner = Planner(network(name, batch).for_gpus(gpus), gpus, kept, device, topology, direct=reads)
        sums = basis(planner.topology, "all_reduce", members(range(gpus), planner.topology.gpus_per_node))
        for plan in PLANS:
            choice = planner.choice(plan)
            planner.measure(choice)
            step_ns = simulate_plan(planner.problem(), choice).makespan.step_ns
            steps[plan] = Predicted(choice, round(step_ns), sums, splits_of(planner.graph, choice))
        ddp = lower_ddp(planner.problem(), broadcast_buffers=False)  # `OneDevice` has none
        ddp_ns = engine_by_name(DEFAULT_ENGINE).run(ddp.plan, ddp.hardware).makespan_ns
        steps["ddp"] = replace(steps["data"], step_ns=round(ddp_ns))
    result: dict[str, Predicted] = from_rank_0(steps, hosts)
    return result


def case(
    name: str,
    batch: int,
    kept: Shares,
    device: torch.device,
    hosts: Any,
    topology: Topology,
    reads: bool,
) -> list[dict[str, Any]]:
    """All plans of a network: predicted, checked, and timed beside DistributedDataParallel."""
    gpus, number = dist.get_world_size(), dist.get_rank()
    predicted = predict(name, batch, gpus, kept, device, hosts, topology, reads)
    one = network(name, batch)
    graph = one.for_gpus(gpus)
    data = make_data(graph, 0, torch.float32, device)
    mine = slice(number * batch, (number + 1) * batch)
    part = Data(data.inputs[mine].contiguous(), data.targets[mine].contiguous())
    devices = [device.index] if device.type == "cuda" else None
    side = torch.cuda.Stream() if device.type == "cuda" else None
    with torch.cuda.stream(side):  # so that its steps can be recorded
        module = torch.nn.parallel.DistributedDataParallel(OneDevice(one).to(device), device_ids=devices)

    def ddp() -> None:
        module.zero_grad()
        module(part.inputs, part.targets).backward()

    steps: dict[str, Callable[[], object]] = {"ddp": ddp}
    generators: dict[str, torch.Generator | None] = {"ddp": None}
    equal: dict[str, bool] = {}
    for plan in PLANS:
        choice = predicted[plan].choice
        small = network(name, 2).for_gpus(gpus)
        transport: Transport = Distributed(groups_of(small, choice, gpus, "synchronised"))
        if reads:
            transport = direct(transport, small, choice, gpus, device, torch.float64)
        equal[plan] = compare_plan(small, choice, gpus, device=device, transport=transport).equal
        transport = Distributed(groups_of(graph, choice, gpus, "local"))
        if reads:
            transport = direct(transport, graph, choice, gpus, device, torch.float32)
        rank = Rank(graph, choice, gpus, transport, device=device, batch_norm="local")

        def step(rank: Rank = rank) -> None:
            rank.clear()
            rank.step(data)

        steps[plan], generators[plan] = step, rank.generator
    contenders = dict(steps)
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    for plan, run in steps.items():
        warm_up = DDP_WARM_UP if plan == "ddp" else WARM_UP
        replay, problem = recorded(run, device, generator=generators[plan], warm_up=warm_up, pool=pool)
        if replay is None:
            print(f"rank {number} records no graph of {plan}: {problem}", flush=True)
        else:
            contenders[f"{plan}_graph"] = replay
    times = timed(contenders, device)
    clock_mhz = sm_clock_mhz(device)
    rows = []
    for plan, step in predicted.items():
        policy = plan if plan == "ddp" else f"parallel_{plan}"
        row = {"network": name, "mode": "train", "batch": batch, "dtype": "tf32", "policy": policy, "gpus": gpus}
        row |= {"plan": "data" if plan == "ddp" else plan, "communication": "measured"}
        row |= {"communication_basis": step.basis, "predicted_ns": step.step_ns}
        measured = times.get(f"{plan}_graph", times[plan])
        row |= {"measured_ns": measured.median_ns, "interval_ns": [measured.lo_ns, measured.hi_ns]}
        row |= {"eager_ns": times[plan].median_ns}
        row |= {"launch": "graph" if f"{plan}_graph" in times else "eager"}
        row |= {"outputs_equal": equal[plan]} if plan in equal else {}  # torch's own step is not compared
        row |= {"splits": step.splits}
        row |= {"exchanges": "direct"} if reads and plan != "ddp" else {}
        ddp_ns = {key: each.median_ns for key, each in times.items() if key.startswith("ddp")}
        row |= {"baselines": ddp_ns, "fitted": False}
        rows.append(row | {"date": today(), "commit": code_version(), "sm_clock_mhz": clock_mhz})
    return rows


def today() -> str:
    return datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d")


def write_rows(file: Path, rows: list[dict[str, Any]], device: torch.device) -> None:
    """Add rows to the results file of this day."""
    document: dict[str, Any] = {"recipe": "parallel_steps", "gpu": "cpu", "date": today()}
    versions = {"torch": str(torch.__version__), "cuda": str(torch.version.cuda)}
    if device.type == "cuda":
        facts = gpu_facts()
        document["gpu"] = facts.name
        versions |= {
            "driver": facts.driver,
            "cudnn": facts.cudnn,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    earlier = json.loads(file.read_text())["cases"] if file.exists() else []
    command = f"torchrun --nproc-per-node {dist.get_world_size()} validate/layerwise/steps.py"
    document |= {"command": command, "versions": versions, "gpusim": code_version(), "cases": [*earlier, *rows]}
    file.write_text(json.dumps(document, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is left to do; rank 0 writes rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).resolve().parents[1] / "results")
    parser.add_argument("--networks", default=",".join(NETWORKS), help="[default: %(default)s]")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)), help="[default: %(default)s]")
    parser.add_argument("--topology", help="links: a bundled name or a file [default: that of the GPU]")
    parser.add_argument("--curves", action="store_true", help="predict by collectives that are timed first")
    parser.add_argument("--direct", action="store_true", help="exchange through memory that all GPUs can read")
    parser.add_argument("--quick", action="store_true", help="a small network: a test of this script")
    options = parser.parse_args(arguments)
    device = join()
    first = dist.get_rank() == 0
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    work = options.output / "parallel_work"
    work.mkdir(parents=True, exist_ok=True)
    kept = Shares(work / "shares.json")
    short = short_name(torch.cuda.get_device_name() if device.type == "cuda" else "cpu")
    file = options.output / f"parallel_steps_{short}_{today().replace('-', '')}.json"
    done = {
        (row["network"], row["batch"], row["gpus"], "exchanges" in row)
        for earlier in options.output.glob(f"parallel_steps_{short}_*.json")
        for row in json.loads(earlier.read_text())["cases"]
        if row["policy"] != "ddp"
    }
    topology = default_topology(default_hardware(torch.cuda.get_device_name() if device.type == "cuda" else ""))
    topology = load_topology(options.topology) if options.topology else topology
    if options.curves:
        everyone = Distributed(Groups(frozenset(), frozenset()))
        shared = Direct(everyone, spaces(MOST_BYTES // 4, device, torch.float32)) if options.direct else None
        topology = with_own_curves(topology, device, shared)
        if first:
            write_document(work / "topology.json", topology, indent=1)
    hosts = dist.new_group(backend="gloo", timeout=PLANNING)
    done = from_rank_0(done, hosts)
    names, batches = options.networks.split(","), [int(batch) for batch in options.batches.split(",")]
    names, batches = QUICK if options.quick else (names, batches)
    for name, batch in itertools.product(names, batches):
        step = name, batch, dist.get_world_size()
        if (*step, options.direct) in done:
            continue
        rows = case(name, batch, kept, device, hosts, topology, options.direct)
        if (*step, not options.direct) in done:
            rows = [row for row in rows if row["policy"] != "ddp"]
        done.add((*step, options.direct))
        if first:
            write_rows(file, rows, device)
            for row in rows:
                error = row["predicted_ns"] / row["measured_ns"] - 1
                gain = min(row["baselines"].values()) / row["measured_ns"]
                text = f"{row['measured_ns'] / 1e3:,.0f} us, predicted {error:+.1%}, {gain:.2f}x over DDP"
                print(f"{name} b{batch} {row['policy']}: {text}", flush=True)
    return 0


if __name__ == "__main__":
    leave(main())
