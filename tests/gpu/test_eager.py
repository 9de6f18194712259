"""The model's own eager step: its runs and times, and the conversion of its pace to host times of ops."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpusim.formats.trace import Phase, Timing, Trace
from gpusim.gpu.capture import capture as capture_module
from gpusim.gpu.capture import eager
from gpusim.gpu.capture.capture import capture
from gpusim.gpu.capture.eager import EAGER_ROUNDS, WARMUP_STEPS, EagerTimes, paced, time_eager
from gpusim.gpu.capture.joint_graph import LEARNING_RATE, MOMENTUM
from gpusim.gpu.capture.options import CaptureOptions
from gpusim.gpu.profiling import ProfiledOps
from gpusim.plan.eager import STEPS_IN_A_ROW
from tests.support.helpers import kernel, make_trace, op
from tests.support.networks import CPU, on_cpu, spec

PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")


class Clock:
    """A clock that moves only when told to, with a log of events."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.log: list[str] = []

    def synchronize(self) -> None:
        self.log.append("synchronize")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace the GPU and the time."""
    found = Clock()
    monkeypatch.setattr(torch.cuda, "synchronize", found.synchronize)
    monkeypatch.setattr(eager, "perf_counter_ns", lambda: found.now_ns)
    return found


def phases_taking(clock: Clock, *durations_ns: Callable[[int], int]) -> Callable[..., Any]:
    """Replace the model's phases: each moves the clock by its function's value for the iteration."""
    calls = dict.fromkeys(PHASES, 0)

    def phase(name: Phase, duration_ns: Callable[[int], int]) -> Callable[[Any], Any]:
        def run(value: Any) -> str:
            clock.log.append(f"{name}({value})")
            clock.now_ns += duration_ns(calls[name])
            calls[name] += 1
            return f"of {name}"

        return run

    made = [(name, phase(name, duration)) for name, duration in zip(PHASES, durations_ns, strict=False)]
    return lambda step, module: made


# --- The pace of the host and the wall time ---


def test_pace_and_wall_time_are_medians_over_the_rounds(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow warm-up steps and one slow later step move neither."""

    def wild(duration_ns: int) -> Callable[[int], int]:
        return lambda i: 10**9 if i < WARMUP_STEPS or i == WARMUP_STEPS + 7 else duration_ns

    monkeypatch.setattr(eager, "_eager_phases", phases_taking(clock, wild(107), wild(200), wild(50)))
    found = time_eager(on_cpu("outputs").step)
    assert found.pace == {"forward": 107, "backward": 200, "optimizer": 50}
    assert (found.wall.median_ns, found.wall.rounds) == (357, EAGER_ROUNDS)


def test_wall_time_and_pace_take_turns(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each round four steps in a row between synchronizations, then one whose phases are each issued to an idle GPU.
    Each phase gets the result of the one before.
    """
    monkeypatch.setattr(eager, "_eager_phases", phases_taking(clock, *[lambda i: 1] * 3))
    time_eager(on_cpu("outputs").step)
    step = ["forward(None)", "backward(of forward)", "optimizer(of backward)"]
    paced_step = [entry for phase in step for entry in ("synchronize", phase)]
    one_round = ["synchronize", *step * STEPS_IN_A_ROW, "synchronize", *paced_step]
    assert clock.log == step * WARMUP_STEPS + one_round * EAGER_ROUNDS + ["synchronize"]


@pytest.mark.parametrize(("mode", "phases"), [("train", PHASES), ("infer", PHASES[:1])])
@pytest.mark.parametrize("name", ["branches", "outputs", "own_loss"])
def test_pace_has_the_phases_of_the_step_and_leaves_the_model_alone(
    name: str, mode: Any, phases: tuple[Phase, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    step = on_cpu(name, mode).step
    before = copy.deepcopy(step.module.state_dict())
    found = time_eager(step, rounds=2).pace
    assert tuple(found) == phases
    assert all(torch.equal(value, before[key]) for key, value in step.module.state_dict().items())
    assert all(parameter.grad is None for parameter in step.module.parameters())


def test_eager_step_is_the_models_own_with_torchs_sgd() -> None:
    step = on_cpu("branches").step
    ours, own = copy.deepcopy(step.module), copy.deepcopy(step.module)
    phases = eager._eager_phases(step, ours)
    optimizer = torch.optim.SGD(own.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    assert step.loss is not None
    for _ in range(3):
        eager._run(phases)
        optimizer.zero_grad(set_to_none=True)
        step.loss(own(*step.inputs), step.target).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), own.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(ours.parameters(), step.module.parameters(), strict=True))


# --- From the pace to the ops ---


def of_phases(*phases: Phase) -> Trace:
    steps = [op(f"a{i}", "x") for i in range(len(phases))]
    trace = make_trace(steps)
    ops = tuple(msgspec.structs.replace(op, phase=phase) for op, phase in zip(trace.ops, phases, strict=True))
    return msgspec.structs.replace(trace, ops=ops)


def test_ops_are_scaled_so_that_each_phase_takes_its_pace() -> None:
    trace = of_phases("forward", "forward", "backward", "backward", "optimizer")
    found = paced(trace, [100, 300, 500, 500, 70], {"forward": 200, "backward": 2000, "optimizer": 7})
    assert found == [50, 150, 1000, 1000, 7]


def test_phase_without_a_pace_stays_as_it_was() -> None:
    trace = of_phases("forward", "backward", "optimizer")
    assert paced(trace, [100, 200, 300], {"backward": 100}) == [100, 100, 300]
    assert paced(trace, [100, 200, 300], {"forward": 0}) == [100, 200, 300]  # a clock that did not move gives no pace
    assert paced(trace, [100, 200, 300], {}) == [100, 200, 300]


def test_phase_of_calls_that_took_no_time_stays_at_none() -> None:
    assert paced(of_phases("forward", "forward"), [0, 0], {"forward": 100}) == [0, 0]


def test_as_many_times_as_ops_are_asked_for() -> None:
    with pytest.raises(ValueError, match="zip"):
        paced(of_phases("forward", "forward"), [1], {"forward": 100})


@given(
    st.lists(st.tuples(st.sampled_from(PHASES), st.integers(0, 10**6)), min_size=1, max_size=40),
    st.fixed_dictionaries({}, optional={phase: st.integers(1, 10**9) for phase in PHASES}),
)
def test_phases_sum_to_their_pace_and_calls_keep_their_proportions(
    calls: list[tuple[Phase, int]], pace: dict[Phase, int]
) -> None:
    """Except for half a ns of rounding per op."""
    found = paced(of_phases(*(phase for phase, _ in calls)), [ns for _, ns in calls], pace)
    for phase in PHASES:
        before = [ns for p, ns in calls if p == phase]
        after = [ns for ns, (p, _) in zip(found, calls, strict=True) if p == phase]
        if phase not in pace or not sum(before):
            assert after == before
            continue
        assert abs(sum(after) - pace[phase]) <= len(after) / 2
        factor = pace[phase] / sum(before)
        assert all(abs(new - old * factor) <= 0.5 + 1e-6 * new for new, old in zip(after, before, strict=True))


# --- Where capture uses it ---


def test_capture_keeps_the_eager_pace_but_profiles_at_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the profiler the ops are issued one by one from Python, slower than the eager step's pace: the GPU's head
    start must cover that, or kernels would run at the host's pace.
    """
    asked: list[int] = []
    given_by_gpu = msgspec.structs.replace(make_trace([op("a", "x")]).provenance.gpu)

    def profile(runner: Any, state: Any, releases: Any, host_ns: int) -> ProfiledOps:
        asked.append(host_ns)
        kernels = [(kernel(1000),) if op.writes else () for op in runner.trace.ops]
        return ProfiledOps(kernels, 1.0, (), [])

    class Recorder:
        def __init__(self, *_: Any) -> None:
            pass

        def record(self, *_: Any, **__: Any) -> Any:
            return self

        def replay(self) -> None:
            pass

    def timing(*_: Any) -> Timing:
        return Timing(median_ns=1000, lo_ns=1000, hi_ns=1000, rounds=1)

    monkeypatch.setattr(torch.cuda, "manual_seed", torch.manual_seed)
    monkeypatch.setattr(capture_module, "require_gpu", lambda: CPU)
    monkeypatch.setattr(capture_module, "set_precision", lambda dtype: None)
    monkeypatch.setattr(capture_module, "time_eager", lambda step: EagerTimes(timing(), {"forward": 900}))
    monkeypatch.setattr(capture_module, "host_times", lambda runner, *_: [5000] * len(runner.trace.ops))
    monkeypatch.setattr(capture_module, "GraphRecorder", Recorder)
    monkeypatch.setattr(capture_module, "gpu_facts", lambda replay: given_by_gpu)
    monkeypatch.setattr(capture_module, "profile_ops", profile)
    monkeypatch.setattr(capture_module, "op_workspaces", lambda runner, *_: [0] * len(runner.trace.ops))
    monkeypatch.setattr(capture_module, "alone", lambda *_: (timing(), None))
    trace = capture(CaptureOptions(spec=spec("outputs"), mode="infer", batch=2, dtype="fp32")).trace
    assert asked == [5000 * len(trace.ops)]
    assert sum(op.host_ns for op in trace.ops) == pytest.approx(900, abs=len(trace.ops) / 2)
