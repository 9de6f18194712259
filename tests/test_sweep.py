"""Sweeps: what they cover, what identifies a point, the store, local workers, and every way to be stopped."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import importlib.util
import itertools
import json
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpusim as package
from gpusim.engine.base import DEFAULT_ENGINE, ENGINES, engine_by_name
from gpusim.errors import OptionError, OutputError, SweepError, TraceError, UnknownNameError, WorkerError
from gpusim.files import encode_json, write_document
from gpusim.hardware.model import bundled_hardware, load_hardware
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.policies.registry import POLICIES, policy_by_name
from gpusim.search.bounds import bounds
from gpusim.sweep import local as local_module
from gpusim.sweep import point as point_module
from gpusim.sweep import store as store_module
from gpusim.sweep.export import export_rows
from gpusim.sweep.grid import Grid, Point, build_grid, code_version, hardware_hash, make_point, trace_hash
from gpusim.sweep.local import LocalWorkers
from gpusim.sweep.run import run_sweep
from gpusim.sweep.spec import Sweep, hardware_files, policy_names, read_sweep, trace_files
from gpusim.sweep.store import APPLICATION_ID, COLUMNS, STORE_VERSION, Row, Store
from gpusim.sweep.summary import best_points, failures
from gpusim.sweep.todo import Todo
from gpusim.trace.schema import Trace
from gpusim.trace.store import bundled_traces, write_trace
from tests.helpers import Step, kernel, make_trace, wide_trace
from tests.sweeping import ENGINE, ROOT, InThisProcess, Spy, finished, gpusim, numbers, wait_until, write_traces
from tests.test_cli import Run, document, refused, run

__all__ = ["run"]  # the fixture

STEPS = ("wavefront", "round_robin", "critical_path")


@pytest.fixture
def spy(tmp_path: Path) -> Spy:
    """A spy whose folder is for nothing else."""
    folder = tmp_path / "spy"
    folder.mkdir()
    return Spy(folder)


@pytest.fixture
def grid(tmp_path: Path) -> Grid:
    """Two traces, one GPU, four policies: 2 x (1 + 3 x 3) points."""
    return small_grid(tmp_path)


def small_grid(folder: Path, **fields: Any) -> Grid:
    lists = {"policies": ("sequential", *STEPS), "streams": (2, 3, 4), "hardware": ("h200",)}
    given = lists | {"engine": ENGINE} | fields
    return build_grid(Sweep(traces=tuple(map(str, write_traces(folder))), **given))


def over_the_limit() -> Trace:
    """A trace with a kernel that asks for more threads than a block may have."""
    return make_trace([Step("big", "x", "big", kernels=(kernel(1000, threads=2048),))])


def computed(grid: Grid, path: Path) -> list[Row]:
    """The rows of a sweep that was not disturbed."""
    with Store(path) as store:
        run_sweep(grid, store, InThisProcess())
        return store.rows()


def rows_of(path: Path) -> list[Row]:
    with Store(path, write=False) as store:
        return store.rows()


# --- What a sweep covers ---


def test_lists_are_multiplied_and_a_policy_gets_only_streams_it_can_use(grid: Grid) -> None:
    found = [(p.policy, p.streams) for p in grid.points if p.trace_hash == grid.points[0].trace_hash]
    assert found == [("sequential", 1), *((policy, streams) for policy in STEPS for streams in (2, 3, 4))]
    assert len(grid.points) == 2 * len(found)
    assert len({point.key for point in grid.points}) == len(grid.points)


def test_names_are_bundled_ones_globs_or_all_each_once() -> None:
    bundled = bundled_traces()
    assert trace_files(["googlenet-train-*", "googlenet-train-b8"]) == [
        path for name, path in bundled.items() if name.startswith("googlenet-train-")
    ]
    assert trace_files(["all"]) == list(bundled.values())
    assert hardware_files(["h*00*", "all"])[0].stem == "h100-sxm"
    assert {path.stem for path in hardware_files(["all"])} == set(bundled_hardware())
    assert policy_names(["wave*", "all"])[0] == "wavefront"


def test_slow_policies_have_to_be_named() -> None:
    slow = [name for name, policy in POLICIES.items() if policy.slow]
    quick = [name for name in POLICIES if name not in slow]
    assert policy_names(["all"]) == policy_names(["*"]) == quick
    assert policy_names([*slow, "all"]) == [*slow, *quick]


def test_files_are_taken_by_path_and_by_glob(tmp_path: Path) -> None:
    paths = write_traces(tmp_path)
    assert trace_files([str(tmp_path / "w*.json")]) == sorted(paths)
    assert trace_files([str(paths[1]), str(tmp_path / "*.json")]) == [paths[1], paths[0]]
    with pytest.raises(TraceError, match=r"nothing\*\.json: no file matches"):
        trace_files([str(tmp_path / "nothing*.json")])
    with pytest.raises(TraceError, match=r"missing\.json: cannot be read: No such file"):
        build_grid(Sweep(traces=(str(tmp_path / "missing.json"),)))


@pytest.mark.parametrize(
    ("expand", "name", "nearest"),
    [
        (trace_files, "googlenet-train-b9", "googlenet-train-b8"),
        (hardware_files, "h20", "h200"),
        (policy_names, "wavefrnt", "wavefront"),
        (policy_names, "wavefrnt*", "wavefront"),
    ],
    ids=["trace", "hardware", "policy", "glob"],
)
def test_unknown_name_suggests_the_nearest(expand: Any, name: str, nearest: str) -> None:
    with pytest.raises(UnknownNameError, match=f"did you mean '{nearest}'"):
        expand([name])


def test_without_hardware_each_trace_has_the_gpu_it_was_captured_on(tmp_path: Path) -> None:
    write_trace(wide_trace(3, gpu=load_hardware("v100").gpu), tmp_path / "v100.json")
    write_trace(wide_trace(4, gpu="NVIDIA Unheard-of"), tmp_path / "other.json")
    found = build_grid(Sweep(traces=(str(tmp_path / "v100.json"), str(tmp_path / "other.json"))))
    by_trace = {
        (found.traces[p.trace_hash].network, p.trace_hash): found.hardware[p.hardware_hash].name for p in found.points
    }
    assert list(by_trace.values()) == ["v100", "h200"]


def test_points_of_one_op_graph_stand_together(tmp_path: Path) -> None:
    points = small_grid(tmp_path, hardware=("h200", "v100")).points
    changes = sum(before.group != after.group for before, after in itertools.pairwise(points))
    assert changes == len({point.group for point in points}) - 1 == 3


# --- What identifies a point ---


def test_key_holds_everything_a_result_follows_from() -> None:
    given: dict[str, Any] = {
        "trace_hash": "t", "hardware_hash": "h", "policy": "p", "streams": 2, "engine": "e", "seed": 0, "version": "v",
    }  # fmt: skip
    other = {"trace_hash": "t2", "hardware_hash": "h2", "policy": "p2", "streams": 3, "engine": "e2", "seed": 1}
    keys = [make_point(**given).key, *(make_point(**given | {name: value}).key for name, value in other.items())]
    keys.append(make_point(**given | {"version": "v2"}).key)
    assert len(set(keys)) == len(keys) == 8
    assert make_point(**given).key == keys[0]


def test_trace_hash_sees_durations_and_measured_times_but_not_the_file_or_the_day() -> None:
    replace = msgspec.structs.replace
    trace = wide_trace(3, graph_ns=100_000)
    slower = wide_trace(3, dur_ns=10_001, graph_ns=100_000)
    anchored = wide_trace(3, graph_ns=100_001)
    elsewhere = wide_trace(3, graph_ns=100_000, gpu="NVIDIA A100")
    assert len({trace_hash(t) for t in (trace, slower, anchored, elsewhere)}) == 4
    later = replace(trace, provenance=replace(trace.provenance, date="2030-01-01", command="again"))
    assert trace_hash(later) == trace_hash(trace)


def test_hardware_hash_sees_every_number_but_no_source() -> None:
    replace = msgspec.structs.replace
    model = load_hardware("h200")
    faster = replace(model, memory=replace(model.memory, dram_bytes_per_ns=9999.0))
    assert hardware_hash(faster) != hardware_hash(model)
    assert hardware_hash(replace(model, sources={})) == hardware_hash(model)


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("policies/wavefront.py", True),
        ("engine/pool.py", True),
        ("plan/lower.py", True),
        ("sweep/point.py", True),
        ("sweep/store.py", False),
        ("cli/sweep.py", False),
    ],
    ids=str,
)
def test_version_changes_with_the_code_that_simulates_only(
    file: str, counts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "gpusim"
    shutil.copytree(Path(package.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__", "_data"))
    monkeypatch.setattr(package, "__file__", str(copy / "__init__.py"))
    before = code_version.__wrapped__()
    with (copy / file).open("a") as text:
        text.write("# changed\n")
    assert (code_version.__wrapped__() != before) is counts
    assert before.startswith(f"{package.__version__}+")


def test_worker_with_other_code_refuses(grid: Grid) -> None:
    point = grid.points[0]
    with pytest.raises(WorkerError, match=r"runs gpusim .*, this sweep 0\.0\+other; the two must be the same"):
        point_module.compute(point, b"", b"", "0.0+other")


# --- The sweep file ---

GOOD = """
traces = ["googlenet-*"]
hardware = ["h200", "v100"]
policies = ["wavefront", "critical_path"]
streams = [2, 4]
seed = 7
"""


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "sweep.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_sweep_file_is_read_with_its_defaults(tmp_path: Path) -> None:
    sweep = read_sweep(write(tmp_path, GOOD))
    assert sweep == Sweep(
        traces=("googlenet-*",),
        hardware=("h200", "v100"),
        policies=("wavefront", "critical_path"),
        streams=(2, 4),
        seed=7,
    )
    least = read_sweep(write(tmp_path, 'traces = ["all"]'))
    assert (least.hardware, least.policies, least.streams) == ((), ("all",), (2, 4, 8))
    assert (least.engine, least.seed) == (DEFAULT_ENGINE, 0)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"traces = ", "is not valid TOML: "),
        (b"traces = '\xff'", "is not valid TOML: "),
        (b"", "$: Object missing required field `traces`"),
        (b"traces = []", "$.traces: Expected `array` of length >= 1"),
        (b'traces = "all"', "$.traces: Expected `array`, got `str`"),
        (GOOD.replace("streams", "stream").encode(), "$: Object contains unknown field `stream`"),
        (GOOD.replace("[2, 4]", "[2, 0]").encode(), "$.streams[1]: Expected `int` >= 1"),
        (GOOD.replace("[2, 4]", "[129]").encode(), "$.streams[0]: Expected `int` <= 128"),
        (GOOD.replace("[2, 4]", "[]").encode(), "$.streams: Expected `array` of length >= 1"),
        (
            GOOD.replace("googlenet-*", "googlenett*").encode(),
            "$.traces[0]: unknown trace 'googlenett*'; did you mean '",
        ),
        (GOOD.replace("v100", "v10").encode(), "$.hardware[1]: unknown hardware 'v10'; did you mean 'v100'?"),
        (
            GOOD.replace("wavefront", "wavefrnt").encode(),
            "$.policies[0]: unknown policy 'wavefrnt'; did you mean 'wave",
        ),
        (b'traces = ["all"]\nengine = "refrence"', "$.engine: unknown engine 'refrence'; did you mean 'reference'?"),
        (b'traces = ["all"]\nseed = -1', "$.seed: Expected `int` >= 0"),
        (b"traces = " + b"[" * 100_000, "is not valid TOML: "),
    ],
)
def test_broken_sweep_file_is_one_line_with_file_and_place(text: bytes, complaint: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(SweepError) as caught:
        read_sweep(path)
    assert str(caught.value).startswith(f"{path}: {complaint}")


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
        assignment = policy_by_name(row.policy)(graph, row.streams)
        timeline = engine_by_name(row.engine).run(lower(graph, assignment.order, assignment.streams), graph.hardware)
        bound = bounds(graph)
        assert (row.makespan_ns, row.peak_bytes) == (timeline.makespan_ns, timeline.peak_bytes)
        assert (row.critical_path_ns, row.area_ns) == (bound.critical_path_ns, bound.area_ns)
        assert (row.bandwidth_ns, row.front_end_ns) == (bound.bandwidth_ns, bound.front_end_ns)
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
    assert len({row.worker for row in found}) == 2


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
    assert all("2048 threads a block" in str(row.error) for row in bad)
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

    monkeypatch.setattr(point_module, "policy_by_name", broken)
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


# --- Handing out points ---


@given(st.data())
def test_every_point_is_handed_out_once_however_often_some_come_back(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    points = [Point(str(n), str(data.draw(st.integers(0, 3))), "h", "p", 1, "e", 0) for n in range(count)]
    todo = Todo(points)
    out: list[Point] = []
    last: tuple[str, str] | None = None
    while todo or out:
        if out and (not todo or data.draw(st.booleans())):
            back = out.pop(data.draw(st.integers(0, len(out) - 1)))
            if data.draw(st.booleans()):
                todo.put_back([back])
            else:
                points.remove(back)
        else:
            groups_before = {group: len(queue) for group, queue in todo.groups.items()}
            point = todo.take(last, {("0", "h")})
            if last in groups_before:
                assert point.group == last
            elif groups_before.keys() - {("0", "h")}:
                assert point.group != ("0", "h")
            out.append(point)
            last = point.group
    assert points == []


def test_more_points_of_a_task_are_of_the_same_graph_and_policy() -> None:
    kinds = [("a", "p"), ("a", "p"), ("a", "p"), ("a", "q"), ("b", "q")]
    points = [Point(str(n), trace, "h", policy, 1, "e", 0) for n, (trace, policy) in enumerate(kinds)]
    todo = Todo(points)
    first = todo.take(None, set())
    assert [first, *todo.take_more(first, 1)] == points[:2]
    assert todo.take_more(first, 9) == points[2:3]
    assert len(todo) == 2
    last = todo.take(first.group, set())
    assert (last, todo.take_more(last, 9), len(todo)) == (points[3], [], 1)


def test_task_ends_with_the_point_that_passes_its_time(grid: Grid) -> None:
    contents = grid.contents
    points = [point for point in grid.points if point.group == grid.points[0].group]
    data = [contents[hash] for hash in points[0].group]
    done = point_module.compute_some(points, *data, grid.version, 60.0)
    assert [result.key for result in done] == [point.key for point in points]
    assert [result.key for result in point_module.compute_some(points, *data, grid.version, -1.0)] == [points[0].key]


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
                os.kill(victim, signal.SIGSTOP)  # else it could begin another point between the look and the kill
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


def arguments(folder: Path) -> tuple[str | Path, ...]:
    """A sweep of 20 points on two processes."""
    traces = [word for path in write_traces(folder) for word in ("--trace", path)]
    policies = [word for name in ("sequential", *STEPS) for word in ("--policy", name)]
    rest = ("--engine", ENGINE, "--streams", "2,3,4", "--workers", "2", "-o", folder / "s.sqlite")
    return ("sweep", *traces, *policies, *rest)


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
    """Rows in a store that may not be there yet."""
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


# --- The store ---


@pytest.fixture
def path(grid: Grid, tmp_path: Path) -> Path:
    """A store with all points of the grid."""
    computed(grid, tmp_path / "store.sqlite")
    return tmp_path / "store.sqlite"


def test_rows_come_back_as_they_were(path: Path) -> None:
    rows = rows_of(path)
    changed = [dataclasses.replace(row, key=f"{row.key}x", calibrated=False, error="é\n'\"") for row in rows]
    with Store(path) as store:
        store.add(changed)
        assert sorted(store.rows(), key=lambda row: row.key) == sorted([*rows, *changed], key=lambda row: row.key)
        assert store.rows([rows[0].key]) == [rows[0]]
        assert store.finished() == {row.key: row.error is None for row in [*rows, *changed]}


def other_database(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE points (key TEXT)")
    connection.commit()
    connection.close()


@pytest.mark.parametrize("write", [True, False], ids=["writing", "reading"])
def test_file_that_is_no_store_is_refused_and_left_alone(write: bool, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("some notes that are longer than the header of a SQLite file, which has a hundred bytes" * 3)
    before = path.read_bytes()
    with pytest.raises(SweepError, match=r"file: is not a store of gpusim sweep"):
        Store(path, write=write)
    assert path.read_bytes() == before
    path.unlink()
    other_database(path)
    before = path.read_bytes()
    with pytest.raises(SweepError, match=r"file: is not a store of gpusim sweep"):
        Store(path, write=write)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_missing_store_is_made_for_writing_only(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match="there is no such store"):
        Store(tmp_path / "s.sqlite", write=False)
    assert not list(tmp_path.iterdir())
    (tmp_path / "s.sqlite").touch()  # an empty file is an empty store, as mktemp makes one
    with Store(tmp_path / "s.sqlite") as store:
        assert store.rows() == []


def test_store_of_a_newer_version_is_refused(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {STORE_VERSION + 1}")
    connection.close()
    with pytest.raises(SweepError, match=r"newer gpusim: store version 2, this one knows 1"):
        Store(path)
    with pytest.raises(SweepError, match="newer gpusim"):
        Store(path, write=False)


def test_damaged_store_is_one_line(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:] = os.urandom(len(data) - 4096)
    path.write_bytes(data)
    with pytest.raises(SweepError, match="is damaged"):
        rows_of(path)


def test_two_sweeps_cannot_share_a_store_but_readers_are_let_in(
    path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, grid: Grid
) -> None:
    monkeypatch.setattr(store_module, "LOCK_WAIT_MS", 10)
    with Store(path) as store:
        text = refused(run(*arguments(path.parent)[:-1], path))
        assert text == f"gpusim: {path}: is in use by another sweep\n"
        rows = store.rows()
        store.add([dataclasses.replace(rows[0], key="new")])
        assert len(rows_of(path)) == len(rows) + 1
        with pytest.raises(SweepError, match="in use"):
            Store(path)  # also between two commits
    with Store(path) as store:
        assert len(store.rows()) == len(rows) + 1


def test_row_is_on_the_disk_when_add_returns(grid: Grid, path: Path, tmp_path: Path) -> None:
    """The process ends without closing anything: what was added before is there."""
    code = (
        "import os, sys, dataclasses; from pathlib import Path; from gpusim.sweep.store import Store\n"
        "store = Store(Path(sys.argv[1])); row = store.rows()[0]\n"
        "store.add([dataclasses.replace(row, key='added')])\n"
        "store.connection.execute('DELETE FROM points')\n"
        "os._exit(0)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "-c", code, path], env=environment, check=True)
    assert len(rows_of(path)) == len(grid.points) + 1


def test_folder_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("sweep", "--trace", "missing.json", "-o")
    assert "there is no folder" in refused(run(*command, tmp_path / "no" / "s.sqlite"))
    assert "it is a folder" in refused(run(*command, tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    assert "no permission" in refused(run(*command, tmp_path / "s.sqlite"))


def test_full_disk_is_one_line_and_keeps_what_was_stored(tmp_path: Path) -> None:
    """The system refuses to let any file grow beyond 20 kB, which the table reaches after some points."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    words = [*map(str, arguments(tmp_path)), "--streams", ",".join(map(str, range(2, 40)))]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "gpusim", *words],
        env=environment, capture_output=True, text=True, check=False, preexec_fn=limit,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"gpusim: {tmp_path / 's.sqlite'}: cannot be written: ")
    assert done.stderr.count("\n") == 1
    kept = rows_of(tmp_path / "s.sqlite")
    assert 0 < len(kept) < 100
    assert all(row.makespan_ns for row in kept)


# --- Export ---


@pytest.fixture
def mixed(tmp_path: Path) -> list[Row]:
    """Rows with and without numbers."""
    write_trace(over_the_limit(), tmp_path / "big.json")
    write_traces(tmp_path, (3,))
    names = (str(tmp_path / "big.json"), str(tmp_path / "wide3.json"))
    return computed(
        build_grid(Sweep(traces=names, hardware=("p100",), streams=(2,), engine=ENGINE)), tmp_path / "m.sqlite"
    )


def read_back(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [
        {name: None if pd.isna(value) else value for name, value in record.items()}
        for record in frame.to_dict("records")
    ]


@pytest.mark.cluster
def test_parquet_gives_the_rows_back(mixed: list[Row], tmp_path: Path) -> None:
    """Needs pyarrow, which comes with dask in the extra `sweep`."""
    export_rows(mixed, tmp_path / "t.parquet")
    frame = pd.read_parquet(tmp_path / "t.parquet")
    assert list(frame.columns) == list(COLUMNS)
    assert read_back(frame) == [dataclasses.asdict(row) for row in mixed]
    assert str(frame.dtypes["makespan_ns"]) == "Int64"
    assert any(row.error for row in mixed)


def test_csv_gives_the_rows_back(mixed: list[Row], tmp_path: Path) -> None:
    export_rows(mixed, tmp_path / "t.csv")
    with (tmp_path / "t.csv").open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    wanted = [
        {name: "" if value is None else str(value) for name, value in dataclasses.asdict(row).items()} for row in mixed
    ]
    assert found == wanted


def test_export_of_another_kind_or_without_pyarrow_is_refused_before_the_work(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("sweep", "--trace", "missing.json", "-o", tmp_path / "s.sqlite", "--export")
    assert "--export x.xlsx: the name ends in .parquet or .csv" in refused(run(*command, "x.xlsx"))
    assert "there is no folder" in refused(run(*command, tmp_path / "no" / "x.csv"))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pyarrow" else find(name))
    assert "pip install 'gpusim[sweep]'" in refused(run(*command, tmp_path / "x.parquet"))
    assert not list(tmp_path.iterdir())
    with pytest.raises(OptionError):
        export_rows([], tmp_path / "x.txt")
    with pytest.raises(OutputError):
        export_rows([], tmp_path / "x.parquet")


# --- The command ---


def test_command_prints_one_json_document(tmp_path: Path, run: Run) -> None:
    words = (*arguments(tmp_path), "--json", "--export", tmp_path / "t.csv")
    found = document(run(*words))
    assert (found["points"], found["computed"], found["failed"], found["before"]) == (20, 20, 0, 0)
    assert (found["engine"], found["seed"], found["store"]) == (ENGINE, 0, str(tmp_path / "s.sqlite"))
    wanted = {"trace", "hardware", "policy", "streams", "makespan_ns", "speedup"}
    assert all(wanted <= set(best) for best in found["best"])
    assert len(found["best"]) == 2
    assert found["failures"] == []
    assert len(pd.read_csv(tmp_path / "t.csv")) == 20
    assert document(run(*words))["before"] == 20


def test_command_without_lists_takes_every_quick_policy_and_the_default_engine(tmp_path: Path, run: Run) -> None:
    (trace, _) = write_traces(tmp_path)
    found = document(run("sweep", "--trace", trace, "--workers", "1", "-o", tmp_path / "s.sqlite", "--json"))
    assert (found["engine"], found["seed"], found["failed"]) == (DEFAULT_ENGINE, 0, 0)
    rows = rows_of(tmp_path / "s.sqlite")
    assert {row.policy for row in rows} == set(policy_names(["all"]))
    assert {row.streams for row in rows if row.policy == "wavefront"} == {2, 4, 8}


def test_command_sums_up_for_people_and_marks_uncalibrated_hardware(tmp_path: Path, run: Run) -> None:
    write_trace(over_the_limit(), tmp_path / "big.json")
    done = run(*arguments(tmp_path), "--trace", tmp_path / "big.json", "--hw", "p100", "--hw", "h200", "--workers", "1")
    assert (done.code, done.err) == (0, "")
    assert "60 points: 60 computed" in done.out
    assert "10 points of tiny-infer-b1 on p100 (uncalibrated) failed: " in done.out
    assert done.out.count("p100 (uncalibrated)") == 3
    alone = run("sweep", "-o", tmp_path / "s.sqlite")
    assert alone.out.splitlines()[:-1] == done.out.splitlines()[1:-1]
    found = document(run("sweep", "-o", tmp_path / "s.sqlite", "--json"))
    assert found["points"] == 60
    assert [failure["points"] for failure in found["failures"]] == [10, 10]


def test_sweep_file_and_options_say_the_same(tmp_path: Path, run: Run) -> None:
    first, second = write_traces(tmp_path)
    lists = {"traces": [str(first), str(second)], "policies": ["sequential", *STEPS], "streams": [2, 3, 4]}
    fields = lists | {"engine": ENGINE}
    text = "\n".join(f"{name} = {json.dumps(value)}" for name, value in fields.items())
    document(run("sweep", write(tmp_path, text), "--workers", "1", "-o", tmp_path / "f.sqlite", "--json"))
    document(run(*arguments(tmp_path), "--json"))
    assert numbers(rows_of(tmp_path / "f.sqlite")) == numbers(rows_of(tmp_path / "s.sqlite"))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--trace", "all", "--streams", "0"), "--streams 0: the number of streams lies between 1 and 128"),
        (("--trace", "all", "--streams", "2,,4"), "--streams 2,,4: not a list of numbers such as 2,4,8"),
        (("--trace", "googlenett"), "unknown trace 'googlenett'; did you mean 'googlenet-"),
        (("--trace", "all", "--policy", "wavefrnt"), "unknown policy 'wavefrnt'; did you mean 'wavefront'?"),
        (("--trace", "all", "--hw", "h20"), "unknown hardware 'h20'; did you mean 'h200'?"),
        (("--trace", "all", "--engine", "refrence"), "unknown engine 'refrence'; did you mean 'reference'?"),
        (("missing.toml",), "missing.toml: cannot be read: No such file"),
        (("missing.toml", "--trace", "all"), "a sweep file goes without --trace"),
        (("missing.toml", "--streams", "2"), "a sweep file goes without --trace"),
        (("--policy", "all"), "give a sweep file or --trace"),
        (("--trace", "all", "--workers", "2", "--scheduler", "tcp://h:1"), "--workers goes without --scheduler"),
        ((), "there is no such store"),
    ],
)
def test_refusals_are_one_line_and_leave_no_store(
    words: tuple[str, ...], complaint: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert complaint in refused(run("sweep", *words, "-o", "s.sqlite"))
    assert not list(tmp_path.iterdir())


def test_hardware_file_is_taken_by_its_content(tmp_path: Path, run: Run) -> None:
    model = load_hardware("h200")
    write_document(tmp_path / "mine.json", msgspec.structs.replace(model, name="mine"))
    (trace, _) = write_traces(tmp_path)
    given = (
        "sweep",
        "--engine",
        ENGINE,
        "--trace",
        trace,
        "--policy",
        "wavefront",
        "--workers",
        "1",
        "-o",
        tmp_path / "s.sqlite",
        "--json",
    )
    found = document(run(*given, "--hw", "h200", "--hw", tmp_path / "mine.json"))
    assert [best["hardware"] for best in found["best"]] == ["h200", "mine"]
    assert len({best["makespan_ns"] for best in found["best"]}) == 1


def test_page_describes_every_column_and_field() -> None:
    page = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
    assert [name for name in (*COLUMNS, *Sweep.__struct_fields__) if f"| `{name}` |" not in page] == []
    assert f"`{APPLICATION_ID:#x}`" in page


def test_contents_are_canonical(grid: Grid) -> None:
    """The same hardware model gives the same bytes, whatever its file looks like."""
    (content,) = grid.hardware.values()
    assert content.data == encode_json(load_hardware("h200"))
