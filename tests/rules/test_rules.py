"""Rules: each constant in one module only, the same numbers plain and compiled, and each can be switched off."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpusim
from gpusim.analysis.relaxed import LIMITS, SWITCHES, relaxed
from gpusim.engine.compiled import arrays, jit
from gpusim.engine.fast import FastEngine
from gpusim.formats.hardware import (
    Contention,
    Copies,
    GraphCosts,
    HardwareModel,
    StreamCosts,
    load_hardware,
    measure_of,
)
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.policies.registry import POLICIES
from gpusim.rules import (
    block_turnover,
    contention,
    copies,
    dispatch,
    dram,
    idle_blocks,
    launch,
    lost_time,
    oldest_first,
    products,
    queues,
    start_interference,
    waits,
)
from tests.support.helpers import Step, build_graph, kernel, make_hardware, make_trace, memset, wide_trace

PACKAGE = Path(gpusim.__file__).parent
#: Sections whose numbers are constants of rules, by their name in a hardware model.
SECTIONS: dict[str, Any] = {"graph": GraphCosts, "stream": StreamCosts, "contention": Contention, "copies": Copies}
#: Modules other than its rule that may name a constant: measurement, file format, and what-if changes.
MAY_NAME = ("formats", "gpu/calibrate", "analysis/relaxed.py", "analysis/whatif.py", "plan/anchor.py", "plan/graph.py")
#: Number of queues that the driver may get: only a limit of `stream.queues`.
NO_RULE = {"stream.max_queues"}


def constants() -> list[str]:
    """`section.field` of each number."""
    return [f"{name}.{field}" for name, section in SECTIONS.items() for field in section.__struct_fields__]


def read_by(path: Path) -> set[str]:
    """Return the constants that functions of a module read from a parameter whose type is a section."""
    names = {section.__name__: name for name, section in SECTIONS.items()}
    found = set()
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef):
            continue
        sections = {a.arg: names[t] for a in function.args.args if (t := getattr(a.annotation, "id", "")) in names}
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in sections:
                found.add(f"{sections[node.value.id]}.{node.attr}")
    return found


def named_in(path: Path) -> Iterator[str]:
    """Yield constants whose names follow their section: `hardware.graph.chain_ns`, `hw.graph.chain_ns`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
            yield f"{node.value.attr}.{node.attr}"


@pytest.mark.parametrize("constant", sorted(set(constants()) - NO_RULE))
def test_every_constant_is_in_exactly_one_rule_and_named_in_its_docstring(constant: str) -> None:
    readers = [path for path in sorted((PACKAGE / "rules").glob("*.py")) if constant in read_by(path)]
    assert len(readers) == 1, readers
    docstring = ast.get_docstring(ast.parse(readers[0].read_text())) or ""
    assert f"`{constant.partition('.')[2]}`" in docstring or f".{constant.partition('.')[2]}`" in docstring


def test_nobody_but_its_rule_computes_with_a_constant() -> None:
    known = set(constants()) - NO_RULE
    others = {
        (str(path.relative_to(PACKAGE)), name)
        for path in PACKAGE.rglob("*.py")
        if not str(path.relative_to(PACKAGE)).startswith(("rules", "cli", "report", *MAY_NAME))
        for name in named_in(path)
        if name in known
    }
    # Which rule for SMs a model has; weights of both classes in bounds; how many queues there are; and `chain_ns` of an
    # op graph.
    allowed = {"contention.sharing_exponent", "contention.cross_load", "stream.queues", "graph.chain_ns"}
    assert {name for _, name in others} <= allowed


# --- Switched off ---


def test_every_launch_cost_and_contention_constant_belongs_to_a_limit() -> None:
    assert set(SWITCHES) == {name for name in constants() if name.startswith(("graph.", "contention."))}
    assert set(SWITCHES.values()) <= set(LIMITS)


def changed(hardware: HardwareModel, constant: str, value: float) -> HardwareModel:
    section, _, field = constant.partition(".")
    numbers = msgspec.structs.replace(getattr(hardware, section), **{field: value})
    return msgspec.structs.replace(hardware, **{section: numbers})


#: Step in which every constant has an effect: several streams, forks, joins, memory ops, full SMs of two classes.
EVERYTHING = {
    "chain_ns": 310.0,
    "fork_ns": 290.0,
    "join_ns": 70.0,
    "busy_ns": 740.0,
    "busy_starts": 2.0,
    "product_frac": 0.1,
    "branch_ns": 20.0,
    "front_end_ns": 200.0,
    "turnover_ns": 0.5,
    "memory_node_ns": 650.0,
}


def makespans(hardware: HardwareModel, limits_on: tuple[str, ...] | None) -> list[int]:
    """Return makespans of a wide step's schedules, on a GPU with only these limits; None: with all."""
    trace = wide_trace(6, 9_000, 4)
    graph = OpGraph.build(trace, hardware)
    times = []
    for streams in (2, 6):
        with_limits = graph if limits_on is None else relaxed(graph, limits_on)
        schedule = POLICIES["wavefront"](graph, streams)
        times.append(FastEngine().run(lower(with_limits, schedule), with_limits.hardware).makespan_ns)
    return times


#: Constants of the rule for pooled SMs, and of that for block-level SMs.
OF_POOL, OF_BLOCKS = {"contention.younger_slowdown"}, {name for name in SWITCHES if name.startswith("contention.")}


@pytest.mark.parametrize(
    ("constant", "sharing"),
    [
        *((name, 0.0) for name in sorted(SWITCHES) if name not in OF_BLOCKS - OF_POOL),
        *((name, 0.4) for name in sorted(SWITCHES)),
    ],
)
def test_a_constant_has_no_effect_where_its_limit_is_off(constant: str, sharing: float) -> None:
    hardware = make_hardware(**EVERYTHING, slowdown=0.9, sharing=sharing, matrix=0.6 if sharing else 0.0, cross=0.6)
    others = tuple(limit for limit in LIMITS if limit != SWITCHES[constant])
    field = constant.partition(".")[2]
    value = {"exponent": 0.9, "count": 7.0, "ratio": 0.3}.get(measures()[constant], 1234.5)
    assert makespans(changed(hardware, constant, value), others) == makespans(hardware, others), field


def measures() -> dict[str, str]:
    return {f"{name}.{field}": m for name in ("graph", "contention") for field, m in measure_of(SECTIONS[name]).items()}


# --- Plain and compiled ---

TIMES = st.one_of(st.sampled_from([0.0, 0.3, 1.0]), st.floats(0.0, 1e9))
COUNTS = st.integers(0, 1 << 40)
FEW = st.integers(1, 5000)
SIZES = st.integers(0, 1 << 20).map(float)
GEMM = st.integers(0, 1)
#: Each rule that engines call, with its section and the ranges of its numbers.
RULES: list[tuple[Callable[..., Any], str | None, tuple[st.SearchStrategy[Any], ...]]] = [
    (launch.gap_ns, "graph", (st.booleans(), FEW, TIMES)),
    (launch.ready_delay_ns, "graph", (TIMES, TIMES, COUNTS, COUNTS)),
    (launch.start_interval_ns, "graph", (st.booleans(), TIMES, TIMES)),
    (block_turnover.time_ns, "graph", (COUNTS.map(float), FEW.map(float), FEW.map(float), st.sampled_from([0.0, 8.0]))),
    (start_interference.lost_ns, "graph", (COUNTS,)),
    (products.lost_ns, "graph", (TIMES, TIMES, st.floats(1.0, 1e9))),
    (queues.host_launch_ns, "stream", (TIMES, FEW)),
    (queues.launched_start_ns, "stream", (TIMES,)),
    (queues.stream_start_ns, "stream", (TIMES,)),
    (queues.event_start_ns, "stream", (TIMES,)),
    (queues.hardware_queue, "stream", (COUNTS,)),
    (copies.full_bytes_per_ns, "copies", (st.booleans(),)),
    (copies.work_bytes, "copies", (SIZES, st.booleans())),
    (copies.bytes_per_ns, "copies", (st.booleans(), st.booleans(), st.booleans())),
    (copies.switch_ns, "copies", (st.booleans(), st.booleans(), st.booleans())),
    (copies.sm_rate, "copies", (FEW,)),
    (copies.memset_wait_ns, "copies", (st.booleans(), st.booleans(), st.integers(0, 9), st.integers(0, 9))),
    (contention.load, "contention", (st.floats(0.0, 64.0), st.floats(0.0, 64.0))),
    (contention.rate, "contention", (st.floats(1e-4, 64.0), GEMM)),
    (contention.waves, "contention", (st.integers(1, 1 << 40), st.integers(1, 64), FEW, GEMM)),
    (contention.block_load, None, (FEW,)),
    (contention.alone_rate, "contention", (st.integers(1, 1 << 40), st.integers(1, 64), FEW, GEMM)),
    (dram.bytes_per_ns, "memory", (SIZES, TIMES)),
    (dram.block_bytes_per_ns, None, (TIMES, st.floats(1e-3, 1e4), FEW)),
    (dram.slowed_frac, "memory", (st.floats(0.0, 1e6),)),
    (dispatch.placed_blocks, None, (st.integers(1, 1 << 53), FEW)),
    (dispatch.blocks_per_fill, None, (st.integers(1, 1 << 40), FEW, FEW)),
    (dispatch.room, None, (SIZES, SIZES, SIZES, SIZES, FEW.map(float), SIZES, SIZES)),
    (oldest_first.later_slowdown, "contention", (st.floats(0.0, 1.0),)),
    (lost_time.possible_blocks, None, (COUNTS, COUNTS, FEW, FEW)),
    (lost_time.slowed_blocks, None, (SIZES, st.floats(1e-3, 2.0), st.floats(1e-3, 2.0))),
    (lost_time.short_blocks, None, (SIZES, st.floats(1e-3, 2.0), st.floats(1e-3, 2.0), st.floats(1e-3, 2.0))),
    (lost_time.missing, None, (SIZES,) * 7),
    (lost_time.copy_part, None, (st.floats(0.0, 2.0), st.floats(1e-3, 2.0))),
]
#: Rules of sequences; `tests/engine/test_events.py` compares them.
OF_SEQUENCES: tuple[Callable[..., Any], ...] = (waits.find_waits,)


@pytest.mark.parametrize("case", RULES, ids=lambda case: f"{case[0].__module__}.{case[0].__name__}")
def test_a_rule_is_the_same_to_the_last_bit_plain_and_compiled(case: tuple[Any, str | None, tuple[Any, ...]]) -> None:
    function, section, strategies = case
    hardware = load_hardware("h200")
    record = arrays.encode_hardware(hardware)
    compiled = jit.rule(function)
    numbers_of = ", ".join(f"x{number}" for number in range(len(strategies)))
    section_of = "" if section is None else f"hardware[0].{section}, "
    # numba knows a record's fields by their names in the source, so there is a function per section.
    source = f"lambda hardware, {numbers_of}: compiled({section_of}{numbers_of})"
    run = numba.njit(**jit.OPTIONS)(eval(source, {"compiled": compiled}))

    @settings(max_examples=300)
    @given(st.tuples(*strategies))
    def check(numbers: tuple[Any, ...]) -> None:
        constants_of = () if section is None else (getattr(hardware, section),)
        assert run(record, *numbers) == function(*constants_of, *numbers)

    check()


def test_every_rule_that_is_compiled_is_compared() -> None:
    """Every `rule(...)` in the compiled engine is covered by the test above, or is a rule of sequences."""
    functions = (*(case[0] for case in RULES), *OF_SEQUENCES)
    compared = {f"{function.__module__.rpartition('.')[2]}.{function.__name__}" for function in functions}
    for path in (PACKAGE / "engine" / "compiled").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "rule" and path.name != "jit.py":
                argument = node.args[0]
                assert isinstance(argument, ast.Attribute), path
                assert argument.attr in {name.partition(".")[2] for name in compared}, ast.unparse(argument)


def test_compiled_rules_are_the_functions_that_the_reference_engine_calls() -> None:
    for function in (*(case[0] for case in RULES), *OF_SEQUENCES):
        assert jit.rule(function).py_func.__code__ is function.__code__  # type: ignore[attr-defined]
        assert inspect.getmodule(function).__name__.startswith(jit.RULES)  # type: ignore[union-attr]


def test_no_rule_needs_numba_or_simpy() -> None:
    for path in (PACKAGE / "rules").glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        assert not any(isinstance(node, ast.Import) for node in nodes), path
        imported = {str(node.module).partition(".")[0] for node in nodes if isinstance(node, ast.ImportFrom)}
        assert imported <= {"__future__", "collections", "dataclasses", "math", "typing", "gpusim"}, path


def test_numbers_of_a_rule_worked_out_by_hand() -> None:
    hardware = make_hardware(**EVERYTHING)
    graph = hardware.graph
    assert launch.gap_ns(graph, True, 3, 50.0) == launch.gap_ns(graph, True, 2, 50.0) == 310 + 20 + 70 + 50
    assert launch.gap_ns(graph, False, 1, 0.0) == 310
    assert [launch.fork_turn(place, 4) for place in range(4)] == [0, 1, 2, 2]  # the last two are ready together
    assert [launch.fork_turn(place, 2) for place in range(2)] == [0, 0]
    assert launch.ready_delay_ns(graph, 310.0, 100.0, 2, 5) == 310 + 100 + 2 * 290
    assert [start_interference.lost_ns(graph, n) for n in (0, 2, 6)] == [0, 370, 555]
    assert [products.lost_ns(graph, 2000.0, beside, 4000.0) for beside in (0.0, 1000.0, 4000.0)] == [0, 50, 200]
    assert np.isclose(contention.waves(make_hardware(sharing=0.5).contention, 132 * 2 + 132, 2, 132, 0), 1 + 0.5**0.5)
    one_wave_and_a_quarter = idle_blocks.time_ns(make_hardware(sharing=0.5).contention, 132 * 4 + 132, 4, 132)
    assert np.isclose(one_wave_and_a_quarter, idle_blocks.IDLE_BLOCK_NS * 4**0.5 * (1 + 0.25**0.5))
    assert idle_blocks.time_ns(make_hardware(sharing=0.5).contention, 132, 1, 132) == idle_blocks.IDLE_BLOCK_NS
    turnover = [block_turnover.time_ns(graph, blocks, 16, 132, 0) for blocks in (2112, 2113, 4224)]
    assert turnover == [0, 2113 * 0.5, 2112]  # 2,112 blocks fit at once
    assert [block_turnover.time_ns(graph, 4224, 16, 132, sms) for sms in (64, 132)] == [0, 2112], "in a partition"
    assert launch.start_interval_ns(graph, True, 900.0, 2112.0) == 900, "no longer than the kernel takes"
    assert launch.start_interval_ns(graph, True, 100.0, 2112.0) == 200, "at least the interval of all"
    assert dispatch.room(1024, 1000, 2048, 3, 512, 0, 0) == 2  # neither registers nor shared memory asked for
    assert dispatch.room(1024, 1000, 2048, 3, 256, 400, 2000) == 1


def test_small_memsets_of_known_size_run_on_a_copy_engine() -> None:
    small = copies.SMALL_MEMSET_BYTES
    assert [copies.on_copy_engine(True, size) for size in (0, 1, small - 1, small)] == [False, True, True, False]
    assert not copies.on_copy_engine(False, small)  # a kernel, or a copy on the device
    step = make_trace([Step("a", makes="a", kernels=(memset(500), kernel(500)))])
    assert [task.on_copy_engine for task in build_graph(step).tasks[0]] == [True, False]
