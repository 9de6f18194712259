"""Invalid plans are refused with a reason: nothing is read before it exists, nothing is lost on its way."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.engine.fast import FastEngine
from gpusim.engine.reference import ReferenceEngine
from gpusim.errors import PlanError
from gpusim.formats.trace import Trace
from gpusim.memplan.checks import check_memory_plan, check_program, check_timeline
from gpusim.memplan.lowering import lower_program
from gpusim.memplan.plan import MemoryPlan, Offload, Redo
from gpusim.memplan.program import Instruction, Program, program_of
from gpusim.memplan.storages import Storages
from tests.support.helpers import Step, kernel, make_trace
from tests.support.memory_steps import chain_step, graph_of, op_of, storage_of


def refusal(trace: Trace, program: Program) -> str:
    with pytest.raises(PlanError) as caught:
        check_program(Storages.of(trace), program)
    return str(caught.value)


def keep_all(trace: Trace) -> list[Instruction]:
    return list(program_of(Storages.of(trace), MemoryPlan()))


def place(program: list[Instruction], trace: Trace, name: str) -> int:
    return program.index(Instruction("run", op=op_of(trace, name)))


def test_reading_what_was_let_go_is_refused() -> None:
    trace = chain_step(3)
    program = keep_all(trace)
    program.insert(place(program, trace, "loss"), Instruction("free", storage=storage_of(trace, "a0")))
    assert "op 'b1': storage" in refusal(trace, tuple(program))
    assert "is not there" in refusal(trace, tuple(program))


def test_copy_back_of_what_never_left_is_refused() -> None:
    trace = chain_step(3)
    program = keep_all(trace)
    a0 = storage_of(trace, "a0")
    at = place(program, trace, "loss")
    program[at:at] = [Instruction("free", storage=a0), Instruction("back", storage=a0)]
    assert "was not copied out" in refusal(trace, tuple(program))


def test_copy_back_over_what_is_there_is_refused() -> None:
    trace = chain_step(3)
    program = keep_all(trace)
    a0 = storage_of(trace, "a0")
    at = place(program, trace, "loss")
    program[at:at] = [Instruction("out", storage=a0), Instruction("back", storage=a0)]
    assert refusal(trace, tuple(program)).endswith("it is there")


def test_changing_what_a_copy_reads_is_refused_unless_something_waited_for_it() -> None:
    steps = [
        Step("make", "x", "a", kernels=(kernel(1),)),
        Step("look", "a", "b", kernels=(kernel(1),)),
        Step("change", "a", changes="a", kernels=(kernel(1),)),
        Step("use", "a b", "c", kernels=(kernel(1),)),
    ]
    trace = make_trace(steps, outputs="c")
    program = keep_all(trace)
    a = storage_of(trace, "a")
    at = place(program, trace, "change")
    program.insert(at, Instruction("out", storage=a))
    assert "overwritten while it is copied out" in refusal(trace, tuple(program))
    program.insert(at + 1, Instruction("barrier"))
    check_program(Storages.of(trace), tuple(program))


def test_stale_copy_of_a_changed_storage_is_refused() -> None:
    # The copy is of `a` before its change: reading it afterwards would give an older value.
    steps = [
        Step("make", "x", "a", kernels=(kernel(1),)),
        Step("change", "a", changes="a", kernels=(kernel(1),)),
        Step("use", "a", "c", kernels=(kernel(1),)),
    ]
    trace = make_trace(steps, outputs="c")
    a = storage_of(trace, "a")
    program = keep_all(trace)
    at = place(program, trace, "change")
    program[at:at] = [Instruction("out", storage=a), Instruction("barrier")]
    at = place(program, trace, "use")
    program[at:at] = [Instruction("free", storage=a), Instruction("back", storage=a)]
    assert "another than in the captured step" in refusal(trace, tuple(program))


def test_op_that_draws_random_numbers_does_not_run_again() -> None:
    steps = [
        Step("draw", "x", "a", kernels=(kernel(1),), random=True),
        Step("use", "a", "b", kernels=(kernel(1),)),
        Step("back", "a b", "c", kernels=(kernel(1),), phase="backward"),
    ]
    trace = make_trace(steps, outputs="c")
    plan = MemoryPlan(redos=(Redo(2, (0,), (storage_of(trace, "a"),)),))
    assert "random numbers" in refusal(trace, program_of(Storages.of(trace), plan))


def test_op_that_changes_a_state_does_not_run_again() -> None:
    steps = [
        Step("count", "n x", "a", changes="n", kernels=(kernel(1),)),
        Step("use", "a", "b", kernels=(kernel(1),)),
        Step("back", "a b", "c", kernels=(kernel(1),), phase="backward"),
    ]
    trace = make_trace(steps, outputs="c")
    plan = MemoryPlan(redos=(Redo(2, (0,), (storage_of(trace, "a"),)),))
    assert "changes a state" in refusal(trace, program_of(Storages.of(trace), plan))


def test_recomputation_from_a_value_that_has_changed_since_is_refused() -> None:
    # `a` is made from the first value of `t`; after a change of `t`, making `a` again would give another one.
    steps = [
        Step("base", "x", "t", kernels=(kernel(1),)),
        Step("make", "t", "a", kernels=(kernel(1),)),
        Step("change", "t", changes="t", kernels=(kernel(1),)),
        Step("back", "a t", "c", kernels=(kernel(1),), phase="backward"),
    ]
    trace = make_trace(steps, outputs="c")
    plan = MemoryPlan(redos=(Redo(3, (1,), (storage_of(trace, "a"),)),))
    assert "another than in the captured step" in refusal(trace, program_of(Storages.of(trace), plan))


def test_result_of_the_step_must_be_there_at_its_end() -> None:
    trace = chain_step(2)
    program = [*keep_all(trace), Instruction("free", storage=storage_of(trace, "w"))]
    assert "is gone at its end" in refusal(trace, tuple(program))


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        (MemoryPlan(offloads=(Offload(99, 0, 1, 2),)), "storage 99"),
        (MemoryPlan(offloads=(Offload(0, 0, 1, 77),)), "op 77"),
        (MemoryPlan(redos=(Redo(0, (-1,), ()),)), "op -1"),
        (MemoryPlan(redos=(Redo(0, (), (50,)),)), "storage 50"),
        (MemoryPlan(redos=(Redo(4, (0,), (3,)),)), "no op that runs again before op 'b2' makes storage 3"),
        (MemoryPlan(held=(44,)), "storage 44"),
        (MemoryPlan(barriers=(66,)), "op 66"),
        (MemoryPlan(order=(0, 1)), "each of the 7 ops once"),
        (MemoryPlan(order=(1, 0, 2, 3, 4, 5, 6)), "comes before 'f0', whose result it needs"),
    ],
)
def test_plans_that_make_no_sense_for_the_trace_are_refused(plan: MemoryPlan, problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        check_memory_plan(Storages.of(chain_step(3)), plan)


def some_offload(trace: Trace) -> tuple[Storages, Program]:
    storages = Storages.of(trace)
    plan = MemoryPlan(
        offloads=(Offload(storage_of(trace, "a0"), op_of(trace, "f1"), op_of(trace, "f3"), op_of(trace, "b2")),)
    )
    return storages, program_of(storages, plan)


@pytest.mark.parametrize("engine", [FastEngine(), ReferenceEngine()], ids=["fast", "reference"])
def test_simulated_times_of_a_legal_plan_pass_and_shifted_ones_do_not(engine: FastEngine | ReferenceEngine) -> None:
    trace = chain_step(5)
    storages, program = some_offload(trace)
    graph = graph_of(trace)
    lowered = lower_program(graph, storages, program)
    timeline = engine.run(lowered.plan, graph.hardware)
    check_timeline(lowered, timeline.start_ns, timeline.end_ns, storages)
    back = next(i for i, task in enumerate(lowered.plan.tasks) if task.kind == "h2d")
    late = [end + (10**9 if i == back else 0) for i, end in enumerate(timeline.end_ns)]
    with pytest.raises(PlanError, match="'b1' starts before storage"):
        check_timeline(lowered, timeline.start_ns, late, storages)
    early = [0 if i == back else start for i, start in enumerate(timeline.start_ns)]
    with pytest.raises(PlanError, match="comes back before its copy out has ended"):
        check_timeline(lowered, early, timeline.end_ns, storages)


@st.composite
def offload_plans(draw: st.DrawFn, trace: Trace) -> MemoryPlan:
    """Draw any offloads of a chain's activations, sensible or not."""
    count = len(trace.ops)
    ops = st.integers(0, count - 1)
    chosen = draw(st.lists(st.integers(0, len(trace.storages) - 1), max_size=3, unique=True))
    return MemoryPlan(offloads=tuple(Offload(s, draw(ops), draw(ops), draw(ops)) for s in chosen))


@given(st.data())
@settings(max_examples=200)
def test_whatever_passes_the_check_of_instructions_passes_that_of_times_in_both_engines(data: st.DataObject) -> None:
    trace = chain_step(4, dur_ns=data.draw(st.sampled_from((1_000, 50_000, 200_000))))
    storages = Storages.of(trace)
    plan = data.draw(offload_plans(trace))
    try:
        program = program_of(storages, check_memory_plan(storages, plan))
        check_program(storages, program)
    except PlanError:
        return
    graph = graph_of(trace)
    lowered = lower_program(graph, storages, program, memory=True)
    fast = FastEngine().run(lowered.plan, graph.hardware)
    reference = ReferenceEngine().run(lowered.plan, graph.hardware)
    assert fast.start_ns == reference.start_ns
    assert fast.end_ns == reference.end_ns
    check_timeline(lowered, fast.start_ns, fast.end_ns, storages)
    assert fast.peak_bytes <= sum(storages.bytes) + storages.bytes[0] * len(plan.offloads)


def test_order_of_actions_does_not_hide_a_read_before_the_copy_back() -> None:
    trace = chain_step(4)
    a0 = storage_of(trace, "a0")
    plan = MemoryPlan(offloads=(Offload(a0, op_of(trace, "f1"), op_of(trace, "f2"), op_of(trace, "b0")),))
    assert f"op 'b1': storage {a0} is not there" in refusal(trace, program_of(Storages.of(trace), plan))
    legal = replace(plan.offloads[0], back=op_of(trace, "b1"))
    check_program(Storages.of(trace), program_of(Storages.of(trace), MemoryPlan(offloads=(legal,))))
