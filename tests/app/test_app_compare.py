"""The dashboard's pages Transfer, Several GPUs and Compare agree with their commands."""

from __future__ import annotations

import json

import pytest

import gpusim
from gpusim.defaults import RECOMMENDED
from gpusim.units import format_ns
from tests.support.pages import BRANCHES, answer, codes, commanded, errors, page, table, table_rows, time_ns, widget


def test_transfer_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    app = page("transfer", gpus="h200,a100-80gb")
    printed = commanded(app, capsys)
    assert answer(app) == printed["text"]
    rows = table(app, "Time lost with a schedule tuned for something else")
    assert len(rows) in (2, 4)
    listed = [row for row in table_rows(app) if "tuned for" in row]
    assert [(row["tuned for"], row["used on"], row["lost"]) for row in listed] == [
        (row["tuned_for"], row["used_on"], f"{row['lost_frac']:+.1%}") for row in printed["rows"]
    ]


def test_several_gpus_are_answered_with_what_the_command_gives(capsys: pytest.CaptureFixture[str]) -> None:
    app = page("parallel")
    document = commanded(app, capsys)
    best, data = (next(plan for plan in document["plans"] if plan["plan"] == name) for name in ("layer", "data"))
    said = answer(app)
    assert f"On 4 GPUs a step takes {format_ns(best['step_ns'])}, for 4 times the samples" in said
    assert f"{4 * data['compute_ns'] / best['step_ns']:.2f}x the work of one GPU" in said
    rows = table(app, "Plans")
    assert [row["plan"].split()[0] for row in rows] == [plan["plan"] for plan in document["plans"]]
    assert [time_ns(row, "step") for row in rows] == pytest.approx([p["step_ns"] for p in document["plans"]], rel=1e-3)
    groups = table(app, "How the layers are split")
    assert sum(int(row["number"]) for row in groups) == len(document["layers"])


def test_transfer_offers_the_batches_that_there_are_traces_of_and_no_others() -> None:
    app = page("transfer", trace="googlenet-train-b8", gpus="h200", batches="8")
    assert widget(app.multiselect, "Batches").options == ["8", "32"]
    app = page("transfer", gpus="h200", batches="64")
    assert ["unknown batches '64'" in error for error in errors(app)] == [True]
    assert "There is no other trace" in " ".join(each.value for each in page("transfer").caption)


def test_compare_sets_two_schedules_of_a_step_on_one_axis() -> None:
    app = page("compare", a_step=BRANCHES, b_step=BRANCHES, a_by="sequential", b_by="wavefront")
    assert errors(app) == []
    rows = table(app, "The two sides")
    simulated = [gpusim.simulate(BRANCHES, policy).makespan_ns for policy in ("sequential", "wavefront")]
    for row, makespan_ns in zip(rows, simulated, strict=True):
        assert time_ns(row, "step") == pytest.approx(makespan_ns, rel=1e-3)
    assert answer(app).startswith(f"B is {simulated[0] / simulated[1]:.2f}x as fast")
    [figure] = [json.loads(each.proto.spec) for each in app.get("plotly_chart")]
    ranges = [axis["range"] for name, axis in figure["layout"].items() if name.startswith("xaxis")]
    assert len(ranges) == 4
    assert len({tuple(each) for each in ranges}) == 1
    lines = codes(app)[-1].splitlines()
    assert [line.split()[:3] for line in lines] == 2 * [["gpusim", "simulate", BRANCHES]]


def test_compare_begins_with_before_and_after_of_the_step_looked_at() -> None:
    app = page("compare")
    assert [widget(app.selectbox, f"Schedule of {side}").value for side in "AB"] == ["sequential", RECOMMENDED]
    assert widget(app.selectbox, "Step of A").value == widget(app.selectbox, "Step of B").value


def test_compared_steps_of_other_batches_are_compared_for_each_sample() -> None:
    app = page(
        "compare", a_step="googlenet-train-b8", b_step="googlenet-train-b32", a_by="sequential", b_by="sequential"
    )
    one, other = table(app, "The two sides")
    assert time_ns(one, "step") < time_ns(other, "step")
    assert time_ns(one, "a sample") > time_ns(other, "a sample")
    assert answer(app).startswith("B is ")
