"""Memory plans on several streams, on the CPU: results stay the same bits, and no wait is missing."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from gpusim.gpu.replay.execute import InitialState, results_of
from gpusim.gpu.replay.memory_run import HostBuffers, MemoryRunner
from gpusim.gpu.replay.memory_streams import StreamLanes, run_on_streams
from gpusim.memplan.checks import check_memory_plan, check_program
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.policies.registry import MEMORY_POLICIES
from gpusim.memplan.program import program_of
from gpusim.memplan.storages import Storages, size_only
from gpusim.memplan.waits import Waits, waits_of
from tests.gpu.test_memory_run import kept_all, setting_of
from tests.support.fake_streams import Races, stand_in
from tests.support.networks import CPU, NETWORKS, OnCpu, on_cpu

POLICIES = ["vdnn_all", "capuchin", "least_time"]


def on_streams(found: OnCpu, policy: str, streams: int, seed: int) -> MemoryPlan:
    """Return a policy's plan with a random stream for each op."""
    plan = MEMORY_POLICIES[policy](setting_of(found.trace))
    dice = random.Random(seed)
    return dataclasses.replace(plan, op_streams=tuple(dice.randrange(streams) for _ in found.trace.ops))


class WithoutSizes(MemoryRunner):
    """Runner that ignores races of ops that look at a tensor for its size alone."""

    races: Races

    def run(self, op: int) -> None:
        before = len(self.races.found)
        super().run(op)
        if size_only(self.trace.ops[op]) is not None:
            del self.races.found[before:]


def ran(
    found: OnCpu, plan: MemoryPlan, monkeypatch: pytest.MonkeyPatch, without: int | None = None
) -> tuple[dict[int, torch.Tensor], Races]:
    """Run a plan with stand-ins for streams, `without` the waits of one instruction."""
    storages = Storages.of(found.trace)
    program = program_of(storages, check_memory_plan(storages, plan))
    check_program(storages, program)
    waits = waits_of(storages, program)
    if without is not None:
        before = tuple(() if place == without else each for place, each in enumerate(waits.before))
        waits = Waits(waits.queues, waits.queue, before, waits.ends)
    streams = stand_in(monkeypatch)
    runner = WithoutSizes(found.trace, CPU, own=True)
    initial = InitialState.copy_of(found.recorded.initial).tensors
    runner.bind(initial)
    buffers = HostBuffers(pinned=False)
    buffers.prepare({i.storage: found.trace.storages[i.storage].bytes for i in program if i.kind == "out"})
    torch.manual_seed(found.options.seed)
    with Races(streams, list(initial.values())) as races:
        runner.races = races
        run_on_streams(program, waits, runner, buffers, StreamLanes(streams.current))  # type: ignore[arg-type]
    assert streams.joined
    return results_of(found.trace, runner.tensors), races


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("policy", POLICIES)
def test_results_are_those_of_the_step_that_keeps_all(name: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a random stream for each op, nothing is read or overwritten before it is known to have ended."""
    found = on_cpu(name, "train")
    wanted = kept_all(name)
    results, races = ran(found, on_streams(found, policy, 3, seed=len(name)), monkeypatch)
    assert races.found == []
    assert wanted.keys() == results.keys()
    for index, tensor in wanted.items():
        assert torch.equal(tensor, results[index]), f"tensor {index} ({found.trace.tensors[index].name}) differs"


def test_a_missing_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above must fail where one wait is left out, of an op, a recomputation or a copy."""
    found = on_cpu(NETWORKS[0], "train")
    plan = on_streams(found, "capuchin", 3, seed=1)
    storages = Storages.of(found.trace)
    waits = waits_of(storages, program_of(storages, plan))
    needed = [place for place, before in enumerate(waits.before) if before]
    seen = sum(bool(ran(found, plan, monkeypatch, place)[1].found) for place in needed[:10])
    assert seen >= 8  # a wait may also keep memory that is used again, which only a GPU's allocator reuses
