"""Names in files are untrusted text: every command accepts them, and none interprets them."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpusim.cli import main
from gpusim.formats.hardware import load_hardware
from gpusim.formats.trace import Trace
from gpusim.trace.store import write_trace
from tests.fuzz.bases import InThisProcess
from tests.io.test_text import is_clean
from tests.report.test_measured import kernels, measurement_of
from tests.support.helpers import wide_trace
from tests.support.made_results import case, make_results

ROOT = Path(__file__).parents[2]
NAMES = {
    "escape": "\x1b[31mred\x1b[0m\x07\x9b2J\x7f",
    "markup": "[/red]",
    "end of markup": "[/]",
    "link": "[link=http://evil.example]click[/link]:smile:",
    "direction": "a\u202egnp.exe\u2066\u200f",
    "lines": "a\nVerdict. Worth it: 9x\r\n\u2028\tb",
    "long": "n" * 2_000,
    "formula": "=cmd|'/C calc'!A0",
    "page": "<script>alert(1)</script><img src=x onerror=alert(2)>&amp;%{x}",
    "path": "../../../../../etc/passwd",
    "root": "/etc/**/passwd",
    "nul": "a\x00b",
    "empty": "",
}
Names = Callable[[str], str]


@pytest.fixture(params=list(NAMES))
def name(request: pytest.FixtureRequest) -> str:
    return NAMES[request.param]


@pytest.fixture
def folder(tmp_path: Path, name: str) -> Path:
    """Write a trace, a hardware model, a measured run, results and more, with the name in every possible place."""
    trace = hostile_trace(name)
    write_trace(trace, tmp_path / "t.json")
    model = load_hardware("h200")
    hardware = msgspec.structs.replace(model, name=name or "x", gpu=name or "x")
    (tmp_path / "hw.json").write_bytes(msgspec.json.encode(hardware))
    measured = kernels({"name": name, "args": {"stream": 7, "op": name, "layer": name, "grid": name, "bytes": name}})
    (tmp_path / "profile.json").write_bytes(measured)
    measurement = msgspec.structs.replace(measurement_of(trace), policy=name, hardware=name, command=name)
    (tmp_path / "replay.json").write_bytes(msgspec.json.encode(measurement))
    one = msgspec.structs.replace(case(1000, 1100, trace=name), policy=name, network=name)
    results = msgspec.structs.replace(make_results([one], recipe=name), gpu=name, hardware=name, command=name)
    (tmp_path / "results.json").write_bytes(msgspec.json.encode(results))
    quoted = msgspec.json.encode(name).decode().replace("\x7f", "\\u007f")
    (tmp_path / "sweep.toml").write_text(f"traces = [{quoted}]\npolicies = [{quoted}]\n")
    (tmp_path / "recipe.toml").write_text(
        f'name = {quoted}\n[[case]]\ntrace = {quoted}\nspec = {quoted}\nmode = "infer"\nbatch = 1\n'
    )
    return tmp_path


def hostile_trace(name: str) -> Trace:
    """Make a trace that gains from streams, with the name everywhere."""
    trace = wide_trace(eager_ns=400_000, graph_ns=130_000)
    gpu = msgspec.structs.replace(trace.provenance.gpu, driver=name, torch=name)
    ops = [
        msgspec.structs.replace(
            op,
            name=f"{name}{index}",
            layer=name,
            kernels=tuple(msgspec.structs.replace(kernel, name=name) for kernel in op.kernels),
        )
        for index, op in enumerate(trace.ops)
    ]
    return msgspec.structs.replace(
        trace,
        ops=tuple(ops),
        model=msgspec.structs.replace(trace.model, network=name, spec=name),
        provenance=msgspec.structs.replace(trace.provenance, gpu=gpu, command=name),
    )


@pytest.fixture
def say(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Run a command in the folder; its exit code must be 0 or 2, and its output clean."""
    monkeypatch.chdir(folder)

    def call(*words: str, codes: tuple[int, ...] = (0,)) -> str:
        monkeypatch.setattr(sys, "argv", ["gpusim", *words])
        capsys.readouterr()
        try:
            main()
            code: Any = 0
        except SystemExit as exited:
            code = exited.code or 0
        out, err = capsys.readouterr()
        assert code in codes, err
        assert is_clean((out + err).replace("\n", "")), words
        assert "Traceback" not in err
        assert not any(len(line) > 2_100 for line in err.splitlines())
        return out

    return call


SMALL = ("--streams", "2")


def test_commands_on_a_trace_take_any_name(say: Any, name: str) -> None:
    ops = f"{name}0,{name}1"
    # Names that a trace cannot have are refused in one line; all others work.
    loads = not re.search(r"[\x00]", name) and name != ""
    codes = (0,) if loads else (0, 2)
    for hardware in ((), ("--hw", "hw.json")):
        say("simulate", "t.json", *SMALL, *hardware, codes=codes)
        say("simulate", "t.json", *SMALL, *hardware, "--json", codes=codes)
        say("whatif", "t.json", *hardware, "--sms", "60", codes=codes)
        say("limits", "t.json", *SMALL, *hardware, codes=codes)
    say("limits", "t.json", *SMALL, "--json", "--csv", "limits.csv", codes=codes)
    say("explore", "t.json", *SMALL, "--evaluations", "2", "-o", "best.json", codes=codes)
    say("explore", "t.json", *SMALL, "--evaluations", "2", "--json", codes=codes)
    say("simulate", "t.json", "--schedule", "best.json", codes=(0, 2))
    say("explain", "t.json", codes=codes)
    say("explain", "t.json", "--window", "1us:20us", codes=codes)
    say("explain", "t.json", "--ops", "1,2", codes=(0, 2))
    say("explain", "t.json", "--ops", ops, codes=(0, 2))
    say("explain", "t.json", "--ops", f"{name}x,y", codes=(2,))
    say("explain", "t.json", "--json", codes=codes)
    say("whatif", "t.json", "--op", f"{name}1", "2", codes=(0, 2))
    say("whatif", "t.json", "--op", "none", "2", codes=(2,))


def test_output_files_take_any_name_and_hold_it_as_text(say: Any, name: str, folder: Path) -> None:
    codes = (0,) if name and "\x00" not in name else (0, 2)
    for kind in ("breakdown", "memory", *(("bounds",) if "<" in name else ())):
        say("figure", kind, "t.json", *SMALL, "--html", f"{kind}.html", codes=codes)
    say("simulate", "t.json", *SMALL, "--html", "s.html", "--measured", "profile.json", codes=(0, 2))
    say("simulate", "t.json", *SMALL, "--html", "r.html", "--measured", "replay.json", codes=(0, 2))
    say("simulate", "t.json", *SMALL, "--html", "n.html", "--measured", name, codes=(0, 2))
    say("simulate", "t.json", *SMALL, "--perfetto", "p.json", codes=codes)
    say("figure", "fidelity", "results.json", "--html", "f.html", codes=(0, 2))
    for page in folder.glob("*.html"):
        text = page.read_text()
        title = re.search(r"<title>(.*?)</title>", text, re.DOTALL)
        assert title is not None
        assert is_clean(title[1])
        assert "<script>alert(1)" not in text
        assert "<img src=x" not in text


def test_sweep_and_files_of_work_take_any_name(
    say: Any, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One name reaches a worker's process; a process for each would take half of the time of this test."""
    if name != NAMES["escape"]:
        monkeypatch.setattr("gpusim.sweep.local.LocalWorkers", InThisProcess)
    codes = (0,) if name and "\x00" not in name else (0, 2)
    store = ("--policy", "wavefront", "--streams", "2", "-o", "s.sqlite", "--workers", "1")
    say("sweep", "--trace", "t.json", *store, "--export", "s.csv", codes=codes)
    say("sweep", "-o", "s.sqlite", codes=(0, 2))
    say("sweep", "-o", "s.sqlite", "--json", codes=(0, 2))
    say("hardware", "--compare", "hw.json", "h200", codes=(0, 2))
    if "\x00" not in name:  # read_toml and globs of such a name: files that are not text
        say("sweep", "sweep.toml", "-o", "t.sqlite", codes=(2,))
        say("validate", "recipe.toml", codes=(2,))
    say("bench", "--trace", "t.json", "--seconds", "0.001", codes=codes)
    for table in folder.glob("*.csv"):
        with table.open(newline="") as file:
            cells = [cell for row in csv.reader(file) for cell in row]
        assert all(is_clean(cell) for cell in cells)
        assert not any(re.match(r"[=+@\t\r]|-(?![\d.])", cell) for cell in cells)


def test_names_on_the_command_line_are_values_too(say: Any, name: str) -> None:
    if "\x00" in name:  # a command line cannot contain it
        return
    word = name or "x"
    say("simulate", word, codes=(2,))
    for option in ("--policy", "--hw", "--engine", "--launch", "--schedule"):
        say("simulate", "squeezenet1_1-infer-b1", option, word, codes=(2,))
    for number in ("inf", "nan", "1" * 400):
        say("explore", "squeezenet1_1-infer-b1", "--memory", number, codes=(2,))
    say(f"no-{word}", codes=(2,))
    say("simulate", f"--no-{word}", codes=(2,))
    say("figure", word, "t.json", codes=(2,))
    say("explain", "squeezenet1_1-infer-b1", "--window", f"{word}:{word}", codes=(2,))
    say("explain", "squeezenet1_1-infer-b1", "--ops", "9" * 5_000 + ",1", codes=(2,))
    say("explain", "squeezenet1_1-infer-b1", "--window", "1" * 5_000 + "us:" + "2" * 5_000 + "us", codes=(2,))
