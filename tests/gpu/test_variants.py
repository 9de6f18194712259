"""Variants of ops: read and refused, chosen by a schedule, simulated alike by both engines, run under settings."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.cli import cli
from gpusim.defaults import VARIANTS
from gpusim.engine.batch import BatchEngine
from gpusim.engine.fast import FastEngine
from gpusim.engine.reference import ReferenceEngine
from gpusim.errors import PlanError, ReplayError, ScheduleError, TraceError
from gpusim.formats.hardware import HardwareModel, load_hardware
from gpusim.formats.trace import Kernel, Trace, Variant, VariantSettings
from gpusim.gpu.replay.execute import Runner
from gpusim.gpu.replay.variants import applied, call_variant
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.ranking import ranked_variants
from gpusim.plan.schedule import Schedule, write_schedule
from gpusim.plan.tasks import LaunchMode
from gpusim.policies.registry import POLICIES
from gpusim.report.tables import explored_document
from gpusim.search import variants as choices
from gpusim.search.explore import explore
from gpusim.search.neighbourhood import refine
from gpusim.search.variants import search_variants
from gpusim.trace.check import check_trace
from gpusim.trace.dependencies import dependencies
from gpusim.trace.fusion import CoverRules
from gpusim.trace.store import load_trace, parse_trace, structure_hash, write_trace
from tests.support.helpers import (
    HALF,
    WHOLE,
    build_graph,
    hardware_models,
    kernel,
    kernels,
    lowered,
    make_hardware,
    make_trace,
    op,
    schedule_of,
    schedules,
    traces,
)

MODES: tuple[LaunchMode, ...] = ("graph", "stream")
#: Pooled and block-level SMs.
EXPONENTS = (0.0, 0.55)


def variant(name: str, *found: Kernel, **fields: Any) -> Variant:
    return Variant(name=name, settings=VariantSettings(**fields), kernels=found)


def with_variants(trace: Trace, variants: dict[int, tuple[Variant, ...]]) -> Trace:
    """Return the trace with variants of some ops, by index."""
    ops = (msgspec.structs.replace(each, variants=variants.get(number, ())) for number, each in enumerate(trace.ops))
    return msgspec.structs.replace(trace, ops=tuple(ops))


@pytest.fixture
def trace() -> Trace:
    """Two branches of a stem; each fills the GPU, and has a slower variant that takes half of it."""
    steps = [op("stem", "x", dur_ns=1000), *(op(name, "stem", dur_ns=10_000, blocks=WHOLE) for name in "ab")]
    made = make_trace([*steps, op("join", "a b", dur_ns=1000)], outputs="join")
    half = variant("half", kernel(12_000, HALF))
    twice = variant("two kernels", kernel(4000, HALF), kernel(5000, HALF), benchmark=True)
    return with_variants(made, {1: (half,), 2: (twice, half)})


# --- Files ---


def test_trace_without_variants_is_read_as_before_and_hashes_as_with_them(trace: Trace) -> None:
    """`variants` may be left out, and a schedule stays valid when variants are added to its trace."""
    plain = with_variants(trace, {})
    assert b"variants" not in msgspec.json.encode(plain)
    assert parse_trace(msgspec.json.encode(plain), "t") == plain
    assert parse_trace(msgspec.json.encode(trace), "t") == trace
    assert structure_hash(plain) == structure_hash(trace)


@pytest.mark.parametrize(
    ("broken", "place"),
    [
        ({1: (variant("a", kernel(1)), variant("a", kernel(2)))}, r"\$\.ops\[1\]\.variants\[1\]\.name"),
        ({1: (variant("a"),)}, r"\$\.ops\[1\]\.variants\[0\]\.kernels"),
    ],
)
def test_variants_of_one_name_or_without_kernels_are_refused(
    trace: Trace, broken: dict[int, tuple[Variant, ...]], place: str
) -> None:
    with pytest.raises(TraceError, match=place):
        check_trace(with_variants(trace, broken), "t.json")


def test_view_has_no_variant(trace: Trace) -> None:
    """An op without kernels vanishes from plans: a variant would bring it back."""
    bare = msgspec.structs.replace(trace.ops[1], kernels=())
    ops = (trace.ops[0], bare, *trace.ops[2:])
    with pytest.raises(TraceError, match=r"\$\.ops\[1\]\.variants\[0\]\.kernels: variant 'half' or its op has no"):
        check_trace(msgspec.structs.replace(trace, ops=ops), "t.json")


def test_schedule_names_variants_and_gives_them_back(trace: Trace) -> None:
    graph = build_graph(trace)
    document = schedule_of([0, 2, 1, 3], [0, 0, 1, 0], variants=[0, 1, 2, 0]).to_document(trace)
    assert [placement.variant for placement in document.placements] == ["", "half", "half", ""]
    assert Schedule.from_document(document, graph).variants == (0, 1, 2, 0)
    plain = schedule_of([0, 2, 1, 3], [0, 0, 1, 0]).to_document(trace)
    assert Schedule.from_document(plain, graph).variants == ()
    assert b"variant" not in msgspec.json.encode(plain)


def test_unknown_variant_is_one_line_with_the_place(trace: Trace) -> None:
    document = schedule_of(range(4), [0] * 4, variants=[0, 1, 0, 0]).to_document(trace)
    graph = build_graph(with_variants(trace, {1: (variant("other", kernel(1)),)}))
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_document(document, graph, "s.json")
    assert str(caught.value) == "s.json: $.placements[1].variant: op 'a' has no variant 'half' (there are: other)"
    with pytest.raises(ScheduleError, match="the trace has none of this op"):
        Schedule.from_document(document, build_graph(with_variants(trace, {})), "s.json")


# --- Simulation ---


def test_smaller_slower_kernels_win_beside_each_other(trace: Trace) -> None:
    """By hand: 1000 + 2 x 10,000 + 1000 one after the other, 1000 + 12,000 + 1000 side by side on half the GPU each."""
    graph = build_graph(trace)
    order, streams = range(4), [0, 0, 1, 0]
    captured = FastEngine().run(lowered(graph, order, streams), graph.hardware)
    chosen = FastEngine().run(lowered(graph, order, streams, variants=[0, 1, 2, 0]), graph.hardware)
    assert (captured.makespan_ns, chosen.makespan_ns) == (22_000, 14_000)


def test_variant_may_have_another_number_of_kernels(trace: Trace) -> None:
    plan = lowered(build_graph(trace), range(4), [0, 0, 1, 0], variants=[0, 0, 1, 0])
    assert [(task.op, task.kernel, task.dur_ns) for task in plan.tasks] == [
        (0, 0, 1000), (1, 0, 10_000), (2, 0, 4000), (2, 1, 5000), (3, 0, 1000),
    ]  # fmt: skip
    assert plan.tasks[4].deps == (3,)


def test_chosen_graph_is_what_policies_and_bounds_see(trace: Trace) -> None:
    graph = build_graph(trace).choosing([0, 1, 0, 0])
    assert graph.tasks[1][0].dur_ns == 12_000
    assert graph.variants == ()
    assert build_graph(trace).choosing([]) == build_graph(trace).choosing([0] * 4) == build_graph(trace)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Trace, list[list[int]], list[list[int]], list[list[int]]]:
    """Draw a trace with variants, and legal schedules with a choice of variants each."""
    made = draw(traces(10))
    rules = CoverRules(made, dependencies(made))
    some = st.lists(kernels(), min_size=1, max_size=3).map(tuple)
    found: dict[int, tuple[Variant, ...]] = {}
    for number, each in enumerate(made.ops):
        if each.kernels:
            count = draw(st.integers(0, 2))
            ways = [variant(f"v{place}", *draw(some)) for place in range(count)]
            ways += [
                msgspec.structs.replace(variant(f"with {other}", *draw(some)), covers=(other,))
                for other in range(len(made.ops))
                if rules.problem(number, (other,)) is None
            ]
            found[number] = tuple(ways)
    made = with_variants(made, found)
    several = [draw(schedules(made)) for _ in range(3)]
    chosen = [[draw(st.integers(0, len(found.get(number, ())))) for number in range(len(made.ops))] for _ in several]
    return made, [order for order, _ in several], [streams for _, streams in several], chosen


@settings(max_examples=150)
@given(cases(), hardware_models(), st.sampled_from(EXPONENTS), st.sampled_from(MODES))
def test_batch_with_variants_gives_what_lowering_and_the_reference_engine_give(
    case: tuple[Trace, list[list[int]], list[list[int]], list[list[int]]],
    hardware: HardwareModel,
    exponent: float,
    mode: LaunchMode,
) -> None:
    """Schedules of one batch may run different variants, with different numbers of kernels; memory agrees, too."""
    made, orders, streams, chosen = case
    contention = msgspec.structs.replace(hardware.contention, sharing_exponent=exponent)
    graph = OpGraph.build(made, msgspec.structs.replace(hardware, contention=contention))
    found = BatchEngine(graph).evaluate(orders, streams, chosen, mode=mode, peak=True)
    assert found.peak_bytes is not None
    for number, (order, placed, variants) in enumerate(zip(orders, streams, chosen, strict=True)):
        plan = lowered(graph, order, placed, mode, variants=variants)
        expected = ReferenceEngine().run(plan, graph.hardware)
        assert FastEngine().run(plan, graph.hardware).end_ns == expected.end_ns
        assert (found.makespan_ns[number], found.peak_bytes[number]) == (expected.makespan_ns, expected.peak_bytes)


@pytest.mark.parametrize("wrong", [[0, 2, 0, 0], [0, -1, 0, 0], [1, 0, 0, 0]])
def test_variant_that_an_op_does_not_have_is_refused_in_a_batch(trace: Trace, wrong: list[int]) -> None:
    engine = BatchEngine(build_graph(trace))
    with pytest.raises(PlanError, match=r"schedule 1: .* or an op has no such variant"):
        engine.evaluate([range(4)] * 2, [[0] * 4] * 2, [[0] * 4, wrong])
    with pytest.raises(PlanError, match="variants"):
        engine.evaluate([range(4)], [[0] * 4], [[0] * 3])


# --- Running them ---


def test_settings_hold_within_and_are_put_back_after_an_error() -> None:
    cudnn = torch.backends.cudnn
    before = (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32)
    within = []

    def fail() -> None:
        with applied(VariantSettings(cudnn=False, benchmark=True, tf32=False)):
            within.append((cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert within == [(False, True, False, False)]
    assert (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32) == before


def test_results_of_another_layout_come_back_as_the_trace_has_them() -> None:
    """The ops behind a variant were captured with the traced strides; values do not change."""
    image, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    arguments = [image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1]
    function = torch.ops.aten.convolution.default
    expected = function(*arguments)
    traced = load_trace("googlenet-infer-b1").tensors[0]
    output = msgspec.structs.replace(traced, shape=tuple(expected.shape), stride=expected.stride())
    (found,) = call_variant(function, arguments, {}, VariantSettings(memory_format="channels_last"), [output])
    assert found.stride() == expected.stride()
    assert torch.allclose(found, expected, atol=1e-5)
    other = msgspec.structs.replace(output, stride=expected.to(memory_format=torch.channels_last).stride())
    (found,) = call_variant(function, arguments, {}, VariantSettings(), [other])
    assert found.is_contiguous(memory_format=torch.channels_last)


def conv_trace() -> Trace:
    """Make one convolution as captured, with synthetic kernels; input and weight exist before the step."""
    made = make_trace([op("conv", "x w", "y", dur_ns=5000)], outputs="y")
    shapes = ((2, 3, 8, 8), (4, 3, 3, 3), (2, 4, 8, 8))
    tensors = tuple(
        msgspec.structs.replace(tensor, shape=shape, stride=torch.empty(shape).stride())
        for tensor, shape in zip(made.tensors, shapes, strict=True)
    )
    storages = tuple(msgspec.structs.replace(made.storages[0], bytes=4 * 4096) for _ in made.storages)
    arguments = ({"tensor": 0}, {"tensor": 1}, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    ops = (msgspec.structs.replace(made.ops[0], target="aten.convolution.default", args=arguments),)
    return msgspec.structs.replace(made, tensors=tensors, storages=storages, ops=ops)


def test_runner_runs_the_variant_that_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op's own call runs under the variant's settings, and only while it is chosen."""
    made = with_variants(
        conv_trace(), {0: (variant("slow", kernel(9000), cudnn=False, memory_format="channels_last"),)}
    )
    runner = Runner(made, torch.device("cpu"))
    runner.bind({0: torch.randn(2, 3, 8, 8), 1: torch.randn(4, 3, 3, 3)})
    seen: list[tuple[bool, bool]] = []
    function = runner.functions[0]

    def watched(image: torch.Tensor, *rest: Any) -> torch.Tensor:
        last = image.is_contiguous(memory_format=torch.channels_last)
        seen.append((torch.backends.cudnn.enabled, last))
        result: torch.Tensor = function(image, *rest)
        return result

    monkeypatch.setattr(runner, "functions", [watched])
    results = []
    for chosen in ((), (1,), (0,)):
        runner.choose(chosen)
        runner.run(0)
        found = runner.tensors[2]
        assert found is not None
        results.append(found)
    assert seen == [(True, False), (False, True), (True, False)]
    assert all(torch.allclose(found, results[0], atol=1e-5) for found in results)
    assert all(found.is_contiguous() for found in results)


def test_autotuned_call_runs_in_one_thread_of_its_own() -> None:
    """In the caller's thread, torch would keep the algorithm of the first call with these arguments."""
    seen: list[tuple[str, bool, bool]] = []

    def function(part: torch.Tensor) -> torch.Tensor:
        thread = threading.current_thread().name
        seen.append((thread, torch.backends.cudnn.benchmark, torch.is_grad_enabled()))
        return part + 1

    for chosen in (VariantSettings(benchmark=True), VariantSettings(), VariantSettings(benchmark=True)):
        (found,) = call_variant(function, [torch.zeros(2)], {}, chosen, [None])
        assert found.tolist() == [1.0, 1.0]
    own = threading.current_thread().name
    assert [thread == own for thread, _, _ in seen] == [False, True, False]
    assert seen[0] == seen[2]
    assert [benchmark for _, benchmark, _ in seen] == [True, False, True]
    assert not seen[0][2], "gradients are off there, too"
    with pytest.raises(ZeroDivisionError):
        call_variant(lambda: 1 // 0, [], {}, VariantSettings(benchmark=True), [])


def test_variant_that_refuses_its_arguments_is_an_error_of_the_replay() -> None:
    made = conv_trace()
    runner = Runner(made, torch.device("cpu"))
    runner.bind({0: torch.randn(2, 3, 8, 8), 1: torch.randn(4, 5, 3, 3)})
    args, kwargs = runner.arguments(0)
    with pytest.raises(ReplayError, match=r"op 'conv' \(aten.convolution.default\) failed"):
        runner.call(0, args, kwargs, VariantSettings(deterministic=True))
    with pytest.raises(ReplayError, match=r"aten.convolution.default has no composition 'by_sample'"):
        runner.call(0, args, kwargs, VariantSettings(composition="by_sample"))


# --- Search ---


def test_search_finds_the_smaller_kernels_and_says_what_they_gain(trace: Trace) -> None:
    """By hand (above): 22,000 with the captured kernels on any number of streams; 14,000 with both small ones."""
    found = explore(
        build_graph(trace, make_hardware()), streams=2, budget_s=60, evaluations=2000, policies=("wavefront",)
    )
    tried = found.variants
    assert tried is not None
    assert (tried.ops, tried.used, tried.slower) == (2, 2, 1)
    assert (tried.without_ns, tried.with_ns, tried.gain) == (22_000, 14_000, pytest.approx(8 / 22))
    assert found.best.policy == VARIANTS
    graph = build_graph(trace)
    timeline = FastEngine().run(lower(graph, found.schedule), graph.hardware)
    assert timeline.makespan_ns == found.best.makespan_ns == found.timeline.makespan_ns == 14_000
    assert found.bounds.largest[0] <= 14_000


def test_kernels_are_ranked_by_their_time_and_by_the_share_of_the_gpu_they_take(trace: Trace) -> None:
    """By hand: b's two kernels take 9,000 of 10,000 ns; on half the GPU, so 4,500 ns x GPU, and a's other 6,000."""
    graph = build_graph(trace)
    assert ranked_variants(graph, 0.0) == (0, 0, 1, 0)
    assert ranked_variants(graph, 1.0) == (0, 1, 1, 0)


@pytest.mark.parametrize("where", ["local_search", "_planned"])
def test_interrupt_while_schedules_are_planned_for_other_kernels_loses_nothing(
    trace: Trace, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(choices, where, interrupted)
    graph = build_graph(trace)
    seeds = [POLICIES["wavefront"](graph, 2)]
    found = search_variants(
        graph, seeds, 2, budget_s=60, seed=0, evaluations=None, memory_limit_bytes=None, progress=lambda *_: None
    )
    assert found.interrupted
    assert min(found.makespans_ns) == 22_000


def test_search_with_variants_is_the_same_for_a_seed_on_any_number_of_threads(trace: Trace) -> None:
    graph = build_graph(trace)
    seeds = [POLICIES["wavefront"](graph, 2)]
    found = [
        refine(graph, seeds, 2, budget_s=60, seed=3, evaluations=300, variants=True, threads=threads)
        for threads in (1, 3)
    ]
    assert found[0] == found[1]


def test_trace_without_variants_is_searched_as_before(trace: Trace) -> None:
    plain = with_variants(trace, {})
    found = explore(
        build_graph(plain, make_hardware()), streams=2, budget_s=60, evaluations=200, policies=("wavefront",)
    )
    assert found.variants is None
    assert all(not row.schedule.variants for row in found.rows)
    assert "variants" not in explored_document(found)


def test_nothing_gained_comes_with_its_evidence(trace: Trace, tmp_path: Path) -> None:
    """A variant that is slower and no smaller is not chosen, and the command reports that."""
    path = tmp_path / "t.json"
    useless = with_variants(trace, {1: (variant("worse", kernel(20_000, WHOLE)),)})
    write_trace(useless, path)
    shown = CliRunner().invoke(cli, ["explore", str(path), "--streams", "2", "--budget", "60", "--evaluations", "500"])
    assert shown.exit_code == 0, shown.output
    assert "Variants: nothing gained, evidence: 1 ops have some" in shown.output


def test_command_simulates_a_schedule_with_variants(trace: Trace, tmp_path: Path) -> None:
    write_trace(trace, tmp_path / "t.json")
    made = schedule_of(range(4), [0, 0, 1, 0], policy="p", variants=[0, 1, 2, 0])
    write_schedule(made, trace, tmp_path / "s.json")
    options = ["simulate", str(tmp_path / "t.json"), "--schedule", str(tmp_path / "s.json"), "--json"]
    document = json.loads(CliRunner().invoke(cli, options).output)
    graph = OpGraph.build(trace, load_hardware("h200"))
    assert document["makespan_ns"] == FastEngine().run(lower(graph, made), graph.hardware).makespan_ns
