"""A plan whose ops and copies all wait for each other: a graph that runs on one stream, where nothing slows a copy."""

from __future__ import annotations

import pytest

from gpusim.memplan.evaluate import MemoryEvaluator
from gpusim.memplan.lowering import lower_program
from gpusim.memplan.plan import MemoryPlan, Offload
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.policies.registry import MEMORY_POLICIES
from tests.support.memory_steps import SIZE, chain_step, graph_of, op_of, storage_of

#: Time of a copy of 4 MiB at 50 bytes per ns.
COPY_NS = SIZE // 50
TRACE = chain_step(4)


def evaluator(copy_slowdown: float = 0.0, memset_d2h_ns: float = 0.0) -> MemoryEvaluator:
    return MemoryEvaluator(graph_of(TRACE, copy_slowdown=copy_slowdown, memset_d2h_ns=memset_d2h_ns))


def moving(free: str, back: str) -> MemoryPlan:
    """Move `a0` out after `f1`."""
    move = Offload(storage_of(TRACE, "a0"), op_of(TRACE, "f1"), op_of(TRACE, free), op_of(TRACE, back))
    return MemoryPlan(offloads=(move,))


def is_chain(plan: MemoryPlan) -> bool:
    made = evaluator()
    return lower_program(made.graph, made.storages, made.program(plan)).is_chain


def test_copies_that_all_wait_are_at_the_full_rate() -> None:
    plan = MEMORY_POLICIES["superneurons_release"](Setting.of(graph_of(TRACE), 5 * SIZE))
    assert is_chain(plan)
    slow, full = evaluator(1.0, 500.0).evaluate(plan), evaluator().evaluate(plan)
    assert slow.step_ns == full.step_ns
    assert full.exposed_copy_ns == 2 * len(plan.offloads) * COPY_NS


@pytest.mark.parametrize(
    ("free", "back", "chain"),
    [
        ("f2", "b1", True),  # f2 waits for the copy out, b1 for the copy back
        ("f3", "b1", False),  # f2 runs beside the copy out
        ("f2", "b2", False),  # b2 runs beside the copy back
    ],
)
def test_one_op_beside_a_copy_makes_no_chain(free: str, back: str, chain: bool) -> None:
    plan = moving(free, back)
    assert is_chain(plan) is chain
    slower = evaluator(1.0).evaluate(plan).step_ns > evaluator().evaluate(plan).step_ns
    assert slower is not chain


def test_a_plan_without_copies_takes_as_long_either_way() -> None:
    assert evaluator(1.0, 500.0).evaluate(MemoryPlan()).step_ns == evaluator().evaluate(MemoryPlan()).step_ns
