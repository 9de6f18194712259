"""A memory plan within torch: checkpointing by a plan gives the same gradients, and recomputes what it lists."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import gpusim
from gpusim.errors import OptionError, PlanError
from gpusim.formats.trace import Trace
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


def gelus_of_steps(contexts: Any, tower: Tower, steps: int = 3) -> list[int]:
    """Train with a checkpoint around the model, and count the GELUs that run in each step."""
    found = []
    for _ in range(steps):
        count = _Count()
        with count:
            checkpoint(tower, torch.randn(4, 8), use_reentrant=False, context_fn=contexts).sum().backward()
        found.append(count.calls["aten.gelu.default"])
    return found


@pytest.mark.filterwarnings("error")
def test_contexts_follow_the_plan_in_each_step_of_a_training_loop() -> None:
    assert gelus_of_steps(policy_fn(tower_trace(), plan_of(2, 5)).contexts, Tower()) == [5, 5, 5]


def test_a_policy_says_so_where_it_meets_a_second_forward_pass() -> None:
    """The calls of the second pass are not those of the trace, so all are saved: the memory of the plan is gone."""
    contexts = functools.partial(create_selective_checkpoint_contexts, policy_fn(tower_trace(), plan_of(2, 5)))
    tower = Tower()
    with pytest.warns(RuntimeWarning, match="more often than the captured step.*for one forward pass") as said:
        assert gelus_of_steps(contexts, tower) == [5, 3, 3]
    assert len(said) == 1


def test_plans_of_another_trace_are_refused() -> None:
    plan = plan_of(2, 5).made("checkpoint", trace_hash="another")
    with pytest.raises(PlanError, match="another trace"):
        policy_fn(tower_trace(), plan)
    with pytest.raises(PlanError, match="another trace"):
        mark_offloads([], tower_trace(), plan)


def test_what_is_no_plan_is_refused() -> None:
    for value in (None, "plan.json", 3):
        with pytest.raises(OptionError, match="is no memory plan: give"):
            gpusim.checkpoint_policy(tower_trace(), value)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match="is no memory plan: give"):
            gpusim.mark_offloads([], tower_trace(), value)  # type: ignore[arg-type]


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


def test_no_node_is_marked_for_another_one_where_the_graph_makes_other_calls() -> None:
    """A product before those of the step would take the mark of the next one."""
    trace = tower_trace()
    moved = {t.name: t.storage for t in trace.tensors}
    plan = MemoryPlan(offloads=(Offload(moved["g1"], 6, 7, 9), Offload(moved["m1"], 5, 6, 9)))
    tower, first, x = Tower(), nn.Linear(8, 8), torch.randn(4, 8)
    graph = make_fx(lambda x: tower(first(x)))(x)
    said = r"other calls than the captured step: aten\.addmm\.default 4 times, not 3; none of these is marked"
    with pytest.warns(RuntimeWarning, match=said):
        assert mark_offloads(graph.graph.nodes, trace, plan) == 1
    marked = [node for node in graph.graph.nodes if node.meta.get("should_offload")]
    assert marked == [node for node in graph.graph.nodes if str(node.target) == "aten.gelu.default"][1:2]


def test_torch_holds_what_the_backward_pass_needs_and_no_more() -> None:
    """Guards memory: torch keeps each saved result to the backward pass, and with a view the memory behind it."""
    trace = make_trace(
        [
            Step("made", "x", "kept", kernels=(kernel(1),), target="aten.mm.default"),
            Step("looked", views="view", looks_at="kept", target="aten.view.default"),
            Step("passing", "view", "passing", kernels=(kernel(1),), target="aten.add.Tensor"),
            Step("last", "passing", "again", kernels=(kernel(1),), target="aten.gelu.default"),
            Step("counts", changes="count", kernels=(kernel(1),), target="aten.add_.Tensor"),
            Step("back", "kept again", "w", kernels=(kernel(1),), phase="backward"),
        ],
        outputs="w",
    )
    again = next(t.storage for t in trace.tensors if t.name == "again")
    decide = policy_fn(trace, MemoryPlan(redos=(Redo(5, (3,), (again,)),)))
    saved = {
        op.name: decide(SelectiveCheckpointContext(is_recompute=False), op.target) == CheckpointPolicy.MUST_SAVE
        for op in trace.ops[:5]
    }
    assert saved == {"made": True, "looked": False, "passing": False, "last": False, "counts": True}


class Leaky(nn.Module):
    """Products changed in place, by what would give another result if it ran twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.nn.functional.leaky_relu_(layer(x), 0.1)
        return x


def leaky_trace() -> Trace:
    """Return the trace of its forward pass: three products, each changed in place."""
    steps = []
    for i in range(3):
        steps.append(
            Step(f"m{i}", f"m{i - 1}" if i else "x", f"m{i}", kernels=(kernel(1),), target="aten.addmm.default")
        )
        steps.append(Step(f"l{i}", changes=f"m{i}", kernels=(kernel(1),), target="aten.leaky_relu_.default"))
    steps.append(Step("back", "m0 m1 m2", "w", kernels=(kernel(1),), phase="backward"))
    return make_trace(steps, outputs="w")


def test_ops_in_place_run_again_with_what_they_change_or_not_at_all() -> None:
    trace = leaky_trace()
    middle = next(t.storage for t in trace.tensors if t.name == "m1")
    plan = MemoryPlan(redos=(Redo(6, (2, 3), (middle,)),))

    def found(context_fn: Any = None) -> tuple[list[torch.Tensor | None], Counter[str]]:
        torch.manual_seed(0)
        model, x = Leaky(), torch.randn(4, 8)
        with _Count() as count:
            out = model(x) if context_fn is None else checkpoint(model, x, use_reentrant=False, context_fn=context_fn)
            out.sum().backward()
        return [p.grad for p in model.parameters()], count.calls

    wanted, plain = found()
    planned, again = found(
        lambda: create_selective_checkpoint_contexts(policy_fn(trace, plan), allow_cache_entry_mutation=True)
    )
    assert all(torch.equal(one, other) for one, other in zip(wanted, planned, strict=True))  # type: ignore[arg-type]
    for operator in ("aten.addmm.default", "aten.leaky_relu_.default"):
        assert again[operator] == plain[operator] + 1


class NoBias(Leaky):
    """The same with products by another operator, as on another device."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))


class Late(Leaky):
    """Two products before the first change."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other, last = self.layers
        x = other(one(x))
        return last(torch.nn.functional.leaky_relu_(x, 0.1))


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (NoBias, r"calls aten\.mm\.default, which the captured step does not: was it captured for another device"),
        (Late, r"calls aten\.leaky_relu_\.default where the captured step calls other operators"),
    ],
)
def test_other_calls_than_the_steps_are_refused_where_ops_change_tensors_in_place(
    model: type[nn.Module], problem: str
) -> None:
    """What such an op changed would be saved, and changed once more."""
    trace = leaky_trace()
    middle = next(t.storage for t in trace.tensors if t.name == "m1")
    contexts = policy_fn(trace, MemoryPlan(redos=(Redo(6, (2, 3), (middle,)),))).contexts
    with pytest.raises(PlanError, match=problem):
        checkpoint(model(), torch.randn(4, 8), use_reentrant=False, context_fn=contexts)


def planned_saves(trace: Trace, plan: MemoryPlan) -> dict[str, bool]:
    decide = policy_fn(trace, plan)
    context = SelectiveCheckpointContext(is_recompute=False)
    forward = [op for op in trace.ops if op.phase == "forward"]
    return {op.name: decide(context, op.target) == CheckpointPolicy.MUST_SAVE for op in forward}


def test_an_op_in_place_runs_again_where_a_plan_brings_back_another_result_of_the_op_before() -> None:
    """The plan runs the norm again for its mean alone. Torch then has a new result, and would not change it."""
    trace = make_trace(
        [
            Step("norm", "x", "kept mean", kernels=(kernel(1),), target="aten.native_batch_norm.default"),
            Step("leaky", changes="kept", kernels=(kernel(1),), target="aten.leaky_relu_.default"),
            Step("back", "kept mean", "w", kernels=(kernel(1),), phase="backward"),
        ],
        outputs="w",
    )
    mean = next(t.storage for t in trace.tensors if t.name == "mean")
    assert planned_saves(trace, MemoryPlan()) == {"norm": True, "leaky": True}
    assert planned_saves(trace, MemoryPlan(redos=(Redo(2, (0,), (mean,)),))) == {"norm": False, "leaky": False}


def test_what_an_op_reads_between_two_changes_runs_again_with_it() -> None:
    """Torch keeps one version of a saved tensor, the last one."""
    trace = make_trace(
        [
            Step("made", "x", "kept", kernels=(kernel(1),), target="aten.mm.default"),
            Step("between", "kept", "again", kernels=(kernel(1),), target="aten.mul.Tensor"),
            Step("leaky", changes="kept", kernels=(kernel(1),), target="aten.leaky_relu_.default"),
            Step("back", "kept again", "w", kernels=(kernel(1),), phase="backward"),
        ],
        outputs="w",
    )
    again = next(t.storage for t in trace.tensors if t.name == "again")
    assert planned_saves(trace, MemoryPlan()) == {"made": True, "between": True, "leaky": True}
    saves = planned_saves(trace, MemoryPlan(redos=(Redo(3, (1,), (again,)),)))
    assert saves == {"made": False, "between": False, "leaky": False}


def test_a_call_in_place_that_the_trace_does_not_have_is_refused() -> None:
    contexts = functools.partial(create_selective_checkpoint_contexts, policy_fn(tower_trace(), MemoryPlan()))
    with pytest.raises(PlanError, match=r"calls aten\.leaky_relu_\.default, which the captured step does not"):
        checkpoint(Leaky(), torch.randn(4, 8), use_reentrant=False, context_fn=contexts)


def test_marks_find_ops_in_place_where_torch_has_made_them_functional() -> None:
    trace = leaky_trace()
    moved = next(t.storage for t in trace.tensors if t.name == "m1")
    model, x = Leaky(), torch.randn(4, 8)
    graph = make_fx(functionalize(lambda x: model(x)))(x)
    mark_offloads(graph.graph.nodes, trace, MemoryPlan(offloads=(Offload(moved, 3, 4, 6),)))
    marked = {node.name for node in graph.graph.nodes if node.meta.get("should_offload")}
    leaky = [node.name for node in graph.graph.nodes if str(node.target) == "aten.leaky_relu.default"]
    assert marked & set(leaky) == {leaky[1]}
