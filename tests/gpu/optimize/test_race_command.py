"""The command `benchmarks/race.py`: what it writes, continues and refuses. On a GPU: graphs with spin kernels."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from gpusim.errors import OptionError
from gpusim.gpu.optimize import race_check
from gpusim.gpu.optimize.race import Racing
from gpusim.gpu.replay.cudagraph import WORKSPACE_VARIABLE
from gpusim.io.files import read_document
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from tests.support.networks import spec

FILE = Path(__file__).parents[3] / "benchmarks/race.py"
Command = Callable[..., int]


@pytest.fixture(scope="module")
def race() -> Iterator[ModuleType]:
    found = importlib.util.spec_from_file_location("race_command", FILE)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["race_command"] = module  # where its types are looked up
    found.loader.exec_module(module)
    yield module
    del sys.modules["race_command"]


@pytest.fixture
def command(race: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv(WORKSPACE_VARIABLE, ":4096:1")
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(gc, "freeze", lambda: None)  # those of other tests stay frozen
    monkeypatch.setattr(gc, "unfreeze", lambda: None)

    def run(*words: object, network: str = "branches", mode: str = "infer", cpu: bool = True) -> int:
        step = ("--step", spec(network), mode, 2, "--schedules", 4, "--events", 3, *["--cpu"] * cpu)
        monkeypatch.setattr("sys.argv", ["race.py", *map(str, (*step, *words))])
        result: int = race.main()
        return result

    return run


def found_in(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def test_output_counts_schedules_and_events(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "race.json"
    assert command("-o", out, "--frontends", "aten") == 0
    found = found_in(out)
    assert found["device"] == "cpu"
    assert "one by one" in found["runs"]
    assert found["versions"]["torch"] == torch.__version__
    assert found["totals"] == {
        "steps": 1,
        "schedules": 4,
        "wrong": 0,
        "removed": 3,
        "caught": 3,
        "wrong_with_the_event": 0,
    }
    (row,) = found["steps"]
    assert (row["frontend"], row["mode"], row["batch"], row["compared"]) == ("aten", "infer", 2, "bit for bit")
    said = capsys.readouterr()
    assert "1 of 1 steps on cpu: 0 of 4 schedules wrong; 3 of 3 removed events caught" in said.out
    assert "schedule 3 of 4, 0 wrong" in said.err
    assert "no GPU is used" in said.err


def test_kernels_of_inductor_are_checked_too(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "race.json"
    assert command("-o", out, "--frontends", "inductor", network="shared", mode="train") == 0
    assert found_in(out)["totals"]["caught"] == 3


@pytest.mark.usefixtures("two_threads")
def test_results_behind_atomic_additions_are_counted(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "race.json"
    assert command("-o", out, "--frontends", "inductor", network="table", mode="train") == 0
    (row,) = found_in(out)["steps"]
    pattern = r"bit for bit, but for [3-6] of 10 results behind atomic additions, within 0\.001"
    assert re.fullmatch(pattern, row["compared"])
    assert 0.0 <= row["largest_error"] < 1e-5


@pytest.mark.usefixtures("two_threads")
def test_deterministic_steps_add_nothing_atomically(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "race.json"
    words = ("-o", out, "--frontends", "inductor", "--deterministic")
    assert command(*words, network="table", mode="train") == 0
    found = found_in(out)
    assert found["deterministic"]
    assert (found["steps"][0]["compared"], found["steps"][0]["largest_error"]) == ("bit for bit", 0.0)
    assert "1 of 1 steps on cpu, by deterministic algorithms: 0 of 4" in capsys.readouterr().out
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.parametrize("asked", [True, False])
def test_algorithms_are_restored_after_an_error(race: ModuleType, asked: bool) -> None:
    def settings() -> tuple[bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory

    def fail() -> None:
        assert settings() == (asked, not asked)
        raise KeyError

    with pytest.raises(KeyError), race.algorithms(asked):
        fail()
    assert settings() == (False, True)


@pytest.mark.parametrize(("workspaces", "right"), [(":4096:8", True), (":16:8", True), (":4096:1", False)])
def test_deterministic_steps_on_a_gpu_need_workspaces_that_torch_takes(
    race: ModuleType, monkeypatch: pytest.MonkeyPatch, workspaces: str, right: bool
) -> None:
    monkeypatch.setenv(WORKSPACE_VARIABLE, workspaces)
    monkeypatch.setattr(race, "gpu_facts", lambda: SimpleNamespace(cuda="", driver="", cudnn=""))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    asked = argparse.Namespace(
        step=None, schedules=1, events=1, frontends=["aten"], dtype="tf32", seed=0, deterministic=True
    )
    said = nullcontext() if right else pytest.raises(OptionError, match="CUBLAS_WORKSPACE_CONFIG is ':4096:1'")
    with said:
        race.new(asked, torch.device("cuda"))


@pytest.mark.parametrize(("words", "expected"), [((), ":4096:1"), (("--deterministic",), ":4096:8")])
def test_workspaces_are_set_where_the_user_sets_none(
    command: Command, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], expected: str
) -> None:
    monkeypatch.delenv(WORKSPACE_VARIABLE)
    command("--schedules", -1, *words)
    assert os.environ[WORKSPACE_VARIABLE] == expected


def test_the_largest_error_of_a_right_result_is_kept(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schedule that is wrong, with infinity, does not count."""
    errors = iter((0.0, 2e-4, math.inf, 1e-4))
    monkeypatch.setattr(race_check.Reference, "error", lambda self, results: next(errors))
    monkeypatch.setattr(race_check.Reference, "tolerance", 1e-3)
    out = tmp_path / "race.json"
    assert command("-o", out, "--frontends", "aten", "--events", 0) == 1
    (row,) = found_in(out)["steps"]
    assert (row["wrong"], row["largest_error"]) == ([2], 2e-4)


def test_output_of_an_earlier_version_is_read(race: ModuleType) -> None:
    path = FILE.parents[1] / "research/data/race_cpu_20261129.json"
    assert "largest_error" not in path.read_text(encoding="utf-8")
    found = read_document(path, race.Found, race.SCHEMA, race.RaceFileError)
    assert {row.largest_error for row in found.steps} == {0.0}
    assert not found.deterministic


def test_an_interrupted_run_is_continued(command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, parts = tmp_path / "whole.json", tmp_path / "parts.json"
    assert command("-o", whole, "--frontends", "aten") == 0
    capsys.readouterr()
    for part in range(6):
        assert command("-o", parts, "--frontends", "aten", "--seconds", 0) == 1
        (row,) = found_in(parts)["steps"]
        assert row["schedules"] + len(row["removed"]) == part + 1
    assert "stopped after 0 s; the same command continues" in capsys.readouterr().out
    assert command("-o", parts, "--frontends", "aten") == 0
    ones, others = (found_in(path)["steps"][0] for path in (whole, parts))
    assert ones | {"seconds": 0} == others | {"seconds": 0}


def test_a_schedule_without_its_events_is_wrong(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Racing.of

    def of(graph: OpGraph, schedule: Schedule) -> Racing:
        racing = right(graph, schedule)
        while racing.events:
            racing = racing.without(0)
        return racing

    monkeypatch.setattr(Racing, "of", of)
    out = tmp_path / "race.json"
    assert command("-o", out, "--frontends", "aten") == 1
    assert found_in(out)["totals"]["wrong"] == 4


def test_nine_of_ten_removed_events_must_show(race: ModuleType) -> None:
    def passed(caught: int) -> bool:
        events = [race.Event(0, "a", "b", "b", "delay" if place < caught else "", True, 0) for place in range(10)]
        row = race.Row("spec", "infer", 1, "aten", schedules=5, removed=events)
        result: bool = race.Found("", "", "", "", "", "", {}, "", "tf32", 0, 5, 10, {}, [row]).passed
        return result

    assert [passed(caught) for caught in (10, 9, 8)] == [True, True, False]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--seed", 5), "is of another run: seed was 0, and is 5 now"),
        (("--deterministic",), "deterministic was False, and is True now"),
        (("--schedules", 9), "schedules was 4, and is 9 now"),
        (("--frontends", "aten", "inductor"), "of other steps"),
    ],
)
def test_output_of_another_run_is_kept(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[object, ...], said: str
) -> None:
    out = tmp_path / "race.json"
    assert command("-o", out, "--frontends", "aten", "--seconds", 0) == 1
    before = out.read_bytes()
    assert command("-o", out, "--frontends", "aten", *words) == 2
    assert said in capsys.readouterr().err
    assert out.read_bytes() == before


def test_mistakes_are_one_line(command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "race.json"
    out.write_text("{}", encoding="utf-8")
    for words, said in (
        (("-o", out), "race.json"),
        (("-o", tmp_path / "none" / "race.json"), "there is no folder"),
        (("--step", "a.py:b", "learn", 2), "mode 'learn' is neither train nor infer"),
        (("--step", "a.py:b", "train", 0), "batch '0' is no number from 1"),
        (("--schedules", -1), "--schedules: -1 is below 0"),
        (("--step", spec("branches"), "infer", 2), "a step is named twice"),
    ):
        assert command(*words) == 2
        err = capsys.readouterr().err
        assert said in err
        assert err.count("\n") == 1


def test_a_step_that_cannot_be_captured_is_named(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "race.json"
    assert command("-o", out, "--frontends", "aten", network="reads_a_value") == 1
    assert found_in(out)["steps"][0]["problem"]
    assert found_in(out)["totals"]["steps"] == 0


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # Inductor's, when it lowers a step
@pytest.mark.parametrize(
    ("network", "frontend"), [("branches", "aten"), ("branches", "inductor"), ("attention", "inductor")]
)
def test_schedules_on_a_gpu_are_right_and_missing_events_show(
    command: Command, tmp_path: Path, network: str, frontend: str
) -> None:
    out = tmp_path / "race.json"
    assert command("-o", out, "--frontends", frontend, network=network, mode="train", cpu=False) == 0
    found = found_in(out)
    assert found["runs"] == "CUDA graphs on streams"
    assert found["totals"]["caught"] == found["totals"]["removed"] == 3
    assert "delay" in {event["caught_by"] for event in found["steps"][0]["removed"]}
