"""The dashboard's pages, run by Streamlit's own test harness, and the command that starts it."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from typing import Any
from unittest.mock import patch

import pytest

from gpusim.cli import main
from gpusim.engine.batch import BatchEngine
from gpusim.engine.fast import FastEngine
from gpusim.engine.reference import ReferenceEngine
from gpusim.hardware.model import load_hardware
from gpusim.resources import resource_dir
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
    assert shown["Sequential graph"] == format_ns(printed["sequential_ns"])
    assert shown["Peak memory"] == format_bytes(printed["best"]["peak_bytes"])
    assert shown["Predicted speed-up"] == f"{printed['verdict']['speedup']:.2f}x"
    assert shown["Largest bound"] == format_ns(max(printed["bounds"].values()))
    assert printed["verdict"]["text"] in [box.value for box in (*app.success, *app.info)]
    low, high = printed["verdict"]["interval"]
    assert f"{low:.2f}x to {high:.2f}x" in widget(app.metric, "Predicted speed-up").delta


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
    widget(app.selectbox, "GPU").select("v100").run()
    assert "uncalibrated" in app.warning[0].value
    widget(app.selectbox, "GPU").select("h200").run()
    widget(app.slider, "is so many times as fast").set_value(2.0).run()
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
    assert any("uncalibrated" in warning.value for warning in app.warning)
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
    ],
)
def test_a_broken_address_gives_a_message_and_the_page_opens(key: str, value: str, words: str) -> None:
    app = opened(**{"trace": SMALL, "streams": "2", key: value})
    assert not app.exception
    assert any(f"{key}=" in error and words in error for error in errors(app))
    assert app.title[0].value == "Overview"
    assert not app.run().error  # said once


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
