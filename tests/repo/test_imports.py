"""Importing gpusim is cheap and has no side effects."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpusim

PACKAGE = Path(gpusim.__file__).parent


def _module_name(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = sorted(
    _module_name(file)
    for file in PACKAGE.rglob("*.py")
    if file.name != "__main__.py" and "_data" not in file.relative_to(PACKAGE).parts
)
CORE = [name for name in MODULES if not name.startswith(("gpusim.gpu", "gpusim.report.figures"))]

# Imports the modules named by argv[1] and reports as JSON: the packages loaded, and every trace left besides.
# The audit hook sees files opened for writing by anything, however deep (open: flags; os.mkdir, os.rename, os.remove).
PROBE = """
import importlib, json, logging, multiprocessing, os, signal, sys
written = []

def watch(event, args):
    if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        if args[0] != os.devnull:
            written.append(f"open {args[0]}")
    elif event in ("os.mkdir", "os.rename", "os.remove", "os.system", "subprocess.Popen", "socket.connect"):
        written.append(f"{event} {args[0]}")

def state():
    return {
        "cwd": os.getcwd(),
        "environment": dict(os.environ),
        "log handlers": len(logging.root.handlers),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "interrupt handler": repr(signal.getsignal(signal.SIGINT)),
    }

before = state()
sys.addaudithook(watch)
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
after = state()
report = {
    "packages": sorted({name.partition(".")[0] for name in sys.modules}),
    "written": list(written),
    "changed": [key for key in before if before[key] != after[key]],
}
print(json.dumps(report))
"""


def probe(modules: list[str], folder: Path) -> dict[str, list[str]]:
    """Return what importing `modules` in a new interpreter loads, writes and changes; `folder` is its home and
    temporary.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(PACKAGE.parent),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(folder),
        "TMPDIR": str(folder),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(modules)],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, list[str]] = json.loads(done.stdout)  # fails where a module prints
    assert done.stderr == ""
    return report


def test_command_line_starts_without_what_help_does_not_need(tmp_path: Path) -> None:
    loaded = probe(["gpusim", "gpusim.cli"], tmp_path)["packages"]
    assert set(loaded).isdisjoint({"torch", "torchvision", "timm", "streamlit", "plotly", "pandas", "simpy", "numba"})


def test_core_imports_neither_torch_nor_the_dashboards_packages(tmp_path: Path) -> None:
    loaded = probe(CORE, tmp_path)["packages"]
    assert set(loaded).isdisjoint({"torch", "torchvision", "timm", "streamlit", "plotly"})


def test_figures_import_plotly_and_neither_torch_nor_what_draws_pngs(tmp_path: Path) -> None:
    figures = [name for name in MODULES if name.startswith("gpusim.report.figures.")]
    loaded = set(probe(figures, tmp_path)["packages"])
    assert "plotly" in loaded
    assert loaded.isdisjoint({"torch", "streamlit", "kaleido"})


def test_importing_changes_nothing(tmp_path: Path) -> None:
    report = probe(CORE, tmp_path)
    assert report["written"] == []
    assert report["changed"] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", MODULES)
def test_public_names_exist(name: str) -> None:
    if name.startswith("gpusim.gpu") and importlib.util.find_spec("torch") is None:
        pytest.skip(f"{name} needs torch, which the tests' command of the README installs")
    module = importlib.import_module(name)
    names = getattr(module, "__all__", [])
    assert len(names) == len(set(names))
    assert [public for public in names if not hasattr(module, public)] == []


def test_figures_have_pandas_before_they_draw() -> None:
    """If two sessions draw while pandas is being imported, plotly takes the partial module for the whole."""
    words = (
        "import sys, gpusim.report.figures; print('plotly' in sys.modules, hasattr(sys.modules['pandas'], 'Series'))"
    )
    shown = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["False", "True"]
