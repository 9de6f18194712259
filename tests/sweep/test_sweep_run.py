"""Sweeps on local processes: results, workers that die, and every way to be stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gpusim.api import sweeps
from gpusim.bounds.bounds import bounds
from gpusim.engine.base import ENGINES, engine_by_name
from gpusim.errors import SweepError, WorkerError
from gpusim.formats.hardware import load_hardware
from gpusim.formats.sweep import Sweep
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.policies.registry import policy_by_name
from gpusim.sweep import local as local_module
from gpusim.sweep import point as point_module
from gpusim.sweep.grid import Grid, build_grid, trace_hash
from gpusim.sweep.local import LocalWorkers
from gpusim.sweep.run import run_sweep
from gpusim.sweep.store import Store
from gpusim.sweep.summary import best_points, failures
from gpusim.trace.store import write_trace
from tests.support.helpers import wide_trace
from tests.support.sweeping import (
    ENGINE,
    InThisProcess,
    Spy,
    arguments,
    computed,
    finished,
    gpusim,
    grid,
    numbers,
    over_the_limit,
    rows_of,
    small_grid,
    spy,
    wait_until,
    write_traces,
)

__all__ = ["grid", "spy"]  # fixtures


# --- Results ---


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_are_what_a_direct_simulation_gives(engine: str, tmp_path: Path) -> None:
    grid = small_grid(tmp_path, engine=engine)
    rows = computed(grid, tmp_path / "s.sqlite")
    assert len(rows) == len(grid.points)
    assert {row.engine for row in rows} == {engine}
    for row in rows:
        width = 3 if row.trace_hash == trace_hash(wide_trace(3)) else 5
        graph = OpGraph.build(wide_trace(width), load_hardware("h200"))
        schedule = policy_by_name(row.policy)(graph, row.streams)
        timeline = engine_by_name(row.engine).run(lower(graph, schedule), graph.hardware)
        bound = bounds(graph)
        assert (row.makespan_ns, row.peak_bytes) == (timeline.makespan_ns, timeline.peak_bytes)
        assert (row.critical_path_ns, row.area_ns) == (bound.critical_path_ns, bound.area_ns)
        assert (row.bandwidth_ns, row.front_end_ns) == (bound.bandwidth_ns, bound.front_end_ns)
        assert row.contention_ns == bound.contention_ns
        assert (row.network, row.mode, row.batch, row.dtype, row.hardware) == ("tiny", "infer", 1, "tf32", "h200")
        assert row.calibrated is True
        assert row.error is None
    alone = {row.trace_hash: row.makespan_ns for row in rows if row.policy == "sequential"}
    assert all(row.sequential_ns == alone[row.trace_hash] for row in rows)
    assert all(
        row.speedup == row.sequential_ns / row.makespan_ns for row in rows if row.sequential_ns and row.makespan_ns
    )
    assert max(row.speedup or 0 for row in rows) > 1.5


def test_local_processes_give_the_same_as_this_one(grid: Grid, tmp_path: Path) -> None:
    with Store(tmp_path / "local.sqlite") as store:
        swept = run_sweep(grid, store, LocalWorkers(2))
        found = store.rows()
    assert (swept.computed, swept.failed, swept.interrupted) == (len(grid.points), 0, False)
    assert numbers(found) == numbers(computed(grid, tmp_path / "here.sqlite"))
    processes = {int(row.worker.rpartition(":")[2]) for row in found}
    assert len(processes) <= 2, "one of two may have done it all on a busy machine"
    assert os.getpid() not in processes


def test_points_in_the_store_are_not_computed_again(grid: Grid, tmp_path: Path) -> None:
    rows = computed(grid, tmp_path / "s.sqlite")
    wider = small_grid(tmp_path, streams=(2, 3, 4, 5))
    with Store(tmp_path / "s.sqlite") as store:
        again = run_sweep(grid, store, InThisProcess())
        more = run_sweep(wider, store, InThisProcess())
        assert {row.key: row for row in store.rows()}.items() >= {row.key: row for row in rows}.items()
    assert (again.before, again.computed, again.done) == (20, 0, 20)
    assert (more.before, more.computed, more.done) == (20, 6, 26)


def test_point_that_fails_is_recorded_and_tried_again_only_when_asked(tmp_path: Path) -> None:
    write_trace(over_the_limit(), tmp_path / "big.json")
    write_traces(tmp_path, (3,))
    names = (str(tmp_path / "big.json"), str(tmp_path / "wide3.json"))
    grid = build_grid(
        Sweep(traces=names, hardware=("p100",), policies=("sequential", "wavefront"), streams=(2,), engine=ENGINE)
    )
    with Store(tmp_path / "s.sqlite") as store:
        first = run_sweep(grid, store, InThisProcess())
        second = run_sweep(grid, store, InThisProcess())
        third = run_sweep(grid, store, InThisProcess(), retry_failed=True)
        rows = store.rows()
    assert [(swept.computed, swept.failed) for swept in (first, second, third)] == [(4, 2), (0, 0), (2, 2)]
    bad = [row for row in rows if row.error is not None]
    assert len(rows) == 4
    assert len(bad) == 2
    assert all("300 registers a thread" in str(row.error) for row in bad)
    assert {(row.makespan_ns, row.sequential_ns, row.speedup, row.area_ns, row.peak_bytes) for row in bad} == {
        (None,) * 5
    }
    (failure,) = failures(rows)
    assert (failure.trace, failure.hardware, failure.points) == ("tiny-infer-b1", "p100 (uncalibrated)", 2)


def test_bug_is_raised_at_the_end_and_the_other_points_are_kept(
    grid: Grid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> Any:
        if name == "round_robin":
            return lambda graph, streams: 1 // 0
        return policy_by_name(name)

    monkeypatch.setattr(sweeps, "policy_by_name", broken)
    point_module._prepare.cache_clear()
    with Store(tmp_path / "s.sqlite") as store:
        with pytest.raises(RuntimeError, match=r"(?s)6 points ran into a bug.*round_robin.*ZeroDivisionError"):
            run_sweep(grid, store, InThisProcess())
        assert {row.policy for row in store.rows()} == {"sequential", "wavefront", "critical_path"}
        assert len(store.rows()) == 14


def test_best_is_the_fastest_and_of_equals_the_one_with_fewest_streams(grid: Grid, tmp_path: Path) -> None:
    rows = computed(grid, tmp_path / "s.sqlite")
    best = best_points(rows)
    assert len(best) == 2
    for found in best:
        group = [row for row in rows if row.trace_hash == found.row.trace_hash]
        assert found.points == len(group) == 10
        assert found.row.makespan_ns == min(row.makespan_ns for row in group if row.makespan_ns is not None)
        assert found.row.streams == min(row.streams for row in group if row.makespan_ns == found.row.makespan_ns)
        assert found.limit >= (found.row.speedup or 0)


# --- Workers that die ---


def test_killed_worker_costs_the_point_it_was_computing_and_nothing_else(
    grid: Grid, tmp_path: Path, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (spy.environment | {"SPY_SLEEP": "0.05"}).items():
        monkeypatch.setenv(name, value)
    lost: list[str] = []
    with Store(tmp_path / "s.sqlite") as store:

        def kill_one(progress: Any) -> None:
            if progress.done >= 5 and not lost:
                victim = spy.workers()[0]
                os.kill(victim, signal.SIGSTOP)  # or it could begin another point before the kill
                lost.append(spy.latest(victim))
                os.kill(victim, signal.SIGKILL)
                spy.hurry()

        swept = run_sweep(grid, store, LocalWorkers(2), progress=kill_one)
        found = store.rows()
    assert swept.computed == len(grid.points)
    assert numbers(found) == numbers(computed(grid, tmp_path / "undisturbed.sqlite"))
    assert {key for key, count in spy.starts().items() if count > 1} <= set(lost)
    assert set(spy.ends()) == {point.key for point in grid.points}
    assert len(lost) == 1


def test_point_that_always_kills_its_worker_is_recorded_as_failed(
    tmp_path: Path, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (spy.environment | {"SPY_KILLER": "round_robin"}).items():
        monkeypatch.setenv(name, value)
    grid = small_grid(tmp_path, streams=(2,))
    with Store(tmp_path / "s.sqlite") as store:
        swept = run_sweep(grid, store, LocalWorkers(1))
        rows = store.rows()
    assert (swept.computed, swept.failed) == (8, 2)
    errors = {row.policy: row.error for row in rows}
    assert errors.pop("round_robin") == "its worker process died 3 times (killed by SIGKILL)"
    assert set(errors.values()) == {None}
    assert Counter(spy.starts().values()) == {1: 6, 3: 2}


def test_workers_that_die_at_start_end_the_sweep_in_one_line(
    grid: Grid, tmp_path: Path, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (spy.environment | {"SPY_DIE_AT_START": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(local_module, "MAX_DEATHS_IN_A_ROW", 4)
    with Store(tmp_path / "s.sqlite") as store:
        with pytest.raises(
            WorkerError, match=r"4 worker processes have died one after the other \(killed by SIGKILL\)"
        ):
            run_sweep(grid, store, LocalWorkers(1))
        assert store.rows() == []


# --- Being stopped ---


def test_sweep_killed_in_the_middle_goes_on_and_repeats_nothing_finished(tmp_path: Path, spy: Spy) -> None:
    slow = spy.environment | {"SPY_SLEEP": "0.5"}
    with gpusim(*arguments(tmp_path), environment=slow) as first:
        wait_until(lambda: stored(tmp_path / "s.sqlite") >= 3, "3 points in the store")
        first.kill()  # the coordinator alone: its workers must end by themselves
    wait_until(lambda: not any(map(alive, spy.workers())), "the workers to end")
    kept = {row.key for row in rows_of(tmp_path / "s.sqlite")}
    before = spy.starts()
    assert 3 <= len(kept) < 20
    assert not kept - set(before)

    _, out, err = finished(*arguments(tmp_path), "--json", environment=spy.environment)
    found = json.loads(out)
    assert (found["points"], found["before"], found["computed"], err) == (20, len(kept), 20 - len(kept), "")
    assert set((spy.starts() - before).values()) == {1}
    assert set(spy.starts() - before).isdisjoint(kept)
    undisturbed = small_grid(tmp_path)
    assert numbers(rows_of(tmp_path / "s.sqlite")) == numbers(computed(undisturbed, tmp_path / "u.sqlite"))


def stored(path: Path) -> int:
    """Return the rows of a store that may not exist yet."""
    with contextlib.suppress(SweepError, sqlite3.OperationalError):
        return len(rows_of(path))
    return 0


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def test_ctrl_c_keeps_what_is_finished_and_says_how_to_go_on(tmp_path: Path, spy: Spy) -> None:
    slow = spy.environment | {"SPY_SLEEP": "0.5"}
    with gpusim(*arguments(tmp_path), "--json", environment=slow) as process:
        wait_until(lambda: stored(tmp_path / "s.sqlite") >= 3, "3 points in the store")
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers get it, too
        out, err = process.communicate()
    assert (process.returncode, out) == (130, "")
    kept = len(rows_of(tmp_path / "s.sqlite"))
    assert [line for line in err.splitlines() if line] == [
        f"  {kept} of 20 points are done",
        f"  finished points are in {tmp_path / 's.sqlite'}; the same command goes on from there",
        "gpusim: interrupted",
    ]
    assert not any(map(alive, spy.workers()))
    _, out, _ = finished(*arguments(tmp_path), "--json", environment=spy.environment)
    assert (json.loads(out)["before"], json.loads(out)["computed"]) == (kept, 20 - kept)
