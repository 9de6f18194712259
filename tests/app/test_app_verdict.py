"""The dashboard's page Verdict says what the command prints, and what to change."""

from __future__ import annotations

import pytest
from streamlit.testing.v1 import AppTest

from gpusim.api import dashboard
from gpusim.report.advice import fused_ways
from gpusim.trace.store import load_trace
from gpusim.units import format_bytes, format_ns
from tests.support.pages import (
    BRANCHES,
    CHAIN,
    WAYS,
    answer,
    codes,
    commanded,
    kind_of_answer,
    markup,
    metrics,
    page,
    table,
    time_ns,
    widget,
)


def test_verdict_says_what_explore_prints(capsys: pytest.CaptureFixture[str]) -> None:
    app = page("verdict")
    printed = commanded(app, capsys)
    shown = metrics(app)
    assert shown["Recommended"] == format_ns(printed["best"]["makespan_ns"])
    assert shown["Peak memory"] == format_bytes(printed["best"]["peak_bytes"])
    assert shown["Over one CUDA graph"] == f"{printed['verdict']['speedup']:.2f}x"
    low, high = printed["verdict"]["interval"]
    assert f"{low:.2f}x to {high:.2f}x" in widget(app.metric, "Over one CUDA graph").delta
    assert kind_of_answer(app) == "yes"
    assert f"streams in it {printed['verdict']['speedup']:.2f}x" in answer(app)


def test_verdict_has_a_row_for_each_way_and_the_bound_with_what_each_takes(capsys: pytest.CaptureFixture[str]) -> None:
    app = page("verdict", trace="googlenet-train-b8", streams="8")
    printed = commanded(app, capsys)
    rows = table(app, WAYS)
    ways = {row["what"]: row for row in printed["verdict"]["rows"]}
    measured = dashboard.results(dashboard.FUSED_RESULTS).values()
    fused = fused_ways(load_trace("googlenet-train-b8").model, "NVIDIA H200", measured)
    assert [next(iter(row.values())).partition(" (")[0] for row in rows] == [
        "eager",
        "one CUDA graph",
        f"{printed['best']['streams']} streams in the graph",
        *(way.name for way in fused),
        "no schedule of these kernels is faster",
    ]
    for row, what in zip(rows, ("eager", "graph", "streams"), strict=False):
        assert time_ns(row, "time") == pytest.approx(ways[what]["time_ns"], rel=1e-3)
        assert row["over eager"] == f"{ways[what]['speedup_over_eager']:.2f}x"
    bound_ns = max(printed["bounds"].values())
    assert time_ns(rows[-1], "time") == pytest.approx(bound_ns, rel=1e-3)
    assert "(measured) what runs today" in rows[0]["way to run the step"]
    assert "torch.cuda.graph" in rows[1]["way to run the step"]
    assert "recommended" in rows[2]["way to run the step"]
    without = next(row for row in printed["verdict"]["rows"] if row["what"] == "streams_without_graph")
    assert any(f"{without['time_ns'] / 1e6:.3f} ms, slower than eager: do not" in c.value for c in app.caption)


def test_a_step_that_gains_nothing_has_a_short_page_with_the_reason() -> None:
    app = page("verdict", trace=CHAIN)
    assert kind_of_answer(app) == "no"
    assert "One CUDA graph does" in answer(app)
    assert "It is a chain" in answer(app)
    assert not app.metric
    assert "Modules that run side by side" not in markup(app)
    app.session_state["code"] = "One CUDA graph"  # the only code, unless gpusim.optimize was measured on this step
    app.run()
    [code, _command] = codes(app)
    assert "torch.cuda.graph(graph)" in code


def test_what_to_change_names_the_users_modules_and_the_code() -> None:
    app = page("verdict", trace=BRANCHES, streams="8")
    rows = table(app, "Modules that run side by side")
    assert rows[0]["in"].startswith("inception3a, inception3b, inception4a and 6 more modules")
    assert rows[0]["side by side"] == "branch1 branch2 branch3 branch4"
    for tab, line in (
        ("gpusim.optimize", "gpusim.optimize(model"),
        ("torch.compile backend", 'backend="gpusim"'),
        ("Streams by hand", "out_3 = self.branch4(x)"),
        ("One CUDA graph", "torch.cuda.graph(graph)"),
    ):
        app.session_state["code"] = tab
        app.run()
        assert line in codes(app)[0]


@pytest.mark.parametrize("python", [True, False])
def test_code_on_a_page_is_the_code_and_nothing_in_it_becomes_markup(python: bool) -> None:
    lines = "for x in \"# no comment\":  # <b>a &amp; b</b>\n    return '</code><img src=x>'"
    app = AppTest.from_string(f"from gpusim_dashboard import html\nhtml.code('<i>', {lines!r}, {python})").run()
    assert codes(app) == [lines]
    body = markup(app)
    assert "<img" not in body
    assert "&lt;i&gt;" in body
    assert ("<strong>for<" in body, "<em># &lt;b&gt;a" in body, "<em># no" in body) == (python, python, False)


def test_training_is_told_how_to_run_its_whole_step() -> None:
    app = page("verdict", trace="googlenet-train-b8", streams="8")
    code = "\n".join(codes(app))
    assert "loss.backward()" in code
    assert any(
        row["side by side"].startswith("Weight gradients") for row in table(app, "Modules that run side by side")
    )


def test_a_searched_schedule_that_is_faster_and_not_recommended_is_explained() -> None:
    app = page("verdict", trace="googlenet-infer-b1", streams="8")
    [said] = [each.value for each in app.caption if "still not recommended" in each.value]
    assert said.startswith("The best searched schedule (search, ")


def test_all_schedules_tried_stand_with_the_bounds_on_one_scale(capsys: pytest.CaptureFixture[str]) -> None:
    app = page("verdict")
    app.session_state["schedules"] = True
    app.run()
    printed = commanded(app, capsys)
    rows = table(app, "The best schedule of each policy, and the bounds")
    best = {}
    for row in printed["results"]:
        best[row["policy"]] = min(row["makespan_ns"], best.get(row["policy"], row["makespan_ns"]))
    for policy, makespan_ns in best.items():
        [row] = [each for each in rows if each["schedule"].startswith(f"{policy},")]
        assert time_ns(row, "time") == pytest.approx(makespan_ns, rel=1e-3)
    assert sum(row["schedule"].startswith("bound: ") for row in rows) == len(printed["bounds"])
