"""A memory plan within torch: checkpointing by a plan gives the same gradients, and recomputes what it lists."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from gpusim.gpu.selective_checkpoint import mark_offloads, policy_fn
from gpusim.memplan.plan import MemoryPlan, Offload, Redo
from gpusim.memplan.storages import Storages
from tests.support.helpers import Step, kernel, make_trace


class Tower(nn.Module):
    """Linear layers with GELU between them, whose inputs and results the backward pass needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x


def tower_trace():  # type: ignore[no-untyped-def]
    """Return the trace of its forward pass: three products and three GELUs."""
    steps = []
    for i in range(3):
        before = f"g{i - 1}" if i else "x"
        steps.append(Step(f"t{i}", views=f"v{i}", looks_at=f"w{i}", target="aten.t.default"))
        steps.append(Step(f"m{i}", before, f"m{i}", kernels=(kernel(1),), target="aten.addmm.default"))
        steps.append(Step(f"g{i}", f"m{i}", f"g{i}", kernels=(kernel(1),), target="aten.gelu.default"))
    steps.append(Step("back", "m0 m1 m2 g0 g1", "w", kernels=(kernel(1),), phase="backward"))
    return make_trace(steps, outputs="w")


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def plan_of(*again: int) -> MemoryPlan:
    trace = tower_trace()
    storages = Storages.of(trace)
    made = tuple(s for op in again for s in storages.makes[op])
    return MemoryPlan(redos=(Redo(len(trace.ops) - 1, again, made),))


def gradients(plan: MemoryPlan | None) -> tuple[list[torch.Tensor], Counter[str]]:
    torch.manual_seed(0)
    tower, x = Tower(), torch.randn(4, 8)
    count = _Count()
    with count:
        if plan is None:
            out = tower(x)
        else:
            contexts = functools.partial(create_selective_checkpoint_contexts, policy_fn(tower_trace(), plan))
            out = checkpoint(tower, x, use_reentrant=False, context_fn=contexts)
        out.sum().backward()
    return [p.grad for p in tower.parameters() if p.grad is not None], count.calls


def test_gradients_are_those_of_the_step_that_keeps_all_and_only_the_planned_ops_run_again() -> None:
    wanted, plain = gradients(None)
    found, again = gradients(plan_of(2, 5))  # the first two GELUs
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))
    assert again["aten.gelu.default"] == plain["aten.gelu.default"] + 2
    assert again["aten.addmm.default"] == plain["aten.addmm.default"]


def test_marks_are_set_on_the_nodes_that_make_what_moves() -> None:
    trace = tower_trace()
    moved = next(t.storage for t in trace.tensors if t.name == "m1")
    plan = MemoryPlan(offloads=(Offload(moved, 5, 6, 9),))
    tower, x = Tower(), torch.randn(4, 8)
    graph = make_fx(lambda x: tower(x))(x)
    assert mark_offloads(graph.graph.nodes, trace, plan) == 1
    marked = [node.name for node in graph.graph.nodes if node.meta.get("should_offload")]
    products = [node.name for node in graph.graph.nodes if str(node.target) == "aten.addmm.default"]
    assert marked == [products[1]]
