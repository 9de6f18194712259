#!/usr/bin/env python3
"""Print what PyTorch's own partitioner saves at several activation budgets, beside our policy `torch_budget`; on a CPU.

    python scripts/compare_torch_budget.py

Each small network is compiled as `torch.compile` does it, with Inductor's decompositions and
`torch._functorch.config.activation_memory_budget`; what its forward graph hands to the backward graph is saved. Ours
are the storages of the estimated step that the plan neither recomputes nor moves. Inputs, parameters and tensors below
4 KiB are left out. `research/2026-11-24-torch-budget.md` has the table.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.nn import functional

from gpusim.formats.hardware import default_hardware
from gpusim.gpu.capture.capture import CaptureOptions
from gpusim.gpu.capture.estimate import capture_estimated
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.policies.torch_budget import at_share
from gpusim.plan.graph import OpGraph

BUDGETS = (1.0, 0.5, 0.0)
LEAST_BYTES = 4096
KIB = 1024
LAYERS, WIDTH, CHANNELS, SIDE, BATCH = 6, 256, 16, 16, 8


class Perceptron(nn.Module):
    """Linear layers with GELU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = functional.gelu(layer(x))
        return x


class Convolutions(nn.Module):
    """Convolution, batch norm, ReLU, several times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False), nn.BatchNorm2d(CHANNELS), nn.ReLU()
                )
                for _ in range(LAYERS)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Attention(nn.Module):
    """Attention of products and a softmax, with a residual and a layer norm, several times."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for project, norm in zip(self.projections, self.norms, strict=True):
            query, key, value = project(x).chunk(3, dim=-1)
            x = norm(x + functional.softmax(query @ key.transpose(1, 2), dim=-1) @ value)
        return x


Made = tuple[nn.Module, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def linear(batch: int) -> Made:
    return Perceptron(), torch.randn(8 * batch, WIDTH), loss_of


def convolution(batch: int) -> Made:
    return Convolutions(), torch.randn(batch, CHANNELS, SIDE, SIDE), loss_of


def attention(batch: int) -> Made:
    return Attention(), torch.randn(batch, 64, WIDTH), loss_of


NETWORKS: tuple[Callable[[int], Made], ...] = (linear, convolution, attention)


def saved_by_torch(make: Callable[[int], Made], budget: float) -> Counter[str]:
    """Return the bytes that torch's partitioner saves at a budget, by the operator that made them."""
    saved: Counter[str] = Counter()

    def forward(graph: fx.GraphModule, _: object) -> fx.GraphModule:
        (output,) = graph.graph.find_nodes(op="output")
        for node in dict.fromkeys(each for each in output.args[0] if isinstance(each, fx.Node)):
            value = node.meta.get("val")
            if node.op != "placeholder" and isinstance(value, torch.Tensor):
                size = value.numel() * value.element_size()
                if size >= LEAST_BYTES:
                    saved[str(node.target).removeprefix("aten.").partition(".")[0]] += size
        return graph

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, _: graph,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(),
    )
    torch.manual_seed(0)
    model, example, loss = make(BATCH)
    with config.patch(activation_memory_budget=budget):
        torch.compile(lambda x: loss(model(x)), backend=backend)(example).backward()
    return saved


def saved_by_ours(make: Callable[[int], Made], share: float) -> Counter[str]:
    """Return the bytes that our policy saves at a share, by the operator that made them last in the forward pass."""
    hardware = default_hardware("")
    options = CaptureOptions(spec=f"{__file__}:{make.__name__}", mode="train", batch=BATCH)
    trace = capture_estimated(options, hardware, lambda _: None)
    setting = Setting.of(OpGraph.build(trace, hardware))
    storages = setting.storages
    gone = {storage for redo in at_share(setting, share).redos for storage in redo.storages}
    saved: Counter[str] = Counter()
    for storage in storages.saved:
        if storage not in gone and storages.bytes[storage] >= LEAST_BYTES:
            maker = max(op for op in storages.writers[storage] if op < storages.first_backward)
            saved[trace.ops[maker].target.removeprefix("aten.").partition(".")[0]] += storages.bytes[storage]
    return saved


def main() -> None:
    """A row for each network, budget and planner."""
    write = sys.stdout.write
    write("| network | budget | by | KiB saved | of which |\n|---|--:|---|--:|---|\n")
    for make in NETWORKS:
        for budget in BUDGETS:
            for by, found in (("torch", saved_by_torch), ("ours", saved_by_ours)):
                saved = found(make, budget)
                parts = ", ".join(f"{target} {size / KIB:,.0f}" for target, size in saved.most_common(4))
                write(f"| {make.__name__} | {budget:g} | {by} | {saved.total() / KIB:,.0f} | {parts} |\n")


if __name__ == "__main__":
    main()
