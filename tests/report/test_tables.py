"""Output of `capture` and `replay`: every number of the document appears, and a difference stands out."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from gpusim.cli import cli
from gpusim.errors import ReplayError
from gpusim.formats.measurement import SCHEMA, Measurement, OutputCheck, read_measurement
from gpusim.formats.trace import Timing, Trace
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.report.as_captured import not_as_captured
from gpusim.report.tables import captured_document, print_captured, print_measurement
from gpusim.trace.store import write_trace
from tests.support.helpers import wide_trace

SAME = OutputCheck(
    equal=True,
    bit_equal=True,
    sequential_repeats=True,
    worst_error=0.0,
    sequential_error=0.0,
    tolerance=1e-3,
    compared=3,
)
APART = msgspec.structs.replace(SAME, equal=False, bit_equal=False, worst_error=0.25)


def timing(median_ns: int) -> Timing:
    return Timing(median_ns=median_ns, lo_ns=median_ns - 1000, hi_ns=median_ns + 1000, rounds=25, slowest_ns=median_ns)


def measurement(trace: Trace, schedule: Schedule | None = None, outputs: OutputCheck = SAME) -> Measurement:
    return Measurement(
        schema=SCHEMA,
        trace=trace.name,
        trace_hash="0",
        policy=schedule.policy if schedule else "wavefront",
        streams=4,
        schedule=timing(500_000),
        sequential=timing(800_000),
        predicted_ns=475_000,
        predicted_sequential_ns=808_000,
        hardware="h200",
        outputs=outputs,
        peak_bytes=3 * 2**20,
        sequential_peak_bytes=2 * 2**20,
        events=7,
        gpu=trace.provenance.gpu,
        date="2026-01-01",
        command="gpusim replay",
    )


def test_replay_prints_measured_predicted_error_clocks_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    trace = wide_trace(graph_ns=800_000)
    print_measurement(measurement(trace), trace)
    said = capsys.readouterr().out
    # 800 / 500 = 1.60x; 475 / 500 - 1 = -5.0 %; 808 / 800 - 1 = +1.0 %
    for part in ("1.60x", "500 us", "499 us", "501 us", "800 us", "-5.0%", "+1.0%", "7 events", "3 MiB", "1980 MHz"):
        assert part in said
    assert "equal bit for bit" in said


@pytest.mark.parametrize(
    ("sequential_ns", "note"),
    [(800_000, ""), (780_000, "3.5% less than at capture"), (850_000, "5.2% more than at capture")],
)
def test_replay_notes_a_sequential_graph_that_is_not_as_captured(
    sequential_ns: int, note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """808 us at capture."""
    trace = wide_trace(graph_ns=808_000)
    print_measurement(msgspec.structs.replace(measurement(trace), sequential=timing(sequential_ns)), trace)
    said = " ".join(capsys.readouterr().out.split())
    assert note in said
    assert ("so may the schedule" in said) == bool(note)


@pytest.mark.parametrize("known", ["no capture", "no graph at capture", "another GPU"])
def test_replay_compares_its_sequential_graph_with_that_of_a_capture_on_the_same_gpu_only(known: str) -> None:
    """Not with a prediction: one for another GPU may be far off, and a step whose calls have no kernels takes 0."""
    trace = wide_trace(graph_ns=0 if known == "no graph at capture" else 808_000)
    if known == "no capture":
        trace = msgspec.structs.replace(trace, ground_truth=None)
    measured = msgspec.structs.replace(measurement(trace), sequential=timing(2_000_000), predicted_sequential_ns=0)
    if known == "another GPU":
        measured = msgspec.structs.replace(measured, gpu=msgspec.structs.replace(measured.gpu, name="NVIDIA A100"))
    assert not not_as_captured(measured, trace)


def test_replay_that_differs_says_so_in_capitals(capsys: pytest.CaptureFixture[str]) -> None:
    trace = wide_trace()
    print_measurement(measurement(trace, outputs=APART), trace)
    assert "DIFFERENT" in capsys.readouterr().out


def test_capture_prints_its_times_and_what_was_tied_to_ops(capsys: pytest.CaptureFixture[str]) -> None:
    trace = wide_trace(graph_ns=800_000)
    print_captured(captured_document(trace, 0.0, 1e-4, "t.json"))
    said = capsys.readouterr().out
    for part in (trace.name, "t.json", "800 us", "%", "0.0001"):
        assert part in said


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replace `gpusim.gpu.replay.replay` by a recorder of its arguments."""
    asked: list[dict[str, Any]] = []
    edge = ModuleType("gpusim.gpu.replay.replay")

    def replay(graph: OpGraph, schedules: list[Schedule], **options: Any) -> list[Measurement]:
        asked.append({"schedules": schedules, **options})
        return [measurement(graph.trace, schedule, asked[0].get("outputs", SAME)) for schedule in schedules]

    def require_equal(found: Measurement) -> None:
        if not found.outputs.equal:
            raise ReplayError("outputs differ")

    edge.replay, edge.require_equal = replay, require_equal  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gpusim.gpu.replay.replay", edge)
    return asked


@pytest.mark.parametrize("as_json", [False, True])
def test_replay_command_hands_over_the_schedule_and_writes_the_measurement(
    as_json: bool, replayed: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpusim.gpu.replay.allowlist.allowed_operators", lambda: frozenset({"aten.test.default"}))
    write_trace(wide_trace(), tmp_path / "t.json")
    options = [
        "--trace",
        str(tmp_path / "t.json"),
        "--policy",
        "wavefront",
        "--streams",
        "3",
        "-o",
        str(tmp_path / "m.json"),
    ]
    done = CliRunner().invoke(cli, ["replay", *options, *(["--json"] if as_json else [])], catch_exceptions=False)
    assert done.exit_code == 0
    assert [schedule.policy for schedule in replayed[0]["schedules"]] == ["wavefront"]
    assert read_measurement(tmp_path / "m.json").policy == "wavefront"
    if as_json:
        assert msgspec.json.decode(done.stdout)["policy"] == "wavefront"
    else:
        assert "1.60x" in done.stdout
