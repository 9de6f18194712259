"""The dashboard's pages in Streamlit's test harness: each page's answer, equal to the command's."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import threading
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

import gpusim
from gpusim.api import dashboard
from gpusim.defaults import RECOMMENDED
from gpusim.engine.batch import BatchEngine
from gpusim.engine.fast import FastEngine
from gpusim.engine.reference import ReferenceEngine
from gpusim.formats.hardware import load_hardware
from gpusim.report.advice import fused_ways
from gpusim.trace.store import bundled_traces, load_trace, read_manifest
from gpusim.units import format_bytes, format_ns
from tests.support.pages import (
    APP,
    OF_A_STEP,
    PAGES,
    REGISTRY,
    SMALL,
    TIMEOUT_S,
    _main_module,  # noqa: F401  (a fixture that every test here uses)
    address,
    answer,
    app_on_path,  # noqa: F401  (likewise)
    codes,
    commanded,
    errors,
    finished,
    kind_of_answer,
    markup,
    metrics,
    opened,
    page,
    plain,
    table,
    unopened,
    widget,
)

BRANCHES, CHAIN = "googlenet-infer-b1", "vgg16-infer-b1"
WAYS = "Ways to run the step"


def ms(text: str) -> float:
    """Convert a table's number in ms or us to ns."""
    return round(float(text) * 1e6)


def cell(row: dict[str, str], head: str) -> str:
    """Return the cell of the column whose head begins with this text."""
    [found] = [value for name, value in row.items() if name.startswith(head)]
    return found


def time_ns(row: dict[str, str], head: str) -> float:
    """Return a table's time in ns; the head has its unit."""
    [(name, value)] = [(name, value) for name, value in row.items() if name.startswith(head)]
    return float(value) * {"ms": 1e6, "us": 1e3, "ns": 1.0}[name.rpartition(", ")[2]]


# --- Pages ---


@pytest.mark.parametrize("name", PAGES)
def test_page_opens_without_errors_under_its_question(name: str) -> None:
    app = page(name)
    assert not app.exception
    assert [error.value for error in app.error] == []
    assert app.title[0].value == REGISTRY.PAGES[name].question
    assert address(app)["page"] == name


def drawn(app: AppTest, kind: str) -> int:
    """Return the number of figures or tables on a page."""
    return len(app.dataframe if kind == "dataframe" else app.get(kind))


@pytest.mark.parametrize(
    ("name", "box", "kind"),
    [
        ("memory", "time against memory", "plotly_chart"),
        ("search", "time against memory", "plotly_chart"),
        ("limits", "by phase", "dataframe"),
        ("limits", "ops at once", "plotly_chart"),
        ("parallel", "layer by layer", "dataframe"),
    ],
)
def test_what_is_folded_is_drawn_once_it_is_opened(name: str, box: str, kind: str) -> None:
    app = page(name)
    before = drawn(app, kind)
    app.session_state[box] = True
    app.run()
    assert drawn(app, kind) == before + 1
    assert errors(app) == []


def test_every_page_is_a_file_in_the_folder_that_the_wheel_packs() -> None:
    files = {entry.file.name for entry in REGISTRY.PAGES.values()}
    assert files == {path.name for path in (APP / "views").glob("*.py")}


def test_links_to_pages_under_their_old_names_open() -> None:
    for old, new in REGISTRY.OLD_NAMES.items():
        app = page(old)
        assert errors(app) == []
        assert address(app)["page"] == new


def test_sidebar_has_what_a_page_takes_and_nothing_else() -> None:
    """Each control appears once: a page's own choice is not in the sidebar as well."""
    labels = {
        REGISTRY.STEP: "Step",
        REGISTRY.HARDWARE: "GPU",
        REGISTRY.SCHEDULE: "Schedule",
        REGISTRY.STREAMS: "Streams, at most",
    }
    for name, entry in REGISTRY.PAGES.items():
        sidebar = page(name).sidebar
        shown = {each.label for each in (*sidebar.selectbox, *sidebar.slider)}
        assert shown == {labels[control] for control in entry.controls}, name


# --- Start ---


def test_first_page_has_one_action_and_a_sample_of_each_bundled_kind() -> None:
    app = opened()
    assert app.title[0].value == REGISTRY.PAGES["start"].question
    assert len(app.file_uploader) == 1
    kinds = {entry["kind"] for entry in read_manifest()}
    cards = [each.value for each in app.subheader]
    assert len(cards) == len(kinds) == len(set(cards))
    assert not app.metric
    samples = [each for each in app.button if each.key.startswith("sample ")]
    assert {each.key.removeprefix("sample ") for each in samples} == set(bundled_traces())
    assert {row["step"] for row in table(app, "All bundled steps")} == set(bundled_traces())


def test_every_kind_has_a_picture_and_words_for_those_who_do_not_see_it() -> None:
    pictures = re.findall(r'<img[^>]*alt="([^"]+)"[^>]*src="data:image/svg\+xml;base64,', markup(opened()))
    assert len(pictures) == len({entry["kind"] for entry in read_manifest()})


def test_a_kind_that_nobody_has_described_is_offered_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpusim.api import dashboard

    entries = [{**entry, "kind": "new"} for entry in read_manifest()]
    monkeypatch.setattr(dashboard, "manifest", lambda: entries)
    app = opened()
    assert [each.value for each in app.subheader] == ["Other steps"]
    assert {each.key for each in app.button if each.key.startswith("sample ")} == {
        f"sample {entry['name']}" for entry in entries
    }


def test_a_click_on_a_sample_is_a_verdict_on_it() -> None:
    app = opened()
    [button] = [each for each in app.button if each.key == f"sample {CHAIN}"]
    button.click().run()
    # Streamlit's harness does not follow a change of page, so the session state is checked.
    assert app.session_state["trace"] == CHAIN
    assert app.session_state["policy"] == RECOMMENDED


# --- Verdict ---


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
    app = page("verdict", trace="googlenet-train-b8", streams="8")
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


@pytest.mark.parametrize("name", ["timeline", "memory", "what-if", "limits"])
def test_every_page_begins_with_the_recommended_schedule(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Compared by the number that each page shows: time or peak memory."""
    best = commanded(page("verdict", trace=BRANCHES), capsys)["best"]
    app = page(name, trace=BRANCHES)
    assert address(app)["policy"] == "recommended"
    label = f"{best['policy']}, {best['streams']} streams"
    if name == "timeline":
        assert f"add up to {format_ns(best['makespan_ns'])}." in " ".join(each.value for each in app.caption)
    elif name == "memory":
        assert format_bytes(best["peak_bytes"]) in " ".join(each.value for each in (*app.header, *app.subheader))
    elif name == "what-if":
        row = table(app, "The step as it is and with the settings below")[0]
        assert time_ns(row, "step") == pytest.approx(best["makespan_ns"], rel=1e-3)
        assert row["setting"] == f"as it is {label}"
    else:
        assert metrics(app)["Recommended"] == format_ns(best["makespan_ns"])
        assert widget(app.metric, "Recommended").delta == label


@pytest.mark.parametrize("name", [name for name in OF_A_STEP if name not in ("accuracy", "transfer")])
def test_uncalibrated_hardware_is_marked_on_every_page_that_uses_it(name: str) -> None:
    model = load_hardware("v100")
    assert not model.calibrated
    app = page(name, hw="v100")
    assert not app.exception
    if name == "verdict":
        assert kind_of_answer(app) == "trend"
        assert "No verdict" in answer(app)
    else:
        assert any("is uncalibrated" in each.value for each in app.warning)
    assert f"on <strong>{model.label}</strong>" in markup(app)


def test_nobody_knows_how_wrong_predictions_for_a_gpu_are_that_nothing_was_measured_on() -> None:
    app = page("accuracy", hw="v100")
    assert kind_of_answer(app) == "trend"
    assert "Nothing was ever measured on Tesla V100" in answer(app)


# --- Timeline ---


def test_timeline_adds_up_to_what_simulate_prints(capsys: pytest.CaptureFixture[str]) -> None:
    app = page("timeline", policy="wavefront")
    printed = commanded(app, capsys)
    assert f"add up to {format_ns(printed['makespan_ns'])}." in " ".join(caption.value for caption in app.caption)


def test_the_worst_delay_is_explained_without_a_click(capsys: pytest.CaptureFixture[str]) -> None:
    """The delay is the first one that `gpusim explain` lists."""
    app = page("timeline", trace=BRANCHES, policy="critical_path", streams="4")
    words = ["explain", BRANCHES, "--policy", "critical_path", "--streams", "4", "--json"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["gpusim", *words])
        gpusim_main()
    worst = json.loads(capsys.readouterr().out)["delays"][0]
    assert f"Worst delay: {worst['layer']} " in plain(markup(app))
    assert f"lost {format_ns(worst['lost_ns'])}" in plain(markup(app))
    assert any(f"`{worst['op']}` of `{worst['layer']}` started at" in each.value for each in app.markdown)


def gpusim_main() -> None:
    from gpusim.cli import main

    main()


def test_an_op_is_found_by_name_and_the_timeline_goes_there() -> None:
    app = page("timeline", trace=BRANCHES)
    assert "window" not in address(app)
    op = next(op for op in load_trace(BRANCHES).ops if op.layer.startswith("inception4c"))
    box = widget(app.selectbox, "Find an op")
    assert any(op.layer in words and op.name in words for words in box.options)
    box.select(op.name).run()
    assert not app.exception
    assert address(app)["op"] == op.name
    assert any(f"`{op.name}` of `{op.layer}` started at" in each.value for each in app.markdown)
    begin, end = map(float, address(app)["window"].split("-"))
    assert 0 <= begin < end
    again = opened(**address(app))
    assert address(again) == address(app)
    widget(app.button, "All").click().run()
    assert "window" not in address(app)
    widget(app.button, "Closer").click().run()
    assert "window" in address(app)


def test_one_zoom_moves_lanes_and_tracks_together() -> None:
    app = page("timeline", window="20-60")
    [figure] = [json.loads(each.proto.spec) for each in app.get("plotly_chart")]
    ranges = [axis["range"] for name, axis in figure["layout"].items() if name.startswith("xaxis")]
    assert ranges == [[20, 60]] * 4
    assert {axis["fixedrange"] for name, axis in figure["layout"].items() if name.startswith("yaxis")} == {True}
    widget(app.button, "Later").click().run()
    assert address(app)["window"] == "40-80"


@pytest.mark.parametrize("window", ["60-20", "a-b", "20", "0-999999999", "-5-20", "nan-20"])
def test_a_window_that_is_no_stretch_of_the_step_is_a_message(window: str) -> None:
    app = page("timeline", window=window)
    assert not app.exception
    assert ["a stretch of the step such as 0-" in error for error in errors(app)] == [True]
    assert "window" not in address(app)


# --- Limits, memory ---


def test_limits_end_in_a_sentence_and_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    app = page("limits")
    step = commanded(app, capsys)["scopes"][-1]
    assert metrics(app)["Best list schedule"] == format_ns(step["best"]["makespan_ns"])
    assert metrics(app)["Ops at once, most"] == str(step["parallelism"]["max"])
    assert re.match(r"\d+% of what there is to win is won; \d+% is lost to dependencies", answer(app))
    rows = table(app, "Where the potential goes")
    losses = {row["part"].removeprefix("+ "): row for row in rows}
    for loss in step["losses"]:
        assert time_ns(losses[loss["limit"]], "time") == pytest.approx(loss["loss_ns"], abs=600)


def test_memory_peak_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    app = page("memory")
    printed = commanded(app, capsys)
    peak = format_bytes(printed["peak_bytes"])
    assert answer(app).startswith(f"Yes. At its peak the step needs {peak}: ")
    assert answer(app).partition(" of the ")[2].startswith(format_bytes(load_hardware("h200").memory.dram_bytes))
    assert f": {peak} at " in " ".join(each.value for each in app.header)


# --- What-if ---

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
    widget(app.toggle, "A second setting beside it").set_value(False).run()
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


# --- Transfer, compare ---


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


def table_rows(app: AppTest) -> list[dict[str, str]]:
    """Return the rows of a page's last table."""
    last = markup(app).rpartition("<table")[2]
    heads = [plain(head) for head in re.findall(r'<th scope="col"[^>]*>(.*?)</th>', last)]
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", last.partition("<tbody>")[2])
    return [dict(zip(heads, map(plain, re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)), strict=True)) for row in rows]


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


# --- Search ---


def test_search_runs_what_it_is_asked_to_and_keeps_it_for_the_verdict() -> None:
    app = page("search", policies="wavefront", schedules="64")
    assert widget(app.multiselect, "Policies").value == ["wavefront"]
    widget(app.button, "Start").click().run()
    app = finished(app)
    assert not app.exception
    result = app.session_state["job"].result
    assert {row.policy for row in result.rows} == {"sequential", "wavefront", "search"}
    assert "--evaluations 64" in codes(app)[-1]
    assert "left out here" in " ".join(caption.value for caption in app.caption)
    assert list(app.session_state["explorations"].values()) == [result]


def test_search_that_ends_while_another_page_is_open_is_what_that_page_shows() -> None:
    searched = page("search", policies="wavefront", schedules="64")
    widget(searched.button, "Start").click().run()
    job = searched.session_state["job"]
    job.wait(TIMEOUT_S)
    app = unopened(page="timeline", trace=SMALL, streams="3")
    for key in ("job", "job_key", "job_words"):
        app.session_state[key] = searched.session_state[key]
    app.run()
    assert not app.exception
    assert list(app.session_state["explorations"].values()) == [job.result]


def test_search_stops_when_told_to() -> None:
    app = page("search", seconds="300")
    widget(app.button, "Start").click().run()
    widget(app.button, "Stop").click().run()
    app = finished(app)
    assert not app.exception
    assert app.session_state["job"].stopped


def test_search_tries_partitions_and_says_what_they_gain() -> None:
    app = page("search", policies="wavefront", schedules="64")
    widget(app.text_input, "Partitions of the SMs").set_value(" 64+68 ").run()
    widget(app.button, "Start").click().run()
    app = finished(app)
    assert not app.exception
    assert "with partitions" in {row.policy for row in app.session_state["job"].result.rows}
    assert any(each.value.startswith("Partitions: ") for each in app.markdown)
    assert "--partitions 64+68" in codes(app)[-1]
    assert address(app)["partitions"] == "64+68"


@pytest.mark.parametrize("asked", ["64", "64+69", "64+68+", "8+8+8+108", "![x](y)"])
def test_partitions_that_the_gpu_cannot_have_are_a_message(asked: str) -> None:
    app = page("search")
    widget(app.text_input, "Partitions of the SMs").set_value(asked).run()
    assert not app.exception
    if asked == "64":  # one partition that leaves no SMs is not a split, but legal
        return
    assert [asked in error for error in errors(app)] == [True]
    assert widget(app.button, "Start").disabled


@pytest.mark.parametrize("name", ["search", "limits"])
def test_a_click_on_a_download_does_not_run_the_page_again(name: str) -> None:
    """Otherwise the file of the previous run would be gone before the browser requests it."""
    buttons = page(name).get("download_button")
    assert buttons
    assert all(button.proto.ignore_rerun for button in buttons)


def test_searched_schedule_is_shown_by_every_page_of_one_schedule() -> None:
    for name in ("timeline", "what-if", "memory"):
        app = page(name, policy="search")
        assert not app.exception
        assert not app.error


# --- Accuracy ---


def test_accuracy_says_how_wrong_steps_like_this_one_were() -> None:
    app = page("accuracy", trace="googlenet-train-b8")
    assert kind_of_answer(app) == "yes"
    assert re.search(r"Of \d+ replayed schedules of steps like this one \(googlenet, training\), half", answer(app))
    assert len(app.get("plotly_chart")) == 1


def test_accuracy_filters_are_in_the_address() -> None:
    app = page("accuracy")
    widget(app.multiselect, "Network").set_value(["googlenet"]).run()
    assert not app.exception
    assert set(app.dataframe[0].value["step"].str.partition("-")[0]) == {"googlenet"}
    widget(app.multiselect, "Policy").set_value(["search"]).run()
    assert set(app.dataframe[0].value["policy"]) == {"search"}
    assert (address(app)["network"], address(app)["policies"]) == ("googlenet", "search")
    assert set(opened(**address(app)).dataframe[0].value["policy"]) == {"search"}


# --- What pages compute ---


def test_the_dashboard_imports_nothing_of_the_command_line() -> None:
    for path in APP.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith("gpusim.cli") for name in names), path


@pytest.fixture
def simulations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record a line per engine call."""
    calls: list[str] = []
    for kind, method in ((ReferenceEngine, "run"), (FastEngine, "run"), (BatchEngine, "evaluate")):
        original = getattr(kind, method)

        def counted(self: Any, *args: Any, _original: Any = original, _name: str = kind.__name__, **kwargs: Any) -> Any:
            calls.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(kind, method, counted)
    return calls


def test_no_page_simulates_again_what_any_page_has_simulated(simulations: list[str]) -> None:
    """Neither a rerun nor another user simulates again."""
    link = {"trace": CHAIN, "streams": "2", "policy": "round_robin"}
    first = {name: page(name, **link) for name in PAGES}
    assert len(simulations) > len(PAGES)
    simulations.clear()
    for name in PAGES:
        assert not first[name].run().exception
        assert simulations == [], name
        assert not page(name, **link).exception
        assert simulations == [], name


def test_a_slider_back_where_it_was_simulates_nothing(simulations: list[str]) -> None:
    app = page("what-if")
    widget(app.slider, "SMs").set_value(100).run()
    simulations.clear()
    widget(app.slider, "SMs").set_value(132).run()
    widget(app.slider, "SMs").set_value(100).run()
    assert simulations == []
    widget(app.slider, "SMs").set_value(101).run()
    assert simulations


def test_the_first_verdict_is_computed_before_anybody_asks(simulations: list[str]) -> None:
    from gpusim_dashboard.ready import first_page

    first_page()
    simulations.clear()
    app = opened(page="verdict")
    assert not app.exception
    assert address(app)["trace"] == "googlenet-train-b8"
    assert simulations == []


@pytest.mark.parametrize("name", ["limits", "timeline", "what-if"])
def test_the_pages_of_a_sample_are_computed_before_anybody_asks(name: str, simulations: list[str]) -> None:
    """A thread outside any session computes them."""
    from gpusim_dashboard import ready, results
    from gpusim_dashboard.choice import as_begun

    sample = as_begun("squeezenet1_1-infer-b1")
    prepare = {"limits": results.limits_of, "timeline": ready.timeline, "what-if": ready.what_if}
    for ahead in (ready.timeline, prepare[name]):
        thread = threading.Thread(target=ahead, args=(sample,))
        thread.start()
        thread.join()
    simulations.clear()
    app = opened(page=name, trace=sample.name)
    assert not app.exception
    assert simulations == []


def test_navigation_and_heading_do_not_wait_for_the_engine() -> None:
    """The frame that draws them imports no slow module."""
    code = f"import sys; sys.path.insert(0, {str(APP)!r}); import gpusim_dashboard.frame; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=APP.parent, capture_output=True, text=True, check=False)
    assert "'gpusim_dashboard.frame'" in done.stdout, done.stderr
    assert "'numba'" not in done.stdout
    assert "'gpusim.plan" not in done.stdout
