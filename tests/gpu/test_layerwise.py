"""Ranks of plans as processes, by gloo on CPUs: their start and end, failures, commands and scripts."""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gpusim.errors import GpuError
from gpusim.formats.hardware import load_hardware
from gpusim.formats.topology import default_topology
from gpusim.gpu.calibrate.collectives import COLLECTIVES, measure_collectives
from gpusim.gpu.capture.estimate import capture_estimated
from gpusim.gpu.capture.options import CaptureOptions
from gpusim.gpu.layerwise import __main__ as layerwise
from gpusim.gpu.layerwise import check
from gpusim.trace.store import write_trace
from tests.support.layer_networks import ROOT, chain, start

CPU = torch.device("cpu")
GATED = """
import torch
from torch import nn


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.gate, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Linear(8, 6)

    def forward(self, x):
        x = nn.functional.hardswish(self.stem(x))
        x = x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))
        return self.last(x.mean((2, 3)))


def gated(batch):
    return Gated(), torch.randn(batch, 3, 9, 9)
"""


def test_a_rank_that_fails_ends_all_and_says_which() -> None:
    begin = time.monotonic()
    with pytest.raises(GpuError, match=r"rank 1 of 2 failed with exit status 3: it was me"):
        start(2, "fail")
    assert time.monotonic() - begin < 100
    assert ranks_left() == []


def test_a_rank_that_is_killed_ends_all() -> None:
    """Its last words are no reason where they are a warning."""
    with pytest.raises(GpuError, match=r"rank 1 of 2 was ended by signal 9 \(SIGKILL\): without a word$"):
        start(2, "die", program="lost_rank")
    assert ranks_left() == []


def test_ranks_that_never_end_are_ended() -> None:
    with pytest.raises(GpuError, match=r"ranks 0, 1 of 2 did not end within 2 s"):
        start(2, "wait", program="lost_rank", timeout_s=2)
    assert ranks_left() == []


def test_an_interrupted_run_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(layerwise, "launch", interrupted)
    assert layerwise.main(["vgg16-infer-b1", "--plan", "data", "--ranks", "2"]) == 130
    assert capsys.readouterr().err == "gpusim: interrupted\n"


def test_a_rank_ends_with_the_process_that_started_it() -> None:
    """Its end of the pipe closes, also where that process is killed."""
    program = "import time; from gpusim.gpu.layerwise.launch import end_with_starter as e; e(); time.sleep(600)"
    rank = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, cwd=ROOT)
    assert rank.stdin is not None
    assert rank.poll() is None
    rank.stdin.close()
    assert rank.wait(timeout=100) == 1


def ranks_left() -> list[str]:
    """Return processes that this process started and that are ranks of these tests."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = {*(folder / "cmdline").read_bytes().split(b"\0")}
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                continue
            if words & {b"tests.support.rank", b"tests.support.lost_rank"} and int(parent) == os.getpid():
                found.append(folder.name)
    return found


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({}, "RANK is not set"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE='two' is no number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 and WORLD_SIZE 2"),
    ],
)
def test_a_rank_without_torchruns_environment_ends_with_one_line(
    more: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in more.items():
        monkeypatch.setenv(name, value)
    assert layerwise.main(["vgg16-infer-b1", "--plan", "data"]) == 2
    assert capsys.readouterr().err.strip() == f"gpusim: {line}: start the ranks with torchrun"


def test_a_rank_of_its_own_ends_with_that_line() -> None:
    words = [sys.executable, "-m", "gpusim.gpu.layerwise", "vgg16-infer-b1", "--plan", "data"]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr.strip()) == (2, "gpusim: RANK is not set: start the ranks with torchrun")


def test_the_command_starts_ranks_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A captured network that no test of single layers has: squeeze-and-excitation in a file of its own."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    (tmp_path / "model.py").write_text(GATED, encoding="utf-8")
    options = CaptureOptions(spec=f"{tmp_path / 'model.py'}:gated", mode="train", batch=2)
    file = tmp_path / "gated.json.gz"
    write_trace(capture_estimated(options, load_hardware("h200"), lambda _: None), file)
    assert layerwise.main([str(file), "--plan", "model", "--dtype", "float64", "--ranks", "2", "--steps", "3"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["gpus"], document["plan"], document["outputs_equal"]) == (2, "model", True)
    assert len(document["steps_ns"]) == 3
    assert all(time_ns > 0 for time_ns in document["steps_ns"])
    assert document["graph_steps_ns"] == []


def test_what_differs_in_single_precision_is_compared_in_double(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank, told that no single-precision gradient is near enough."""
    (tmp_path / "model.py").write_text(GATED, encoding="utf-8")
    options = CaptureOptions(spec=f"{tmp_path / 'model.py'}:gated", mode="train", batch=2)
    file = tmp_path / "gated.json.gz"
    write_trace(capture_estimated(options, load_hardware("h200"), lambda _: None), file)
    monkeypatch.setattr(layerwise, "join", lambda: None)
    monkeypatch.setitem(check.TOLERANCE, torch.float32, -1.0)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        assert layerwise.main([str(file), "--plan", "data"]) == 0
    finally:
        dist.destroy_process_group()
    document = json.loads(capsys.readouterr().out)
    assert (document["compared_in"], document["outputs_equal"]) == ("float64", True)
    assert "in float32 gradients differ by" in document["notes"][-1]


def test_a_negative_number_of_steps_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        layerwise.main(["googlenet-train-b8", "--plan", "data", "--steps", "-1"])
    assert "--steps -1: 0 or more" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_ranks_step_replays_as_a_graph(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With its collectives, here of one rank, the step is recorded and timed."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    words = ["googlenet-train-b8", "--plan", "data", "--ranks", "1", "--steps", "3"]
    assert layerwise.main(words) == 0
    document = json.loads(capsys.readouterr().out)
    assert "no_graph" not in document
    assert len(document["graph_steps_ns"]) == 3
    assert statistics.median(document["graph_steps_ns"]) < statistics.median(document["steps_ns"])


@pytest.mark.parametrize(
    ("plan", "ranks", "line"),
    [
        ("data", "0", "gpusim: --ranks is 0: give a number from 1 to 1024"),
        ("layer", "1", "gpusim: rank 0 of 1 failed with exit status 2: gpusim: --plan layer: give the file that"),
        ("data", "1", "gpusim: rank 0 of 1 failed with exit status 2: gpusim: 'vgg16-infer-b1' is no training step"),
    ],
)
def test_ranks_that_cannot_run_end_with_one_line(
    plan: str, ranks: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    trace = "vgg16-infer-b1" if plan == "data" else "googlenet-train-b8"
    assert layerwise.main([trace, "--plan", plan, "--ranks", ranks]) == 2
    [found] = capsys.readouterr().err.splitlines()
    assert found.startswith(line)


# --- Without processes ---


def test_collectives_of_this_machine_become_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two CPUs with gloo: every collective at two sizes, in a topology that can be read again."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    base = default_topology(load_hardware("v100"))
    found = measure_collectives(2, base, "a test")
    assert [(curve.collective, curve.gpus, len(curve.points)) for curve in found.curves] == [
        (name, 2, 2) for name in COLLECTIVES
    ]
    assert all(time_ns > 0 for curve in found.curves for _, time_ns in curve.points)
    assert found.links == base.links
    with pytest.raises(GpuError, match="has 8 GPUs per node, fewer than the 16 to measure"):
        measure_collectives(16, base, "a test")


def test_steps_are_predicted_without_the_optimizer_that_no_rank_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "validate" / "layerwise")
    shares = importlib.import_module("measured_shares")
    planner = shares.Planner(chain(1).for_gpus(2), 2, shares.Shares(tmp_path / "shares.json"), CPU)
    assert planner.problem().times.optimizer_ns(1e6) == 0


def test_the_script_for_one_gpu_predicts_measures_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--quick` on a CPU: three plans of a small network, each rank's shares alone, then as a whole."""
    words = [sys.executable, str(ROOT / "validate" / "layerwise" / "ranks.py"), "--quick", "-o", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.splitlines()[-1] == "done"
    (file,) = tmp_path.glob("parallel_*.json")
    rows = json.loads(file.read_text())["cases"]
    assert [(row["plan"], row["gpus"], row["communication"]) for row in rows] == [
        (plan, 2, "predicted") for plan in ("data", "layer", "owt")
    ]
    assert all(row["predicted_ns"] > 0 and row["measured_ns"] > 0 for row in rows)
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "parallel_work").glob("*gpus-*.json"))
    monkeypatch.syspath_prepend(ROOT / "validate" / "layerwise")
    assert importlib.import_module("ranks").main(words[2:]) == 0
    after = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "parallel_work").glob("*gpus-*.json"))
    assert before == after
