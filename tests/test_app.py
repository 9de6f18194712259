"""The dashboard's pages, run by Streamlit's own test harness, and the command that starts it."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from streamlit.testing.v1 import AppTest

from gpusim.cli import main
from gpusim.engine.batch import BatchEngine
from gpusim.engine.fast import FastEngine
from gpusim.engine.reference import ReferenceEngine
from gpusim.hardware.model import load_hardware
from gpusim.resources import resource_dir
from gpusim.search import searches
from gpusim.trace.store import bundled_traces
from gpusim.units import format_bytes, format_ns
from tests.pages import (
    APP,
    PAGES,
    SMALL,
    _main_module,  # noqa: F401  (a fixture that every test here uses)
    address,
    app_on_path,  # noqa: F401  (likewise)
    commanded,
    errors,
    finished,
    metrics,
    opened,
    page,
    widget,
)


@pytest.mark.parametrize("name", PAGES)
def test_page_opens_without_errors(name: str) -> None:
    app = page(name)
    assert not app.exception
    assert [error.value for error in app.error] == []
    assert app.title[0].value.lower() == name
    assert address(app)["page"] == name


def test_overview_is_the_first_page_and_all_bundled_traces_are_offered() -> None:
    app = opened(trace=SMALL)
    assert app.title[0].value == "Overview"
    assert set(bundled_traces()) <= set(widget(app.selectbox, "Trace").options)


def test_overview_says_what_explore_prints(capsys: pytest.CaptureFixture[str]) -> None:
    app = page("overview")
    printed = commanded(app, capsys)
    shown = metrics(app)
    assert shown["Recommended"] == format_ns(printed["best"]["makespan_ns"])
    assert shown["Eager today"] == format_ns(printed["verdict"]["rows"][0]["time_ns"])
    assert shown["Peak memory"] == format_bytes(printed["best"]["peak_bytes"])
    assert shown["Over one CUDA graph"] == f"{printed['verdict']['speedup']:.2f}x"
    bound_ns = max(printed["bounds"].values())
    assert shown["Best possible"] == f"{printed['sequential_ns'] / bound_ns:.2f}x"
    assert widget(app.metric, "Best possible").delta.startswith(format_ns(bound_ns))
    [verdict] = [box.value for box in (*app.success, *app.info)]
    assert verdict == printed["verdict"]["text"].replace("; `gpusim limits` says what is between", "")
    low, high = printed["verdict"]["interval"]
    assert f"{low:.2f}x to {high:.2f}x" in widget(app.metric, "Over one CUDA graph").delta


@pytest.mark.parametrize("name", ["overview", "explore"])
def test_verdict_has_a_row_for_each_way_to_run_the_step(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    app = page(name, trace="googlenet-train-b8")
    printed = commanded(app, capsys)["verdict"]["rows"]
    [shown] = [each.value for each in app.markdown if each.value.startswith("| way to run")]
    rows = [[cell.strip() for cell in line.replace("*", "").strip("|").split("|")] for line in shown.splitlines()[2:]]
    assert [row[0].partition(":")[0].split(" ", 1)[-1] for row in rows] == [
        "today (measured)",
        "CUDA graph",
        "streams in the graph",
        "streams without a graph",
    ]
    for row, expected in zip(rows, printed, strict=True):
        assert float(row[1].split()[0]) == pytest.approx(expected["time_ns"] / 1e6, rel=1e-2)
        assert row[2] == f"{expected['speedup_over_eager']:.2f}x"
        assert row[0].partition(": ")[2] == expected["advice"]
    assert rows[-1][0].endswith(": slower than eager: do not")
    assert [line.count("**") for line in shown.splitlines()[2:]] == [0, 0, 6, 0]


def test_a_searched_schedule_that_is_faster_and_not_recommended_is_explained() -> None:
    app = page("overview", trace="googlenet-train-b8", streams="8")
    [said] = [each.value for each in app.caption if "still not recommended" in each.value]
    assert said.startswith("The best searched schedule (search, ")


@pytest.mark.parametrize("name", ["timeline", "memory", "what-if", "limits"])
def test_every_page_begins_with_the_recommended_schedule(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By the number that each page gives for it: its time, or its peak of memory."""
    best = commanded(page("explore", trace="googlenet-infer-b1"), capsys)["best"]
    app = page(name, trace="googlenet-infer-b1")
    assert address(app)["policy"] == "recommended"
    if name == "timeline":
        assert f"add up to {format_ns(best['makespan_ns'])}." in " ".join(each.value for each in app.caption)
    elif name == "memory":
        assert f" {best['policy']}, {best['streams']} streams (recommended): " in app.subheader[0].value
        assert f": {format_bytes(best['peak_bytes'])} at " in app.subheader[0].value
    else:
        label = "Recommended" if name == "limits" else "Baseline"
        assert metrics(app)[label] == format_ns(best["makespan_ns"])
        assert widget(app.metric, label).delta == f"{best['policy']}, {best['streams']} streams"


@pytest.mark.parametrize("name", ["explore", "limits"])
def test_a_click_on_a_download_does_not_run_the_page_again(name: str) -> None:
    """The file of the run before would be gone before the browser asks for it."""
    buttons = page(name).get("download_button")
    assert buttons
    assert all(button.proto.ignore_rerun for button in buttons)


def test_timeline_adds_up_to_what_simulate_prints(capsys: pytest.CaptureFixture[str]) -> None:
    app = page("timeline", policy="wavefront")
    printed = commanded(app, capsys)
    assert f"add up to {format_ns(printed['makespan_ns'])}." in " ".join(caption.value for caption in app.caption)


def test_limits_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    app = page("limits")
    printed = commanded(app, capsys)
    assert metrics(app)["Best list schedule"] == format_ns(printed["scopes"][-1]["best"]["makespan_ns"])
    assert metrics(app)["At most"] == str(printed["scopes"][-1]["parallelism"]["max"])


def test_memory_peak_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    app = page("memory")
    printed = commanded(app, capsys)
    assert f": {format_bytes(printed['peak_bytes'])} at " in app.subheader[0].value


def test_what_if_begins_at_the_baseline_and_follows_a_slider(capsys: pytest.CaptureFixture[str]) -> None:
    app = page("what-if")
    assert metrics(app)["What if"] == metrics(app)["Baseline"]
    assert not app.warning
    widget(app.slider, "SMs").set_value(66).run()
    assert not app.exception
    printed = commanded(app, capsys)
    assert metrics(app)["What if"] == format_ns(printed["whatif"]["makespan_ns"])
    assert metrics(app)["Baseline"] == format_ns(printed["baseline"]["makespan_ns"])
    assert printed["whatif"]["makespan_ns"] > printed["baseline"]["makespan_ns"]
    assert "Uncalibrated" in app.warning[0].value


def test_what_if_changes_gpu_batch_launch_and_op() -> None:
    app = page("what-if", trace="googlenet-infer-b1")
    widget(app.selectbox, "GPU to try").select("v100").run()
    assert "uncalibrated" in app.warning[0].value
    widget(app.selectbox, "GPU to try").select("h200").run()
    widget(app.slider, "Op speed-up, x").set_value(2.0).run()
    assert not app.warning
    assert metrics(app)["What if"] != metrics(app)["Baseline"]
    widget(app.selectbox, "Launched by").select("stream").run()
    widget(app.slider, "Hardware queues").set_value(1).run()
    assert not app.exception


def test_what_if_offers_the_other_batches() -> None:
    app = page("what-if", trace="googlenet-train-b8")
    widget(app.selectbox, "Batch").select(32).run()
    assert not app.exception
    assert "What if for 32 samples" in metrics(app)
    assert "For each sample" in " ".join(caption.value for caption in app.caption)


@pytest.mark.parametrize("name", [name for name in PAGES if name != "fidelity"])
def test_uncalibrated_hardware_is_marked_on_every_page_that_uses_it(name: str) -> None:
    model = load_hardware("v100")
    assert not model.calibrated
    app = page(name, hw="v100")
    assert not app.exception
    said = app.markdown if name in ("overview", "explore") else app.warning
    assert any("is uncalibrated" in each.value for each in said)
    assert not app.success  # no green verdict
    assert f"**{model.label}**" in app.markdown[0].value


def test_searched_schedule_is_shown_by_every_page_of_one_schedule() -> None:
    for name in ("timeline", "what-if", "memory"):
        app = page(name, policy="search")
        assert not app.exception
        assert not app.error


def test_fidelity_filters() -> None:
    app = page("fidelity")
    widget(app.multiselect, "Network").set_value(["googlenet"]).run()
    assert not app.exception
    assert set(app.dataframe[0].value["step"].str.partition("-")[0]) == {"googlenet"}
    widget(app.multiselect, "Policy").set_value(["search"]).run()
    assert set(app.dataframe[0].value["policy"]) == {"search"}


# --- Explore ---


def test_explore_runs_what_it_is_asked_to_and_keeps_it_for_the_overview() -> None:
    app = page("explore")
    widget(app.multiselect, "Policies").set_value(["wavefront"])
    widget(app.number_input, "Schedules, at most").set_value(64)
    widget(app.button, "Start").click().run()
    app = finished(app)
    assert not app.exception
    result = app.session_state["job"].result
    assert {row.policy for row in result.rows} == {"sequential", "wavefront", "search"}
    assert "--evaluations 64" in app.code[-1].value
    assert "left out here" in " ".join(caption.value for caption in app.caption)
    assert list(app.session_state["explorations"].values()) == [result]


def test_explore_stops_when_told_to() -> None:
    app = page("explore")
    widget(app.number_input, "Search, seconds").set_value(300)
    widget(app.button, "Start").click().run()
    widget(app.button, "Stop").click().run()
    app = finished(app)
    assert not app.exception
    assert app.session_state["job"].stopped


def test_explore_searches_partitions_and_says_what_they_gain() -> None:
    app = page("explore")
    widget(app.multiselect, "Policies").set_value(["wavefront"])
    widget(app.number_input, "Schedules, at most").set_value(64)
    widget(app.text_input, "Partitions of the SMs").set_value(" 64+68 ").run()
    widget(app.button, "Start").click().run()
    app = finished(app)
    assert not app.exception
    assert "with partitions" in {row.policy for row in app.session_state["job"].result.rows}
    assert any(each.value.startswith("Partitions: ") for each in app.markdown)
    assert "--partitions 64+68" in app.code[-1].value


@pytest.mark.parametrize("asked", ["64", "64+69", "64+68+", "8+8+8+108", "![x](y)"])
def test_partitions_that_the_gpu_cannot_have_are_a_message(asked: str) -> None:
    app = page("explore")
    widget(app.text_input, "Partitions of the SMs").set_value(asked).run()
    assert not app.exception
    if asked == "64":  # the rest of the SMs is left unused by nobody: one partition is no split, but legal
        return
    assert [asked in error for error in errors(app)] == [True]
    assert widget(app.button, "Start").disabled


def test_what_if_settings_are_in_the_address_and_open_again() -> None:
    app = page("what-if", trace="googlenet-train-b8", policy="critical_path")
    assert set(address(app)) == {"page", "trace", "hw", "policy", "streams"}
    op = widget(app.selectbox, "Op").options[3]
    widget(app.selectbox, "GPU to try").select("a100-80gb").run()
    widget(app.selectbox, "Batch").select(32).run()
    widget(app.selectbox, "Launched by").select("stream").run()
    widget(app.slider, "Streams to try").set_value(2).run()
    widget(app.slider, "SMs").set_value(50).run()
    widget(app.slider, "DRAM bandwidth, x").set_value(0.5).run()
    widget(app.slider, "Launch cost, x").set_value(1.5).run()
    widget(app.slider, "Hardware queues").set_value(3).run()
    widget(app.selectbox, "Op").select_index(3).run()
    widget(app.slider, "Op speed-up, x").set_value(2.0).run()
    assert not app.exception
    assert set(NAMES) <= set(address(app))
    assert op
    again = opened(**address(app))
    assert not again.exception
    assert errors(again) == []
    assert address(again) == address(app)
    assert metrics(again) == metrics(app)
    widget(again.button, "Reset").click().run()
    assert not set(NAMES) & set(address(again))
    assert metrics(again)["What if"] == metrics(again)["Baseline"]


def test_what_if_settings_end_with_their_step() -> None:
    app = page("what-if", sms="50", bandwidth="2.0")
    assert widget(app.slider, "SMs").value == 50
    widget(app.selectbox, "Trace").select("vgg16-infer-b1").run()
    assert not set(NAMES) & set(address(app))
    assert widget(app.slider, "SMs").value == 132


NAMES = ("gpu", "batch", "launch", "on_streams", "sms", "bandwidth", "launch_cost", "queues", "op", "op_speed")


def test_the_dashboard_imports_nothing_of_the_command_line() -> None:
    for path in APP.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith("gpusim.cli") for name in names), path


def test_what_the_light_pages_repeat_is_what_the_search_says() -> None:
    from gpusim_dashboard import choice

    assert choice.SEARCH == searches.SEARCH


@pytest.fixture
def simulations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A line for each time that an engine is asked for anything."""
    calls: list[str] = []
    for kind, method in ((ReferenceEngine, "run"), (FastEngine, "run"), (BatchEngine, "evaluate")):
        original = getattr(kind, method)

        def counted(self: Any, *args: Any, _original: Any = original, _name: str = kind.__name__, **kwargs: Any) -> Any:
            calls.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(kind, method, counted)
    return calls


def test_no_page_simulates_again_what_any_page_has_simulated(simulations: list[str]) -> None:
    """Neither on a rerun nor for another user."""
    link = {"trace": "vgg16-infer-b1", "streams": "2", "policy": "round_robin"}
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


def test_the_first_page_is_computed_before_anybody_asks(simulations: list[str]) -> None:
    from gpusim_dashboard.ready import first_page

    first_page()
    simulations.clear()
    app = opened()
    assert not app.exception
    assert address(app)["trace"] == "googlenet-train-b8"
    assert simulations == []


def test_navigation_and_title_do_not_wait_for_the_engine() -> None:
    """The frame, which draws them, imports nothing that takes long."""
    code = f"import sys; sys.path.insert(0, {str(APP)!r}); import gpusim_dashboard.frame; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=APP.parent, capture_output=True, text=True, check=False)
    assert "'gpusim_dashboard.frame'" in done.stdout, done.stderr
    assert "'numba'" not in done.stdout
    assert "'gpusim.plan" not in done.stdout


# --- What is kept on disk ---


def forget() -> None:
    """What this process remembers, as after a restart."""
    from gpusim_dashboard import kept, results

    for cached in (kept._read, results._explored, results._step, results._breakdown):
        cached.clear()


def kept_files() -> list[Path]:
    return sorted(Path(os.environ["XDG_CACHE_HOME"]).glob("gpusim/dashboard/*.json"))


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget()


def everything(app: AppTest) -> list[Any]:
    """What a page shows, as data."""
    figures = [json.loads(each.proto.spec) for each in app.get("plotly_chart")]
    return [metrics(app), [each.value for each in (*app.success, *app.info, *app.caption, *app.code)], figures]


def test_after_a_restart_explorations_are_read_and_not_searched_again(
    empty_cache: None, simulations: list[str]
) -> None:
    first = {name: everything(page(name)) for name in ("overview", "explore")}
    assert len(kept_files()) == 1
    forget()
    simulations.clear()
    assert everything(page("overview")) == first["overview"]
    assert simulations == []
    assert everything(page("explore")) == first["explore"]
    assert set(simulations) <= {"ReferenceEngine"}  # the timeline of the schedule offered for download


def test_an_overview_on_disk_needs_no_engine(empty_cache: None) -> None:
    shown = metrics(page("overview"))
    code = (
        f"import sys; sys.path.insert(0, {str(APP)!r}); from streamlit.testing.v1 import AppTest\n"
        f"app = AppTest.from_file({str(APP / 'Home.py')!r}, default_timeout=60)\n"
        f"app.query_params['trace'] = {SMALL!r}; app.query_params['streams'] = '3'\n"
        "app.run(); print({each.label: each.value for each in app.metric}, 'numba' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=APP.parent, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == f"{shown} False", done.stderr


@pytest.mark.parametrize("broken", ["", "{", "rows", "key", "best"])
def test_what_is_broken_on_disk_is_computed_again(broken: str, empty_cache: None) -> None:
    first = {name: everything(page(name)) for name in ("overview", "explore")}
    [file] = kept_files()
    document = json.loads(file.read_bytes())
    if broken == "rows":
        document["explored"]["rows"][0]["schedule"]["order"][0] += 1
    elif broken == "key":
        document["key"] = "another"
    elif broken == "best":
        document["explored"]["best_row"] = 999
    text = broken if len(broken) < 2 else json.dumps(document)
    file.write_text(text, encoding="utf-8")
    forget()
    assert {name: everything(page(name)) for name in ("overview", "explore")} == first


def test_what_is_kept_is_for_one_question_and_one_state_of_the_code(
    empty_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpusim_dashboard import choice, kept

    first = choice.first()
    keys = {
        kept._key(each, question)
        for each in (first, replace(first, streams=3), replace(first, content="other"))
        for question in ((512,), (513,))
    }
    keys.add(kept._key(replace(first, hardware=load_hardware("v100")), (512,)))
    monkeypatch.setattr(kept, "_code", lambda: "edited")
    keys.add(kept._key(first, (512,)))
    assert len(keys) == 8


def test_a_folder_that_cannot_be_written_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty_cache: None
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    app = page("overview")
    assert not app.exception
    assert not app.error


# --- Addresses ---


def test_address_holds_the_state() -> None:
    app = page("timeline", policy="wavefront", hw="v100")
    assert address(app) == {"page": "timeline", "trace": SMALL, "hw": "v100", "policy": "wavefront", "streams": "3"}
    widget(app.selectbox, "Policy").select("round_robin").run()
    assert address(app)["policy"] == "round_robin"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("trace", "googlenet-train-b9", "did you mean 'googlenet-train-b8'"),
        ("trace", "../../../etc/passwd", "unknown trace"),
        ("trace", "upload-0123456789abcdef", "upload it again"),
        ("hw", "h2000", "did you mean 'h200'"),
        ("policy", "wave", "unknown policy"),
        ("streams", "0", "between 1 and 128"),
        ("streams", "many", "between 1 and 128"),
        ("streams", "9" * 5000, "between 1 and 128"),
        ("page", "nowhere", "unknown page"),
        ("gpu", "h2000", "did you mean 'h200'"),
        ("batch", "9", "one of 1"),
        ("launch", "by hand", "unknown launch mode"),
        ("on_streams", "33", "between 1 and 32"),
        ("sms", "265", "between 1 and 264"),
        ("bandwidth", "nan", "between 0.25 and 4"),
        ("launch_cost", "-1", "between 0 and 4"),
        ("queues", "9" * 5000, "between 1 and 32"),
        ("op", "![x](y)", "unknown op"),
        ("op_speed", "", "between 0.25 and 8"),
    ],
)
def test_a_broken_address_gives_a_message_and_the_page_opens(key: str, value: str, words: str) -> None:
    app = opened(**{"trace": SMALL, "streams": "2", key: value})
    assert not app.exception
    [error] = errors(app)
    assert f"{key}=" in error
    assert words in error
    assert app.title[0].value == "Overview"
    assert not app.run().error  # said once


def test_a_broken_address_is_one_banner() -> None:
    app = opened(trace="zz", hw="zz", policy="zz", streams="0", page="zz", sms="0")
    [error] = errors(app)
    assert all(f"- {key}=" in error for key in ("trace", "hw", "policy", "streams", "page", "sms"))


def test_streams_beyond_the_slider_are_kept() -> None:
    app = page("timeline", streams="128")
    assert not app.exception
    assert address(app)["streams"] == "128"


# --- The command ---


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What `gpusim app` would become."""
    found: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, words: found.append(words))
    return found


def call(*words: str) -> None:
    with patch.object(sys, "argv", ["gpusim", "app", *words]):
        main()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def test_command_starts_streamlit_for_this_machine_only_and_without_statistics(executed: list[list[str]]) -> None:
    port = free_port()
    call("--port", str(port), "--headless")
    [words] = executed
    assert words[1] == str(resource_dir("app") / "serve.py")
    assert "--server.address=127.0.0.1" in words
    assert f"--server.port={port}" in words
    assert "--server.headless=true" in words
    assert "--browser.gatherUsageStats=false" in words


def test_a_port_in_use_is_one_line(executed: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(SystemExit) as caught:
            call("--port", str(port))
    assert caught.value.code == 2
    assert executed == []
    [line] = capsys.readouterr().err.splitlines()
    assert f"--port {port}" in line
    assert "in use" in line


def test_without_streamlit_the_line_names_the_extra(
    executed: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as caught:
        call("--headless")
    assert caught.value.code == 2
    assert executed == []
    [line] = capsys.readouterr().err.splitlines()
    assert "gpusim[app]" in line


def test_every_page_is_in_the_folder_that_the_wheel_packs() -> None:
    assert {path.stem.replace("_", "-") for path in (APP / "views").glob("*.py")} == set(PAGES)
