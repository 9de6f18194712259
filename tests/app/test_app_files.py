"""Files in the dashboard: uploaded traces and replays, broken ones, and separation of sessions."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest
from streamlit.testing.v1 import AppTest

import gpusim
from gpusim.errors import GpusimError
from gpusim.formats.trace import Kernel, Variant, VariantSettings
from gpusim.report.measured import bundled_measured, read_measured
from gpusim.trace.store import load_trace, write_trace
from gpusim.units import GIB, format_ns
from tests.report.test_measured import measurement_of, timeline_of
from tests.support.helpers import Step, make_trace, view, wide_trace
from tests.support.pages import (
    APP,
    PAGES,
    SMALL,
    address,
    answer,
    codes,
    errors,
    finished,
    kind_of_answer,
    markup,
    metrics,
    opened,
    page,
    widget,
)

# --- Uploads ---


def uploaded(name: str, data: bytes) -> AppTest:
    """Upload a file on the first page of a new session."""
    return uploader(opened(), "A trace of gpusim").upload(name, data, "application/json").run()


def at(page_name: str, app: AppTest) -> AppTest:
    """Open another page of the uploaded step in a new session, by its address alone."""
    return opened(**{**address(app), "page": page_name})


def uploader(app: AppTest, label: str) -> Any:
    [found] = [each for each in app.file_uploader if each.label.startswith(label)]
    return found


def trace_file(tmp_path: Path, name: str = "mine.json.gz") -> bytes:
    write_trace(wide_trace(), tmp_path / name)
    return (tmp_path / name).read_bytes()


def test_an_uploaded_trace_is_a_verdict_on_it_at_once(tmp_path: Path) -> None:
    app = uploaded("mine.json.gz", trace_file(tmp_path))
    assert not app.exception
    assert not app.error
    assert address(app)["page"] == "verdict"
    assert "<strong>tiny-infer-b1</strong>" in markup(app)
    assert address(app)["trace"].startswith("upload-")
    assert "mine.json.gz" in codes(app)[-1]


def test_a_step_that_never_ran_on_a_gpu_says_that_its_times_are_estimates(tmp_path: Path) -> None:
    trace = wide_trace()
    source = msgspec.structs.replace(trace.provenance, estimated="tensor sizes")
    write_trace(msgspec.structs.replace(trace, provenance=source), tmp_path / "mine.json")
    app = uploaded("mine.json", (tmp_path / "mine.json").read_bytes())
    assert "kernel times estimated" in markup(app)
    assert "Its kernel times are estimates." in markup(app)
    assert any("nothing ran on a GPU" in each.value for each in app.caption)
    assert not any("captured on" in each.value for each in app.caption)
    # Errors and intervals are from steps whose kernels were timed.
    accuracy = opened(**address(app) | {"page": "accuracy", "hw": "h200"})
    assert (kind_of_answer(accuracy), "times of this step are estimated" in answer(accuracy)) == ("trend", True)
    what_if = opened(**address(app) | {"page": "what-if", "hw": "h200"})
    assert any(each.value.startswith("No interval: the kernel times are estimated") for each in what_if.caption)


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
def test_a_broken_upload_says_what_it_is_in_the_main_area_and_shows_no_answer(
    name: str, data: bytes, words: str
) -> None:
    """It shows no answer for another step either."""
    app = uploaded(name, data)
    assert not app.exception
    assert [words in error for error in errors(app)] == [True]
    assert address(app) == {"page": "start"}
    assert app.main.error
    assert not app.metric
    assert "g-answer" not in markup(app)


#: Files of any origin, by name.
STRAY = {
    "page.html": b"<!DOCTYPE html><html><body>Sign in</body></html>",
    "shot.png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
    "snapshot.pickle": pickle.dumps({"segments": [], "device_traces": []}),
    "snapshot.pt": pickle.dumps({"segments": [], "device_traces": []}, protocol=2),
    "stuff.zip": b"PK\x03\x04" + bytes(26) + b"readme.txt",
    "run.nsys-rep": b"\x01\x02\x03",
    "run.sqlite": b"SQLite format 3\0" + bytes(100),
    "empty.json": b"",
    "cut.json.gz": gzip.compress(b'{"schema": "gpusim-trace/2"}')[:-9],
    "notes.txt": b"hello",
}


def test_any_file_is_refused_as_by_the_library_and_without_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One message in the main area, the library's; the step that was open before is not shown beside it."""
    monkeypatch.chdir(tmp_path)
    app = uploaded("mine.json.gz", trace_file(tmp_path))
    app.switch_page(str(APP / "views" / "start.py")).run()
    for name, data in STRAY.items():
        Path(name).write_bytes(data)
        with pytest.raises(GpusimError) as caught:
            gpusim.load(name)
        app = uploader(app, "A trace of gpusim").upload(name, data, "application/json").run()
        assert not app.exception, name
        assert errors(app) == [str(caught.value)]
        assert app.main.error, name
        assert not app.metric
        assert "g-answer" not in markup(app), name


@pytest.mark.parametrize("name", ["report.sqlite", "trace.txt", "no suffix", "a.json.zst"])
def test_a_file_is_known_by_its_content_and_not_by_its_name(name: str, tmp_path: Path) -> None:
    app = uploaded(name, trace_file(tmp_path))
    assert errors(app) == []
    assert "<strong>tiny-infer-b1</strong>" in markup(app)
    app = uploaded(name, b"NVR\0" + bytes(100))
    assert [f"{name}: is" in error and "Nsight Compute" in error for error in errors(app)] == [True]
    assert not app.metric


def test_after_a_broken_upload_another_file_or_a_sample_goes_on(tmp_path: Path) -> None:
    app = uploaded("a.json", b"{")
    app = uploader(app, "A trace of gpusim").upload("b.json.gz", trace_file(tmp_path), "application/json").run()
    assert errors(app) == []
    assert address(app)["page"] == "verdict"
    app = uploaded("a.json", b"{")
    next(each for each in app.button if each.key == f"sample {SMALL}").click().run()
    assert app.session_state["trace"] == SMALL


def test_a_reload_keeps_an_upload(tmp_path: Path) -> None:
    app = uploaded("mine.json.gz", trace_file(tmp_path))
    again = opened(**address(app))
    assert not again.exception
    assert errors(again) == []
    assert address(again) == address(app)
    assert metrics(again) == metrics(app)
    assert answer(again) == answer(app)


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
    monkeypatch.setattr("gpusim.importers.upload.MAX_UPLOAD_BYTES", 100)
    app = uploaded("mine.json.gz", trace_file(tmp_path))
    assert not app.exception
    assert ["mine.json.gz: is " in error and "the limit is 100 B" in error for error in errors(app)] == [True]


@pytest.mark.parametrize("steps", [[], [view("v", "x")]], ids=["no ops", "no kernels"])
def test_a_step_without_work_opens_on_every_page(steps: list[Step], tmp_path: Path) -> None:
    """The page shows a message or nothing, and raises no exception."""
    write_trace(make_trace(steps), tmp_path / "empty.json")
    first = uploaded("empty.json", (tmp_path / "empty.json").read_bytes())
    if errors(first):  # refused: no page to check
        assert address(first) == {"page": "start"}
        return
    for name in PAGES:
        app = at(name, first)
        assert not app.exception, name
        assert len(app.error) <= 1, name


def test_a_large_step_gets_the_same_answers_from_the_compiled_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its timeline still shows the load of the GPU, and it goes to other GPUs only when asked to."""
    small = uploaded("mine.json.gz", trace_file(tmp_path))
    said = markup(at("timeline", small))
    monkeypatch.setattr("gpusim.plan.graph.COMPILED_FROM_OPS", 5)
    write_trace(wide_trace(dur_ns=10_001), tmp_path / "other.json.gz")  # results are kept by content
    large = uploaded("other.json.gz", (tmp_path / "other.json.gz").read_bytes())
    timeline = at("timeline", large)
    assert not timeline.exception
    assert "Worst delay" in said
    assert "Worst delay" in markup(timeline)
    assert len(timeline.get("plotly_chart")) == 1
    what_if = at("what-if", large)
    assert not what_if.exception
    assert "On other GPUs" in [each.label for each in what_if.expander]
    assert "The same step on other GPUs" not in markup(what_if)


def test_a_step_that_needs_more_memory_than_the_gpu_has_does_not_fit(tmp_path: Path) -> None:
    trace = wide_trace()
    storages = [msgspec.structs.replace(each, bytes=100 * GIB) for each in trace.storages]
    write_trace(msgspec.structs.replace(trace, storages=tuple(storages)), tmp_path / "large.json")
    app = at("memory", uploaded("large.json", (tmp_path / "large.json").read_bytes()))
    assert answer(app).startswith("No. At its peak the step needs ")


def test_no_text_of_a_file_becomes_markdown(tmp_path: Path) -> None:
    """An image in a name would be loaded from any address."""
    trace = wide_trace()
    model = msgspec.structs.replace(trace.model, network="![x](http://127.0.0.1:1/x.png) $a$ <b>")
    write_trace(msgspec.structs.replace(trace, model=model), tmp_path / "mine.json")
    first = uploaded("mine.json", (tmp_path / "mine.json").read_bytes())
    for name in PAGES:
        app = at(name, first)
        assert not app.exception, name
        for each in (*app.markdown, *app.caption, *app.header, *app.subheader, *app.error, *app.warning, *app.info):
            assert "![x]" not in each.value, name
            assert "$a$" not in each.value, name
        assert "<b>" not in markup(app), name


# --- Measured runs ---


def replayed(app: AppTest, name: str, data: bytes) -> AppTest:
    return uploader(app, "What `gpusim replay").upload(name, data, "application/json").run()


def test_a_replay_is_shown_beside_the_simulated_run_and_only_with_its_step() -> None:
    app = page("timeline")
    assert widget(app.selectbox, "Measured run").value == "none"
    trace = load_trace(SMALL)
    app = replayed(app, "replay.json", timeline_of(trace, measurement_of(trace, 400_000)))
    assert not app.exception
    assert errors(app) == []
    name = widget(app.selectbox, "Measured run").value
    assert name.startswith("upload-")
    assert address(app)["measured"] == name
    shown = metrics(app)
    assert (shown["Measured"], shown["Outputs"]) == ("400 us", "bit-equal")
    assert f"add up to {shown['Simulated']}." in " ".join(caption.value for caption in app.caption)
    widget(app.selectbox, "Step").select("vgg16-infer-b1").run()
    assert "Measured" not in metrics(app)
    widget(app.selectbox, "Step").select(SMALL).run()
    assert "Measured" not in metrics(app)
    widget(app.selectbox, "Measured run").select(name).run()
    assert metrics(app)["Measured"] == "400 us"
    assert "Measured" not in metrics(page("timeline"))  # another user
    again = opened(**address(app))  # the address gives access to the file
    assert metrics(again)["Measured"] == "400 us"


def test_a_measured_run_of_other_conditions_gets_no_error() -> None:
    """Conditions differ by GPU, launch mode or schedule."""
    link = {"trace": "googlenet-train-b8", "streams": "8", "policy": "critical_path"}

    def compared(app: AppTest) -> str:
        assert not app.exception
        note: str = widget(app.metric, "Simulated").delta
        return note

    app = page("timeline", **link)
    assert compared(app).endswith("% against measured")
    widget(app.selectbox, "Launched by").select("stream").run()
    assert "%" not in compared(app)
    assert any("launched from the host" in each.value for each in app.caption)
    for other in ({"hw": "v100"}, {"policy": "wavefront"}, {"streams": "3"}):
        app = page("timeline", **(link | other))
        widget(app.selectbox, "Measured run").select("critical_path-8").run()
        assert "%" not in compared(app), other
        assert any(each.value.startswith("No error is given: ") for each in app.caption), other


def test_the_bundled_replay_stands_beside_its_schedule() -> None:
    """The bundled measured timeline shows the file's numbers, and only for its schedule."""
    link = {"trace": "googlenet-train-b8", "streams": "8", "policy": "critical_path"}
    app = page("timeline", **link)
    assert not app.exception
    assert errors(app) == []
    assert widget(app.selectbox, "Measured run").value == "critical_path-8"
    trace = load_trace("googlenet-train-b8")
    assert codes(app)[-1].endswith("--measured critical_path-8")
    found = read_measured(bundled_measured(trace)["critical_path-8"], trace)
    assert found.run is not None
    shown = metrics(app)
    assert shown["Measured"] == format_ns(found.makespan_ns) == "3.125 ms"
    assert shown["Measured speed-up"] == "1.61x"
    # Without the two kernels that set the random generator's seed and offset before the graph.
    assert len(found.run.slices) == sum(len(op.kernels) for op in trace.ops)
    assert min(piece.start_ns for piece in found.run.slices) == 0
    assert found.profiled_ns is not None
    assert found.profiled_ns > found.makespan_ns
    assert widget(app.metric, "Measured").delta == f"profiled: {format_ns(found.profiled_ns)}"
    other = page("timeline", **{**link, "policy": "wavefront"})
    assert widget(other.selectbox, "Measured run").value == "none"


def test_a_step_with_variants_says_so_and_what_they_gain(tmp_path: Path) -> None:
    kernel = Kernel(name="other", dur_ns=9_000, grid=(20, 1, 1), block=(256, 1, 1), samples=7)
    trace = wide_trace()
    other = Variant(name="deterministic", settings=VariantSettings(deterministic=True), kernels=(kernel,))
    ops = tuple(msgspec.structs.replace(op, variants=(other,)) if op.kernels else op for op in trace.ops)
    write_trace(msgspec.structs.replace(trace, ops=ops), tmp_path / "mine.json.gz")
    app = at("search", uploaded("mine.json.gz", (tmp_path / "mine.json.gz").read_bytes()))
    assert not app.exception
    assert errors(app) == []
    assert any("have variants" in each.value for each in app.caption)
    assert any(each.value.startswith("Variants: ") for each in app.markdown)


def test_an_upload_is_not_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    app = uploaded("mine.json.gz", trace_file(tmp_path))
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
    one, other = page("search", schedules="10"), page("search")
    widget(one.button, "Start").click().run()
    one = finished(one)
    assert len(one.session_state["explorations"]) == 1
    name = address(uploaded("mine.json.gz", trace_file(tmp_path)))["trace"]
    other.run()
    assert name not in other.session_state["uploads"]
    assert not other.session_state["explorations"]
    assert "job" not in other.session_state
    assert (address(other)["trace"], address(other)["policy"]) == (SMALL, "recommended")
    assert name in opened(page="verdict", trace=name).session_state["uploads"]  # the address gives access to the file
