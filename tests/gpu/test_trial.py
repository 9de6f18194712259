"""Trial of the best few schedules on the GPU: candidates, result, and the command without a GPU."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpusim.defaults import SEARCH, VARIANTS
from gpusim.errors import ReplayError
from gpusim.formats.measurement import SCHEMA, Measurement, OutputCheck
from gpusim.formats.trace import Gpu, Timing
from gpusim.gpu import trial as trial_module
from gpusim.gpu.replay import replay as replay_module
from gpusim.gpu.trial import try_best
from gpusim.plan.schedule import Schedule
from gpusim.report.trial_table import print_trial, trial_document
from gpusim.search.budget import POLICIES_WITH_VARIANTS
from gpusim.search.explore import explore
from gpusim.search.explored import Explored, Row
from gpusim.search.trial import contenders
from gpusim.trace.store import write_trace
from tests.support.helpers import build_graph, make_hardware, wide_trace

WIDE = wide_trace(6, 9000, 3)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def explored() -> Explored:
    return explore(
        build_graph(WIDE, make_hardware(chain_ns=100, slowdown=0.6)), streams=4, budget_s=60.0, evaluations=300
    )


def measurement(schedule: Schedule, time_ns: int, sequential_ns: int, equal: bool = True) -> Measurement:
    gpu = Gpu(name="g", driver="1", cuda="1", torch="1", cudnn="1", sm_clock_mhz=1, mem_clock_mhz=1)
    return Measurement(
        schema=SCHEMA,
        trace=WIDE.name,
        trace_hash="0",
        policy=schedule.policy,
        streams=schedule.stream_count,
        schedule=Timing(median_ns=time_ns, lo_ns=time_ns, hi_ns=time_ns, rounds=1),
        sequential=Timing(median_ns=sequential_ns, lo_ns=sequential_ns, hi_ns=sequential_ns, rounds=1),
        predicted_ns=schedule.predicted_ns or 0,
        predicted_sequential_ns=1,
        hardware="h",
        outputs=OutputCheck(
            equal=equal,
            bit_equal=equal,
            sequential_repeats=True,
            worst_error=0.0 if equal else 1.0,
            sequential_error=0.0,
            tolerance=1e-3,
            compared=1,
        ),
        peak_bytes=1,
        sequential_peak_bytes=1,
        events=0,
        gpu=gpu,
        date="2026-01-01",
        command="",
    )


Play = Callable[..., list[Schedule]]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Replace the GPU by given times; records the schedules that were tried."""

    def play(times_ns: Sequence[int], replayed_ns: int = 500, sequential_ns: int = 1000, equal: bool = True) -> Any:
        tried: list[Schedule] = []

        def trial_ns(graph: Any, schedules: Sequence[Schedule], **_: Any) -> list[int]:
            tried.extend(schedules)
            return list(times_ns[: len(schedules)])

        def replay(graph: Any, schedules: Sequence[Schedule], **_: Any) -> list[Measurement]:
            return [measurement(schedule, replayed_ns, sequential_ns, equal) for schedule in schedules]

        monkeypatch.setattr(replay_module, "trial_ns", trial_ns)
        monkeypatch.setattr(replay_module, "replay", replay)
        return tried

    return play


def test_contenders_are_the_best_of_each_policy_and_search_best_prediction_first(explored: Explored) -> None:
    found = contenders(explored)
    times = [row.makespan_ns for row in found]
    assert times == sorted(set(times)), "best first, none twice"
    assert times[0] == min(row.makespan_ns for row in explored.rows)
    policies = {row.policy for row in explored.rows} - {"search"}
    assert {explored.best_of(policy).makespan_ns for policy in policies} <= set(times)
    assert contenders(explored, 0) == []


def test_few_contenders_have_the_best_of_the_search_and_of_the_policies_among_them(explored: Explored) -> None:
    """A search's schedules are alike, and so are their prediction errors."""
    policies = [row for row in explored.rows if row.policy != SEARCH]
    best_ns = min(row.makespan_ns for row in policies)
    searched = explored.best_of(SEARCH)
    found = [
        dataclasses.replace(searched, policy=policy, streams=streams, makespan_ns=best_ns - 10 * less)
        for policy, streams, less in ((SEARCH, 3, 1), (VARIANTS, 3, 4), (VARIANTS, 4, 3), (VARIANTS, 5, 2))
    ]
    several = dataclasses.replace(explored, rows=(*policies, *found))
    for count, less in ((4, (4, 3, 1, 0)), (3, (4, 1, 0)), (2, (4, 1)), (1, (4,))):
        assert [row.makespan_ns for row in contenders(several, count)] == [best_ns - 10 * each for each in less]


def test_schedules_that_are_unlikely_to_be_the_fastest_are_tried_last(explored: Explored) -> None:
    """Each kind within reach takes its turn: searches, policies, and policies on other kernels, of each the best."""
    searched = explored.best_of(SEARCH)
    wanted = (
        (VARIANTS, "with variants", 4, 1000),
        (VARIANTS, "with variants", 8, 1001),
        (POLICIES_WITH_VARIANTS, "critical_path with variants", 4, 1020),
        (POLICIES_WITH_VARIANTS, "critical_path with variants", 8, 1021),
        (POLICIES_WITH_VARIANTS, "trtllm with variants", 4, 1030),
        (SEARCH, "search", 4, 1200),
        ("critical_path", "critical_path", 4, 1300),
    )
    rows = tuple(
        dataclasses.replace(
            searched,
            policy=policy,
            streams=streams,
            makespan_ns=1000 * us,
            events=0,
            schedule=searched.schedule.made(name, "test"),
        )
        for policy, name, streams, us in wanted
    )
    several = dataclasses.replace(explored, rows=rows)
    order = ([1000], [1000, 1020], [1000, 1001, 1020], [1000, 1001, 1020, 1030], [1000, 1001, 1020, 1030, 1200])
    for count, times_us in enumerate(order, 1):
        assert [row.makespan_ns // 1000 for row in contenders(several, count)] == times_us
    assert len(contenders(several)) == 6, "one schedule of a policy"


def test_fastest_in_the_trial_becomes_the_result_with_its_own_numbers(explored: Explored, play: Play) -> None:
    tried = play([700, 600, 800])
    found, trial = try_best(explored, 3, command="c")
    wanted = contenders(explored, 3)
    assert [schedule.predicted_ns for schedule in tried] == [row.makespan_ns for row in wanted]
    assert trial.fastest is trial.best is found.best is wanted[1]
    assert trial.times_ns == (700, 600, 800)
    assert found.schedule == tried[1]
    assert found.timeline.makespan_ns == found.best.makespan_ns == found.schedule.predicted_ns
    gain = found.attribution
    assert gain.concurrency_ns + gain.kernels_ns + gain.order_ns == found.sequential_ns - found.best.makespan_ns
    assert found.rows == explored.rows


def test_only_the_result_of_a_trial_is_concluded_and_no_contender_that_lost(
    explored: Explored, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    concluded: list[Row] = []
    conclude = Explored.with_best

    def counted(self: Explored, row: Row) -> Explored:
        concluded.append(row)
        return conclude(self, row)

    monkeypatch.setattr(Explored, "with_best", counted)
    play([700, 600, 800])
    found, _ = try_best(explored, 3, command="c")
    assert concluded == [found.best]


def test_sequential_schedule_stays_where_the_fastest_is_not_faster(explored: Explored, play: Play) -> None:
    play([700], replayed_ns=1000, sequential_ns=1000)
    found, trial = try_best(explored, 1, command="c")
    assert found.best.policy == trial.best.policy == "sequential"
    assert found.schedule.stream_count == 1
    assert trial.fastest.policy != "sequential"


def test_sequential_schedule_that_wins_the_trial_needs_no_replay(explored: Explored, play: Play) -> None:
    count = len(contenders(explored))
    place = [row.policy for row in contenders(explored)].index("sequential")
    play([500 if number == place else 900 for number in range(count)])
    found, trial = try_best(explored, count, command="c")
    assert trial.measurement is None
    assert found.best.policy == "sequential"


def test_other_outputs_are_an_error(explored: Explored, play: Play) -> None:
    play([700, 600], equal=False)
    with pytest.raises(ReplayError, match="outputs differ"):
        try_best(explored, 2, command="c")


def test_first_of_equals_wins(explored: Explored, play: Play) -> None:
    play([600, 600])
    assert trial_module.fastest(explored.graph, [explored.schedule] * 2, 0) == ([600, 600], 0)


def test_report_has_every_schedule_tried_and_the_measured_speedup(
    explored: Explored, play: Play, capsys: pytest.CaptureFixture[str]
) -> None:
    play([700, 600])
    _, trial = try_best(explored, 2, command="c")
    document = trial_document(trial)
    assert [row["measured_ns"] for row in document["tried"]] == [700, 600]
    assert document["best"] == {"policy": trial.best.policy, "streams": trial.best.streams}
    print_trial(trial, WIDE)
    assert "2.00x over the sequential graph" in capsys.readouterr().out
    play([700], replayed_ns=1100)
    _, trial = try_best(explored, 1, command="c")
    print_trial(trial, WIDE)
    assert "the sequential graph stays" in " ".join(capsys.readouterr().out.split())


def test_command_prints_the_measured_result_as_json(
    explored: Explored, play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gpusim.cli import main

    play([700, 600, 650])
    write_trace(WIDE, tmp_path / "t.json")
    monkeypatch.setattr("gpusim.api.gpu.check_gpu", lambda step, trust_code: None)
    line = ["gpusim", "explore", str(tmp_path / "t.json"), "--budget", "0.1", "--measure", "2", "--json"]
    monkeypatch.setattr(sys, "argv", line)
    main()
    document = json.loads(capsys.readouterr().out)
    assert [row["measured_ns"] for row in document["measured"]["tried"]] == [700, 600]
    assert document["measured"]["measurement"]["schedule"]["median_ns"] == 500
    assert document["best"]["policy"] == document["measured"]["best"]["policy"]


def test_without_a_gpu_it_is_one_line_before_anything_is_searched(tmp_path: Path) -> None:
    write_trace(WIDE, tmp_path / "t.json")
    text = (tmp_path / "t.json").read_text().replace("aten.test.default", "aten.relu.default")
    (tmp_path / "t.json").write_text(text)
    line = [sys.executable, "-m", "gpusim", "explore", str(tmp_path / "t.json"), "--measure", "2", "--budget", "3600"]
    done = subprocess.run(
        line, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, timeout=120
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gpusim: no GPU: ")
    assert done.stderr.count("\n") == 1
