"""Memory plans run on the CPU: with any moves and recomputation, loss, gradients and states stay the same bits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from gpusim.formats.trace import Op, Timing, Trace, Variant, VariantSettings
from gpusim.gpu.replay import execute, memory_replay
from gpusim.gpu.replay.compare import check_variants, compare
from gpusim.gpu.replay.execute import InitialState, results_of
from gpusim.gpu.replay.memory_replay import ProgramRecorder, RecordedProgram, with_buffers
from gpusim.gpu.replay.memory_run import HostBuffers, Inline, Lanes, MemoryRunner, ProgramRunner
from gpusim.gpu.replay.variants import CONVOLUTIONS, call_variant
from gpusim.memplan.checks import check_memory_plan, check_program
from gpusim.memplan.evaluate import MemoryEvaluator
from gpusim.memplan.memory import needs_at_once
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.policies import gaps
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.policies.orders import Orders, worth_keeping
from gpusim.memplan.policies.registry import MEMORY_POLICIES
from gpusim.memplan.program import Program, needed, program_of
from gpusim.memplan.rebuild import grouped_redos
from gpusim.memplan.storages import Storages
from gpusim.plan.graph import OpGraph
from tests.support.helpers import make_hardware, with_kernels
from tests.support.memory_steps import WITHOUT_VARIANTS
from tests.support.networks import CPU, NETWORKS, OnCpu, on_cpu
from tests.validation.test_recipes import GPU

every_network = pytest.mark.parametrize("name", NETWORKS)
every_policy = pytest.mark.parametrize("policy", WITHOUT_VARIANTS)


@functools.cache
def kept_all(name: str) -> dict[int, torch.Tensor]:
    """Return the results of a network that keeps all its tensors."""
    return run(on_cpu(name, "train"), MemoryPlan())[0]


def setting_of(trace: Trace) -> Setting:
    return Setting.of(OpGraph.build(with_kernels(trace), make_hardware()))


def run(
    found: OnCpu, plan: MemoryPlan, lanes: Lanes | None = None, own: bool = True
) -> tuple[dict[int, torch.Tensor], MemoryRunner]:
    """Run a checked plan from the recorded initial state, and return its results.

    What is not one's `own` is checked like a file for each runner, which takes ten times as long as the plan.
    """
    storages = Storages.of(found.trace)
    program = program_of(storages, check_memory_plan(storages, plan))
    check_program(storages, program)
    runner = MemoryRunner(found.trace, CPU, own=own)
    runner.bind(InitialState.copy_of(found.recorded.initial).tensors)
    programs = ProgramRunner(runner, HostBuffers(pinned=False), lanes or Inline())
    programs.prepare(program)
    runner.choose(plan.variants)
    torch.manual_seed(found.options.seed)
    programs.run(program, [needed(storages, instruction) for instruction in program])
    return results_of(found.trace, runner.tensors), runner


@every_network
@every_policy
def test_every_policy_gives_the_results_of_the_step_that_keeps_all(name: str, policy: str) -> None:
    found = on_cpu(name, "train")
    wanted = kept_all(name)
    results, _ = run(found, MEMORY_POLICIES[policy](setting_of(found.trace)))
    assert wanted.keys() == results.keys()
    for index, tensor in wanted.items():
        assert torch.equal(tensor, results[index]), f"tensor {index} ({found.trace.tensors[index].name}) differs"


def with_smaller_variants(trace: Trace) -> Trace:
    """Return the trace with a workspace of each convolution, and with two variants that take less, made by hand."""
    settings = {"channels_last": VariantSettings(memory_format="channels_last"), "native": VariantSettings(cudnn=False)}
    trace = with_kernels(trace)

    def variants(op: Op) -> tuple[Variant, ...]:
        return tuple(
            Variant(name=name, settings=each, kernels=op.kernels, workspace_bytes=number << 20)
            for number, (name, each) in enumerate(settings.items())
        )

    ops = (
        msgspec.structs.replace(op, workspace_bytes=9 << 20, variants=variants(op)) if op.target in CONVOLUTIONS else op
        for op in trace.ops
    )
    return msgspec.structs.replace(trace, ops=tuple(ops))


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[VariantSettings]:
    """Settings of the variants that run, one by one."""
    settings: list[VariantSettings] = []

    def call(function: Any, args: Any, kwargs: Any, of_call: VariantSettings, outputs: Any) -> list[Any]:
        settings.append(of_call)
        return call_variant(function, args, kwargs, of_call, outputs)

    monkeypatch.setattr(execute, "call_variant", call)
    return settings


@pytest.mark.parametrize("name", ["branches", "grouped", "in_place"])
def test_plan_with_variants_runs_them_and_its_results_are_as_good(name: str, called: list[VariantSettings]) -> None:
    """Each convolution in another layout rounds otherwise: results are held to the rule for schedules with variants."""
    found = on_cpu(name, "train")
    wanted = kept_all(name)
    step = replace(found, trace=with_smaller_variants(found.trace))
    convolutions = [op for op in step.trace.ops if op.target in CONVOLUTIONS]
    setting = Setting.of(OpGraph.build(step.trace, make_hardware()))
    plan = MEMORY_POLICIES["vdnn_all_m"](setting)
    results, _ = run(step, plan)
    assert [each.memory_format for each in called] == ["channels_last"] * len(convolutions)
    same = compare(step.trace, wanted, wanted)
    assert check_variants(step.trace, results, wanted, same).equal
    first = next(index for index, tensor in wanted.items() if tensor.is_floating_point() and tensor.any())
    assert not check_variants(step.trace, {**results, first: -wanted[first]}, wanted, same).equal
    called.clear()
    run(step, MEMORY_POLICIES["vdnn_all"](setting))
    assert not called


def test_what_runs_again_runs_its_variant_again(called: list[VariantSettings]) -> None:
    """All that checkpointing runs again are the kernels of the plan, which its predicted times are of."""
    found = on_cpu("branches", "train")
    step = replace(found, trace=with_smaller_variants(found.trace))
    plan = MEMORY_POLICIES["checkpoint"](Setting.of(OpGraph.build(step.trace, make_hardware())))
    runs = [*range(len(step.trace.ops)), *(op for redo in plan.redos for op in redo.ops)]
    convolutions = [op for op in runs if step.trace.ops[op].target in CONVOLUTIONS]
    assert len(convolutions) > sum(op.target in CONVOLUTIONS for op in step.trace.ops)
    chosen = tuple(2 if op.variants else 0 for op in step.trace.ops)
    results, _ = run(step, replace(plan, variants=chosen))
    assert called == [VariantSettings(cudnn=False)] * len(convolutions)
    same = compare(step.trace, kept_all("branches"), kept_all("branches"))
    assert check_variants(step.trace, results, kept_all("branches"), same).equal


class CpuRecorder:
    """`ProgramRecorder` without CUDA graphs: a replay runs the program again."""

    def __init__(self, evaluator: MemoryEvaluator, runner: MemoryRunner, initial_bytes: int) -> None:
        self.storages, self.runner = evaluator.storages, runner
        self.programs = ProgramRunner(runner, HostBuffers(pinned=False), Inline())

    def record(self, program: Program, variants: Sequence[int] = (), warm: bool = False) -> RecordedProgram:
        needs = [needed(self.storages, instruction) for instruction in program]
        recorded = RecordedProgram(cast(torch.cuda.CUDAGraph, None), [], len(program), 0, 0)

        def replay() -> None:
            self.runner.choose(variants)
            self.programs.run(program, needs)
            recorded.tensors = list(self.runner.tensors)
            self.runner.drop_temporaries()

        recorded.replay = replay  # type: ignore[method-assign]
        return recorded


def test_replay_runs_variants_and_holds_them_to_the_rule_for_variants(
    called: list[VariantSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three plans the middle one has variants: it alone runs them, and it is compared with a run in FP32."""
    found = on_cpu("branches", "train")
    trace = with_smaller_variants(found.trace)
    trace = msgspec.structs.replace(trace, model=msgspec.structs.replace(trace.model, dtype="tf32"))
    graph = OpGraph.build(trace, make_hardware())
    precisions: list[str] = []
    state = InitialState.copy_of(found.recorded.initial)
    timing = Timing(median_ns=1, lo_ns=1, hi_ns=1, rounds=1)
    for name, stand_in in {
        "require_gpu": lambda: CPU,
        "set_precision": precisions.append,
        "own_link": lambda: None,
        "state_on_gpu": lambda *_: (state, 0),
        "gpu_facts": lambda _: GPU,
        "ProgramRecorder": CpuRecorder,
        "time_typical": lambda recorders, *_: {each: timing for each, make in recorders.items() if make()},
    }.items():
        monkeypatch.setattr(memory_replay, name, stand_in)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    setting = Setting.of(graph)
    plans = [MEMORY_POLICIES[name](setting) for name in ("vdnn_all", "vdnn_all_m", "vdnn_all")]
    checks = [measured.outputs for measured in memory_replay.replay_memory(graph, plans)]
    assert precisions == ["tf32", "fp32", "tf32"]
    assert len(called) == sum(op.target in CONVOLUTIONS for op in graph.trace.ops)
    assert all(check.equal for check in checks)
    assert [check.bit_equal for check in checks] == [True, False, True]
    assert [check.fp32_error is not None for check in checks] == [False, True, False]


@every_network
def test_what_moves_between_two_uses_gives_the_same_results(name: str) -> None:
    found = on_cpu(name, "train")
    setting = setting_of(found.trace)
    least, most = max(needs_at_once(setting.storages)), setting.keep_all_bytes
    budgets = [round(least + share * (most - least)) for share in (0.2, 0.5, 0.8)]
    plan = next(filter(None, (gaps.within(setting, MemoryPlan(), budget) for budget in budgets)), MemoryPlan())
    results, _ = run(found, plan)
    for index, tensor in kept_all(name).items():
        assert torch.equal(tensor, results[index]), f"tensor {index} ({found.trace.tensors[index].name}) differs"


def test_what_stays_for_recomputation_gives_the_same_results() -> None:
    """Nothing of the step needs the kept result any more, and nothing has changed it since."""
    found = on_cpu("up_and_down", "train")
    setting = setting_of(found.trace)
    kept = worth_keeping(setting.storages, setting.chains)
    orders = Orders(setting, setting.times, kept)
    shorter = tuple(s for s in orders.chains if len(orders.chains[s].ops) < len(setting.chains[s].ops))
    assert kept
    assert shorter
    redos = grouped_redos(setting.storages, shorter, setting.times.place, setting.uses, kept)
    assert redos is not None
    read = frozenset().union(*(setting.storages.reads[op] for redo in redos for op in redo.ops))
    assert read & kept
    wanted, _ = run(found, MemoryPlan())
    results, _ = run(found, MemoryPlan(redos=redos))
    for index, tensor in wanted.items():
        assert torch.equal(tensor, results[index]), f"tensor {index} ({found.trace.tensors[index].name}) differs"


class AsLateAsAllowed:
    """Copies that happen when something first waits for them; memory on its way back holds NaN until then.

    An op that reads before it waits computes NaN; a copy out whose memory is overwritten or freed too early moves the
    wrong numbers.
    """

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def out(self, host: torch.Tensor, memory: torch.Tensor) -> Callable[[], None]:
        return self._later(lambda: host.copy_(memory))

    def back(self, memory: torch.Tensor, host: torch.Tensor, after: Callable[[], None] | None) -> Callable[[], None]:
        memory.fill_(0xFF)

        def copy() -> None:
            if after is not None:
                self.wait(after)
            memory.copy_(host)

        return self._later(copy)

    def wait(self, token: Callable[[], None]) -> None:
        if token in self.waiting:
            self.waiting.remove(token)
            token()

    def finish(self) -> None:
        while self.waiting:
            self.wait(self.waiting[0])

    def _later(self, copy: Callable[[], object]) -> Callable[[], None]:
        def token() -> None:
            copy()

        self.waiting.append(token)
        return token


@every_network
@pytest.mark.parametrize("policy", ["vdnn_all", "layrub", "superneurons", "capuchin", "torch_offload", "least_time"])
def test_copies_that_end_as_late_as_they_may_give_the_same_results(name: str, policy: str) -> None:
    """Nothing is read before its prefetch has ended, nothing is overwritten or freed while a copy reads it."""
    found = on_cpu(name, "train")
    plan = MEMORY_POLICIES[policy](setting_of(found.trace))
    wanted = kept_all(name)
    results, _ = run(found, plan, AsLateAsAllowed())
    for index, tensor in wanted.items():
        assert torch.equal(tensor, results[index]), f"tensor {index} ({found.trace.tensors[index].name}) differs"


def test_late_copies_find_a_missing_wait() -> None:
    """The test above must fail where an op does not wait for its prefetch."""
    found = on_cpu(NETWORKS[0], "train")
    plan = MEMORY_POLICIES["torch_offload"](setting_of(found.trace))
    assert plan.offloads

    class NoWait(AsLateAsAllowed):
        def wait(self, token: Callable[[], None]) -> None:
            pass

        def finish(self) -> None:
            pass

    wanted = kept_all(NETWORKS[0])
    results, _ = run(found, plan, NoWait())
    assert any(not torch.equal(tensor, results[index]) for index, tensor in wanted.items())


@every_network
def test_at_the_end_nothing_is_left_but_states_and_results(name: str) -> None:
    found = on_cpu(name, "train")
    storages = Storages.of(found.trace)
    _, runner = run(found, MemoryPlan(), own=False)
    left = {found.trace.tensors[i].storage for i, tensor in enumerate(runner.tensors) if tensor is not None}
    assert left <= storages.initial | storages.results


@pytest.mark.parametrize("share", [0.0, 0.5, None])
def test_where_the_host_pins_too_little_tensors_stay_and_a_line_says_so(share: float | None) -> None:
    found = on_cpu(NETWORKS[0], "train")
    setting = setting_of(found.trace)
    evaluator = MemoryEvaluator(setting.graph)
    outcome = evaluator.evaluate(MEMORY_POLICIES["torch_offload"](setting))
    assert outcome.pinned_bytes
    # Without a GPU no memory can be pinned: torch refuses, as on a host without free memory.
    buffers = HostBuffers(pinned=True)
    if share is not None:
        buffers = HostBuffers(pinned=False, limit_bytes=round(share * outcome.pinned_bytes))
    runner = MemoryRunner(found.trace, CPU)
    recorder = SimpleNamespace(programs=ProgramRunner(runner, buffers, Inline()))
    said: list[str] = []
    kept = with_buffers(cast(ProgramRecorder, recorder), evaluator, outcome, said.append)
    assert kept.pinned_bytes <= (share or 0.0) * outcome.pinned_bytes
    assert len(kept.plan.offloads) < len(outcome.plan.offloads)
    assert buffers.total_bytes == kept.pinned_bytes
    assert all("the host has pinned memory for" in line and "stay on the GPU" in line for line in said)
    assert said
