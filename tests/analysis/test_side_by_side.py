"""Modules that a schedule runs concurrently: the sides, their join, and the time they overlap."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gpusim.analysis.side_by_side import Concurrency, SideBySide, side_by_side
from gpusim.engine.base import engine_by_name
from gpusim.formats.trace import Trace
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule
from tests.support.helpers import Step, build_graph, kernel, make_hardware, make_trace, op


def layered(steps: list[Step], layers: Mapping[str, str]) -> Trace:
    """Make a trace whose ops have modules."""
    trace = make_trace(steps)
    ops = tuple(msgspec.structs.replace(each, layer=layers.get(each.name, "")) for each in trace.ops)
    return msgspec.structs.replace(trace, ops=ops)


def concurrent(trace: Trace, streams: Mapping[str, int]) -> Concurrency:
    """Return what runs concurrently with each op on the given stream, in recorded order."""
    graph = build_graph(trace, make_hardware())
    names = [each.name for each in trace.ops]
    schedule = Schedule(tuple(range(len(names))), tuple(streams.get(name, 0) for name in names))
    timeline = engine_by_name("reference").run(lower(graph, schedule), graph.hardware)
    return side_by_side(graph, timeline)


def branched(block: str) -> tuple[list[Step], dict[str, str]]:
    """Make a block of two branches, one of two modules, with their join."""
    steps = [
        op(f"{block}_a1", f"{block}_in", dur_ns=1000),
        op(f"{block}_a2", f"{block}_a1", dur_ns=1000),
        op(f"{block}_b", f"{block}_in", dur_ns=1500),
        op(f"{block}_cat", f"{block}_a2 {block}_b"),
    ]
    layers = {f"{block}_a1": "conv1", f"{block}_a2": "conv2", f"{block}_b": "pool", f"{block}_cat": ""}
    return steps, {name: ".".join(filter(None, (block, layer))) for name, layer in layers.items()}


def test_branches_of_a_module_are_its_sides_and_a_chain_is_one_side() -> None:
    found = concurrent(layered(*branched("net.block")), {"net.block_b": 1})
    assert found.rows == (SideBySide("modules", ("net.block",), (("conv1", "conv2"), ("pool",)), ("forward",), 1500),)
    assert (found.streams, found.named, found.together_ns) == (2, True, 1500)


def test_blocks_with_the_same_sides_are_one_row() -> None:
    (one, first), (two, second) = branched("a"), branched("b")
    two[0] = op("b_a1", "a_cat", dur_ns=1000)
    two[2] = op("b_b", "a_cat", dur_ns=1500)
    [row] = concurrent(layered([*one, *two], {**first, **second}), {"a_b": 1, "b_b": 1}).rows
    assert row.parents == ("a", "b")
    assert row.together_ns == 3000


def test_one_stream_runs_nothing_side_by_side() -> None:
    found = concurrent(layered(*branched("a")), {})
    assert (found.rows, found.together_ns, found.streams) == ((), 0, 1)


def test_a_step_without_layers_says_so() -> None:
    found = concurrent(make_trace(branched("a")[0]), {"a_b": 1})
    assert not found.named
    assert found.together_ns == 1500


def test_weight_gradients_and_updates_are_no_sides_of_a_module() -> None:
    steps = [
        op("f", "x"),
        Step("dx", "f", "gx", kernels=(kernel(2000),), phase="backward"),
        Step("dw", "f", "gw", kernels=(kernel(2000),), phase="backward"),
        Step("dx2", "gx", "gx2", kernels=(kernel(2000),), phase="backward"),
        Step("update", "gw", "w", kernels=(kernel(1000),), phase="optimizer"),
        Step("after", "gx2 w", "end", kernels=(kernel(1000),), phase="optimizer"),
    ]
    trace = layered(steps, {"f": "net.conv", "dx": "net.conv", "dw": "net.conv", "dx2": "net.bn"})
    rows = concurrent(trace, {"dw": 1, "update": 1}).rows
    assert [(row.kind, row.together_ns) for row in rows] == [("weight gradients", 2000), ("optimizer", 1000)]


def test_the_backward_pass_of_a_block_has_the_sides_of_its_forward_pass() -> None:
    """Sums of gradients join branches that are independent of each other."""
    steps, layers = branched("a")
    steps += [
        Step("ga2", "a_cat", "ga2", kernels=(kernel(1000),), phase="backward"),
        Step("gb", "a_cat", "gb", kernels=(kernel(1000),), phase="backward"),
        Step("sum", "ga2 gb", "sum", kernels=(kernel(1000),), phase="backward"),
        Step("more", "sum gb", "more", kernels=(kernel(1000),), phase="backward"),
    ]
    layers |= {"ga2": "a.conv2", "gb": "a.pool", "sum": "a.conv1", "more": "a.conv1"}
    [row] = concurrent(layered(steps, layers), {"a_b": 1, "gb": 1}).rows
    assert row.sides == (("conv1", "conv2"), ("pool",))
    assert row.phases == ("forward", "backward")
    assert row.together_ns == 2500


def test_time_together_counts_once_however_many_sides_run() -> None:
    steps = [op(f"s{i}", "x", dur_ns=1000 * (i + 1)) for i in range(3)]
    trace = layered(steps, {f"s{i}": f"m.{i}" for i in range(3)})
    [row] = concurrent(trace, {"s1": 1, "s2": 2}).rows
    assert row.sides == (("0",), ("1",), ("2",))
    assert row.together_ns == 2000  # until the second of them has ended
