"""Examples, notebook and quickstart: all of their code runs as printed."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import gpusim
from gpusim.cli import cli, main

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text()
BLOCK = re.compile(r"(<!-- needs: gpu -->\n)?```(python|sh)\n(.*?)```", re.DOTALL)


def run_python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run in a new interpreter, in `folder`, with this checkout's gpusim and no GPU."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def blocks(language: str, needs_gpu: bool) -> Iterator[str]:
    for gpu, found, text in BLOCK.findall(QUICKSTART):
        if found == language and bool(gpu) == needs_gpu:
            yield text


def commands(needs_gpu: bool) -> list[str]:
    lines = [line.partition("#")[0].strip() for text in blocks("sh", needs_gpu) for line in text.splitlines()]
    return [line for line in lines if line.startswith("gpusim ")]


# --- Scripts ---


def test_there_are_seven_scripts_and_a_notebook() -> None:
    assert len(SCRIPTS) == 7
    assert len(list(EXAMPLES.glob("*.ipynb"))) == 1


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script_runs_is_short_and_uses_the_front_door_alone(script: Path, tmp_path: Path) -> None:
    text = script.read_text()
    assert len(text.splitlines()) <= 60
    imported = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom | ast.Import)]
    modules = {name.name for node in imported if isinstance(node, ast.Import) for name in node.names}
    modules |= {str(node.module) for node in imported if isinstance(node, ast.ImportFrom)}
    assert {module for module in modules if module.startswith("gpusim")} == {"gpusim"}
    done = run_python(text, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert done.stderr == ""
    if script.stem == "your_own_model":  # needs a GPU
        assert done.stdout.startswith("skipped: no GPU: ")
        assert done.stdout.count("\n") == 1
    if script.stem == "export_to_perfetto":
        assert {path.name for path in tmp_path.iterdir()} == {"best.json", "timeline.json.gz"}


# --- The notebook ---


def test_every_cell_of_the_notebook_runs_and_shows_a_table_or_a_value(tmp_path: Path) -> None:
    (path,) = EXAMPLES.glob("*.ipynb")
    document = json.loads(path.read_text())
    assert (document["nbformat"], document["metadata"]["kernelspec"]["language"]) == (4, "python")
    cells = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    names: dict[str, object] = {}
    tables = 0
    for cell in cells:
        body = ast.parse("".join(cell["source"])).body
        assert isinstance(body[-1], ast.Expr), "a cell ends with what it shows"
        exec(compile(ast.Module(body[:-1], []), str(path), "exec"), names)
        value = eval(compile(ast.Expression(body[-1].value), str(path), "eval"), names)
        shown = getattr(value, "_repr_html_", lambda value=value: repr(value))()
        tables += "<table>" in shown
        assert 0 < len(shown) < 20_000
    assert tables >= 5


# --- The quickstart ---


def test_quickstart_says_how_many_steps_ship() -> None:
    assert len(gpusim.list_traces()) == 18
    assert "Eighteen steps ship with gpusim" in QUICKSTART


def test_python_of_the_quickstart_runs(tmp_path: Path) -> None:
    done = run_python("\n".join(blocks("python", needs_gpu=False)), tmp_path)
    assert done.returncode == 0, done.stderr
    for code, comment in re.findall(r"^print\((step|best)\)  # (<.*>)$", QUICKSTART, re.MULTILINE):
        assert comment in done.stdout, code
    assert "streams=300: the number of streams lies between 1 and 128" in done.stdout


def test_python_for_a_gpu_stops_where_the_gpu_is_needed(tmp_path: Path) -> None:
    code = "import gpusim\n" + "\n".join(blocks("python", needs_gpu=True)).replace(".cuda()", "")
    done = run_python(code, tmp_path)
    assert done.returncode == 1
    assert re.search(r"^gpusim\.errors\.GpuError: no GPU: ", done.stderr, re.MULTILINE), done.stderr


@pytest.mark.parametrize("command", commands(needs_gpu=False))
def test_command_of_the_quickstart_runs(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process; scripts and the quickstart's Python have one of their own."""
    monkeypatch.chdir(tmp_path)
    if "best.json" in command and "-o" not in command:
        gpusim.explore("googlenet-train-b8", evaluations=1).save("best.json")
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    main()
    printed = capsys.readouterr()
    assert printed.out
    assert printed.err == ""


@pytest.mark.parametrize("command", commands(needs_gpu=True))
def test_command_for_a_gpu_has_the_options_that_are_printed(command: str) -> None:
    words = shlex.split(command)[1:]
    known = {option for parameter in cli.commands[words[0]].params for option in parameter.opts}
    assert {word for word in words if word.startswith("-")} <= known


def test_quickstart_is_short() -> None:
    assert len(QUICKSTART.split()) < 700


@pytest.mark.gpu
def test_script_for_a_gpu_captures_explores_and_replays(tmp_path: Path) -> None:
    assert torch.cuda.is_available()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, EXAMPLES / "your_own_model.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "<Measurement " in done.stdout
