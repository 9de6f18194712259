"""Losses of several steps by a memory plan; on the CPU, without a limit, from the same code."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch

from gpusim.errors import OperatorError
from gpusim.formats.trace import TensorInit
from gpusim.gpu.replay.execute import InitialState, make_initial
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
    """Its trace has none, and replay refuses it: weights are drawn, norms begin as they are made, and it learns."""
    found = on_cpu(NETWORKS[0], "train")
    estimated = msgspec.structs.replace(
        found.trace,
        provenance=msgspec.structs.replace(found.trace.provenance, estimated="sizes"),
        tensors=tuple(
            tensor if tensor.init is None else msgspec.structs.replace(tensor, init=TensorInit(kind="constant"))
            for tensor in found.trace.tensors
        ),
    )
    with pytest.raises(OperatorError, match="is estimated"):
        MemoryRunner(estimated, CPU)
    trace = with_values(estimated)
    state = make_initial(trace, CPU, 0)
    of_role = {index: trace.tensors[index].role for index in state.tensors}
    weights = [t for i, t in state.tensors.items() if of_role[i] == "parameter" and t.dim() > 1]
    assert weights
    assert all(float(weight.std()) > 0 for weight in weights)
    variances = [t for i, t in state.tensors.items() if trace.tensors[i].name.endswith("running_var")]
    assert all(float(t.min()) == float(t.max()) == 1.0 for t in variances)
    runner = MemoryRunner(trace, CPU)
    runner.bind(state.tensors)
    storages = Storages.of(trace)
    program = program_of(storages, MemoryPlan())
    needs = [needed(storages, instruction) for instruction in program]
    programs = ProgramRunner(runner, HostBuffers(pinned=False), Inline())
    got, _ = losses_of(trace, lambda: programs.run(program, needs), runner.tensors, 4)
    assert len(set(got)) == 4
    assert all(map(math.isfinite, got))


def test_a_captured_step_keeps_its_values() -> None:
    trace = on_cpu(NETWORKS[0], "train").trace
    assert with_values(trace) is trace
