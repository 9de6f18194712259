"""Losses of several steps by a memory plan; on the CPU, without a limit, from the same code."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
import torch

from gpusim.errors import OperatorError
from gpusim.formats.trace import TensorInit
from gpusim.gpu.replay.execute import InitialState, make_initial
from gpusim.gpu.replay.memory_run import HostBuffers, Inline, MemoryRunner, ProgramRunner
from gpusim.gpu.replay.memory_train import Trained, losses_of, with_values
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.policies.registry import MEMORY_POLICIES
from gpusim.memplan.program import needed, program_of
from gpusim.memplan.storages import Storages
from gpusim.trace.store import write_trace
from tests.gpu.test_memory_run import setting_of
from tests.support.memory_steps import chain_step
from tests.support.networks import CPU, NETWORKS, OnCpu, on_cpu

ROOT = Path(__file__).parents[2]


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


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_within_limit", ROOT / "scripts" / "train_within_limit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_interrupted_training_within_a_limit_goes_on_with_the_run_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run with the plan is written before the other begins; another request begins anew."""
    module = script()
    trace, plan, output = tmp_path / "t.json.gz", tmp_path / "p.json", tmp_path / "r.json"
    write_trace(chain_step(2), trace)
    plan.write_text("{}", encoding="utf-8")
    asked: list[tuple[object, int]] = []
    fails = True

    def alone(_: object, trace: Path, plan: Path | None, limit: int, steps: int) -> Trained:
        asked.append((plan, limit))
        if plan is None and fails:
            raise KeyboardInterrupt
        return Trained(
            policy="", losses=(2.0, 1.0)[:steps], step_ns=1, predicted_peak_bytes=1, predicted_reserved_bytes=1,
            peak_bytes=1, reserved_bytes=1, limit_bytes=limit, pinned_bytes=0,
        )  # fmt: skip

    def run(limit: str) -> int:
        words = ["train_within_limit.py", str(trace), str(plan), "--limit", limit, "--steps", "2", "-o", str(output)]
        monkeypatch.setattr(sys, "argv", words)
        done: int = module.main()
        return done

    monkeypatch.setattr(module, "alone", alone)
    with pytest.raises(KeyboardInterrupt):
        run("1GiB")
    assert list(json.loads(output.read_bytes())["runs"]) == ["plan"]
    fails = False
    assert run("1GiB") == 0
    assert asked == [(plan, 1 << 30), (None, 0), (None, 0)]
    assert json.loads(output.read_bytes())["losses_equal"] is True
    assert json.loads(capsys.readouterr().out)["runs"].keys() == {"plan", "keep_all"}
    assert run("2GiB") == 0
    assert asked[3:] == [(plan, 2 << 30), (None, 0)]
