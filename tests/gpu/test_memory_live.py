"""What is alive after each instruction of a memory plan, run on the CPU, is what the simulation says."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpusim.gpu.replay.execute import InitialState
from gpusim.gpu.replay.memory_run import HostBuffers, Inline, MemoryRunner, ProgramRunner
from gpusim.gpu.replay.memory_streams import StreamLanes, run_on_streams
from gpusim.memplan.checks import check_memory_plan
from gpusim.memplan.memory import live_after
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.policies.registry import MEMORY_POLICIES
from gpusim.memplan.program import Instruction, Program, needed, program_of
from gpusim.memplan.storages import Storages
from gpusim.memplan.waits import waits_of
from tests.gpu.test_memory_run import every_network, setting_of
from tests.support.networks import CPU, OnCpu, on_cpu

every_policy = pytest.mark.parametrize("policy", ["vdnn_all", "capuchin", "least_time"])


class Live(TorchDispatchMode):
    """Counter of the bytes that operators have allocated and something still holds."""

    def __init__(self, before: list[torch.Tensor]) -> None:
        super().__init__()
        self._seen = {StorageWeakRef(tensor.untyped_storage()) for tensor in before}
        self._bytes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for part in tree_leaves(result):
            if isinstance(part, torch.Tensor):
                storage = part.untyped_storage()
                self._bytes.setdefault(StorageWeakRef(storage), storage.nbytes())
        return result

    @property
    def bytes(self) -> int:
        """Bytes alive now, without what was there before."""
        return sum(size for weak, size in self._bytes.items() if weak not in self._seen and not weak.expired())


def run(found: OnCpu, plan: MemoryPlan) -> list[tuple[int, int]]:
    """Run a plan; returns what lives after each instruction, in bytes: in the simulation, and in the executor."""
    storages = Storages.of(found.trace)
    program = program_of(storages, check_memory_plan(storages, plan))
    runner = MemoryRunner(found.trace, CPU, own=True)
    initial = InitialState.copy_of(found.recorded.initial).tensors
    runner.bind(initial)
    buffers = HostBuffers(pinned=False)
    programs = ProgramRunner(runner, buffers, Inline())
    assert programs.prepare(program) is None
    moved = {i.storage for i in program if i.kind == "out"}
    live = Live([*initial.values(), *(buffers.of(s, storages.bytes[s]) for s in moved)])
    levels: list[tuple[int, int]] = []

    def watched() -> Iterator[Instruction]:
        for place, instruction in enumerate(program):
            yield instruction
            now = live_after(storages, program[: place + 1])
            levels.append((sum(storages.bytes[storage] for storage in now), live.bytes))

    instructions = cast(Program, watched())
    with live:
        if plan.op_streams:
            run_on_streams(instructions, waits_of(storages, program), runner, buffers, StreamLanes(None))
        else:
            programs.run(instructions, [needed(storages, instruction) for instruction in program])
    assert len(levels) == len(program)
    return levels


@every_network
@every_policy
@pytest.mark.parametrize("streams", [1, 3])
def test_what_lives_after_each_instruction_is_what_the_simulation_says(name: str, policy: str, streams: int) -> None:
    """A tensor that the executor still holds after its `free` adds to the measured peak."""
    found = on_cpu(name, "train")
    plan = MEMORY_POLICIES[policy](setting_of(found.trace))
    if streams > 1:
        plan = dataclasses.replace(plan, op_streams=tuple(op % streams for op in range(len(found.trace.ops))))
    for place, (simulated_bytes, live_bytes) in enumerate(run(found, plan)):
        assert live_bytes == simulated_bytes, f"after instruction {place}"
