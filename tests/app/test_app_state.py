"""State of the dashboard on disk and in addresses, and the command that starts it."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
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
from gpusim.formats.hardware import load_hardware
from gpusim.io.resources import resource_dir
from tests.support.pages import (
    APP,
    REGISTRY,
    SMALL,
    address,
    errors,
    markup,
    metrics,
    opened,
    page,
    widget,
)


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


# --- What is kept on disk ---


def forget() -> None:
    """Clear the state of this process, as after a restart."""
    from gpusim_dashboard import kept, results

    for cached in (
        kept._read,
        results._explored,
        results._step,
        results._breakdown,
        results._timeline,
        results._concurrency,
    ):
        cached.clear()


def kept_files() -> list[Path]:
    return sorted(Path(os.environ["XDG_CACHE_HOME"]).glob("gpusim/dashboard/*.json"))


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget()


def everything(app: AppTest) -> list[Any]:
    """Return a page's content as data."""
    figures = [json.loads(each.proto.spec) for each in app.get("plotly_chart")]
    return [metrics(app), markup(app), [each.value for each in (*app.info, *app.caption)], figures]


def test_after_a_restart_explorations_are_read_and_not_searched_again(
    empty_cache: None, simulations: list[str]
) -> None:
    first = {name: everything(page(name)) for name in ("verdict", "search")}
    assert len(kept_files()) == 1
    forget()
    simulations.clear()
    assert everything(page("verdict")) == first["verdict"]
    assert simulations == []
    assert everything(page("search")) == first["search"]
    assert simulations == []


def test_a_verdict_on_disk_needs_no_engine(empty_cache: None) -> None:
    shown = metrics(page("verdict"))
    code = (
        f"import sys; sys.path.insert(0, {str(APP)!r}); from streamlit.testing.v1 import AppTest\n"
        f"app = AppTest.from_file({str(APP / 'Home.py')!r}, default_timeout=60)\n"
        f"app.query_params.update(page='verdict', trace={SMALL!r}, streams='3')\n"
        "app.run(); print({each.label: each.value for each in app.metric}, 'numba' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=APP.parent, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == f"{shown} False", done.stderr


@pytest.mark.parametrize("broken", ["", "{", "rows", "key", "best"])
def test_what_is_broken_on_disk_is_computed_again(broken: str, empty_cache: None) -> None:
    first = {name: everything(page(name)) for name in ("verdict", "search")}
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
    assert {name: everything(page(name)) for name in ("verdict", "search")} == first


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
    app = page("verdict")
    assert not app.exception
    assert not app.error


# --- Addresses ---


def test_address_holds_the_state() -> None:
    app = page("timeline", policy="wavefront", hw="v100")
    assert address(app) == {"page": "timeline", "trace": SMALL, "hw": "v100", "policy": "wavefront", "streams": "3"}
    widget(app.selectbox, "Schedule").select("round_robin").run()
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
    app = opened(**{"page": "verdict", "trace": SMALL, "streams": "2", key: value})
    assert not app.exception
    [error] = errors(app)
    assert f"{key}=" in error
    assert words in error
    wanted = "start" if key == "page" else "verdict"
    assert app.title[0].value == REGISTRY.PAGES[wanted].question
    assert not app.run().error  # said once


@pytest.mark.parametrize(
    ("name", "key", "value", "words"),
    [
        ("what-if", "gpu", "h2000", "did you mean 'h200'"),
        ("what-if", "batch", "9", "unknown batch '9'"),
        ("what-if", "launch", "by hand", "unknown launch 'by hand'"),
        ("what-if", "on_streams", "33", "between 1 and 32"),
        ("what-if", "sms", "265", "between 1 and 264"),
        ("what-if", "bandwidth", "nan", "between 0.25 and 4"),
        ("what-if", "launch_cost", "-1", "between 0 and 4"),
        ("what-if", "queues", "9" * 5000, "between 1 and 32"),
        ("what-if", "op", "![x](y)", "unknown op"),
        ("what-if", "op_speed", "", "between 0.25 and 8"),
        ("what-if", "nonsense", "1", "unknown setting 'nonsense'"),
        ("timeline", "launch", "hand", "unknown launch 'hand'"),
        ("timeline", "op", "nothing", "unknown op 'nothing'"),
        ("timeline", "measured", "nothing", "unknown measured 'nothing'"),
        ("search", "seconds", "0", "between 1 and 300"),
        ("search", "policies", "wave", "unknown policies 'wave'"),
        ("transfer", "gpus", "h2000", "unknown gpus 'h2000'"),
        ("transfer", "batches", "64", "unknown batches '64'"),
        ("compare", "a_step", "zz", "unknown a step 'zz'"),
        ("compare", "b_most", "33", "between 1 and 32"),
        ("accuracy", "network", "zz", "unknown network 'zz'"),
    ],
)
def test_a_setting_that_cannot_be_is_a_message_and_its_default_holds(
    name: str, key: str, value: str, words: str
) -> None:
    app = page(name, **{key: value})
    assert not app.exception
    [error] = errors(app)
    assert key in error
    assert words in error
    assert key not in address(app)
    assert not app.run().error  # said once


@pytest.mark.parametrize("name", REGISTRY.PAGES)
def test_what_a_page_does_not_know_leaves_its_address(name: str) -> None:
    app = page(name, nonsense="1")
    assert not app.exception
    assert "nonsense" not in address(app)


def test_a_broken_address_is_one_banner() -> None:
    app = page("what-if", trace="zz", hw="zz", policy="zz", streams="0", sms="0", gpu="zz")
    [error] = errors(app)
    assert all(f"- {key}=" in error for key in ("trace", "hw", "policy", "streams", "sms", "gpu"))


def test_streams_beyond_the_slider_are_kept() -> None:
    app = page("timeline", streams="128")
    assert not app.exception
    assert address(app)["streams"] == "128"


# --- The command ---


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record the program that `gpusim app` would execute."""
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


@pytest.mark.parametrize("work", ["first_page", "other_pages"])
def test_work_ahead_of_a_page_ends_silently_with_the_server(work: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(APP))
    from gpusim_dashboard import ready

    spec = importlib.util.spec_from_file_location("dashboard_serve", APP / "serve.py")
    assert spec is not None
    assert spec.loader is not None
    serve = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(serve)
    ended = threading.Event()

    def no_more_threads() -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(serve, "wait_for_server", lambda: None)
    monkeypatch.setattr(serve, "PATIENCE_S", 0.0)
    monkeypatch.setattr(serve, "DRAWING_S", 0.0)
    monkeypatch.setattr(ready, "first_page", lambda: None)
    monkeypatch.setattr(ready, work, no_more_threads)
    with pytest.raises(RuntimeError, match="cannot schedule"):
        serve.prepare(ended)
    ended.set()
    serve.prepare(ended)
