"""The race check: results are the same at any pace of the streams, and a missing event is detected."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from itertools import islice
from random import Random

import pytest
import torch
from msgspec.structs import replace

from gpusim.errors import ReplayError
from gpusim.formats.hardware import load_hardware
from gpusim.formats.trace import Mode, Source, Trace
from gpusim.gpu.optimize.arena_runner import ArenaRunner
from gpusim.gpu.optimize.race import Racing, Results, delayed, disorders, hurried
from gpusim.gpu.optimize.race_check import OnGpu, Reference, StepCheck, _SlowRunner
from gpusim.gpu.replay.execute import InitialState
from gpusim.gpu.replay.timing import SPIN_CYCLES_PER_NS
from gpusim.plan.arena import Arena, pack
from gpusim.plan.graph import OpGraph
from gpusim.plan.happens_before import HappensBefore, data_races
from gpusim.plan.schedule import Schedule
from gpusim.plan.sync import works
from tests.support.helpers import chain_trace, with_kernels
from tests.support.networks import CPU, fused_on_cpu, on_cpu

#: Steps with branches, views, changes in place, random numbers, shared weights, recurrence.
STEPS: tuple[tuple[str, Mode], ...] = (
    ("branches", "train"),
    ("branches", "infer"),
    ("views", "train"),
    ("in_place", "train"),
    ("dropouts", "train"),
    ("shared", "train"),
    ("grouped", "train"),
    ("attention", "train"),
    ("recurrent", "train"),
    ("heads", "infer"),
)
SCHEDULES = 30
EVENTS = 10


@functools.cache
def step(name: str, mode: Mode) -> StepCheck:
    found = on_cpu(name, mode)
    graph = OpGraph.build(with_kernels(found.trace), load_hardware("h200"))
    return StepCheck(graph, InitialState.copy_of(found.recorded.initial), CPU, seed=1)


@pytest.mark.parametrize(("name", "mode"), STEPS)
def test_random_schedules_of_ten_steps_have_no_wrong_output(name: str, mode: Mode) -> None:
    check = step(name, mode)
    assert check.reference.bit_for_bit
    for number in range(SCHEDULES):
        assert list(data_races(check.graph.trace, check.schedule(number).happens_before)) == []
    assert [number for number in range(SCHEDULES) if not check.schedule_is_right(number)] == []


@pytest.mark.parametrize(("name", "mode"), STEPS)
def test_a_schedule_without_one_event_is_caught(name: str, mode: Mode) -> None:
    """Of each step ten events are removed, one at a time."""
    removed = list(islice(step(name, mode).without_events(), EVENTS))
    assert len(removed) == EVENTS
    assert all(each.right_with_it for each in removed)
    assert [each for each in removed if not each.caught_by] == []


def test_an_event_between_columns_of_one_matrix_is_unnecessary() -> None:
    """Gates of a GRU are columns: one is changed in place while another is copied."""
    check = step("recurrent", "train")
    ops = check.graph.trace.ops
    targets = [op.target for op in ops]
    change, clone = targets.index("aten.add_.Tensor"), targets.index("aten.clone.default")
    sigmoid = clone - 1
    assert ops[sigmoid].target == "aten.sigmoid_.default"
    streams = [int(op >= change and op != clone) for op in range(len(ops))]
    racing = Racing.of(check.graph, Schedule(tuple(range(len(ops))), tuple(streams), policy="test"))
    place = racing.events.index((clone, sigmoid))
    less = racing.without(place)
    assert list(data_races(check.graph.trace, less.happens_before))
    assert list(disorders(racing, place)) == []


def test_orders_hurry_and_delay_an_op() -> None:
    """Of a chain 0, 1 on one stream and 2 on another, 3 waits for both ends."""
    order = HappensBefore({0: 0, 1: 0b1, 2: 0, 3: 0b111}, {0: (), 1: (0,), 2: (), 3: (1, 2)})
    assert hurried(order, 2) == [2, 0, 1, 3]
    assert hurried(order, 1) == [0, 1, 2, 3]
    assert delayed(order, 0) == [2, 0, 1, 3]
    assert delayed(order, 2) == [0, 1, 2, 3]


def test_a_recording_joins_all_streams_without_an_event() -> None:
    """The end of a stream that nobody waits for any more is waited for at the end of the step."""
    check = step("branches", "infer")
    for number in range(5):
        racing = check.schedule(number)
        used = {racing.streams[op] for op in racing.happens_before.before}
        for place, (op, earlier) in enumerate(racing.events):
            sync = racing.without(place).sync
            assert {racing.streams[end] for end in sync.ends} == used - {0}
            assert earlier not in sync.waits[racing.order.index(op)]
            assert sync.records >= {each for waits in sync.waits for each in waits} | set(sync.ends)
            firsts: dict[int, tuple[int, ...]] = {}
            for each in racing.order:
                if works(check.graph.trace.ops[each]):
                    firsts.setdefault(racing.streams[each], sync.waits[racing.order.index(each)])
            assert sync.roots == {stream for stream in used - {0} if not firsts[stream]}


def test_kernels_that_are_not_deterministic_are_compared_within_a_limit() -> None:
    trace = step("shared", "infer").graph.trace
    (index,) = (place for place, tensor in enumerate(trace.tensors) if tensor.role == "output")
    ones = torch.ones(trace.tensors[index].shape)

    def reference(apart: float) -> Reference:
        runs = iter((ones, ones + apart))
        return Reference(trace, lambda: {index: next(runs)}, dict)

    exact, near = reference(0.0), reference(1e-5)
    assert (exact.bit_for_bit, exact.tolerance) == (True, 0.0)
    assert (near.bit_for_bit, near.tolerance) == (False, 1e-3)
    assert not exact.agrees({index: ones + 1e-5})
    assert near.agrees({index: ones + 5e-4})
    assert not near.agrees({index: ones + 2e-3})
    for each in (exact, near):
        assert not each.agrees({index: torch.full_like(ones, torch.nan)})
        assert not each.agrees({})
    with pytest.raises(ReplayError, match=r"in recorded order differ by 0\.01"):
        reference(1e-2)


def atomic_step() -> tuple[Trace, int, int]:
    """Return a step that adds atomically, and its results before and behind that."""
    made = chain_trace(2, outputs="a0 a1")
    source = Source(sha256="0" * 64, text="tl.atomic_add(out_ptr0 + (tmp4), tmp6, xmask, sem='relaxed')")
    first, adds = made.ops
    trace = replace(made, ops=(first, replace(adds, source=source.sha256)), sources=(source,))
    before, behind = (index for index, tensor in enumerate(trace.tensors) if tensor.role == "output")
    return trace, before, behind


def test_results_behind_atomic_additions_are_compared_within_a_limit() -> None:
    """Even where two runs agree bit for bit: that may be luck."""
    trace, before, behind = atomic_step()
    ones = torch.ones(256)
    reference = Reference(trace, lambda: {before: ones, behind: ones}, dict)
    assert (reference.bit_for_bit, reference.rounded, reference.tolerance) == (False, {behind}, 1e-3)
    one_ulp, many_ulps, wrong = ones.clone(), ones + 5e-4, ones.clone()
    one_ulp[7] = 1 + torch.finfo(torch.float32).eps
    wrong[7] = 2.0
    assert reference.error({before: ones, behind: ones}) == 0.0
    assert 0.0 < reference.error({before: ones, behind: one_ulp}) < 1e-7
    assert reference.agrees({before: ones, behind: many_ulps})
    assert not reference.agrees({before: ones, behind: wrong})
    assert not reference.agrees({before: ones, behind: torch.full_like(ones, torch.nan)})
    assert not reference.agrees({before: one_ulp, behind: ones})
    assert not reference.agrees({before: ones})


@pytest.mark.parametrize("differing", ["before", "behind"])
def test_a_result_that_differs_before_atomic_additions_puts_all_within_the_limit(differing: str) -> None:
    trace, before, behind = atomic_step()
    ones = torch.ones(256)
    again = {before: ones, behind: ones} | {before if differing == "before" else behind: ones + 1e-5}
    runs = iter(({before: ones, behind: ones}, again))
    reference = Reference(trace, lambda: next(runs), dict)
    assert reference.rounded == ({before, behind} if differing == "before" else {behind})


@pytest.mark.usefixtures("two_threads")
def test_a_sum_over_rows_of_a_table_is_behind_atomic_additions() -> None:
    """The same kernel may update the layer's weight; neither its bias nor an output is behind."""
    found = fused_on_cpu("table")
    graph = OpGraph.build(with_kernels(found.trace), load_hardware("h200"))
    check = StepCheck(graph, InitialState.copy_of(found.recorded.initial), CPU, seed=1)
    tensors = graph.trace.tensors
    behind = {tensors[index].name for index in check.reference.behind}
    assert behind >= {"rows.weight", "momentum.rows.weight"}
    assert not behind & {"layer.bias", "momentum.layer.bias"}
    assert "output" not in {tensors[index].role for index in check.reference.behind}
    assert check.reference.rounded == check.reference.behind
    assert [number for number in range(SCHEDULES) if not check.schedule_is_right(number)] == []
    wrong = check.on.recorded()
    assert check.reference.agrees(wrong)
    (bias,) = (index for index in wrong if tensors[index].name == "layer.bias")
    wrong[bias][0].nextafter_(torch.tensor(torch.inf))
    assert not check.reference.agrees(wrong)


def test_nothing_of_an_earlier_run_is_left_in_a_spoiled_arena() -> None:
    check = step("branches", "train")
    racing = check.schedule(0)
    arena = racing.arena(racing.happens_before)
    runner = ArenaRunner(check.graph.trace, CPU, check.state.tensors, arena, poison=True)
    runner.memory.zero_()
    runner.spoil()
    mine = [
        tensor
        for tensor, declared in zip(runner.tensors, check.graph.trace.tensors, strict=True)
        if declared.storage in arena.offsets and tensor is not None
    ]
    numbers = [tensor for tensor in mine if tensor.is_floating_point()]
    integers = [tensor for tensor in mine if not tensor.is_floating_point()]
    assert numbers
    assert all(bool(tensor.isnan().all()) for tensor in numbers)
    assert integers  # places of a pooling
    assert all(not bool(tensor.any()) for tensor in integers)


def test_on_a_gpu_streams_are_held_back_at_random_and_one_op_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the schedules run at the GPU's pace; of the others, one op of each stream waits for up to a step."""
    drawn: list[dict[int, float]] = []
    on_gpu = OnGpu.__new__(OnGpu)
    on_gpu.step_ns = 1_000_000

    def results(racing: Racing, arena: Arena, delays: Mapping[int, float]) -> Results:
        drawn.append(dict(delays))
        return {}

    monkeypatch.setattr(on_gpu, "_results", results)
    check = step("branches", "train")
    racing, rng = check.schedule(0), Random(0)
    planned = racing.happens_before
    for _ in range(40):
        on_gpu.at_some_pace(racing, planned, rng)
    held = [delays for delays in drawn if delays]
    assert 8 < len(held) < 32
    assert all(len({racing.streams[op] for op in delays}) == len(delays) for delays in held)
    assert all(0.0 <= delay_ns <= on_gpu.step_ns for delays in held for delay_ns in delays.values())
    on_gpu.without_haste(racing, 3, pack(racing.trace, planned, racing.covered, kept=True))
    assert drawn[-1] == {3: 10 * on_gpu.step_ns}


def test_a_stream_is_held_back_before_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, int]] = []
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append(("sleep", cycles)))
    monkeypatch.setattr(ArenaRunner, "run", lambda self, op: done.append(("run", op)))
    runner = _SlowRunner.__new__(_SlowRunner)
    runner.delays = {1: 1000.0}
    runner.run(0)
    runner.run(1)
    assert done == [("run", 0), ("sleep", round(1000.0 * SPIN_CYCLES_PER_NS)), ("run", 1)]
