"""The largest batch that fits, against the peak of a step captured at that batch."""

from __future__ import annotations

import msgspec
import pytest

import gpusim
from gpusim.memplan.batches import constant_levels, largest_batch
from gpusim.memplan.compare import compare_policies
from gpusim.memplan.evaluate import MemoryEvaluator
from gpusim.memplan.memory import memory_of
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.policies.registry import MEMORY_POLICIES
from gpusim.memplan.program import program_of
from gpusim.memplan.storages import Storages
from gpusim.plan.graph import OpGraph
from tests.support.memory_steps import chain_step


@pytest.mark.parametrize("policy", ["keep_all", "vdnn_conv", "checkpoint"])
def test_a_step_of_the_largest_batch_takes_the_limit(policy: str) -> None:
    """At 8 images the peak is where gradients of parameters are, at 32 it is not."""
    small, large = (MemoryEvaluator(gpusim.load(f"googlenet-train-b{batch}").graph) for batch in (8, 32))
    ours, theirs = (
        each.evaluate(MEMORY_POLICIES[policy](Setting(each.graph, each.storages, None, None, None)))
        for each in (small, large)
    )
    assert largest_batch(small.storages, ours, theirs.peak_bytes) in (31, 32)


def test_no_batch_fits_below_what_does_not_grow() -> None:
    evaluator = MemoryEvaluator(gpusim.load("googlenet-train-b8").graph)
    outcome = evaluator.evaluate(MemoryPlan())
    constant = max(constant_levels(evaluator.storages, outcome.program))
    assert largest_batch(evaluator.storages, outcome, constant) == 0
    assert largest_batch(evaluator.storages, outcome, 0) == 0


def test_what_is_constant_is_part_of_what_is_allocated() -> None:
    storages = Storages.of(chain_step(3))
    program = program_of(storages, MemoryPlan())
    for constant, level in zip(
        constant_levels(storages, program), memory_of(storages, program).allocated_bytes, strict=True
    ):
        assert 0 <= constant <= level


def test_a_gpu_must_hold_what_is_reserved_and_a_budget_what_is_allocated() -> None:
    step = gpusim.load("googlenet-train-b8")
    outcome = compare_policies(step.graph, policies=[]).keep_all
    between = (outcome.peak_bytes + outcome.use.reserved_bytes) // 2
    assert outcome.peak_bytes < between < outcome.use.reserved_bytes
    memory = msgspec.structs.replace(step.graph.hardware.memory, dram_bytes=between)
    small = OpGraph.build(step.trace, msgspec.structs.replace(step.graph.hardware, memory=memory))
    on_gpu = compare_policies(small, policies=[])
    assert not on_gpu.fits(outcome)
    assert on_gpu.largest_batch(outcome) < 8
    within = compare_policies(small, policies=[], budget_bytes=between)
    assert within.fits(outcome)
    assert within.largest_batch(outcome) >= 8
