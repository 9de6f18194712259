"""`gpusim memory` on the command line: impossible requests are refused in one line, and no file is half written."""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from gpusim.cli import main
from gpusim.trace.store import write_trace
from tests.search.test_refine import hungry
from tests.support.memory_steps import SIZE, chain_step

MIB = 1 << 20


class Done(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command line in this process."""

    def call(*arguments: str | Path) -> Done:
        monkeypatch.setattr(sys, "argv", ["gpusim", *map(str, arguments)])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as exited:
            code = int(exited.code or 0)
        return Done(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training step of six convolutions with results of 4 MiB each."""
    path = tmp_path_factory.mktemp("traces") / "chain.json.gz"
    write_trace(chain_step(6, target="aten.convolution.default"), path)
    return path


def refused(done: Done) -> str:
    """Return the single line of a refused command."""
    assert (done.code, done.out) == (2, ""), done
    assert done.err.count("\n") == 1, done.err
    assert done.err.startswith("gpusim: ")
    return done.err


@pytest.mark.parametrize("policies", [(), ("--policy", "least_time"), ("--policy", "vdnn_all", "--policy", "vdnn_dyn")])
@pytest.mark.parametrize("option", ["--budget", "--memory"])
def test_budget_below_every_plan_names_the_smallest_that_works(
    run: Run, trace: Path, tmp_path: Path, policies: tuple[str, ...], option: str
) -> None:
    files = [tmp_path / "plan.json", tmp_path / "viewer.pickle", tmp_path / "front.html"]
    written = ["-o", files[0], "--snapshot", files[1], "--html", files[2]]
    line = refused(run("memory", trace, option, "1MiB", *policies, *written))
    found = re.fullmatch(
        r"gpusim: --budget 1 MiB: no plan keeps 1 MiB; the smallest budget that works for a plan found here is "
        r"(\d+) MiB: op '(\w+)' decides it, with the result of '(\w+)', 4 MiB(; .* are there before the step)?\n",
        line,
    )
    assert found is not None, line
    assert not any(tmp_path.iterdir())
    least = int(found[1])
    assert run("memory", trace, option, f"{least}MiB", "-o", files[0]).code == 0
    assert json.loads(files[0].read_bytes())["predicted_peak_bytes"] <= least * MIB
    assert f"is {least} MiB" in refused(run("memory", trace, option, f"{least - 1}MiB", *policies))
    line = refused(run("memory", trace, option, "1MiB", "--pinned", "4MiB", *policies))
    assert "no plan keeps 1 MiB with at most 4 MiB of pinned memory; the smallest budget that works" in line


def test_pinned_memory_that_is_not_there_keeps_tensors_on_the_gpu_and_says_so(run: Run, trace: Path) -> None:
    peaks = []
    for pinned, moved in (("0", 0), ("5MiB", 1), ("1GiB", None)):
        done = run("memory", trace, "--policy", "torch_offload", "--pinned", pinned, "--json")
        assert (done.code, done.err) == (0, "")
        row = json.loads(done.out)["policies"][1]
        assert row["pinned_bytes"] <= (moved or 1 << 40) * SIZE
        assert bool(row["kept_for_pinned"]) == (moved is not None)
        peaks.append(row["peak_bytes"])
    assert peaks[0] >= peaks[1] >= peaks[2]
    shown = " ".join(run("memory", trace, "--policy", "torch_offload", "--pinned", "5MiB").out.split())
    assert re.search(r"torch_offload.*\d stay", shown)


def test_plan_of_another_trace_is_refused(run: Run, tmp_path: Path) -> None:
    plan, measurement = tmp_path / "plan.json", tmp_path / "measured.json"
    assert run("memory", "resnet50-train-b8", "--policy", "vdnn_all", "-o", plan).code == 0
    line = refused(run("replay", "googlenet-train-b8", "--memory-plan", plan, "-o", measurement))
    assert line == (
        f"gpusim: {plan}: $.trace_hash: is a memory plan of another trace: of 'resnet50-train-b8', "
        "not of this 'googlenet-train-b8'\n"
    )
    assert not measurement.exists()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--budget", "99999999999GiB"), "--budget 99999999999GiB: a size such as 8GiB, or a number of MiB"),
        (("--budget", "much"), "--budget much: a size such as 8GiB, or a number of MiB"),
        (("--budget", "0"), "--budget 0: a size"),
        (("--pinned", "-1"), "--pinned -1: a size"),
        (("--policy", "vdnn_al"), "unknown memory policy 'vdnn_al'; did you mean 'vdnn_all'"),
        (("--sync", "never"), "synchronisation"),
    ],
)
def test_what_is_no_option_is_refused(run: Run, trace: Path, arguments: tuple[str, ...], problem: str) -> None:
    assert problem in refused(run("memory", trace, *arguments))


@pytest.mark.parametrize("policies", [(), ("--policy", "vdnn_all")])
def test_step_with_a_result_that_no_op_makes_is_refused(run: Run, tmp_path: Path, policies: tuple[str, ...]) -> None:
    """A broken or cut file: then keeping all is no plan, and there is nothing to compare with."""
    path, whole = tmp_path / "cut.json", chain_step(4)
    write_trace(msgspec.structs.replace(whole, ops=whole.ops[:1]), path)
    line = refused(run("memory", path, *policies))
    assert line.startswith(f"gpusim: {path}: the step cannot run as recorded: storage ")
    assert line.endswith("a result of the step, is gone at its end\n")


def test_what_no_plan_fits_names_the_policies_that_were_tried(run: Run, trace: Path) -> None:
    peak = json.loads(run("memory", trace, "--policy", "keep_all", "--json").out)["policies"][0]["peak_bytes"]
    done = run("memory", trace, "--policy", "keep_all", "--budget", f"{peak // MIB - 1}MiB")
    assert done.code == 0  # our own policy would keep it
    assert "None of these plans keeps" in done.out


@pytest.mark.parametrize("option", ["-o", "--snapshot"])
def test_plan_that_exceeds_the_budget_is_not_written(run: Run, trace: Path, tmp_path: Path, option: str) -> None:
    peak = json.loads(run("memory", trace, "--policy", "keep_all", "--json").out)["policies"][0]["peak_bytes"]
    budget, target = peak // MIB - 1, tmp_path / "plan"
    line = refused(run("memory", trace, "--policy", "keep_all", "--budget", f"{budget}MiB", option, target))
    assert line == f"gpusim: keep_all: its plan takes {peak // MIB} MiB, more than the budget of {budget} MiB\n"
    assert not target.exists()


def test_snapshot_of_a_plan_is_a_file_for_the_viewer_and_can_be_held_to(run: Run, trace: Path, tmp_path: Path) -> None:
    viewer = tmp_path / "viewer.pickle"
    done = run("memory", trace, "--policy", "keep_all", "--snapshot", viewer)
    assert (done.code, done.err) == (0, "")
    assert f"memory over time written to {viewer}" in done.out
    assert set(pickle.loads(viewer.read_bytes())) >= {"segments", "device_traces"}
    done = run("memory", trace, "--policy", "keep_all", "--measured", viewer, "--json")
    document = json.loads(done.out)
    measured = document["measured"]
    assert measured["peak_bytes"] == measured["predicted_peak_bytes"] == document["peak"]["bytes"]
    assert measured["prediction_error"] == 0
    assert measured["reserved_bytes"] == measured["simulated_reserved_bytes"]
    assert json.loads(run("memory", trace, "--policy", "keep_all", "--json").out)["measured"] is None


def test_run_that_took_more_than_predicted_shows_how_much(run: Run, trace: Path, tmp_path: Path) -> None:
    peak = json.loads(run("memory", trace, "--policy", "keep_all", "--json").out)["peak"]["bytes"]
    file = tmp_path / "run.pickle"
    event = {"action": "alloc", "addr": 0, "size": 2 * peak, "stream": 0, "frames": []}
    file.write_bytes(pickle.dumps({"segments": [], "device_traces": [[event]]}))
    shown = " ".join(run("memory", trace, "--policy", "keep_all", "--measured", file).out.split())
    assert f"Measured: 1 event on device 0, peak {2 * peak // MIB} MiB, reserved 0 B." in shown
    assert "The peak predicted for keep_all is -50.00% off." in shown


class _Runs:
    """Action of a hostile pickle."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def test_snapshot_that_would_run_something_is_refused_before_anything_is_written(
    run: Run, trace: Path, tmp_path: Path
) -> None:
    hostile, plan, mark = tmp_path / "run.pickle", tmp_path / "plan.json", tmp_path / "it-ran"
    hostile.write_bytes(pickle.dumps({"segments": _Runs(mark), "device_traces": [[]]}))
    line = refused(run("memory", trace, "--measured", hostile, "-o", plan))
    assert re.search(r"run.pickle: is no memory snapshot: asks for '\w+\.system', which is no plain value", line)
    assert not mark.exists()
    assert not plan.exists()
    assert "nothing.pickle: cannot be read" in refused(run("memory", trace, "--measured", tmp_path / "nothing.pickle"))


def test_explore_within_a_limit_that_no_schedule_keeps_writes_a_memory_plan(
    run: Run, trace: Path, tmp_path: Path
) -> None:
    """The plan keeps the limit; where nothing does, one line says how much is needed, and nothing is written."""
    plan = tmp_path / "plan.json"
    explore = ("explore", trace, "--budget", "0.05", "-o", plan)
    rows = json.loads(run(*explore, "--json").out)["results"]
    plan.unlink()
    limit = min(row["peak_bytes"] for row in rows) // MIB - 2 * SIZE // MIB
    best = json.loads(run(*explore, "--memory", f"{limit}MiB", "--json").out)["best"]
    assert best["policy"] == "memory_actions"
    assert best["peak_bytes"] <= limit * MIB
    document = json.loads(plan.read_text())
    assert document["schema"] == "gpusim-memory-plan/1"
    assert document["predicted_ns"] == best["makespan_ns"]
    plan.unlink()
    line = refused(run(*explore, "--memory", "1MiB"))
    assert re.match(
        r"gpusim: memory limit 1 MiB: the least that any schedule found needs is \d+ MiB; no plan keeps", line
    )
    assert "the smallest budget that works for a plan found here is" in line
    assert not plan.exists()


def test_explore_says_which_rows_do_not_keep_the_limit(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "hungry.json.gz"
    write_trace(hungry(), file)
    explore = ("explore", file, "--streams", "3", "--budget", "0.05", "--evaluations", "64")
    peaks = {row["policy"]: row["peak_bytes"] for row in json.loads(run(*explore, "--json").out)["results"]}
    limit = min(peaks.values())
    assert limit < max(peaks.values())
    done = run(*explore, "--memory", f"{limit}B")
    assert done.code == 0
    said = re.search(r"memory limit .*: not kept by (.*), so not recommended", " ".join(done.out.split()))
    assert said is not None, done.out
    assert {name for name, peak in peaks.items() if peak > limit} - {"search"} <= set(said[1].split(", "))
