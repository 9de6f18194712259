"""Memory of a step by hand: lifetimes, the peak, and the live tensors at it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given

from gpusim.formats.trace import Trace
from gpusim.memplan.checks import check_program
from gpusim.memplan.memory import memory_of
from gpusim.memplan.plan import MemoryPlan, Offload, Redo
from gpusim.memplan.program import Instruction, program_of
from gpusim.memplan.storages import Storages
from tests.support.helpers import Step, kernel, make_trace, traces
from tests.support.memory_steps import SIZE, chain_step, op_of, storage_of


def use_of(trace: Trace, plan: MemoryPlan | None = None):  # type: ignore[no-untyped-def]
    storages = Storages.of(trace)
    program = program_of(storages, plan or MemoryPlan())
    check_program(storages, program)
    return memory_of(storages, program)


def test_peak_of_a_chain_is_at_its_first_backward_op() -> None:
    # x, a0 .. a3, g3 and b3's result: 7 tensors; a3 is freed after the loss, so 6 of 4 MiB are live at the peak.
    trace = chain_step(4)
    use = use_of(trace)
    assert use.initial_bytes == SIZE
    assert use.peak.allocated_bytes == 6 * SIZE
    assert trace.ops[use.peak.op].name in ("loss", "b3")
    assert use.peak_by_op[op_of(trace, "f0")] == 2 * SIZE
    assert use.peak_by_op[op_of(trace, "b0")] == 3 * SIZE  # x, g0, w


def test_workspace_counts_while_its_op_runs_and_no_longer() -> None:
    trace = chain_step(3)
    ops = list(trace.ops)
    place = op_of(trace, "f1")
    ops[place] = msgspec.structs.replace(ops[place], workspace_bytes=10 * SIZE)
    use = use_of(msgspec.structs.replace(trace, ops=tuple(ops)))
    assert use.peak.allocated_bytes == (3 + 10) * SIZE
    assert use.peak.op == place
    assert use.peak.by_category["workspace"] == 10 * SIZE
    assert use.allocated_bytes[place + 1] < 13 * SIZE


def test_live_storages_of_the_peak_add_up_to_its_categories() -> None:
    trace = chain_step(4)
    peak = use_of(trace).peak
    assert sum(peak.by_category.values()) == peak.allocated_bytes  # 4 MiB need no rounding
    assert peak.by_category["input"] == SIZE
    assert sum(trace.storages[s].bytes for s in peak.live) == peak.allocated_bytes


def test_alias_and_change_in_place_take_no_memory_of_their_own() -> None:
    steps = [
        Step("make", "x", "a", kernels=(kernel(1),)),
        Step("look", views="v", looks_at="a"),
        Step("change", "v", changes="v", kernels=(kernel(1),)),
        Step("use", "a", "b", kernels=(kernel(1),)),
    ]
    trace = make_trace(steps, outputs="b", elements=SIZE // 4)
    assert use_of(trace).peak.allocated_bytes == 3 * SIZE


def test_result_of_the_step_stays_to_its_end() -> None:
    trace = chain_step(2)
    storages = Storages.of(trace)
    program = program_of(storages, MemoryPlan())
    freed = {i.storage for i in program if i.kind == "free"}
    assert storage_of(trace, "w") not in freed
    assert freed == set(range(len(storages))) - storages.initial - {storage_of(trace, "w")}


def test_offload_takes_a_storage_away_between_its_copies() -> None:
    # a0 leaves after f1 and is back before b1: the peak has one tensor less.
    trace = chain_step(4)
    plan = MemoryPlan(
        offloads=(
            Offload(storage_of(trace, "a0"), op_of(trace, "f1"), free=op_of(trace, "f3"), back=op_of(trace, "b1")),
        )
    )
    use = use_of(trace, plan)
    assert use.peak.allocated_bytes == 5 * SIZE
    assert use.pinned_bytes == SIZE
    assert use.peak_by_op[op_of(trace, "f2")] == 4 * SIZE  # still there
    assert use.peak_by_op[op_of(trace, "f3")] == 4 * SIZE  # gone


def test_recomputation_takes_a_storage_away_until_it_is_needed() -> None:
    trace = chain_step(4)
    a1 = storage_of(trace, "a1")
    plan = MemoryPlan(redos=(Redo(op_of(trace, "b2"), (op_of(trace, "f1"),), (a1,)),))
    use = use_of(trace, plan)
    assert use.peak.allocated_bytes == 5 * SIZE
    program = program_of(Storages.of(trace), plan)
    kinds = [(i.kind, trace.ops[i.op].name if i.op >= 0 else i.storage) for i in program]
    assert kinds[kinds.index(("run", "f2")) + 1] == ("free", a1)
    assert kinds[kinds.index(("run", "b2")) - 1] == ("again", "f1")
    assert kinds[kinds.index(("run", "b2")) + 1] in (("free", a1), ("free", storage_of(trace, "g2")))


def test_storage_that_is_held_stays_to_the_end() -> None:
    trace = chain_step(3)
    a2 = storage_of(trace, "a2")
    assert Instruction("free", storage=a2) in program_of(Storages.of(trace), MemoryPlan())
    assert Instruction("free", storage=a2) not in program_of(Storages.of(trace), MemoryPlan(held=(a2,)))


@given(traces())
def test_any_step_frees_everything_once_and_never_needs_less_than_its_largest_op(trace: Trace) -> None:
    storages = Storages.of(trace)
    program = program_of(storages, MemoryPlan())
    check_program(storages, program)
    freed = [i.storage for i in program if i.kind == "free"]
    assert len(freed) == len(set(freed))
    use = memory_of(storages, program)
    for op, touched in enumerate(storages.touched):
        assert use.peak_by_op[op] >= sum(storages.bytes[s] for s in touched | storages.initial)
    assert use.peak.allocated_bytes == max(use.allocated_bytes, default=use.initial_bytes)
    assert use.reserved_bytes >= use.peak.allocated_bytes


@pytest.mark.parametrize("layers", [1, 2, 8])
def test_categories_tell_activations_from_their_gradients(layers: int) -> None:
    trace = chain_step(layers)
    storages = Storages.of(trace)
    assert storages.category[storage_of(trace, "a0")] == "activation"
    assert storages.category[storage_of(trace, "x")] == "input"
    if layers > 1:
        assert storages.category[storage_of(trace, "g0")] == "activation_gradient"
