"""Sweeps: coverage, identity of a point, the sweep file, the order of points."""

from __future__ import annotations

import itertools
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpusim as package
from gpusim import version
from gpusim.defaults import DEFAULT_ENGINE
from gpusim.errors import SweepError, TraceError, UnknownNameError, WorkerError
from gpusim.formats.hardware import bundled_hardware, load_hardware
from gpusim.formats.sweep import Sweep
from gpusim.io.files import encode_json
from gpusim.policies.registry import POLICIES
from gpusim.sweep import point as point_module
from gpusim.sweep.grid import Grid, Point, build_grid, code_version, hardware_hash, make_point, trace_hash
from gpusim.sweep.spec import hardware_files, policy_names, read_sweep, trace_files
from gpusim.sweep.todo import Todo
from gpusim.trace.store import bundled_traces, write_trace
from tests.support.helpers import wide_trace
from tests.support.sweeping import (
    STEPS,
    grid,
    small_grid,
    write,
    write_traces,
)

__all__ = ["grid"]  # fixtures


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
        ("rules/occupancy.py", True),
        ("formats/trace.py", True),
        ("formats/results.py", False),
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
    monkeypatch.setattr(version, "__file__", str(copy / "version.py"))
    before = code_version.__wrapped__()
    with (copy / file).open("a") as text:
        text.write("# changed\n")
    assert (code_version.__wrapped__() != before) is counts
    assert before.startswith(f"{package.__version__}+")


def test_version_that_provenance_carries_changes_with_any_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "gpusim"
    shutil.copytree(Path(package.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__", "_data"))
    monkeypatch.setattr(version, "__file__", str(copy / "version.py"))
    before = version.code_version.__wrapped__()
    assert re.fullmatch(rf"{re.escape(package.__version__)}\+[0-9a-f]{{8}}", before)
    with (copy / "gpu" / "capture" / "capture.py").open("a") as text:
        text.write("# changed\n")
    assert version.code_version.__wrapped__() != before


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


def test_contents_are_canonical(grid: Grid) -> None:
    """The same hardware model gives the same bytes, whatever the layout of its file."""
    (content,) = grid.hardware.values()
    assert content.data == encode_json(load_hardware("h200"))
