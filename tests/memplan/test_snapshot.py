"""PyTorch's memory snapshots: its viewer can read written ones, and a pickle that would run something is refused."""

from __future__ import annotations

import contextlib
import gzip
import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.errors import MeasurementError
from gpusim.io.plain_pickle import PickleProblemError, read_plain_pickle
from gpusim.memplan.evaluate import MemoryEvaluator
from gpusim.memplan.measured import read_snapshot
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.policies.registry import MEMORY_POLICIES
from gpusim.memplan.snapshot import snapshot_document, write_snapshot
from gpusim.plan.allocator import MIB
from tests.support.memory_steps import SIZE, chain_step, graph_of

DATA = Path(__file__).parents[1] / "data"


def alloc(size: object = 512, addr: object = 0) -> dict[str, object]:
    return {"action": "alloc", "size": size, "addr": addr, "stream": 0}


def documents() -> st.SearchStrategy[object]:
    """Snapshots, most of them with something wrong."""
    odd = st.sampled_from((None, True, -1, 0, 512, 3 << 20, 1 << 40, 1 << 70, "alloc", "free_completed", [], {}, 1.5))
    size, state = st.sampled_from((512, 700, 3 << 20)) | odd, st.sampled_from(("active_allocated", "inactive")) | odd
    event = st.fixed_dictionaries(
        {"action": st.sampled_from(("alloc", "free_completed", "oom")) | odd, "addr": st.integers(0, 5) | odd},
        optional={"size": size, "stream": odd},
    )
    block = st.fixed_dictionaries({"size": size, "state": state}, optional={"requested_size": size})
    segment = st.fixed_dictionaries(
        {"device": st.just(0) | odd, "address": size, "total_size": size, "blocks": st.lists(block | odd, max_size=3)}
    )
    return st.fixed_dictionaries(
        {"device_traces": st.lists(st.lists(event, max_size=8) | odd, max_size=2), "segments": st.lists(segment)}
    )


class _Runs:
    """Action of a hostile pickle."""

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
    assert snapshot.requested_peak_bytes == outcome.peak_bytes
    assert snapshot.reserved_bytes == snapshot.simulated.reserved_bytes
    assert not snapshot.before
    assert snapshot.events[0].bytes == SIZE


@pytest.mark.parametrize(
    ("name", "peak_bytes"),
    [("memory_snapshot_resnet18", 394_249_728), ("memory_snapshot_resnet18_stacks", 393_627_136)],
)
def test_snapshots_of_torch_are_read(name: str, peak_bytes: int, tmp_path: Path) -> None:
    """Recorded by torch 2.11.0 on an H200, without and with Python stacks (of which file names are kept): the second
    training step of torchvision's ResNet-18, 8 images, SGD with momentum. `peak_bytes` is torch's own
    `max_memory_allocated()`; the simulated allocator places the blocks from before anew, so it rounds a few otherwise.
    """
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(gzip.decompress((DATA / f"{name}.pickle.gz").read_bytes()))
    snapshot = read_snapshot(path)
    assert len(snapshot.events) == 536
    assert len(snapshot.before) == 251
    assert snapshot.requested_peak_bytes == 390_393_288
    assert snapshot.peak_bytes == pytest.approx(peak_bytes, rel=0.01)
    assert snapshot.reserved_bytes == 465_567_744


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
    pool = read_snapshot(path).simulated
    assert pool.reserved_bytes == 20 * MIB
    assert pool.allocated_bytes == 12 * MIB


def test_what_was_there_before_recording_counts(tmp_path: Path) -> None:
    # A block of 8 MiB freed by the first event, and one of 4 MiB throughout; then 6 MiB are allocated.
    entries = [
        {"action": "free_completed", "addr": 8 * MIB, "size": 8 * MIB, "stream": 0},
        {"action": "oom", "size": 1 << 50, "device_free": 0, "stream": 0},
        {"action": "alloc", "addr": 100 * MIB, "size": 6 * MIB, "stream": 0},
    ]
    blocks = [
        {"size": 2 * MIB, "state": "inactive"},
        {"size": 5 * MIB, "requested_size": 4 * MIB, "state": "active_allocated"},
        {"size": 1 * MIB, "state": "inactive"},
    ]
    segments = [
        {"device": 1, "address": 0, "total_size": 8 * MIB, "blocks": blocks},
        {"device": 0, "address": 0, "total_size": 1 << 39, "blocks": []},
    ]
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": [[], entries]}))
    snapshot = read_snapshot(path)
    assert snapshot.device == 1
    assert snapshot.before == {8 * MIB: 8 * MIB, 2 * MIB: 4 * MIB}
    assert snapshot.requested_peak_bytes == 12 * MIB
    assert snapshot.peak_bytes == 12 * MIB
    assert snapshot.reserved_bytes == 8 * MIB


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
        ({"device_traces": 3}, r"\$.device_traces: is no list"),
        ({"device_traces": []}, "has no device"),
        ({"device_traces": [[]], "segments": []}, "has no events: call torch.cuda.memory._record_memory_history"),
        ({"device_traces": [[alloc(size=-1)]], "segments": []}, r"\[0\]\[0\].size: is no whole number"),
        ({"device_traces": [[alloc(size="x")]], "segments": []}, "is no whole number"),
        ({"device_traces": [[alloc(size=True)]], "segments": []}, "is no whole number"),
        ({"device_traces": [[alloc(size=1 << 80)]], "segments": []}, "is no whole number"),
        ({"device_traces": [[alloc(addr=1 << 63)]], "segments": []}, "is no whole number"),
        ({"device_traces": [[alloc(), alloc()]], "segments": []}, "event 1 takes a block that is in use"),
        (
            {"device_traces": [[alloc(size=512), alloc(size=1024) | {"action": "free_completed"}]], "segments": []},
            "event 1 frees 1,024 bytes of a block of 512",
        ),
        ({"device_traces": [[3]], "segments": []}, "no 'action'"),
        ({"device_traces": [[alloc()]]}, "no 'segments'"),
        ({"device_traces": [[alloc()]], "segments": [{"device": 0}]}, "no 'total_size'"),
        (
            {"device_traces": [[alloc()]], "segments": [{"device": 0, "total_size": 9, "address": 0, "blocks": [4]}]},
            r"segments\[0\].blocks\[0\]: is no memory snapshot: no 'size'",
        ),
    ],
)
def test_what_is_no_snapshot_is_refused_with_its_place(tmp_path: Path, document: object, problem: str) -> None:
    path = tmp_path / "odd.pickle"
    path.write_bytes(pickle.dumps(document))
    with pytest.raises(MeasurementError, match=problem):
        read_snapshot(path)


PLAIN = {
    "numbers": [1, -2, 300, 1 << 40, -(1 << 62), 1.5, None, True, False],
    "texts": ["", "\u00fc" * 300],
    "parts": [(), (1,), (1, 2), (1, 2, 3), (1,) * 5, {}, []],
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_are_read_as_python_reads_them(protocol: int) -> None:
    shared = [PLAIN, {"key": "text"}]
    assert read_plain_pickle(pickle.dumps([shared, shared, PLAIN], protocol=protocol)) == [shared, shared, PLAIN]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\x80", "ends too early"),
        (b"not a pickle at all", "opcode 0x6e at byte 0"),
        (b"\x80\x04.", "takes a value that is not there"),
        (b"\x80\x04K\x01R.", "opcode 0x52 at byte 4"),
        (b"cos\nsystem\n(tR.", "asks for 'os.system', which is no plain value"),
        (b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x7f.", "opcode 0x96"),  # 8 EiB, asked for in nine bytes
        (b"\x80\x04X\xff\xff\xff\xff.", "ends too early"),
        (b"\x80\x04\x8b\xff\xff\xff\x7f.", "a whole number of 2147483647 bytes"),
        (b"\x80\x04j\xff\xff\xff\x7f.", "refers to value 2147483647, which is not there"),
        (b"}]K\x01s.", "keys are no text"),
        (b"K\x01K\x02a.", "appends to what is no list"),
        (b"]e.", "a mark that is not there"),
        (b"X\x01\x00\x00\x00\xff.", "text that is not UTF-8"),
        (b"(" * 1000 + b".", "takes a value that is not there"),
        (b"]" * 7_000_000 + b".", "values of more than 512 MiB"),
        # Text of these values would need more levels than Python has, and more memory than available.
        (b")" + b"\x85" * 100_000 + b")\x93.", "a class without a name"),
        (b")" + b"q\x00h\x00\x86" * 60 + b")\x93.", "a class without a name"),
    ],
)
def test_hostile_and_broken_pickles_are_refused(tmp_path: Path, data: bytes, problem: str) -> None:
    path = tmp_path / "broken.pickle"
    path.write_bytes(data)
    with pytest.raises(MeasurementError, match="is no memory snapshot: .*" + problem):
        read_snapshot(path)


def test_blocks_of_all_segments_count_together(tmp_path: Path) -> None:
    """A few kilobytes can give a million segments one list of blocks."""
    blocks = [{"size": 512, "state": "inactive"}] * 2_000
    segment = {"device": 0, "address": 0, "total_size": 0, "blocks": blocks}
    event = {"action": "alloc", "addr": 1, "size": 1}
    path = tmp_path / "wide.pickle"
    path.write_bytes(pickle.dumps({"device_traces": [[event]], "segments": [segment] * 2_000}, protocol=4))
    with pytest.raises(MeasurementError, match=r"\$\.segments\[500\]\.blocks: has more than 1,000,000 blocks"):
        read_snapshot(path)


def test_place_in_the_memo_takes_no_room() -> None:
    # Python's own reader allocates 16 GiB for this.
    assert read_plain_pickle(b"\x80\x04]r\xff\xff\xff\x7f.") == []


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_changed_pickles_are_read_or_refused(data: st.DataObject) -> None:
    whole = bytearray(pickle.dumps({"device_traces": [[alloc(), alloc(addr=1 << 40)]], "segments": [PLAIN]}))
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
        whole = whole or bytearray(b".")
    with contextlib.suppress(PickleProblemError):
        read_plain_pickle(bytes(whole))


@settings(max_examples=300, deadline=None)
@given(document=documents())
def test_any_plain_document_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, document: object) -> None:
    path = tmp_path_factory.mktemp("any") / "any.pickle"
    path.write_bytes(pickle.dumps(document))
    with contextlib.suppress(MeasurementError):
        snapshot = read_snapshot(path)
        assert snapshot.peak_bytes >= snapshot.requested_peak_bytes > 0
