"""Whole steps with every possible fusion: the same results, in any legal order."""

from __future__ import annotations

import random

import msgspec
import pytest
import torch

from gpusim.formats.trace import Mode, Trace
from gpusim.gpu.replay.execute import Runner, make_initial, results_of
from gpusim.gpu.replay.fusion import SUM, chains_of
from gpusim.plan.sync import plan_sync
from gpusim.trace.dependencies import dependencies
from gpusim.trace.fusion import covered_by, place_fused
from tests.gpu.test_compositions import _cpu_operators  # noqa: F401  batch norm over several GPUs, on the CPU
from tests.support.chains import with_chains
from tests.support.helpers import Step, kernel, make_trace
from tests.support.networks import CPU, NETWORKS, on_cpu

#: As if every op that writes took long enough for any fusion to pay off.
KERNEL = kernel(20_000)


def step(name: str, mode: Mode) -> Trace:
    """Make a network of the tests with every chain as a variant; each op that writes has a kernel."""
    trace = on_cpu(name, mode).trace
    ops = tuple(msgspec.structs.replace(op, kernels=(KERNEL,) if op.writes else ()) for op in trace.ops)
    return with_chains(msgspec.structs.replace(trace, ops=ops))


def run(trace: Trace, order: list[int], streams: list[int], variants: list[int]) -> dict[int, torch.Tensor]:
    """Return the step's results as recorded in replay: covered ops run with their variants, memory is freed."""
    covered = covered_by(trace, variants)
    order, streams = place_fused(order, streams, covered)
    sync = plan_sync(trace, dependencies(trace), order, streams, covered)
    torch.manual_seed(0)
    runner = Runner(trace, CPU)
    runner.bind(make_initial(trace, CPU, seed=0).tensors)
    runner.choose(variants)
    for place, op in enumerate(order):
        runner.release(sync.releases[place])
        runner.run(op)
    return results_of(trace, runner.tensors)


def legal_order(trace: Trace, draw: random.Random) -> list[int]:
    preds = [set(before) for before in dependencies(trace)]
    order: list[int] = []
    left = set(range(len(trace.ops)))
    while left:
        ready = [op for op in sorted(left) if not preds[op] & left]
        order.append(draw.choice(ready))
        left.remove(order[-1])
    return order


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("name", NETWORKS)
def test_step_with_chains_gives_the_same_results_in_any_order(name: str, mode: Mode) -> None:
    """Every possible fusion, first or last alternative; streams and order at random; memory is freed as in a replay."""
    trace = step(name, mode)
    n = len(trace.ops)
    expected = run(trace, list(range(n)), [0] * n, [0] * n)
    draw = random.Random(0)
    for way in (1, 0, -1):
        chosen = [
            draw.randint(0, len(op.variants)) if way < 0 else min(1, len(op.variants)) if way else len(op.variants)
            for op in trace.ops
        ]
        found = run(trace, legal_order(trace, draw), [draw.randrange(3) for _ in range(n)], chosen)
        assert found.keys() == expected.keys()
        for index, wanted in expected.items():
            assert torch.allclose(found[index], wanted, rtol=1e-3, atol=1e-4), trace.tensors[index]


def test_sum_of_a_sum_with_itself_is_no_sum_of_three() -> None:
    """The partial sum, the absent argument, must be added once."""
    total = Step("total", "x y", "total", target=SUM, kernels=(KERNEL,))
    for last, wanted in (("total z", 1), ("total total", 0)):
        trace = make_trace([total, Step("last", last, "last", target=SUM, kernels=(KERNEL,))], outputs="last")
        assert sum("joined_sums" in ways for ways in chains_of(trace).values()) == wanted


def test_most_kinds_of_chains_are_among_them() -> None:
    names = {
        variant.name
        for mode in ("infer", "train")
        for name in ("branches", "shared", "in_place", "pooled")
        for op in step(name, mode).ops
        for variant in op.variants
    }
    assert names == {"fused", "fused_channels_last", "joined", "joined_sums", "fused_sgd"}
