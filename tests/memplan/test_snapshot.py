"""PyTorch's memory snapshots: its viewer can follow what is written, a pickle that would run something is refused."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from gpusim.errors import MeasurementError
from gpusim.memplan.allocator import MIB
from gpusim.memplan.evaluate import MemoryEvaluator
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.policies.registry import MEMORY_POLICIES
from gpusim.memplan.snapshot import read_snapshot, snapshot_document, write_snapshot
from tests.support.memory_steps import SIZE, chain_step, graph_of


class _Runs:
    """What a hostile pickle would do."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("policy", ["keep_all", "vdnn_all", "checkpoint", "least_time"])
def test_events_follow_the_plan_and_never_use_memory_twice(policy: str) -> None:
    graph = graph_of(chain_step(6, target="aten.convolution.default"))
    evaluator = MemoryEvaluator(graph)
    outcome = evaluator.evaluate(MEMORY_POLICIES[policy](Setting.of(graph)))
    document = snapshot_document(evaluator.storages, outcome)
    live: dict[int, int] = {}
    level = peak = 0
    for entry in document["device_traces"][0]:
        if entry["action"] == "alloc":
            assert all(a + s <= entry["addr"] or entry["addr"] + entry["size"] <= a for a, s in live.items())
            live[entry["addr"]] = entry["size"]
            level += entry["size"]
            peak = max(peak, level)
        elif entry["action"] == "free_completed":
            level -= live.pop(entry["addr"])
    assert peak == outcome.peak_bytes  # 4 MiB are never rounded
    blocks = {b["address"]: b for segment in document["segments"] for b in segment["blocks"]}
    assert {a for a, b in blocks.items() if b["state"] == "active_allocated"} == set(live)
    for segment in document["segments"]:
        assert segment["total_size"] == sum(block["size"] for block in segment["blocks"])


def test_what_is_written_is_read_and_needs_no_class(tmp_path: Path) -> None:
    graph = graph_of(chain_step(5))
    evaluator = MemoryEvaluator(graph)
    outcome = evaluator.evaluate(MEMORY_POLICIES["keep_all"](Setting.of(graph)))
    path = tmp_path / "snapshot.pickle"
    write_snapshot(evaluator.storages, outcome, path)
    snapshot = read_snapshot(path)
    assert snapshot.peak_bytes == outcome.peak_bytes
    assert snapshot.reserved_bytes == snapshot.simulated().reserved_bytes
    assert snapshot.events[0].bytes == SIZE


def test_same_requests_give_the_same_segments(tmp_path: Path) -> None:
    entries = [
        {"action": "alloc", "addr": 1, "size": 3 * MIB, "stream": 0, "frames": []},
        {"action": "segment_alloc", "addr": 1, "size": 20 * MIB, "stream": 0, "frames": []},
        {"action": "free_completed", "addr": 1, "size": 3 * MIB, "stream": 0, "frames": []},
        {"action": "alloc", "addr": 1, "size": 12 * MIB, "stream": 0, "frames": []},
    ]
    document = {"segments": [], "device_traces": [entries]}
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(document))
    pool = read_snapshot(path).simulated()
    assert pool.reserved_bytes == 20 * MIB
    assert pool.allocated_bytes == 12 * MIB


def test_pickle_that_would_run_something_is_refused_and_does_not(tmp_path: Path) -> None:
    mark = tmp_path / "it-ran"
    path = tmp_path / "hostile.pickle"
    path.write_bytes(pickle.dumps({"segments": _Runs(mark), "device_traces": [[]]}))
    with pytest.raises(MeasurementError, match=r"hostile.pickle: is no memory snapshot: asks for '.*system'"):
        read_snapshot(path)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ([], "no 'device_traces'"),
        ({"device_traces": 3}, "is no list"),
        ({"device_traces": []}, "has no device 0"),
        ({"device_traces": [[{"action": "alloc", "size": -1, "addr": 0, "stream": 0}]], "segments": []}, "63 bits"),
        ({"device_traces": [[{"action": "alloc", "size": "x", "addr": 0, "stream": 0}]], "segments": []}, "63 bits"),
        ({"device_traces": [[3]], "segments": []}, "no 'action'"),
        ({"device_traces": [[]]}, "no 'segments'"),
        ({"device_traces": [[]], "segments": [{"device": 0}]}, "no 'total_size'"),
    ],
)
def test_what_is_no_snapshot_is_refused_with_its_place(tmp_path: Path, document: object, problem: str) -> None:
    path = tmp_path / "odd.pickle"
    path.write_bytes(pickle.dumps(document))
    with pytest.raises(MeasurementError, match=problem):
        read_snapshot(path)


@pytest.mark.parametrize("data", [b"\x80", b"not a pickle at all", b"\x80\x04.", b"\x80\x04K\x01R."])
def test_broken_pickles_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "broken.pickle"
    path.write_bytes(data)
    with pytest.raises(MeasurementError, match="is no memory snapshot"):
        read_snapshot(path)
