"""Exploration in a process of its own: its result, its end by the user or by a bug, and what each row has."""

from __future__ import annotations

import csv
import io
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from gpusim.defaults import SEARCH
from gpusim.errors import OptionError, WorkerError
from gpusim.formats.trace import Trace
from gpusim.report.explored_table import CSV_FIELDS, rows_csv
from gpusim.search.background import Exploration
from gpusim.search.explore import explore
from gpusim.search.explored import Explored
from tests.support.helpers import build_graph, make_hardware, wide_trace


def explored(trace: Trace | None = None) -> Explored:
    return explore(build_graph(trace or wide_trace(), make_hardware()), streams=3, budget_s=60.0, evaluations=8)


def test_background_exploration_finds_what_explore_finds() -> None:
    job = Exploration(build_graph(wide_trace(), make_hardware()), streams=3, budget_s=60.0, evaluations=8).start()
    job.wait(60)
    assert not job.running
    assert job.bug is None
    assert job.result is not None
    assert job.result.rows == job.rows == explored().rows


def searching(job: Exploration) -> Exploration:
    """Start it, and wait until it is past the policies."""
    job.start()
    deadline = time.monotonic() + 120
    while job.what != SEARCH:
        assert job.running
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return job


def test_a_stopped_search_keeps_the_best_found() -> None:
    job = searching(Exploration(build_graph(wide_trace(width=12), make_hardware()), streams=3, budget_s=600.0))
    job.stop()
    job.wait(60)
    assert (job.error, job.bug) == (None, None)
    assert job.result is not None
    assert job.result.interrupted
    assert any(row.policy == SEARCH for row in job.result.rows)


def test_stopped_before_the_search_there_is_no_result_and_no_bug() -> None:
    job = Exploration(build_graph(wide_trace(), make_hardware()), streams=3, budget_s=60.0)
    job.stop()
    job.start().wait(60)
    assert (job.result, job.error, job.bug) == (None, None, None)
    assert job.stopped


def test_an_interrupted_exploration_ends_without_a_bug() -> None:
    """Its process is gone, wherever it was."""
    job = searching(Exploration(build_graph(wide_trace(), make_hardware()), streams=3, budget_s=600.0))
    job.interrupt()
    job.wait(60)
    assert not job.running
    assert (job.result, job.error, job.bug) == (None, None, None)
    assert job.process is not None
    assert not Path(f"/proc/{job.process}").exists()


def test_what_goes_wrong_in_the_background_is_kept() -> None:
    job = Exploration(build_graph(wide_trace(), make_hardware()), streams=999, budget_s=60.0).start()
    job.wait(60)
    assert isinstance(job.error, OptionError)
    job = Exploration(build_graph(wide_trace(), make_hardware()), streams=3, budget_s=60.0, seed="x")  # type: ignore[arg-type]
    job.start().wait(60)
    assert isinstance(job.bug, RuntimeError)
    assert "TypeError" in str(job.bug)


def test_a_search_whose_process_is_killed_says_so() -> None:
    """For example by the system when memory runs out."""
    job = searching(Exploration(build_graph(wide_trace(), make_hardware()), streams=3, budget_s=600.0))
    assert job.process is not None
    os.kill(job.process, signal.SIGKILL)
    job.wait(60)
    assert isinstance(job.error, WorkerError)
    assert str(job.error) == "the process of the search was ended by SIGKILL"


def test_a_search_that_cannot_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", refused)
    with pytest.raises(WorkerError, match=r"no process can be started for the search: .*unavailable"):
        Exploration(build_graph(wide_trace(), make_hardware()), streams=3, budget_s=60.0).start()


def test_only_the_policies_named_run_besides_the_sequential_one() -> None:
    seen: list[str] = []
    found = explore(
        build_graph(wide_trace(), make_hardware()),
        streams=2,
        budget_s=60.0,
        evaluations=1,
        policies=("wavefront",),
        on_row=lambda row: seen.append(row.policy),
    )
    assert set(seen) == {"sequential", "wavefront", SEARCH}
    assert seen == [row.policy for row in found.rows]


def test_every_row_has_its_schedule_with_its_origin() -> None:
    found = explored()
    for row in found.rows:
        origin = (row.schedule.policy, row.schedule.made_by, row.schedule.predicted_ns)
        assert origin == (row.policy, found.schedule.made_by, row.makespan_ns)
    assert found.schedule is found.best.schedule


def test_csv_has_a_row_for_each_schedule_and_says_what_is_uncalibrated() -> None:
    found = explored()
    rows = list(csv.DictReader(io.StringIO(rows_csv(found.rows, "t", "h (uncalibrated)", calibrated=False))))
    assert tuple(rows[0]) == CSV_FIELDS
    assert [int(row["makespan_ns"]) for row in rows] == [row.makespan_ns for row in found.rows]
    assert {row["calibrated"] for row in rows} == {"false"}
