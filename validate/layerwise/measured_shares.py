"""Plans from shares that were timed one by one on a GPU: what `ranks.py` and `steps.py` predict from."""

from __future__ import annotations

import json
from pathlib import Path

import networks
import torch

from gpusim.formats.hardware import default_hardware
from gpusim.formats.topology import Topology, default_topology
from gpusim.gpu.device import gpu_facts
from gpusim.gpu.layerwise.alone import rank_alone, share_of_state, time_shares
from gpusim.gpu.layerwise.batch import Data
from gpusim.layerwise.compute import MeasuredTimes, PassTimes, Roofline
from gpusim.layerwise.costs import Problem
from gpusim.layerwise.explore import explore_problem
from gpusim.layerwise.fixed_plans import FIXED_PLANS, Choice
from gpusim.layerwise.layers import BATCH, LayerGraph
from gpusim.layerwise.roles import roles_of
from gpusim.layerwise.shares import Share

#: Kinds of ranks of a plan that are run, and rounds of search with newly measured shares.
MOST_RANKS, SEARCHES = 2, 3


class Shares:
    """Measured shares, kept in a file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.times: dict[str, PassTimes] = {}
        if file.exists():
            self.times = {key: pass_times(*values) for key, values in json.loads(file.read_text()).items()}

    def add(self, times: dict[str, PassTimes]) -> None:
        """Keep new ones."""
        self.times |= times
        document = {key: [each.forward_ns, each.backward_ns, each.product_ns] for key, each in self.times.items()}
        temporary = self.file.with_suffix(".part")
        temporary.write_text(json.dumps(document, indent=0))
        temporary.replace(self.file)


def pass_times(forward_ns: float, backward_ns: float, product_ns: float | None = None) -> PassTimes:
    """Times of a share as a file has them; older files lack the last."""
    return PassTimes(forward_ns, backward_ns, product_ns=product_ns)


class Planner:
    """Plans of one network on some GPUs; shares that a plan needs are timed when it is asked for."""

    def __init__(
        self,
        graph: LayerGraph,
        gpus: int,
        kept: Shares,
        device: torch.device,
        topology: Topology | None = None,
        *,
        direct: bool = False,
    ) -> None:
        """`topology` is by default that of this GPU; `direct` as in `Problem`."""
        self.direct = direct
        self.graph, self.gpus, self.kept, self.device = graph, gpus, kept, device
        self.hardware = default_hardware(torch.cuda.get_device_name() if device.type == "cuda" else "")
        self.topology = topology or default_topology(self.hardware)
        self.data = data_on(graph, device)
        self.seen: dict[int, list[Share]] = {}
        self.ranks_of: dict[Choice, list[int]] = {}

    def problem(self) -> Problem:
        """The search's problem with all shares measured so far; others by a roofline. No rank runs an optimizer."""
        seen = {layer: tuple(shares) for layer, shares in self.seen.items()}
        times = MeasuredTimes(self.kept.times, seen, Roofline(self.hardware, optimizer=False))
        return Problem(self.graph, self.gpus, self.topology, times, self.hardware, direct=self.direct)

    def measure(self, choice: Choice) -> list[int]:
        """Time the shares of a plan that are new, and return one rank of each kind."""
        if choice in self.ranks_of:
            return self.ranks_of[choice]
        roles, _ = roles_of(self.problem(), choice)
        self.ranks_of[choice] = [role.gpu for role in roles][:MOST_RANKS]
        for number in self.ranks_of[choice]:
            rank = rank_alone(self.graph, choice, self.gpus, number, device=self.device)
            self.kept.add(time_shares(rank, self.data, self.kept.times, lambda text: None))
            for index, state in enumerate(rank.states):
                if state.active:
                    self.seen.setdefault(index, []).append(share_of_state(rank, index))
        return self.ranks_of[choice]

    def choice(self, plan: str) -> Choice:
        """A fixed plan, or `layer`: that of least simulated time, as `gpusim parallel` has it."""
        self.measure(FIXED_PLANS["data"](self.graph, self.gpus))
        if plan in FIXED_PLANS:
            return FIXED_PLANS[plan](self.graph, self.gpus)
        self.measure(FIXED_PLANS["owt"](self.graph, self.gpus))
        for _ in range(SEARCHES):
            choice = explore_problem(self.problem()).best.choice
            if choice in self.ranks_of:  # nothing new to learn: the next search would find the same
                break
            self.measure(choice)
        return choice


def network(name: str, batch: int) -> LayerGraph:
    """A network's layers for the batch of one GPU."""
    return networks.encoder(batch) if name == "encoder" else networks.NETWORKS[name](batch)


def data_on(graph: LayerGraph, device: torch.device) -> Data:
    """Inputs and targets of the whole batch, made on the device: times do not depend on their values."""
    edge = next(edge for layer in graph.layers for edge in layer.inputs if edge.source == BATCH)
    loss = next(layer for layer in graph.layers if layer.kind == "loss")
    targets = torch.randint(0, loss.output[1], (edge.extents[0],), device=device)
    return Data(torch.randn(edge.extents, device=device), targets)


def splits_of(graph: LayerGraph, choice: Choice) -> dict[str, str]:
    """The split of each layer in a plan."""
    return {layer.name: str(config) for layer, config in zip(graph.layers, choice, strict=True)}


def short_name(gpu: str) -> str:
    """A GPU's name in the name of a results file."""
    return gpu.removeprefix("NVIDIA ").lower().replace(" ", "_")


def sm_clock_mhz(device: torch.device) -> int:
    """The clock of the SMs under load; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    matrix = torch.rand(4096, 4096, device=device)
    return gpu_facts(lambda: matrix @ matrix).sm_clock_mhz
