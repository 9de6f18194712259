"""Advice of a verdict: the answer, its reason, the ways to run with their times, and the code."""

from __future__ import annotations

import ast
from dataclasses import replace

import msgspec
import pytest

import gpusim
from gpusim.analysis.side_by_side import Concurrency, SideBySide
from gpusim.bounds.names import AREA, BANDWIDTH, CRITICAL_PATH, FRONT_END
from gpusim.report import code_lines
from gpusim.report.advice import (
    COMPILE,
    FUSED,
    OPTIMIZE,
    Way,
    against_fused,
    fused_ways,
    headline,
    note_on_fused,
    note_without_graph,
    reason,
    ways,
)
from gpusim.report.delays import CAUSES, causes_sentence, worst_delay
from gpusim.report.summary import Summary, SummaryWay, summarize
from gpusim.report.waterfall import gain_rows
from tests.support.drawing import explored_step
from tests.support.helpers import chain_trace, wide_trace
from tests.support.made_results import case, make_results


@pytest.fixture(scope="module")
def found() -> Summary:
    """Return ten branches that gain: 400 us eager."""
    return summarize(explored_step())


def test_yes_gives_the_time_of_a_step_before_and_after_and_what_a_graph_alone_gives(found: Summary) -> None:
    said = headline(found, calibrated=True)
    eager, graph, best = (next(r for r in found.verdict.rows if r.what == w) for w in ("eager", "graph", "streams"))
    assert said.startswith("Yes. ")
    assert f"{best.speedup_over_eager:.2f}x. Of that, one CUDA graph is {graph.speedup_over_eager:.2f}x" in said
    assert f"{eager.time_ns / 1e3:.1f} us eager" in said


def test_without_an_eager_time_the_graph_is_the_baseline(found: Summary) -> None:
    rows = tuple(
        msgspec.structs.replace(row, speedup_over_eager=None) for row in found.verdict.rows if row.what != "eager"
    )
    said = headline(msgspec.structs.replace(found, verdict=msgspec.structs.replace(found.verdict, rows=rows)), True)
    assert "in one CUDA graph" in said
    assert "eager" not in said


def test_no_is_an_answer_of_its_own_and_an_uncalibrated_model_gives_none(found: Summary) -> None:
    no = msgspec.structs.replace(found, verdict=msgspec.structs.replace(found.verdict, worth_it=False))
    assert headline(no, calibrated=True).startswith("No. Streams gain nothing here. One CUDA graph does: ")
    unknown = msgspec.structs.replace(no, verdict=msgspec.structs.replace(no.verdict, unknown=True))
    assert headline(unknown, calibrated=True).startswith("Unknown. ")
    assert headline(found, calibrated=False).startswith("As a trend: ")


@pytest.mark.parametrize(
    ("bound", "words"),
    [
        (CRITICAL_PATH, "need each other"),
        (AREA, "fills the GPU"),
        (BANDWIDTH, "wait for memory"),
        (FRONT_END, "so short"),
    ],
)
def test_the_reason_is_that_of_the_bound_that_binds(bound: str, words: str, found: Summary) -> None:
    tight = msgspec.structs.replace(found, largest_bound=(found.sequential_ns, bound))
    assert words in reason(tight)
    assert "No schedule can win anything." in reason(tight)
    loose = msgspec.structs.replace(
        found,
        largest_bound=(found.sequential_ns // 2, bound),
        verdict=msgspec.structs.replace(found.verdict, worth_it=False),
    )
    assert "No schedule can pass 2.00x" in reason(loose)


def test_a_chain_is_called_one() -> None:
    chain = summarize(gpusim.explore(chain_trace(20, dur_ns=10_000, graph_ns=210_000), evaluations=5))
    assert reason(chain).startswith("It is a chain. Its operations need each other: on average 1.0 of them")


def test_ways_are_eager_graph_and_streams_with_what_each_takes(found: Summary) -> None:
    rows = ways(found)
    assert [row.name for row in rows] == ["eager", "one CUDA graph", f"{found.best.streams} streams in the graph"]
    assert [row.recommended for row in rows] == [False, False, True]
    assert all(row.takes for row in rows)
    assert rows[0].over_eager == 1.0


def test_streams_without_a_graph_are_a_warning_and_no_way(found: Summary) -> None:
    without = SummaryWay(
        what="streams_without_graph",
        label="3 streams without a graph",
        time_ns=900_000,
        measured=False,
        speedup_over_eager=0.5,
        advice="slower than eager: do not",
        best=False,
    )
    rows = (*(row for row in found.verdict.rows if row.what != "streams_without_graph"), without)
    changed = msgspec.structs.replace(found, verdict=msgspec.structs.replace(found.verdict, rows=rows))
    assert note_without_graph(changed) == "3 streams without a graph: 900.0 us, slower than eager: do not."
    assert len(ways(changed)) == 3


def test_fused_kernels_are_the_fastest_that_was_measured_for_this_step_on_this_gpu(found: Summary) -> None:
    model = wide_trace().model
    step = msgspec.structs.replace(
        case(100, 60_000), network=model.network, mode=model.mode, batch=model.batch, dtype=model.dtype
    )
    slow, fast = (
        msgspec.structs.replace(step, baselines={name: time_ns, "ddp": 1})
        for name, time_ns in (("torch_compile_max_autotune", 90_000), ("torch_compile_own_graph", 80_000))
    )
    own = msgspec.structs.replace(step, policy="optimize")
    other = msgspec.structs.replace(own, batch=99, measured_ns=1_000)
    compiled, optimized = fused_ways(model, "NVIDIA H200", [make_results([slow, fast, own, other])])
    assert (compiled.time_ns, compiled.takes, compiled.measured) == (80_000, FUSED["torch_compile_own_graph"], True)
    assert (optimized.time_ns, optimized.name) == (60_000, "gpusim.optimize, 4 streams")
    assert fused_ways(model, "NVIDIA A100", [make_results([slow, own])]) == []
    rows = ways(found, [compiled, optimized])
    results = make_results([slow])
    said = note_on_fused(rows)
    assert f"measured on NVIDIA H200, {results.date}, {results.recipe}.toml, where eager took" in said
    assert note_on_fused(rows[:3]) == ""
    assert [row.over_eager for row in rows[3:]] == [400_000 / 80_000, 400_000 / 60_000]


def test_a_baseline_that_a_later_run_added_counts_by_its_ratio() -> None:
    """440 us in turns with 660: 1.5x, so 600 us in the run in which the step took 400."""
    model = wide_trace().model
    step = msgspec.structs.replace(
        case(100, 400_000),
        network=model.network,
        mode=model.mode,
        batch=model.batch,
        dtype=model.dtype,
        policy="optimize",
        baselines={"torch_compile_own_graph": 640_000, "torch_compile_max_autotune": 660_000},
        beside_ns={"torch_compile_max_autotune": 440_000},
    )
    compiled, optimized = fused_ways(model, "NVIDIA H200", [make_results([step])])
    assert (compiled.time_ns, optimized.time_ns) == (600_000, 400_000)
    assert compiled.takes == FUSED["torch_compile_max_autotune"]


def test_of_several_runs_the_newest_counts_and_different_outputs_or_ablations_are_no_way() -> None:
    model = wide_trace().model
    step = msgspec.structs.replace(
        case(100, 60_000),
        network=model.network,
        mode=model.mode,
        batch=model.batch,
        dtype=model.dtype,
        policy="optimize",
        baselines={"torch_compile_own_graph": 80_000},
    )
    old = msgspec.structs.replace(step, date="2026-01-01", measured_ns=50_000)
    new = msgspec.structs.replace(step, date="2026-01-02", measured_ns=70_000)
    for cases in ([old, new], [new, old]):
        _, optimized = fused_ways(model, "NVIDIA H200", [make_results([each]) for each in cases])
        assert optimized.time_ns == 70_000
    for change in ({"outputs_equal": False}, {"ablation": "aten"}):
        other = msgspec.structs.replace(new, **change)
        assert [way.what for way in fused_ways(model, "NVIDIA H200", [make_results([other])])] == [COMPILE]


@pytest.mark.parametrize(
    ("compiled_ns", "optimized_ns", "words"),
    [
        (None, None, ""),
        (40_000, 20_000, "was measured at 20.0 us, 2.00x over torch.compile."),
        (None, 20_000, "was measured at 20.0 us."),
        (20_000, 40_000, "Fuse kernels first: torch.compile was measured at 20.0 us, 2.50x over 2 streams"),
        (20_000, None, "Fuse kernels first: torch.compile was measured at 20.0 us, 2.50x over 2 streams"),
        (80_000, 60_000, "Fused kernels were measured, too, and are slower"),
    ],
)
def test_measured_fused_kernels_change_the_answer(
    compiled_ns: int | None, optimized_ns: int | None, words: str
) -> None:
    """Beside one CUDA graph of 90 us and two streams of 50 us."""
    rows = [
        Way("eager", "eager", 400_000, True, 1.0, ""),
        Way("graph", "one CUDA graph", 90_000, False, None, ""),
        Way("streams", "2 streams in the graph", 50_000, False, None, ""),
    ]
    if compiled_ns is not None:
        rows.append(Way(COMPILE, "fused kernels", compiled_ns, True, None, "torch.compile"))
    if optimized_ns is not None:
        rows.append(Way(OPTIMIZE, "gpusim.optimize", optimized_ns, True, None, ""))
    said = against_fused(rows)
    assert words in said
    assert bool(said) == bool(words)


def test_gain_rows_lead_from_eager_to_the_recommended_schedule(found: Summary) -> None:
    rows = gain_rows(found)
    assert rows[0].length_ns == found.eager_ns
    assert rows[-1].length_ns == found.best.makespan_ns
    level = rows[0].length_ns
    for row in rows[1:]:
        if row.share is None:
            assert row.length_ns == level
        else:
            assert row.base_ns == level
            level += row.length_ns
            assert row.share == pytest.approx(row.length_ns / row.base_ns)


# --- Code ---


def rows_of(*rows: SideBySide) -> Concurrency:
    return Concurrency(1000, 500, 3, rows, True)


INCEPTION = SideBySide(
    "modules",
    ("inception3a", "inception3b", "inception4a", "inception4b", "inception4c"),
    (("branch1",), ("branch2", "branch2_1"), ("0",)),
    ("forward", "backward"),
    500,
)


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_every_piece_of_code_is_python(mode: str) -> None:
    assert mode in ("infer", "train")
    for lines in (
        code_lines.CAPTURE,
        code_lines.graph_lines(mode),  # type: ignore[arg-type]
        code_lines.optimize_lines(mode, 4),  # type: ignore[arg-type]
        code_lines.backend_lines(4),
        code_lines.by_hand_lines(rows_of(INCEPTION)),
    ):
        ast.parse(lines)


def test_streams_by_hand_have_a_stream_for_each_side_but_the_first() -> None:
    lines = code_lines.by_hand_lines(rows_of(INCEPTION))
    assert "range(2)" in lines
    assert "out_1 = self.branch2_1(self.branch2(x))" in lines
    assert "out_2 = self[0](x)" in lines
    assert lines.count("with torch.cuda.stream") == 2
    assert "inception3a, inception3b, inception4a and 2 more modules" in lines


def test_without_modules_there_is_no_code_by_hand() -> None:
    gradients = SideBySide("weight gradients", (), (), ("backward",), 500)
    assert code_lines.by_hand_lines(rows_of(gradients)) == ""
    assert code_lines.by_hand_lines(rows_of(replace(INCEPTION, phases=("backward",)))) == ""


def test_names_from_a_file_do_not_leave_their_place_in_the_code() -> None:
    """A module may have any name: one that is not a Python identifier becomes a string."""
    evil = replace(INCEPTION, parents=("a\nimport os",), sides=(("x'); import os #",), ("b",)))
    tree = ast.parse(code_lines.by_hand_lines(rows_of(evil)))
    imported = [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    assert imported == ["torch"]


def test_parents_are_named_up_to_four_and_then_counted() -> None:
    names = [f"m{i}" for i in range(6)]
    words = [code_lines.parents_in_words(replace(INCEPTION, parents=tuple(names[:count]))) for count in (1, 2, 4, 6)]
    assert words == ["m0", "m0 and m1", "m0, m1, m2 and m3", "m0, m1, m2 and 3 more modules"]
    assert code_lines.parents_in_words(replace(INCEPTION, parents=("",))) == "the model"


# --- Delays ---


def test_the_worst_delay_is_the_longest_on_the_way_to_the_end() -> None:
    explained = gpusim.explain(wide_trace(8, blocks=200, graph_ns=900_000), "wavefront", streams=8)
    found = worst_delay(explained)
    assert found is not None
    lost: dict[tuple[int, str, int | None], float] = {}
    for delay in explained.step().delays:
        key = (delay.task, delay.cause, delay.by)
        lost[key] = lost.get(key, 0.0) + delay.lost_ns
    assert found.delay.lost_ns == pytest.approx(max(lost.values()))
    assert CAUSES[found.delay.cause].why in found.text
    assert found.text.endswith(CAUSES[found.delay.cause].helps)
    assert CAUSES[next(iter(explained.causes_ns()))].why in causes_sentence(explained)


def test_a_chain_on_one_stream_has_no_delay() -> None:
    explained = gpusim.explain(chain_trace(3), "sequential")
    assert worst_delay(explained) is None
    assert causes_sentence(explained) == ""


def test_every_cause_has_words() -> None:
    from gpusim.analysis import explain

    assert set(CAUSES) == set(explain.CAUSES)
