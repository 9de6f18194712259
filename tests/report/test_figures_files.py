"""Figures as files: HTML and PNG, and the commands that write them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpusim.cli import main
from gpusim.errors import FigureError, OutputError
from gpusim.formats.results import read_results
from gpusim.report.figures.explored import bounds_figure, gain_figure
from gpusim.report.figures.output import check_png, figure_html, write_html, write_png
from gpusim.search.explored import Explored
from gpusim.trace.store import write_trace
from tests.support.drawing import (
    ROOT,
    explored_step,
    fake_kaleido,
)
from tests.support.helpers import wide_trace


@pytest.fixture(scope="module")
def found() -> Explored:
    return explored_step()


# --- Files ---


def test_html_opens_without_a_network(found: Explored) -> None:
    text = figure_html(gain_figure(found), "a <title>")
    assert "<title>a &lt;title&gt;</title>" in text
    assert "plotly.js v" in text
    assert len(text) > 1_000_000
    assert '"showSendToCloud": false' in text  # no button that uploads
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)\s*=", text)


def test_html_of_the_same_figure_is_the_same(found: Explored) -> None:
    assert figure_html(gain_figure(found), "t") == figure_html(gain_figure(found), "t")


def test_html_that_cannot_be_written_leaves_nothing(
    found: Explored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OutputError, match="No space left on device"):
        write_html(tmp_path / "f.html", gain_figure(found), "t")
    assert not list(tmp_path.iterdir())


def test_png_is_asked_for_in_the_size_of_the_figure_and_without_a_network(
    found: Explored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, Any]] = []

    def draw(figure: Any, opts: Any, kopts: Any) -> bytes:
        calls.append((opts, kopts))
        return b"picture"

    fake_kaleido(monkeypatch, draw)
    figure = bounds_figure(found)
    write_png(tmp_path / "f.png", figure, width=900)
    assert (tmp_path / "f.png").read_bytes() == b"picture"
    ((options, kaleido_options),) = calls
    assert (options["format"], options["width"], options["height"]) == ("png", 900, figure.layout.height)
    assert kaleido_options["mathjax"] is False


def test_png_without_kaleido_or_browser_is_one_line_that_names_what_to_install(
    found: Explored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = bounds_figure(found)

    def draw(*_: object, **__: object) -> bytes:
        raise missing

    missing = fake_kaleido(monkeypatch, draw)("no chrome\nhere")
    with pytest.raises(FigureError, match=r"none was found: install one .*chromium"):
        write_png(tmp_path / "f.png", figure)
    missing = TimeoutError("no answer\nfor a minute")
    with pytest.raises(FigureError, match=r"drew no PNG \(TimeoutError: no answer for a minute\)"):
        write_png(tmp_path / "f.png", figure)
    monkeypatch.setitem(sys.modules, "kaleido", None)
    with pytest.raises(FigureError, match="pip install 'gpusim\\[app\\]'"):
        check_png()
    assert not list(tmp_path.iterdir())


# --- Commands ---


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "step.json"
    write_trace(wide_trace(), path)
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["gpusim", *map(str, arguments)])
    try:
        main()
    except SystemExit as exited:
        return int(exited.code or 0)
    return 0


@pytest.mark.parametrize("command", ["simulate", "limits"])
def test_commands_write_their_figure(
    command: str,
    trace_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page, picture = tmp_path / "f.html", tmp_path / "f.png"
    fake_kaleido(monkeypatch, lambda *_, **__: b"picture")
    assert run(monkeypatch, command, trace_file, "--html", page, "--png", picture) == 0
    out = capsys.readouterr().out.replace("\n", "")
    assert f"figure written to {page}" in out
    assert f"figure written to {picture}" in out
    assert "tiny-infer-b1" in page.read_text()
    assert picture.read_bytes() == b"picture"


def test_fidelity_figure_draws_bundled_results_a_file_and_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = sorted(
        path
        for path in (ROOT / "validate" / "results").glob("*.json")
        if not path.name.endswith(".pairs.json") and not path.name.startswith(("rules_", "parallel_"))
    )
    for source, cases in (
        ([], sum(len(read_results(path).cases) for path in results)),
        ([results[0]], len(read_results(results[0]).cases)),
        ([results[0].parent], sum(len(read_results(path).cases) for path in results)),
    ):
        assert run(monkeypatch, "figure", "fidelity", *source, "--html", tmp_path / "f.html") == 0
        assert f"{cases} replayed schedules" in (tmp_path / "f.html").read_text()
    (tmp_path / "empty").mkdir()
    for source, words in ((tmp_path / "empty", "has no file of results"), (tmp_path / "none.json", "cannot be read")):
        assert run(monkeypatch, "figure", "fidelity", source, "--html", tmp_path / "g.html") == 2
        [line] = capsys.readouterr().err.splitlines()
        assert words in line
        assert not (tmp_path / "g.html").exists()


def test_a_figure_of_a_trace_needs_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "figure", "bounds", "--html", "f.html") == 2
    assert capsys.readouterr().err == "gpusim: figure bounds: give a trace\n"


def test_json_stays_alone_on_standard_output_beside_a_figure(
    trace_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "simulate", trace_file, "--html", tmp_path / "f.html", "--json") == 0
    assert json.loads(capsys.readouterr().out)["trace"] == "tiny-infer-b1"


@pytest.mark.parametrize("command", ["simulate", "limits"])
@pytest.mark.parametrize(("missing", "option"), [("plotly", "--html"), ("plotly", "--png"), ("kaleido", "--png")])
def test_without_its_packages_a_figure_is_refused_before_the_work(
    command: str, missing: str, option: str, tmp_path: Path
) -> None:
    """The trace does not exist, so an error about the package shows that the package is checked first."""
    code = f"import sys; sys.modules[{missing!r}] = None; from gpusim.cli import main; main()"
    target = tmp_path / "out"
    words = [sys.executable, "-c", code, command, "missing.json", option, str(target)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert missing in done.stderr
    assert "pip install 'gpusim[app]'" in done.stderr
    assert not target.exists()


def test_without_a_figure_asked_for_plotly_is_not_imported(trace_file: Path) -> None:
    """Importing it, or the PNG renderer, would fail."""
    code = """
import sys
sys.modules["plotly"] = sys.modules["kaleido"] = None
from gpusim.cli import main
for words in (["simulate"], ["limits"], ["explore", "--budget", "0.05"]):
    sys.argv = ["gpusim", *words, sys.argv[-1]]
    main()
"""
    done = subprocess.run([sys.executable, "-c", code, str(trace_file)], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
