"""The verdict as rows: eager, one CUDA graph, streams in the graph, streams without a graph."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from gpusim.formats.hardware import HardwareModel
from gpusim.formats.trace import Trace
from gpusim.report.tables import explored_document, print_explored
from gpusim.search.explore import explore
from gpusim.search.explored import Explored
from gpusim.search.verdict import UNKNOWN_WAY, best_way
from tests.support.helpers import Step, build_graph, chain_trace, kernel, make_hardware, make_trace, op, wide_trace

HOST_NS = 30_000


def run(trace: Trace, hardware: HardwareModel | None = None, **options: Any) -> Explored:
    hardware = hardware or make_hardware(chain_ns=100)
    return explore(build_graph(trace, hardware), **({"streams": 4, "budget_s": 1e6, "evaluations": 64} | options))


def ways(found: Explored) -> dict[str, int]:
    return {row.what: row.time_ns for row in found.verdict.rows}


def test_rows_go_from_measured_eager_over_one_graph_to_streams_in_it() -> None:
    found = run(wide_trace(eager_ns=400_000, graph_ns=130_000))
    assert list(ways(found)) == ["eager", "graph", "streams", "streams_without_graph"]
    eager, graph, streams, _ = found.verdict.rows
    assert (eager.time_ns, eager.measured, eager.speedup_over_eager) == (400_000, True, 1.0)
    assert (graph.time_ns, graph.measured) == (found.sequential_ns, False)
    assert graph.speedup_over_eager == pytest.approx(400_000 / found.sequential_ns)
    assert "needs no gpusim" in graph.advice
    assert (streams.time_ns, streams.streams) == (found.best.makespan_ns, found.best.streams)
    assert streams.label == f"{found.best.streams} streams in the graph"
    assert best_way(found.verdict.rows) == streams


def test_streams_that_lose_without_a_graph_say_what_they_are_slower_than_and_not_to() -> None:
    """Fourteen launches of 50 us from one host thread: at least 700 us, on any number of streams."""
    hardware = make_hardware(chain_ns=100, launch_ns=50_000)
    row = run(wide_trace(eager_ns=400_000, graph_ns=130_000), hardware).verdict.rows[-1]
    assert row.what == "streams_without_graph"
    assert row.time_ns >= 14 * 50_000
    assert row.advice == "slower than eager: do not"
    assert row.speedup_over_eager is not None
    assert row.speedup_over_eager < 400_000 / (14 * 50_000)


def test_streams_without_a_graph_that_beat_eager_but_not_the_graph_name_the_graph() -> None:
    hardware = make_hardware(chain_ns=100, launch_ns=50_000)
    row = run(wide_trace(eager_ns=4_000_000, graph_ns=130_000), hardware).verdict.rows[-1]
    assert row.advice == "slower than one CUDA graph: do not"


def test_eager_is_predicted_where_it_was_not_measured_on_this_gpu() -> None:
    steps = [Step(f"a{i}", "x", f"y{i}", kernels=(kernel(1000),), host_ns=HOST_NS) for i in range(6)]
    found = run(make_trace(steps))
    eager = found.verdict.rows[0]
    assert (eager.what, eager.measured) == ("eager", False)
    assert eager.time_ns >= 6 * HOST_NS


def test_without_any_eager_time_rows_are_those_of_the_graph_and_have_no_ratio() -> None:
    found = run(wide_trace())
    assert list(ways(found)) == ["graph", "streams"]  # host times are unknown, which streams without a graph depend on
    assert [row.speedup_over_eager for row in found.verdict.rows] == [None, None]


def test_step_not_worth_streams_has_eager_and_the_graph_only() -> None:
    found = run(chain_trace(eager_ns=400_000, graph_ns=6000))
    assert list(ways(found)) == ["eager", "graph"]
    assert best_way(found.verdict.rows) == found.verdict.rows[1]


@pytest.mark.parametrize(("width", "answer", "advice"), [(2, "Unknown", UNKNOWN_WAY), (6, "Worth it", "recommended")])
def test_streams_are_recommended_for_estimated_kernels_only_beyond_their_doubt(
    width: int, answer: str, advice: str
) -> None:
    trace = wide_trace(width, depth=1, dur_ns=1000)
    provenance = msgspec.structs.replace(trace.provenance, estimated="tensor sizes")
    found = run(msgspec.structs.replace(trace, provenance=provenance))
    graph, streams = found.verdict.rows
    assert found.verdict.text.startswith(f"{answer}: ")
    assert streams.advice == advice
    assert found.verdict.unknown is (answer == "Unknown")
    assert best_way(found.verdict.rows) is (graph if found.verdict.unknown else streams)


def passed_over(found: Explored) -> Explored:
    """Return the same with a searched schedule that is predicted 1 ns faster than the recommended one."""
    row = next(row for row in found.rows if row.policy == "search")
    better = row.__class__("search", 3, found.best.makespan_ns - 1, 9.87, 0, row.schedule)
    return found.__class__(**{**found.__dict__, "rows": (*found.rows, better)})


def test_better_search_row_is_named_and_why_it_is_not_recommended(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(wide_trace(eager_ns=400_000, graph_ns=130_000), make_hardware(searched_frac=0.025))
    assert found.best.policy != "search"
    assert found.passed_over is None
    print_explored(found)
    assert "not recommended" not in capsys.readouterr().out
    print_explored(passed_over(found))
    words = " ".join(capsys.readouterr().out.split())
    assert (
        "search found 9.87x, not recommended: its lead is smaller than the model's known optimism (2.5%); "
        "try it with --measure"
    ) in words
    print_explored(passed_over(found), tried=True)
    assert "not recommended" not in capsys.readouterr().out, "the GPU has decided"


def test_search_row_over_the_sequential_one_is_passed_over_for_its_uncertainty() -> None:
    """A step that keeps one stream does so for the model's uncertainty, whatever the search's lead over a policy."""
    found = run(wide_trace(eager_ns=400_000, graph_ns=130_000))
    kept = found.__class__(**{**found.__dict__, "best": found.best_of("sequential")})
    assert passed_over(kept).passed_over_reason == "its gain is within the model's uncertainty"
    assert found.passed_over_reason == ""


def test_document_has_the_rows_beside_the_keys_it_had() -> None:
    found = run(wide_trace(eager_ns=400_000, graph_ns=130_000))
    verdict = json.loads(msgspec.json.encode(explored_document(passed_over(found))))["verdict"]
    assert {"worth_it", "speedup", "interval", "text"} <= set(verdict)
    assert [row["what"] for row in verdict["rows"]] == list(ways(found))
    assert [row["time_ns"] for row in verdict["rows"]] == list(ways(found).values())
    assert verdict["passed_over"]["speedup"] == 9.87


def test_printed_waterfall_adds_up_and_has_one_line_a_change(capsys: pytest.CaptureFixture[str]) -> None:
    steps = [op(f"a{i}", "x", dur_ns=100_000) for i in range(4)]
    found = run(make_trace(steps, eager_ns=900_000, graph_ns=400_300))
    print_explored(found)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.count("│") == 2]
    cells = [[cell.strip() for cell in line.split("│")] for line in lines]
    assert [cell[0] for cell in cells] == ["eager step, measured", "launch overhead removed", "streams"]
    values = [[float(text.split()[0]) if text else None for text in cell[1:]] for cell in cells]
    assert values[0] == [None, 900.0]
    for (_, before), (change, after) in pairwise(values):
        assert change is not None
        assert before is not None
        assert after == pytest.approx(before + change)
    assert cells[-1][2] == f"{found.best.makespan_ns / 1000:.1f} us"


def test_verdict_rows_are_printed_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    print_explored(run(wide_trace(eager_ns=400_000, graph_ns=130_000)))
    out = capsys.readouterr().out
    for words in ("eager", "one CUDA graph", "streams in the graph", "streams without a graph", "needs no gpusim"):
        assert words in out
