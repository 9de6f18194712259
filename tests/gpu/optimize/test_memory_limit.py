"""A memory limit that no schedule keeps: a memory plan runs the user's step, with state in the user's tensors.

On the CPU, where copies are ordinary ones: what a plan moves or computes again is what a GPU would.
"""

from __future__ import annotations

import copy
import gc
import json
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own habit)

from gpusim.formats.trace import Trace
from gpusim.gpu.optimize import choose, memory
from gpusim.gpu.optimize.callable import OptimizedStep
from gpusim.gpu.optimize.captured import Captured
from gpusim.gpu.optimize.executors import CpuExecutor, Ready, _InOrder
from gpusim.gpu.replay.execute import initial_bytes
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.units import format_bytes, parse_bytes
from tests.support.optimizing import Batch, Twins, batches, eager_step, fast, sgd

ROWS, WIDTH, CLASSES = 1 << 9, 8, 5
Make = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
POLICIES = ["least_time", "vdnn_all", "layrub", "checkpoint"]


class Chain(nn.Module):
    """Layers whose activations are far larger than their weights, with running means, and dropout in the middle."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        # Without bias: its gradient before batch norm is rounding alone, which Adam makes as large as any.
        layers = [
            nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.ReLU()) for _ in range(6)
        ]
        self.below, self.above = nn.Sequential(*layers[:3]), nn.Sequential(*layers[3:])
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.above(self.drop(self.below(x))))  # type: ignore[no-any-return]


def chain(dropout: float = 0.0) -> Chain:
    torch.manual_seed(0)
    return Chain(dropout)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def data(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(ROWS, WIDTH, generator=generator), torch.randint(0, CLASSES, (ROWS,), generator=generator))
        for _ in range(count)
    ]


def within(model: nn.Module, optimizer: torch.optim.Optimizer, limit_bytes: int | None, **more: Any) -> Any:
    """Return the step on one stream within a limit."""
    options = {"loss": F.cross_entropy, "optimizer": optimizer, "streams": 1, "memory_limit_bytes": limit_bytes}
    return fast(model, data(1)[0], **options, **more)


def least_bytes(make: Make = sgd) -> int:
    """Return the peak of the step in recorded order, in bytes."""
    model = chain()
    return int(within(model, make(model.parameters()), None).gain.peak_bytes)


class Limited(Twins):
    """A model trained within a limit, and a copy trained eagerly."""

    def __init__(self, make: Make, limit_bytes: int, dropout: float = 0.0) -> None:
        self.model = chain(dropout)
        self.other = copy.deepcopy(self.model)
        self.optimizer, self.other_optimizer = make(self.model.parameters()), make(self.other.parameters())
        self.fast = within(self.model, self.optimizer, limit_bytes)
        self.eager = eager_step(self.other, self.other_optimizer)


@pytest.mark.parametrize("policy", POLICIES)
def test_training_within_a_limit_is_that_of_eager(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, gradients, parameters, running means and states agree over several batches, for any plan."""
    monkeypatch.setattr(memory, "LEAST_TIME", policy)
    limit = least_bytes() * 9 // 10
    twins = Limited(sgd, limit)
    assert isinstance(twins.fast, OptimizedStep)
    assert twins.fast.gain is not None
    assert twins.fast.gain.policy == f"memory plan, {policy}"
    assert twins.fast.gain.peak_bytes <= limit
    twins.train(data(5))
    twins.check()


def test_dropout_draws_what_eager_draws_and_states_may_be_replaced() -> None:
    """Random ops are never recomputed, and a checkpoint loaded in between reaches the plan's step."""
    twins = Limited(adam, least_bytes(adam) * 3 // 4, dropout=0.3)
    assert isinstance(twins.fast, OptimizedStep)
    twins.train(data(3))
    for model, optimizer in ((twins.model, twins.optimizer), (twins.other, twins.other_optimizer)):
        state = copy.deepcopy(optimizer.state_dict())
        for each in state["state"].values():
            each["exp_avg"] = each["exp_avg"] * 0.5
        optimizer.load_state_dict(state)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
    twins.train(data(6)[3:], seed=70)
    twins.check()


def test_results_of_a_call_stay_as_they_are() -> None:
    """A later call reuses the memory, but returned results, and a copied gradient, stay the user's."""
    model = chain()
    step = within(model, sgd(model.parameters()), least_bytes() * 3 // 4)
    first, second = data(2)
    loss = step(*first)
    kept = loss.clone()
    step(*second)
    assert torch.equal(loss, kept)


def test_a_limit_that_a_schedule_keeps_needs_no_plan() -> None:
    model = chain()
    step = within(model, sgd(model.parameters()), least_bytes())
    assert step.gain.policy == "sequential"
    assert step.gain.streams == 1


def test_a_limit_that_nothing_keeps_names_the_smallest_that_works() -> None:
    """With that limit it runs; the user's model is unchanged."""
    model = chain()
    optimizer = sgd(model.parameters())
    with pytest.warns(UserWarning, match="the step runs as it is") as caught:
        found = within(model, optimizer, 50_000)
    assert not isinstance(found, OptimizedStep)
    text = str(caught[0].message)
    assert "memory limit 48.8 KiB: the least that any schedule takes is " in text
    smallest = text.partition("the smallest budget that works for a plan found here is ")[2].partition(":")[0]
    step = within(model, optimizer, parse_bytes(smallest))
    assert isinstance(step, OptimizedStep)


class Workspaces(CpuExecutor):
    """A GPU whose libraries take workspaces that are not in a step's trace; counts the plans made."""

    def __init__(self, extra_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.extra_bytes = extra_bytes
        self.plans = 0

        class WithWorkspaces(memory.MemoryReady):
            def __init__(plan, *given: Any) -> None:  # noqa: N805  (self is the executor's)
                super().__init__(*given)
                plan._peak_bytes += extra_bytes
                self.plans += 1

        monkeypatch.setattr(memory, "MemoryReady", WithWorkspaces)

    def prepare(self, captured: Captured, trace: Trace, schedule: Schedule) -> Ready:
        ready = super().prepare(captured, trace, schedule)
        assert isinstance(ready, _InOrder)
        return replace(ready, peak_bytes=ready.peak_bytes + self.extra_bytes)


@pytest.mark.parametrize("share", [0.97, 0.85, 0.75])
def test_a_plan_over_the_limit_is_made_again_for_less(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next plan leaves room for workspaces, also where the first one would keep the limit without them.

    Half as much as the step itself takes, as cuBLAS's workspace of 32 MiB beside a step of 62 MiB.
    """
    alone = least_bytes()
    gpu = Workspaces(alone // 2, monkeypatch)
    limit = round(share * (alone + gpu.extra_bytes))
    model = chain()
    step = within(model, sgd(model.parameters()), limit, executor=gpu)
    assert isinstance(step, OptimizedStep)
    assert step.gain is not None
    assert step.gain.policy == "memory plan, least_time"
    assert step.gain.peak_bytes <= limit
    assert gpu.plans == 2


def test_smallest_limit_that_works_counts_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is more than the limit that was too small, and with it the step runs."""
    extra = least_bytes() // 2
    model = chain()
    optimizer = sgd(model.parameters())
    said: list[str] = []
    gpu = Workspaces(extra, monkeypatch)
    found = within(model, optimizer, extra + 20_000, executor=gpu, warn=said.append)
    assert not isinstance(found, OptimizedStep)
    (text,) = said
    assert f"{format_bytes(extra)} of it are workspaces of libraries" in text
    smallest = parse_bytes(text.partition("that works for a plan found here is ")[2].partition(":")[0])
    assert smallest > extra + 20_000
    step = within(model, optimizer, smallest, executor=gpu)
    assert isinstance(step, OptimizedStep)
    assert step.gain is not None
    assert step.gain.peak_bytes <= smallest


def traced(limit_bytes: int) -> tuple[Captured, OpGraph]:
    """Return the step as it is captured, and the graph that its plans are made for."""
    found: list[tuple[Captured, OpGraph]] = []

    def noted(captured: Captured, graph: OpGraph, *_: Any) -> tuple[None, str]:
        found.append((captured, graph))
        return None, "noted"

    model = chain()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "within_limit", noted)
        within(model, sgd(model.parameters()), limit_bytes, warn=lambda _: None)
    return found[0]


def test_plans_that_take_too_much_are_let_go_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each has a graph with memory of its own, the searched one too."""
    limit = least_bytes() * 3 // 4
    captured, graph = traced(limit)
    alive: list[weakref.ref[memory.MemoryReady]] = []

    class Counted(memory.MemoryReady):
        def __init__(self, *given: Any) -> None:
            gc.collect()
            assert all(other() is None for other in alive)
            super().__init__(*given)
            alive.append(weakref.ref(self))
            self._peak_bytes += limit if len(alive) < 3 else 0

    monkeypatch.setattr(memory, "MemoryReady", Counted)
    best = memory.compare_policies(graph, policies=["least_time"], budget_bytes=limit).best
    assert best is not None
    assert best.outcome is not None
    searched = replace(best.outcome.plan, op_streams=(0,) * len(graph.trace.ops))
    planned, _ = memory.within_limit(captured, graph, limit, torch.device("cpu"), lambda _: None, searched)
    assert planned is not None
    assert len(alive) == 3


def test_a_smallest_plan_that_no_gpu_holds_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is prepared to measure its workspaces; where it does not fit the GPU, the plan alone names the limit."""
    captured, graph = traced(50_000)

    def full(*_: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(memory, "prepare_memory", full)
    planned, problem = memory.within_limit(captured, graph, 50_000, torch.device("cpu"), lambda _: None)
    assert planned is None
    assert "the smallest budget that works for a plan found here is" in problem
    with pytest.raises(torch.cuda.OutOfMemoryError):  # of plans that were to fit the limit
        memory.within_limit(captured, graph, 1 << 40, torch.device("cpu"), lambda _: None)


def cached_plan(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the only entry of the cache that has a memory plan."""
    found = [(path, json.loads(path.read_text())) for path in (tmp_path / "cache").glob("*.json")]
    ((path, entry),) = [(path, entry) for path, entry in found if entry.get("plan")]
    return path, entry


def test_the_second_start_plans_nothing_and_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = least_bytes() * 9 // 10
    model = chain()
    first = within(model, sgd(model.parameters()), limit)
    assert cached_plan(tmp_path)[1]["plan"]["policy"] == "least_time"
    monkeypatch.setattr(memory, "compare_policies", lambda *_, **__: pytest.fail("planned again"))
    monkeypatch.setattr(choose, "explore", lambda *_, **__: pytest.fail("searched again"))
    twins = Limited(sgd, limit)
    assert twins.fast.gain.decided_by == "what was found before"
    assert (twins.fast.gain.policy, twins.fast.gain.peak_bytes) == (first.gain.policy, first.gain.peak_bytes)
    twins.train(data(3))
    twins.check()


def test_a_plan_of_another_step_in_the_cache_is_passed_over(tmp_path: Path) -> None:
    """A changed entry is not run: it is planned again, and the step is that of eager."""
    limit = least_bytes() * 9 // 10
    model = chain()
    within(model, sgd(model.parameters()), limit)
    path, entry = cached_plan(tmp_path)
    entry["plan"]["trace_hash"] = "0" * 32
    path.write_text(json.dumps(entry))
    twins = Limited(sgd, limit)
    assert twins.fast.gain.decided_by != "what was found before"
    twins.train(data(2))
    twins.check()


class Small(CpuExecutor):
    """A device with memory for some recordings, several of each schedule; it fails where one more is made."""

    recordings = 3

    def __init__(self, room: float) -> None:
        self.room = room
        self.made: list[weakref.ref[Ready]] = []
        self.most = 0
        self.one_bytes = 0

    def prepare(self, captured: Captured, trace: Trace, schedule: Schedule) -> Ready:
        ready = super().prepare(captured, trace, schedule)
        self.made.append(weakref.ref(ready))
        self.one_bytes = max(self.one_bytes, ready.peak_bytes - initial_bytes(trace))
        self.most = max(self.most, self.alive)
        return ready

    @property
    def alive(self) -> int:
        return sum(each() is not None for each in self.made)

    def free_bytes(self) -> int:
        return int((self.room - self.alive) * self.one_bytes)


@pytest.mark.parametrize(("room", "most"), [(0, 1), (4.5, 3), (10.5, 9), (99, 20)])
def test_as_many_schedules_are_tried_as_there_is_memory_for(room: float, most: int) -> None:
    """The first always is. For each further one, and each further recording, there must be room for two: the user's own
    step is run beside them. With all the room there are nine schedules, and in the end eleven more recordings of one.
    """
    said: list[str] = []
    executor = Small(room)
    twins = Twins(sgd, executor=executor, frontends=("aten",), say=said.append)
    assert isinstance(twins.fast, OptimizedStep)
    assert executor.most == most
    assert any("too little memory is free to try them" in each for each in said) == (room < 9)
    twins.train(batches(2))
    twins.check()
