"""On a CUDA GPU: capture, explore, replay and compare small networks, also with unreasonable schedules.

The networks are those of tests/support/networks.py, given as a user would give them. Nothing here looks at how long
anything took: only at what was computed, and that times are there.
"""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpusim.formats.hardware import load_hardware
from gpusim.formats.measurement import read_measurement
from gpusim.formats.trace import Trace
from gpusim.gpu.capture.capture import Captured, capture
from gpusim.gpu.capture.options import CaptureOptions
from gpusim.gpu.capture.rebuild import CHECK_TOLERANCE
from gpusim.gpu.isolate import alone
from gpusim.gpu.profiling import MIN_ATTRIBUTED_FRAC
from gpusim.gpu.replay.replay import replay
from gpusim.plan.schedule import Schedule, write_schedule
from gpusim.search.explore import explore
from gpusim.trace.check import check_trace
from gpusim.trace.dependencies import dependencies
from gpusim.trace.store import read_trace, write_trace
from tests.support.helpers import build_graph, schedule_of
from tests.support.networks import spec

# Libraries warn about themselves on a GPU, which these tests ignore.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

ROOT = Path(__file__).parents[2]
STREAMS = 4
STEPS = {
    "train": CaptureOptions(
        spec=spec("branches"), mode="train", batch=2, memory_format="channels_last", command="test"
    ),
    "infer": CaptureOptions(spec=spec("dropouts"), mode="infer", batch=2, command="test"),
}


@pytest.fixture(scope="module", params=sorted(STEPS))
def captured(request: pytest.FixtureRequest) -> Captured:
    """A step captured in a process of its own: torch allows one profiler session a process."""
    return alone(capture, STEPS[request.param])


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    """Free the GPU memory of a test."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


def random_schedule(trace: Trace, seed: int) -> Schedule:
    """Return a legal schedule with random order and streams."""
    lot = random.Random(seed)
    left = {op: set(before) for op, before in enumerate(dependencies(trace))}
    order: list[int] = []
    while left:
        op = lot.choice([op for op, before in left.items() if not before])
        del left[op]
        for before in left.values():
            before.discard(op)
        order.append(op)
    streams = [lot.randrange(STREAMS) for _ in order]
    return schedule_of(order, streams, policy="random")


def best_schedule(trace: Trace) -> Schedule:
    """Return the fastest of the policies with several streams, worth it or not."""
    found = explore(build_graph(trace, load_hardware("h200")), streams=STREAMS, budget_s=0.3)
    return min((row for row in found.rows if row.streams > 1), key=lambda row: row.makespan_ns).schedule


def test_capture_has_its_ground_truth_and_ties_its_kernels_to_ops(captured: Captured, tmp_path: Path) -> None:
    trace = captured.trace
    truth = trace.ground_truth
    assert truth is not None
    assert truth.attributed_frac >= MIN_ATTRIBUTED_FRAC
    assert truth.eager.median_ns > 0
    assert truth.graph.lo_ns <= truth.graph.median_ns <= truth.graph.hi_ns
    limit = CHECK_TOLERANCE[trace.model.dtype]
    assert captured.loss_error <= limit
    assert captured.gradient_error <= limit
    assert trace.provenance.gpu.name == torch.cuda.get_device_name()
    kernels = [kernel for op in trace.ops for kernel in op.kernels]
    assert all(kernel.dur_ns > 0 and kernel.samples >= 5 for kernel in kernels)
    assert all(op.writes for op in trace.ops if op.kernels), "an op with kernels writes something"
    assert all(op.kernels for op in trace.ops if "convolution" in op.target or "mm." in op.target)
    check_trace(trace, "captured")
    write_trace(trace, tmp_path / "t.json.gz")
    assert read_trace(tmp_path / "t.json.gz") == trace


def test_schedules_give_the_outputs_of_the_sequential_run(captured: Captured) -> None:
    """The best one and two random ones, which use every stream: a missing event or early release shows."""
    trace = captured.trace
    schedules = [best_schedule(trace), random_schedule(trace, 1), random_schedule(trace, 2)]
    measurements = replay(build_graph(trace, load_hardware("h200")), schedules, recordings=1)
    assert len(measurements) == len(schedules)
    assert all(measurement.events > 0 for measurement in measurements[1:]), "order and streams by lot need events"
    for measurement in measurements:
        assert measurement.outputs.equal, measurement.outputs
        assert measurement.outputs.compared > 0
        assert measurement.peak_bytes > 0
        assert measurement.schedule.median_ns > 0
        assert measurement.sequential.median_ns > 0


def gpusim(*arguments: str | Path, first: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, after executing `first`."""
    code = f"{first}\nfrom gpusim.cli import main\nmain()"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))  # torch itself may come from that path
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("captured", ["infer"], indirect=True)
def test_replay_out_of_memory_is_one_line_and_exit_code_2(captured: Captured, tmp_path: Path) -> None:
    """With a millionth of the GPU's memory for the process, the smallest allocation fails."""
    trace, output = tmp_path / "t.json", tmp_path / "m.json"
    write_trace(captured.trace, trace)
    limit = "import torch; torch.cuda.set_per_process_memory_fraction(1e-6)"
    done = gpusim("replay", "--trace", trace, "--policy", "wavefront", "-o", output, first=limit)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if not line.endswith(" ...")]  # without the progress
    assert len(errors) == 1
    assert errors[0].startswith("gpusim: GPU out of memory: ")
    assert not output.exists()


@pytest.mark.parametrize("captured", ["infer"], indirect=True)
def test_command_line_replays_and_shows_both_timelines_side_by_side(captured: Captured, tmp_path: Path) -> None:
    trace, schedule, timeline, output = (tmp_path / name for name in ("t.json", "s.json", "p.json", "m.json"))
    write_trace(captured.trace, trace)
    write_schedule(random_schedule(captured.trace, 3), captured.trace, schedule)
    options = ("--schedule", schedule, "--perfetto", timeline, "-o", output, "--json")
    done = gpusim("replay", "--trace", trace, *options)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outputs"]["equal"] is True
    assert read_measurement(output).policy == "random"
    events = json.loads(timeline.read_bytes())["traceEvents"]
    processes = {event["args"]["name"]: event["pid"] for event in events if event.get("name") == "process_name"}
    slices = {name: [e for e in events if e["ph"] == "X" and e["pid"] == pid] for name, pid in processes.items()}
    (simulated,) = (found for name, found in slices.items() if name.startswith("simulated"))
    (measured,) = (found for name, found in slices.items() if name.startswith("measured"))
    assert len(simulated) == sum(len(op.kernels) for op in captured.trace.ops)
    assert {piece["cat"] for piece in measured} >= {"kernel"}
