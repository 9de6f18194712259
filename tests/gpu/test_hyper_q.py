"""Stream mode against the measured table of launches into many streams, and the measurement of that table."""

from __future__ import annotations

import contextlib
import json
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpusim.engine.base import Engine
from gpusim.engine.fast import FastEngine
from gpusim.engine.reference import ReferenceEngine
from gpusim.errors import GpuError, MeasurementError
from gpusim.formats.hardware import load_hardware
from gpusim.formats.hyper_q import CONNECTIONS, SHAPES, HyperQ, HyperQCell, launch_order, read_hyper_q
from gpusim.validation.hyper_q import hyper_q_markdown, predict_hyper_q, spin_plan

FILE = Path(__file__).parents[1] / "data" / "hyper_q_h200_20261120.json"
MEASURED = read_hyper_q(FILE)
H200 = load_hardware("h200")

#: One queue, 16 streams of 4 kernels, breadth first: measured once at 4.42. The same with 2, 8 and 32 queues gave 4.13
#: to 4.15, and 32 streams on one queue 4.35. No rule of queues makes 16 streams slower than 32: it is left as it is.
ODD_ONE_OUT = (1, 16, 4, False)


def test_the_table_has_every_case() -> None:
    found = [(cell.connections, cell.streams, cell.depth, cell.depth_first) for cell in MEASURED.cells]
    assert found == [(connections, *shape) for connections in CONNECTIONS for shape in SHAPES]
    assert len(found) == 44


@pytest.mark.parametrize("engine", [FastEngine(), ReferenceEngine()], ids=["fast", "reference"])
def test_all_cases_but_one_are_predicted_within_5_percent(engine: Engine) -> None:
    """All cells within 5 %. Nothing is fitted to the table; the host's pace is the recorded one."""
    cells = predict_hyper_q(MEASURED, H200, engine)
    over = {
        (found.cell.connections, found.cell.streams, found.cell.depth, found.cell.depth_first): found.error
        for found in cells
        if abs(found.error) > 0.05
    }
    assert set(over) <= {ODD_ONE_OUT}
    assert all(abs(error) < 0.08 for error in over.values())


def test_launch_orders() -> None:
    assert list(launch_order(3, 2, depth_first=False)) == [0, 1, 2, 0, 1, 2]
    assert list(launch_order(3, 2, depth_first=True)) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("streams", "depth", "depth_first", "queues"), [(32, 4, True, 8), (32, 4, False, 8), (4, 4, True, 1)]
)
def test_without_costs_the_textbook_count_comes_out(streams: int, depth: int, depth_first: bool, queues: int) -> None:
    """(k / q)(d - 1) + 1 kernel times depth first, d breadth first."""
    free = msgspec.structs.replace(
        H200,
        stream=msgspec.structs.replace(
            H200.stream, launch_ns=0, start_ns=0, chain_ns=0, event_ns=0, event_host_ns=0, queues=queues
        ),
        contention=msgspec.structs.replace(H200.contention, younger_slowdown=0.0),
    )
    plan = spin_plan(streams, depth, depth_first, 1_000_000, free)
    expected = -(-streams // queues) * (depth - 1) + 1 if depth_first else depth
    assert FastEngine().run(plan, free).makespan_ns == expected * 1_000_000


def test_table_names_the_cases_that_are_off() -> None:
    def cell(units: float) -> HyperQCell:
        return HyperQCell(connections=8, streams=1, depth=4, depth_first=True, units=units)

    table = HyperQ(
        schema="gpusim-hyper-q/1", gpu="G", date="2026-01-02", source="here", spin_ns=1_000_000, launch_ns=0,
        cells=(cell(4.0), cell(5.0)),
    )  # fmt: skip
    text = hyper_q_markdown(table, predict_hyper_q(table, H200))
    assert "2 cases, 1 within 5 %" in text
    assert "| 8 | 1 | 4 | depth first | 4.00 |" in text
    assert text.count("**") == 2


def test_broken_table_is_refused_with_its_place(tmp_path: Path) -> None:
    document = json.loads(FILE.read_text())
    document["cells"][3]["units"] = 0
    path = tmp_path / "table.json"
    path.write_text(json.dumps(document))
    with pytest.raises(MeasurementError, match=r"cells\[3\]\.units"):
        read_hyper_q(path)


def test_measuring_asks_a_fresh_process_for_each_number_of_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver reads CUDA_DEVICE_MAX_CONNECTIONS once per process."""
    from gpusim.gpu.calibrate import hyper_q

    asked: list[str] = []

    def run(command: list[str], env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(env["CUDA_DEVICE_MAX_CONNECTIONS"])
        found = {
            "units": [float(asked[-1])] * len(SHAPES),
            "launch_ns": [9_000.0 + place for place in range(len(SHAPES))],
            "first_launch_ns": 6_000.2,
            "spin_ns": 760_000.4,
        }
        return subprocess.CompletedProcess(command, 0, "a warning\n" + json.dumps(found) + "\n", "")

    monkeypatch.setattr(hyper_q, "require_gpu", lambda: None)
    monkeypatch.setattr(hyper_q.torch.cuda, "get_device_name", lambda: "G")
    monkeypatch.setattr(hyper_q.subprocess, "run", run)
    found = hyper_q.measure_hyper_q("gpusim calibrate --rules r.json")
    assert asked == ["1", "2", "8", "32"]
    assert (found.spin_ns, found.launch_ns, found.first_launch_ns, len(found.cells)) == (760_000, 9_005, 6_000, 44)
    assert [cell.launch_ns for cell in found.cells[11:14]] == [9_000, 9_001, 9_002]
    assert [cell.units for cell in found.cells[::11]] == [1, 2, 8, 32]


def test_program_that_measures_a_gpu_without_queues_agrees_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch pace, first launch and times are recorded so that the simulator reproduces the table from them."""
    from gpusim.gpu.calibrate import hyper_q

    launch_ns, spin_ns = 6_000, 760_000
    now, current = 0, 0
    ends = dict.fromkeys(range(-1, hyper_q.STREAMS), 0)

    def clock() -> int:
        nonlocal now
        now += 50
        return now

    def sleep(cycles: int) -> None:
        nonlocal now
        now += launch_ns
        ends[current] = max(ends[current], now) + cycles

    def synchronize() -> None:
        nonlocal now
        now = max(now, *ends.values())

    def set_stream(stream: int) -> None:
        nonlocal current
        current = stream

    numbers = iter(range(hyper_q.STREAMS))
    cuda = hyper_q.torch.cuda
    monkeypatch.setattr(hyper_q, "perf_counter_ns", clock)
    monkeypatch.setattr(hyper_q, "spin_cycles", lambda us: spin_ns)
    monkeypatch.setattr(hyper_q, "idle_sync_ns", lambda: 0.0)
    monkeypatch.setattr(hyper_q, "event_ns", lambda *_, **__: float(spin_ns))
    monkeypatch.setattr(cuda, "Stream", lambda: next(numbers))
    monkeypatch.setattr(cuda, "stream", lambda lane: contextlib.nullcontext())
    monkeypatch.setattr(cuda, "default_stream", lambda: -1)
    for name, instead in (("_sleep", sleep), ("synchronize", synchronize), ("set_stream", set_stream)):
        monkeypatch.setattr(cuda, name, instead)
    found = hyper_q.units()
    assert found["first_launch_ns"] == pytest.approx(launch_ns, abs=200)
    assert all(pace == pytest.approx(hyper_q.PACE_NS, rel=0.02) for pace in found["launch_ns"])
    cells = [
        HyperQCell(connections=64, streams=streams, depth=depth, depth_first=first, units=units, launch_ns=round(pace))
        for (streams, depth, first), units, pace in zip(SHAPES, found["units"], found["launch_ns"], strict=True)
    ]
    table = HyperQ(
        schema="gpusim-hyper-q/1", gpu="G", date="2026-01-02", source="here", spin_ns=spin_ns,
        launch_ns=hyper_q.PACE_NS, first_launch_ns=round(found["first_launch_ns"]), cells=tuple(cells),
    )  # fmt: skip
    costs = {"start_ns": 0.0, "chain_ns": 0.0}
    ideal = msgspec.structs.replace(H200, stream=msgspec.structs.replace(H200.stream, **costs))
    assert all(abs(cell.error) < 0.001 for cell in predict_hyper_q(table, ideal))


def test_pace_of_a_case_counts_before_that_of_the_table() -> None:
    """Four launches into four streams, one kernel each: the last one starts three launches late."""
    cell = HyperQCell(connections=8, streams=4, depth=1, depth_first=False, units=1.0)
    table = HyperQ(
        schema="gpusim-hyper-q/1", gpu="G", date="2026-01-02", source="here", spin_ns=1_000_000, launch_ns=10_000,
        first_launch_ns=5_000, cells=(cell, msgspec.structs.replace(cell, launch_ns=20_000)),
    )  # fmt: skip
    ideal = msgspec.structs.replace(H200, stream=msgspec.structs.replace(H200.stream, start_ns=0.0))
    slow, slower = (found.predicted for found in predict_hyper_q(table, ideal))
    assert slow == pytest.approx((5_000 + 30_000 + 1_000_000) / 1_005_000)
    assert slower == pytest.approx((5_000 + 60_000 + 1_000_000) / 1_005_000)


def test_process_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpusim.gpu.calibrate import hyper_q

    monkeypatch.setattr(hyper_q, "require_gpu", lambda: None)
    monkeypatch.setattr(
        hyper_q.subprocess,
        "run",
        lambda command, **_: subprocess.CompletedProcess(command, 1, "", "Traceback\nRuntimeError: no device\n"),
    )
    with pytest.raises(GpuError, match="MAX_CONNECTIONS=1 failed: RuntimeError: no device"):
        hyper_q.measure_hyper_q("")
