"""On a real GPU: capture, explore, replay, compare. Skipped, with the reason shown, where there is none."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from gpusim.cli.common import choose_hardware
from gpusim.errors import GpuError
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule, make_schedule, read_schedule, write_schedule
from gpusim.runtime.capture import Captured, CaptureOptions, capture
from gpusim.runtime.isolate import alone
from gpusim.runtime.replay import replay
from gpusim.search.explore import explore
from gpusim.trace.schema import Mode, Trace
from gpusim.trace.store import read_trace, write_trace
from tests.networks import spec

pytestmark = pytest.mark.gpu


def capture_here(name: str, mode: Mode) -> tuple[Trace, float, float]:
    """Trace and check errors, captured in this process."""
    found: Captured = capture(CaptureOptions(spec=spec(name), mode=mode, batch=4))
    return found.trace, found.loss_error, found.gradient_error


@functools.cache
def captured(name: str, mode: Mode) -> tuple[Trace, float, float]:
    """Trace and check errors, captured in a process of its own: torch allows one profiler session a process."""
    return alone(capture_here, name, mode)


def random_schedule(trace: Trace, graph: OpGraph, streams: int, seed: int) -> Schedule:
    """A legal schedule drawn at random: any ready op next, on any stream."""
    draw = random.Random(seed)
    waiting = {op: len(before) for op, before in enumerate(graph.preds)}
    ready = [op for op, count in waiting.items() if not count]
    order = []
    while ready:
        op = ready.pop(draw.randrange(len(ready)))
        order.append(op)
        for after in graph.succs[op]:
            waiting[after] -= 1
            if not waiting[after]:
                ready.append(after)
    placed = [draw.randrange(streams) for _ in order]
    return make_schedule(trace, order, placed, policy="random", made_by="test")


@pytest.mark.parametrize(("name", "mode"), [("branches", "train"), ("dropouts", "train"), ("attention", "infer")])
def test_loop_gives_the_sequential_results(name: str, mode: Mode, tmp_path: Path) -> None:
    """Capture, explore, write, read, replay: every schedule, random ones too, ends in the sequential run's results."""
    trace, loss_error, gradient_error = captured(name, mode)
    assert loss_error < 1e-2
    assert gradient_error < 2e-2
    truth = trace.ground_truth
    assert truth is not None
    assert truth.attributed_frac >= 0.999
    assert 0 < truth.graph.median_ns < truth.eager.median_ns
    write_trace(trace, tmp_path / "t.json.gz")
    trace = read_trace(tmp_path / "t.json.gz")
    hardware = choose_hardware(None, trace)
    explored = explore(trace, hardware, streams=4, budget_s=1.0)
    write_schedule(explored.schedule, tmp_path / "s.json")
    graph = OpGraph.build(trace, hardware)
    schedules = [read_schedule(tmp_path / "s.json"), *(random_schedule(trace, graph, 4, seed) for seed in range(3))]
    for measurement in replay(trace, schedules, hardware, instances=2):
        assert measurement.outputs.equal, measurement.outputs
        assert measurement.outputs.compared > 0
        assert measurement.schedule.median_ns > 0
        assert measurement.peak_bytes > 0
        assert measurement.gpu.sm_clock_mhz > 0


def test_measured_timeline_goes_beside_the_simulated_one(tmp_path: Path) -> None:
    """`replay --perfetto` writes two runs, and the measured one has every kernel."""
    from gpusim.engine.reference import ReferenceEngine
    from gpusim.plan.lower import lower
    from gpusim.report.perfetto import run_from_kineto, run_from_timeline, write_perfetto
    from gpusim.runtime.timeline import measured_events

    trace, _, _ = captured("branches", "train")
    hardware = choose_hardware(None, trace)
    graph = OpGraph.build(trace, hardware)
    order, streams = list(range(len(trace.ops))), [0] * len(trace.ops)
    events = alone(measured_events, trace, order, streams, 0)
    kernels = sum(len(op.kernels) for op in trace.ops)
    assert len(events) == kernels
    simulated = ReferenceEngine().run(lower(graph, order, streams), graph.hardware)
    runs = [run_from_timeline(simulated, trace, "simulated", hardware), run_from_kineto(events, "measured")]
    write_perfetto(tmp_path / "both.json", runs)
    slices = [e for e in json.loads((tmp_path / "both.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert len(slices) == 2 * kernels


def replay_in_little_memory(trace: Trace) -> str:
    """What replay says on a GPU of which it may use almost nothing; to be called in a process of its own."""
    torch.cuda.set_per_process_memory_fraction(1e-6)
    graph = OpGraph.build(trace, choose_hardware(None, trace))
    try:
        replay(trace, [random_schedule(trace, graph, 2, 0)], graph.hardware, instances=1)
    except GpuError as error:
        return str(error)
    return "it fitted"


def test_gpu_out_of_memory_is_one_line() -> None:
    trace, _, _ = captured("branches", "train")
    said = alone(replay_in_little_memory, trace)
    assert "GPU out of memory" in said
    assert "\n" not in said
