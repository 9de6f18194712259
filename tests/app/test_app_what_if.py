"""The dashboard's page What-if: settings, side by side, in the address."""

from __future__ import annotations

import dataclasses
import re

import pytest

import gpusim
from gpusim.defaults import QUICK_EVALUATIONS
from gpusim.trace.store import load_trace
from tests.support.pages import (
    BRANCHES,
    CHAIN,
    address,
    cell,
    codes,
    commanded,
    errors,
    opened,
    page,
    table,
    time_ns,
    widget,
)

SETTINGS = "The step as it is and with the settings below"


def test_what_if_begins_at_the_step_as_it_is_and_follows_a_slider(capsys: pytest.CaptureFixture[str]) -> None:
    app = page("what-if")
    base, what_if = table(app, SETTINGS)
    assert cell(base, "step") == cell(what_if, "step")
    assert what_if["change a sample"] == "the same"
    assert not app.warning
    widget(app.slider, "SMs").set_value(66).run()
    assert not app.exception
    printed = commanded(app, capsys)
    base, what_if = table(app, SETTINGS)
    assert time_ns(what_if, "step") == pytest.approx(printed["whatif"]["makespan_ns"], rel=1e-3)
    assert time_ns(base, "step") == pytest.approx(printed["baseline"]["makespan_ns"], rel=1e-3)
    assert printed["whatif"]["makespan_ns"] > printed["baseline"]["makespan_ns"]
    assert "uncalibrated" in what_if["setting"]


def test_interval_of_a_searched_schedule_is_that_of_the_verdict() -> None:
    """Both pages end it later than that of a policy's."""
    trace = "googlenet-train-b8"
    [said] = [each.value for each in page("what-if", trace=trace).caption if "90 % interval" in each.value]
    shown = [float(number) for number in re.findall(r"([\d.]+) ms", said)]
    [note] = [each.delta for each in page("verdict", trace=trace).metric if each.label == "Recommended"]
    assert [float(number) for number in re.findall(r"[\d.]+", note)] == shown
    step = gpusim.load(trace)
    best = gpusim.explore(step, evaluations=QUICK_EVALUATIONS)
    assert best.schedule.searched
    planned = dataclasses.replace(best.schedule, searched=False, policy="critical_path")
    assert planned.interval_ns(step.graph, best.best.makespan_ns)[1] < 1e6 * shown[1] - 1e3


def test_contention_is_a_control_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    app = page("what-if", trace=BRANCHES, policy="critical_path")
    widget(app.slider, "Contention, x").set_value(2.0).run()
    assert "--contention 2" in codes(app)[-1]
    printed = commanded(app, capsys)
    _, what_if = table(app, SETTINGS)
    assert time_ns(what_if, "step") == pytest.approx(printed["whatif"]["makespan_ns"], rel=1e-3)
    assert printed["whatif"]["makespan_ns"] > printed["baseline"]["makespan_ns"]


def test_another_batch_is_compared_for_each_sample() -> None:
    app = page("what-if", trace="googlenet-train-b8")
    widget(app.selectbox, "Batch").select(32).run()
    assert not app.exception
    base, what_if = table(app, SETTINGS)
    assert time_ns(base, "step") / 8 == pytest.approx(time_ns(base, "a sample"), rel=1e-3)
    assert time_ns(what_if, "step") / 32 == pytest.approx(time_ns(what_if, "a sample"), rel=1e-3)
    change = time_ns(what_if, "a sample") / time_ns(base, "a sample") - 1
    assert float(what_if["change a sample"].rstrip("%")) == pytest.approx(100 * change, abs=0.1)


def test_two_settings_stand_side_by_side_and_reset_takes_both_back() -> None:
    app = page("what-if", policy="critical_path", second="on", sms="66", b_sms="99", b_bandwidth="2")
    assert errors(app) == []
    rows = table(app, SETTINGS)
    assert [row["setting"].split()[0] for row in rows] == ["as", "A", "B"]
    times = [time_ns(row, "step") for row in rows]
    assert times[0] < times[2] < times[1]
    assert (address(app)["sms"], address(app)["b_sms"]) == ("66", "99")
    widget(app.button, "Reset").click().run()
    assert set(address(app)) == {"page", "trace", "hw", "policy", "streams"}
    assert len(table(app, SETTINGS)) == 2


def test_the_second_setting_s_values_leave_the_address_with_it() -> None:
    app = page("what-if", second="on", b_sms="99")
    widget(app.toggle, "Compare with a second setting").set_value(False).run()
    assert not {"second", "b_sms"} & set(address(app))


def test_other_gpus_are_answered_without_a_control(capsys: pytest.CaptureFixture[str]) -> None:
    app = page("what-if", trace=BRANCHES, policy="critical_path")
    rows = {row["GPU"].split()[0]: row for row in table(app, "The same step on other GPUs")}
    assert set(rows) == set(gpusim.list_hardware())
    widget(app.selectbox, "GPU").select("a100-80gb").run()
    printed = commanded(app, capsys)
    assert time_ns(rows["a100-80gb"], "on streams") == pytest.approx(printed["baseline"]["makespan_ns"], rel=1e-3)
    assert rows["a100-80gb"]["streams win"] == f"{printed['baseline']['speedup']:.2f}x"


def longest_op(trace: str) -> str:
    return max(load_trace(trace).ops, key=lambda op: sum(kernel.dur_ns for kernel in op.kernels)).name


NAMES = (
    "gpu",
    "batch",
    "launch",
    "on_streams",
    "sms",
    "bandwidth",
    "launch_cost",
    "contention",
    "queues",
    "op",
    "op_speed",
)


def test_what_if_settings_are_in_the_address_and_open_again() -> None:
    app = page("what-if", trace="googlenet-train-b8", policy="critical_path")
    assert set(address(app)) == {"page", "trace", "hw", "policy", "streams"}
    widget(app.selectbox, "GPU").select("a100-80gb").run()
    widget(app.selectbox, "Batch").select(32).run()
    widget(app.selectbox, "Launched by").select("stream").run()
    widget(app.slider, "Streams").set_value(2).run()
    widget(app.slider, "SMs").set_value(50).run()
    widget(app.slider, "DRAM bandwidth, x").set_value(0.5).run()
    widget(app.slider, "Launch cost, x").set_value(1.5).run()
    widget(app.slider, "Contention, x").set_value(0.5).run()
    widget(app.slider, "Hardware queues").set_value(3).run()
    widget(app.selectbox, "A faster op").select(longest_op("googlenet-train-b8")).run()
    widget(app.slider, "Op speed-up, x").set_value(2.0).run()
    assert not app.exception
    assert set(NAMES) <= set(address(app))
    again = opened(**address(app))
    assert not again.exception
    assert errors(again) == []
    assert address(again) == address(app)
    assert table(again, SETTINGS) == table(app, SETTINGS)
    widget(again.button, "Reset").click().run()
    assert not set(NAMES) & set(address(again))
    base, what_if = table(again, SETTINGS)
    assert cell(base, "step") == cell(what_if, "step")


def test_what_if_settings_end_with_their_step() -> None:
    app = page("what-if", sms="50", bandwidth="2.0")
    assert widget(app.slider, "SMs").value == 50
    widget(app.selectbox, "Step").select(CHAIN).run()
    assert not set(NAMES) & set(address(app))
    assert widget(app.slider, "SMs").value == 132
