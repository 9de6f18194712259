"""Files in the dashboard: uploaded traces and replays, broken ones, and that each session has its own."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import msgspec
import pytest
from streamlit.testing.v1 import AppTest

from gpusim.report.measured import bundled_measured, read_measured
from gpusim.trace.schema import Kernel, Variant, VariantSettings
from gpusim.trace.store import load_trace, write_trace
from gpusim.units import format_ns
from tests.helpers import Step, make_trace, view, wide_trace
from tests.pages import (
    PAGES,
    SMALL,
    _main_module,  # noqa: F401  (a fixture that every test here uses)
    address,
    app_on_path,  # noqa: F401  (likewise)
    errors,
    finished,
    metrics,
    opened,
    page,
    widget,
)
from tests.test_measured import measurement_of, timeline_of

# --- Uploads ---


def uploaded(app: AppTest, name: str, data: bytes) -> AppTest:
    return uploader(app, "or a trace of your own").upload(name, data, "application/json").run()


def uploader(app: AppTest, label: str) -> Any:
    [found] = [each for each in app.file_uploader if each.label.startswith(label)]
    return found


def trace_file(tmp_path: Path, name: str = "mine.json.gz") -> bytes:
    write_trace(wide_trace(), tmp_path / name)
    return (tmp_path / name).read_bytes()


def test_an_uploaded_trace_is_chosen_and_explored(tmp_path: Path) -> None:
    app = uploaded(page("overview"), "mine.json.gz", trace_file(tmp_path))
    assert not app.exception
    assert not app.error
    assert "**tiny-infer-b1**" in app.markdown[0].value
    assert address(app)["trace"].startswith("upload-")
    assert "mine.json.gz" in app.code[-1].value


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.json", b"not json", "a.json: is not valid JSON"),
        ("b.json.gz", b"\x1f\x8b\x08\x00broken", "b.json.gz: is"),
        ("c.json", b'{"schema": "gpusim-trace/1"}', "c.json: $"),
        ("d.json", b"", "d.json: is empty"),
        ("e.json", b"import os; os.abort()", "e.json: is not valid JSON"),
        ("f.json.gz", gzip.compress(b'{"schema": "gpusim-trace/1", "ops": ['), "f.json.gz: is not valid JSON"),
        ("g.json.gz", gzip.compress(b" " * 300_000_000), "g.json.gz: is larger than"),
        ("h.json", b'{"schema": "![x](http://127.0.0.1:1/x.png)"}', "unknown schema version '![x](http://127"),
    ],
)
def test_a_broken_upload_is_a_message_in_the_place_of_the_page(name: str, data: bytes, words: str) -> None:
    """Not beside the answer for another step."""
    app = uploaded(page("overview"), name, data)
    assert not app.exception
    assert [words in error for error in errors(app)] == [True]
    assert address(app)["trace"] == SMALL
    assert app.main.error
    assert not (*app.metric, *app.success, *app.info, *app.code)


@pytest.mark.parametrize("name", ["report.sqlite", "trace.txt", "no suffix", "a.json.zst"])
def test_a_file_is_known_by_its_content_and_not_by_its_name(name: str, tmp_path: Path) -> None:
    app = uploaded(page("overview"), name, trace_file(tmp_path))
    assert errors(app) == []
    assert "**tiny-infer-b1**" in app.markdown[0].value
    app = uploaded(page("overview"), name, b"SQLite format 3\0" + bytes(100))
    assert [f"{name}: is an SQLite file" in error for error in errors(app)] == [True]
    assert not app.metric


def test_after_a_broken_upload_the_page_comes_back_when_asked_for() -> None:
    for back in (
        lambda app: widget(app.button, "Go on without it").click(),
        lambda app: widget(app.selectbox, "Trace").select("vgg16-infer-b1"),
    ):
        app = uploaded(page("limits"), "a.json", b"{")
        assert not app.metric
        app = back(app).run()
        assert errors(app) == []
        assert "Recommended" in metrics(app)


def test_a_reload_keeps_an_upload(tmp_path: Path) -> None:
    app = uploaded(page("memory"), "mine.json.gz", trace_file(tmp_path))
    again = opened(**address(app))
    assert not again.exception
    assert errors(again) == []
    assert address(again) == address(app)
    assert metrics(again) == metrics(app)
    assert app.subheader[0].value == again.subheader[0].value


def test_the_server_keeps_few_uploads_of_few_bytes_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpusim_dashboard import shelf

    now_s = [0.0]
    monkeypatch.setattr(shelf, "MAX_FILES", 3)
    monkeypatch.setattr(shelf, "MAX_BYTES", 100)
    kept = shelf.Shelf(lambda: now_s[0])
    one, two, three = (kept.put(name, name.encode()) for name in ("one", "two", "three"))
    assert kept.get(one) == shelf.KeptFile("one", b"one")  # opened last now
    four = kept.put("four", b"four")
    assert [kept.get(each) is None for each in (one, two, three, four)] == [False, True, False, False]
    large = kept.put("large", bytes(95))
    assert [kept.get(each) is None for each in (one, three, four, large)] == [True, True, False, False]
    now_s[0] = shelf.MAX_AGE_S - 1.0
    assert kept.get(large[:32]) is not None
    now_s[0] = 1.5 * shelf.MAX_AGE_S
    assert (kept.get(four), kept.get(large)) == (None, shelf.KeptFile("large", bytes(95)))
    assert kept.put("too large", bytes(101)) is not None
    assert kept.get(large) is None


def test_an_upload_over_the_limit_is_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpusim.trace.store.MAX_UPLOAD_BYTES", 100)
    app = uploaded(page("overview"), "mine.json.gz", trace_file(tmp_path))
    assert not app.exception
    assert ["mine.json.gz: is " in error and "the limit is 100 B" in error for error in errors(app)] == [True]


@pytest.mark.parametrize("steps", [[], [view("v", "x")]], ids=["no ops", "no kernels"])
def test_a_step_without_work_opens_on_every_page(steps: list[Step], tmp_path: Path) -> None:
    """No exception: a message, or a page with nothing on it."""
    write_trace(make_trace(steps), tmp_path / "empty.json")
    data = (tmp_path / "empty.json").read_bytes()
    for name in PAGES:
        app = uploaded(page(name), "empty.json", data)
        assert not app.exception, name
        assert len(app.error) <= 1, name


def test_no_text_of_a_file_becomes_markdown(tmp_path: Path) -> None:
    """An image in a name would be loaded from wherever it says."""
    trace = wide_trace()
    model = msgspec.structs.replace(trace.model, network="![x](http://127.0.0.1:1/x.png) $a$ <b>")
    write_trace(msgspec.structs.replace(trace, model=model), tmp_path / "mine.json")
    for name in PAGES:
        app = uploaded(page(name), "mine.json", (tmp_path / "mine.json").read_bytes())
        assert not app.exception, name
        for each in (*app.markdown, *app.caption, *app.subheader, *app.error, *app.warning, *app.info, *app.success):
            assert "![x]" not in each.value, name
            assert "$a$" not in each.value, name


# --- Measured runs ---


def replayed(app: AppTest, name: str, data: bytes) -> AppTest:
    return uploader(app, "What `gpusim replay").upload(name, data, "application/json").run()


def test_a_replay_is_shown_beside_the_simulated_run_and_only_with_its_step() -> None:
    app = page("timeline")
    assert widget(app.selectbox, "Measured run below the simulated one").value == "none"
    trace = load_trace(SMALL)
    app = replayed(app, "replay.json", timeline_of(trace, measurement_of(trace, 400_000)))
    assert not app.exception
    assert errors(app) == []
    assert widget(app.selectbox, "Measured run below the simulated one").value == "replay.json"
    shown = metrics(app)
    assert (shown["Measured"], shown["Outputs"]) == ("400 us", "bit-equal")
    assert f"add up to {shown['Simulated']}." in " ".join(caption.value for caption in app.caption)
    widget(app.selectbox, "Trace").select("vgg16-infer-b1").run()
    assert "Measured" not in metrics(app)
    widget(app.selectbox, "Trace").select(SMALL).run()
    assert metrics(app)["Measured"] == "400 us"
    assert "Measured" not in metrics(page("timeline"))  # another user


def test_a_measured_run_of_other_conditions_gets_no_error() -> None:
    """Another GPU, launch mode or schedule than the one that was measured."""
    link = {"trace": "googlenet-train-b8", "streams": "8", "policy": "critical_path"}

    def compared(app: AppTest) -> str:
        assert not app.exception
        note: str = widget(app.metric, "Simulated").delta
        return note

    app = page("timeline", **link)
    assert compared(app).endswith("% against measured")
    widget(app.radio, "Launched by").set_value("stream").run()
    assert "%" not in compared(app)
    assert "launched from the host" in app.caption[0].value
    for other in ({"hw": "v100"}, {"policy": "wavefront"}, {"streams": "3"}):
        app = page("timeline", **(link | other))
        widget(app.selectbox, "Measured run below the simulated one").select("critical_path-8").run()
        assert "%" not in compared(app), other
        assert app.caption[0].value.startswith("No error is given: "), other


def test_the_bundled_replay_stands_beside_its_schedule() -> None:
    """The one measured timeline that ships: its numbers are those of the file, and other schedules do not get it."""
    link = {"trace": "googlenet-train-b8", "streams": "8", "policy": "critical_path"}
    app = page("timeline", **link)
    assert not app.exception
    assert errors(app) == []
    assert widget(app.selectbox, "Measured run below the simulated one").value == "critical_path-8"
    trace = load_trace("googlenet-train-b8")
    assert app.code[-1].value.endswith("--measured critical_path-8")
    found = read_measured(bundled_measured(trace)["critical_path-8"], trace)
    assert found.run is not None
    shown = metrics(app)
    assert shown["Measured"] == format_ns(found.makespan_ns) == "3.125 ms"
    assert shown["Measured speed-up"] == "1.61x"
    # Without the two that set the random generator's seed and offset before the graph.
    assert len(found.run.slices) == sum(len(op.kernels) for op in trace.ops)
    assert min(piece.start_ns for piece in found.run.slices) == 0
    assert found.profiled_ns is not None
    assert found.profiled_ns > found.makespan_ns
    assert widget(app.metric, "Measured").delta == f"profiled: {format_ns(found.profiled_ns)}"
    other = page("timeline", **{**link, "policy": "wavefront"})
    assert widget(other.selectbox, "Measured run below the simulated one").value == "none"


def test_a_step_with_variants_says_so_and_what_they_gain(tmp_path: Path) -> None:
    kernel = Kernel(name="other", dur_ns=9_000, grid=(20, 1, 1), block=(256, 1, 1), samples=7)
    trace = wide_trace()
    other = Variant(name="deterministic", settings=VariantSettings(deterministic=True), kernels=(kernel,))
    ops = tuple(msgspec.structs.replace(op, variants=(other,)) if op.kernels else op for op in trace.ops)
    write_trace(msgspec.structs.replace(trace, ops=ops), tmp_path / "mine.json.gz")
    app = uploaded(page("explore"), "mine.json.gz", (tmp_path / "mine.json.gz").read_bytes())
    assert not app.exception
    assert errors(app) == []
    assert any("have variants" in each.value for each in app.caption)
    assert any(each.value.startswith("Variants: ") for each in app.markdown)


def test_an_upload_is_not_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    app = uploaded(page("overview"), "mine.json.gz", trace_file(tmp_path))
    assert not app.exception
    assert "Recommended" in metrics(app)
    assert not any("tiny-infer" in path.read_text("utf-8") for path in (tmp_path / "cache").rglob("*.json"))


def test_a_replay_of_another_step_or_a_broken_one_is_a_message() -> None:
    other = load_trace("vgg16-infer-b1")
    app = replayed(page("timeline"), "replay.json", timeline_of(other))
    assert not app.exception
    assert [f"is a timeline of '{other.name}'" in error for error in errors(app)] == [True]
    kernel = {"ph": "X", "cat": "kernel", "name": "another", "ts": 1, "dur": 2, "args": {"stream": 7}}
    app = replayed(app, "kineto.json", msgspec.json.encode({"traceEvents": [kernel] * 20}))
    assert [f"is a profile of another step than '{SMALL}'" in error for error in errors(app)] == [True]
    app = replayed(app, "broken.json", b"{")
    assert ["broken.json: is not valid JSON" in error for error in errors(app)] == [True]
    assert "Measured" not in metrics(app)


def test_two_sessions_do_not_see_each_other(tmp_path: Path) -> None:
    one, other = page("explore"), page("explore")
    widget(one.selectbox, "Policy").select("wavefront").run()
    widget(one.number_input, "Schedules, at most").set_value(10)
    widget(one.button, "Start").click().run()
    one = finished(one)
    assert len(one.session_state["explorations"]) == 1
    one = uploaded(one, "mine.json.gz", trace_file(tmp_path))
    name = address(one)["trace"]
    other.run()
    assert name not in other.session_state["uploads"]
    assert not other.session_state["explorations"]
    assert "job" not in other.session_state
    assert (address(other)["trace"], address(other)["policy"]) == (SMALL, "recommended")
    assert name in opened(trace=name).session_state["uploads"]  # who has the address has the file
