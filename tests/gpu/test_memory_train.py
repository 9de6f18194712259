"""Losses of several steps by a memory plan; on the CPU, without a limit, from the same code."""

from __future__ import annotations

import math

import pytest
import torch

from gpusim.gpu.replay.execute import InitialState
from gpusim.gpu.replay.memory_run import HostBuffers, Inline, MemoryRunner, ProgramRunner
from gpusim.gpu.replay.memory_train import losses_of, with_values
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.policies.registry import MEMORY_POLICIES
from gpusim.memplan.program import needed, program_of
from gpusim.memplan.storages import Storages
from tests.gpu.test_memory_run import setting_of
from tests.support.networks import CPU, NETWORKS, OnCpu, on_cpu


def losses(found: OnCpu, plan: MemoryPlan, steps: int) -> tuple[float, ...]:
    storages = Storages.of(found.trace)
    program = program_of(storages, plan)
    needs = [needed(storages, instruction) for instruction in program]
    runner = MemoryRunner(found.trace, CPU)
    runner.bind(InitialState.copy_of(found.recorded.initial).tensors)
    programs = ProgramRunner(runner, HostBuffers(pinned=False), Inline())
    programs.prepare(program)
    torch.manual_seed(3)
    return losses_of(found.trace, lambda: programs.run(program, needs), runner.tensors, steps)[0]


@pytest.mark.parametrize("policy", ["least_time", "layrub", "checkpoint"])
def test_losses_of_several_steps_are_those_of_the_step_that_keeps_all(policy: str) -> None:
    """The step trains: its losses differ from step to step, and a plan changes none of them."""
    found = on_cpu(NETWORKS[0], "train")
    wanted = losses(found, MemoryPlan(), 4)
    assert len(set(wanted)) == 4
    assert losses(found, MEMORY_POLICIES[policy](setting_of(found.trace)), 4) == wanted


def test_an_estimated_step_gets_numbers_to_train_from() -> None:
    """Its trace has none, and a network of zeros learns nothing: weights are drawn, norms begin as they are made."""
    found = on_cpu(NETWORKS[0], "train")
    copies = InitialState.copy_of(found.recorded.initial)
    for tensor in copies.tensors.values():
        tensor.zero_()
    state = with_values(found.trace, copies, 0)
    by_name = {found.trace.tensors[index].name: tensor for index, tensor in state.tensors.items()}
    weights = [t for n, t in by_name.items() if n.endswith("weight") and t.dim() > 1 and "momentum" not in n]
    assert weights
    assert all(float(weight.std()) > 0 for weight in weights)
    assert all(float(t.min()) == float(t.max()) == 1.0 for n, t in by_name.items() if n.endswith("running_var"))
    runner = MemoryRunner(found.trace, CPU)
    runner.bind(state.tensors)
    storages = Storages.of(found.trace)
    program = program_of(storages, MemoryPlan())
    needs = [needed(storages, instruction) for instruction in program]
    programs = ProgramRunner(runner, HostBuffers(pinned=False), Inline())
    got, _ = losses_of(found.trace, lambda: programs.run(program, needs), runner.tensors, 4)
    assert len(set(got)) == 4
    assert all(map(math.isfinite, got))
