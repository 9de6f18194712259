"""Kernels and copies of memory plans' replays, as the profiler sees them, and the rate of copies by their number.

    python research/prototypes/plan_timeline.py OUT.json TRACE [PLAN ...]

OUT has one replay each of the step that keeps all and of every plan (JSON files of `gpusim memory`): kind, stream
inside the graph, start and duration in ns, bytes. Each plan is recorded twice, the second time with the edges of a
kernel that waits for a copy in the other order: copy, chain. `rates` has the bytes per ns of copies in a row in one
graph.
"""

from __future__ import annotations

import ctypes
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

import gpusim
from gpusim.gpu.calibrate.copies import DIRECTIONS, CopyBench
from gpusim.gpu.calibrate.microbench import event_ns
from gpusim.gpu.device import provenance, require_gpu, set_precision
from gpusim.gpu.profiling import exported_events, profiled
from gpusim.gpu.replay.memory_replay import ProgramRecorder, state_on_gpu, with_buffers
from gpusim.gpu.replay.memory_run import CudaLanes, MemoryRunner
from gpusim.memplan.evaluate import MemoryEvaluator
from gpusim.memplan.plan import MemoryPlan, read_memory_plan
from gpusim.units import MIB

REPLAYS = 3
#: CU_STREAM_CAPTURE_STATUS_ACTIVE, CU_STREAM_SET_CAPTURE_DEPENDENCIES.
CAPTURING, SET_DEPENDENCIES = 1, ctypes.c_uint(1)
KINDS = {"kernel": "kernel", "gpu_memset": "memset"}
#: Sizes and numbers of copies in a row.
IN_A_ROW = ((MIB, (8, 64, 512)), (8 * MIB, (8, 32, 128, 256)), (40 * MIB, (8, 32, 64)))


class OtherOrder(CudaLanes):
    """Lanes whose waits put the edge from the copy before that from the chain of ops."""

    def wait(self, token: Any) -> None:
        super().wait(token)
        reverse_dependencies(self.ops)


def reverse_dependencies(stream: torch.cuda.Stream) -> None:
    """Reverse the nodes that the next one on a capturing stream depends on; nothing outside a capture."""
    driver = ctypes.CDLL("libcuda.so.1")
    status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    nodes, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_size_t()
    handle = ctypes.c_void_p(stream.cuda_stream)
    pointers = [ctypes.byref(each) for each in (status, number, graph, nodes, count)]
    code = driver.cuStreamGetCaptureInfo_v2(handle, *pointers)
    if code == 0 and status.value == CAPTURING and count.value > 1:
        turned = (ctypes.c_void_p * count.value)(*(nodes[place] for place in reversed(range(count.value))))
        code = driver.cuStreamUpdateCaptureDependencies(handle, turned, count, SET_DEPENDENCIES)
    if code:
        raise RuntimeError(f"the driver's error {code} while edges were put in another order")


def timeline(replay: Any) -> list[list[Any]]:
    """Return the events of the second of some replays in a row."""
    for _ in range(REPLAYS):
        replay()
    torch.cuda.synchronize()
    with profiled() as session:
        for _ in range(REPLAYS):
            replay()
            torch.cuda.synchronize()
    kinds = (*KINDS, "gpu_memcpy")
    events = sorted((e for e in exported_events(session) if e.get("cat") in kinds), key=lambda e: e["ts"])
    count = len(events) // REPLAYS
    return [row(event, events[count]["ts"]) for event in events[count : 2 * count]]


def row(event: dict[str, Any], start_us: float) -> list[Any]:
    """Return kind, stream, start and duration in ns, and bytes of an event."""
    kind = KINDS.get(event["cat"]) or ("d2h" if "DtoH" in event["name"] else "h2d")
    args = event["args"]
    start_ns = round((event["ts"] - start_us) * 1e3)
    return [kind, args.get("stream"), start_ns, round(event["dur"] * 1e3), args.get("bytes", 0)]


def replays(trace_path: str, plan_paths: list[str]) -> dict[str, Any]:
    """Return time, prediction and events of each plan."""
    graph = gpusim.load(trace_path).graph
    device = require_gpu()
    set_precision(graph.trace.model.dtype)
    plans = {"keep_all": MemoryPlan(policy="keep_all")}
    plans |= {Path(path).stem: read_memory_plan(Path(path), graph.trace) for path in plan_paths}
    evaluator, runner = MemoryEvaluator(graph), MemoryRunner(graph.trace, device)
    state, initial_bytes = state_on_gpu(graph.trace, device, 0)
    runner.bind(state.tensors)
    recorder = ProgramRecorder(evaluator, runner, initial_bytes)
    result: dict[str, Any] = {}
    lanes = {"": recorder.lanes, ", other order of edges": OtherOrder()}
    for name, plan in plans.items():
        outcome = with_buffers(recorder, evaluator, evaluator.evaluate(plan), print)
        for order, chosen in lanes.items():
            recorder.lanes = recorder.programs.lanes = chosen
            recorded = recorder.record(outcome.program, warm=True)
            replay_ns = round(event_ns(recorded.replay, calls=3, rounds=9))
            print(f"{name}{order}: {replay_ns / 1e6:.3f} ms, predicted {outcome.step_ns / 1e6:.3f} ms", flush=True)
            events = timeline(recorded.replay)
            result[name + order] = {"replay_ns": replay_ns, "predicted_ns": outcome.step_ns, "events": events}
            del recorded
    return result


def rates() -> list[list[Any]]:
    """Return size, number, direction and bytes per ns of copies in a row, each of a buffer of its own."""
    bench, rows = CopyBench(), []
    for size, counts in IN_A_ROW:
        for count in counts:
            for direction in DIRECTIONS:
                time_ns = bench.graph_ns((), {direction: bench.copies(size, count, direction)})
                rows.append([size, count, direction, size * count / time_ns])
        bench.forget()
    return rows


def main() -> None:
    """Write both, with the GPU's name."""
    out, trace_path, *plan_paths = sys.argv[1:]
    require_gpu()
    command = "python research/prototypes/plan_timeline.py " + " ".join(sys.argv[1:])
    head = provenance(command, partial(torch.cuda._sleep, 2_000_000))
    result = head | {"replays": replays(trace_path, plan_paths), "rates": rates()}
    Path(out).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
