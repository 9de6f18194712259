"""Time and peak memory of a step's CUDA graphs by the size of cuBLAS's workspaces. Needs a GPU.

    python research/prototypes/workspace_sizes.py OUT.json TRACE...

Each step is recorded on one stream and by `critical_path` on eight, once for each size. torch reads the size from the
environment when a stream's workspace is made. All graphs of a step are timed in turns. OUT keeps what earlier commands
wrote, and a step that it has is left out, so that an interrupted command goes on.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Final

from gpusim.defaults import DEFAULT_SEED
from gpusim.gpu.device import provenance, require_gpu, set_precision
from gpusim.gpu.replay.cudagraph import GraphRecorder, RecordedGraph
from gpusim.gpu.replay.execute import Runner, make_initial
from gpusim.gpu.replay.timing import time_interleaved
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.policies.registry import POLICIES
from gpusim.trace.store import load_trace
from gpusim.validation.chosen import hardware_of

VARIABLE: Final = "CUBLAS_WORKSPACE_CONFIG"
#: torch's default for Hopper is 32 MiB; each pair is a size in KiB and a number.
SETTINGS: Final = {"32 MiB": ":4096:8", "8 MiB": ":4096:2:16:8", "4 MiB": ":4096:1", "1 MiB": ":1024:1"}
STREAMS: Final = 8


def measured(name: str) -> dict[str, Any]:
    """Return the times in ns and peaks in bytes of one step's graphs, by number of streams and size."""
    trace = load_trace(name)
    graph = OpGraph.build(trace, hardware_of(trace))
    device = require_gpu()
    set_precision(trace.model.dtype)
    runner = Runner(trace, device)
    runner.bind(make_initial(trace, device, DEFAULT_SEED).tensors)
    schedules = {
        "one stream": Schedule.in_recorded_order(len(graph)),
        "several": POLICIES["critical_path"](graph, STREAMS),
    }
    graphs: dict[str, RecordedGraph] = {}
    for size, setting in SETTINGS.items():
        os.environ[VARIABLE] = setting
        for streams, schedule in schedules.items():
            # A recorder of its own: streams that have a workspace keep it.
            recorder = GraphRecorder(runner, graph.preds, own_workspaces=True)
            graphs[f"{streams}, {size}"] = recorder.record(schedule, warm=True)
    times = time_interleaved({key: recorded.replay for key, recorded in graphs.items()})
    found: dict[str, Any] = {"provenance": provenance(" ".join(sys.argv), graphs["one stream, 32 MiB"].replay)}
    for key, recorded in graphs.items():
        time = times[key]
        interval_ns = [time.lo_ns, time.hi_ns]
        found[key] = {"ns": time.median_ns, "interval_ns": interval_ns, "peak_bytes": recorded.peak_bytes}
    return found


def main() -> None:
    out, *names = sys.argv[1:]
    path = Path(out)
    told = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"steps": {}}
    for name in names:
        if name in told["steps"]:
            continue
        told["steps"][name] = measured(name)
        path.write_text(json.dumps(told, indent=1, default=str) + "\n", encoding="utf-8")
        print(name, {key: each.get("ns") for key, each in told["steps"][name].items()}, flush=True)


if __name__ == "__main__":
    main()
