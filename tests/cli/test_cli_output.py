"""Output of a command: a reader that leaves, a full disk; and the file that an error names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from gpusim.cli import main
from gpusim.formats.hardware import load_hardware
from gpusim.trace.store import write_trace
from tests.support.helpers import wide_trace

ROOT = Path(__file__).parents[2]
FULL = Path("/dev/full")
COMMANDS = {
    "help": ("--help",),
    "version": ("--version",),
    "traces": ("traces",),
    "hardware": ("hardware",),
    "hardware as JSON": ("hardware", "--json"),
    "simulate": ("simulate", "t.json"),
    "simulate as JSON": ("simulate", "t.json", "--json"),
    "limits": ("limits", "t.json", "--streams", "2"),
    "explain": ("explain", "t.json"),
    "whatif": ("whatif", "t.json"),
    "explore": ("explore", "t.json", "--streams", "2", "--evaluations", "1"),
    "sweep": ("sweep", "--trace", "t.json", "--policy", "sequential", "--workers", "1", "-o", "s.sqlite"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_trace(wide_trace(), tmp_path / "t.json")
    return tmp_path


def gpusim(folder: Path, *words: str, stdout: int | None = None, stderr: int = subprocess.PIPE) -> tuple[int, str]:
    """Run a command with this standard output; returns exit code and errors."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "gpusim", *words]
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=stdout, stderr=stderr, text=True, check=False, timeout=300
    )
    return done.returncode, done.stderr or ""


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_reader_that_leaves_ends_every_command_silently(folder: Path, words: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert gpusim(folder, *words, stdout=writer) == (0, "")
    finally:
        os.close(writer)


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_full_disk_is_one_line_and_exit_code_2(folder: Path, words: tuple[str, ...]) -> None:
    with FULL.open("w") as full:
        code, errors = gpusim(folder, *words, stdout=full.fileno())
    assert code == 2
    assert errors == "gpusim: standard output: cannot be written: No space left on device\n"


def test_a_full_disk_for_errors_changes_no_exit_code(folder: Path) -> None:
    with FULL.open("w") as full:
        assert gpusim(folder, "simulate", "none", stdout=subprocess.DEVNULL, stderr=full.fileno())[0] == 2
        assert gpusim(folder, "bench", "--trace", "t.json", "--seconds", "0.001", "--json",
                      stdout=subprocess.DEVNULL, stderr=full.fileno())[0] == 0  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        ("simulate", "t.json", "--perfetto", "/dev/full"),
        ("simulate", "t.json", "--html", "/dev/full"),
        ("limits", "t.json", "--streams", "2", "--csv", "/dev/full"),
        ("explore", "t.json", "--evaluations", "1", "-o", "/dev/full"),
    ],
    ids=lambda words: words[-2],
)
def test_an_output_file_on_a_full_disk_is_one_line_and_exit_code_2(folder: Path, words: tuple[str, ...]) -> None:
    code, errors = gpusim(folder, *words, stdout=subprocess.DEVNULL)
    assert (code, errors) == (2, "gpusim: /dev/full: cannot be written: No space left on device\n")


@pytest.mark.parametrize(
    ("option", "name", "problem"),
    [
        ("--html", "page.pdf", "would hold a page for a browser; use the suffix .html"),
        ("--png", "page.html", "would hold a PNG image; use the suffix .png"),
    ],
)
def test_a_figure_is_not_written_under_the_suffix_of_another_kind(
    folder: Path, option: str, name: str, problem: str
) -> None:
    code, errors = gpusim(folder, "simulate", "t.json", option, name, stdout=subprocess.DEVNULL)
    assert (code, errors) == (2, f"gpusim: {name}: {problem}\n")
    assert not (folder / name).exists()


def test_output_in_an_encoding_that_lacks_a_character_is_no_traceback(folder: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "gpusim", "limits", "t.json", "--streams", "2"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


@pytest.mark.parametrize("command", ["simulate", "explore", "limits", "explain", "whatif"])
def test_a_hardware_model_without_room_for_a_kernel_is_named_itself(
    folder: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    model = load_hardware("h200")
    limits = msgspec.structs.replace(model.limits, threads_per_block=8)
    Path("hw.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(model, name="tiny", limits=limits)))
    monkeypatch.setattr(sys, "argv", ["gpusim", command, "t.json", "--hw", "hw.json"])
    with pytest.raises(SystemExit) as exited:
        main()
    assert exited.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("gpusim: hw.json: has no room for a kernel of t.json: $.ops[0].kernels[0]: kernel '")
    assert error.endswith("the GPU's limit is 8 on 'tiny'\n")


def test_a_kernel_over_the_limits_of_a_bundled_model_is_the_traces(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    trace = wide_trace()
    kernel = msgspec.structs.replace(trace.ops[0].kernels[0], smem_bytes=300 * 1024)
    ops = (msgspec.structs.replace(trace.ops[0], kernels=(kernel,)), *trace.ops[1:])
    write_trace(msgspec.structs.replace(trace, ops=ops), Path("big.json"))
    monkeypatch.setattr(sys, "argv", ["gpusim", "simulate", "big.json", "--hw", "h200"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err.startswith("gpusim: big.json: $.ops[0].kernels[0]: kernel '")
