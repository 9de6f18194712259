"""Steps with very many ready ops at once: chosen as from one list, whatever their number."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.engine.compiled.lists import WIDE
from gpusim.plan.graph import OpGraph
from gpusim.policies.shared.list_scheduling import FastLists
from tests.support.helpers import Step, build_graph, kernel, make_hardware, make_trace, memset
from tests.support.list_scheduling import list_schedule


def wide_graph(seed: int, ops: int, after: float) -> OpGraph:
    """Make ops of many demands; the share `after` of them waits for one or two others."""
    draw = random.Random(seed)
    steps = []
    for number in range(ops):
        reads = "x"
        if number and draw.random() < after:
            reads = " ".join(f"a{draw.randrange(number)}" for _ in range(draw.choice((1, 1, 2))))
        launches = [
            kernel(
                draw.choice((500, 1000, 2000, 7000)),
                blocks=draw.choice((1, 40, 132, 264, 1000)),
                threads=draw.choice((64, 256, 1024)),
                regs=draw.choice((0, 16, 32)),
                smem=draw.choice((0, 0, 20_000, 100_000)),
            )
            for _ in range(draw.choice((1, 1, 1, 3)))
        ]
        if draw.random() < 0.05:
            launches = [memset(300)]
        steps.append(Step(f"a{number}", " ".join(dict.fromkeys(reads.split())), f"a{number}", kernels=tuple(launches)))
    return build_graph(make_trace(steps), make_hardware(chain_ns=100, join_ns=50, fork_ns=20, front_end_ns=30))


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    after=st.sampled_from((0.0, 0.3, 0.8)),
    streams=st.sampled_from((1, 2, 5, 16)),
    min_share=st.sampled_from((0.0, 0.05, 0.5, 1.0)),
    levels=st.booleans(),
)
def test_compiled_list_scheduler_makes_the_same_schedule_of_wide_steps(
    seed: int, after: float, streams: int, min_share: float, levels: bool
) -> None:
    graph = wide_graph(seed, 5 * WIDE, after)
    draw = random.Random(seed)
    priority = list(graph.bottom_ns) if levels else [draw.choice((0.0, 1.0, 2.5, draw.random())) for _ in graph.preds]
    expected = list_schedule(graph, streams, priority, min_share)
    assert FastLists(graph).schedule(streams, priority, min_share) == expected


@pytest.mark.parametrize("ops", [WIDE, WIDE + 1, 2 * WIDE, 2 * WIDE + 1])
def test_tree_has_room_for_each_number_of_ops(ops: int) -> None:
    graph = wide_graph(1, ops, 0.0)
    lists = FastLists(graph)
    priorities = [graph.bottom_ns, tuple(reversed(graph.bottom_ns))]
    expected = [list_schedule(graph, 4, priority).makespan_ns for priority in priorities]
    assert lists.makespans(priorities, 4, threads=2).tolist() == expected
