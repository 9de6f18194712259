"""One step in several styles of Inductor's, each on one stream and on several, and torch.compile's own graph.

    python benchmarks/styles.py torchvision:inception_v3 train 8 -o styles.json

Needs a GPU, and a core for each style: each has a process of its own, and all compile at the same time. What runs
kernels waits for the others: torch.compile's step first, then the recordings, then the measurements in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
from multiprocessing.connection import Connection
from typing import Any, Final

import torch
from inductor_step import OwnGraph, profiled, say

from gpusim.gpu.capture.capture import build_step
from gpusim.gpu.capture.joint_graph import joint_graph
from gpusim.gpu.capture.options import CaptureOptions
from gpusim.gpu.capture.rebuild import bare_trace
from gpusim.gpu.capture.record import record
from gpusim.gpu.device import require_gpu, set_precision
from gpusim.gpu.inductor.kernels import start_compiling
from gpusim.gpu.inductor.own_step import own_step
from gpusim.gpu.inductor.step import with_values
from gpusim.gpu.replay.timing import Recording, time_interleaved

OWN_GRAPH: Final = "torch_compile_own_graph"
#: cuDNN's kernels that change the layout of an image or weight, by parts of their names.
TRANSPOSES: Final = ("nchwToNhwc", "nhwcToNchw")
#: Times that each process measures; processes of torch's that compile, for each of ours.
TURNS, COMPILERS = 5, 4


def work(name: str, asked: argparse.Namespace, pipe: Connection) -> None:
    """Measure one contender as the other end of the pipe says, and report what it cannot do."""
    try:
        measure(name, asked, pipe)
    except EOFError:
        pass  # the other end has gone
    except Exception as cause:
        problem = (str(cause) or type(cause).__name__).splitlines()[0]
        pipe.send({"style": name, "problem": problem})


def measure(name: str, asked: argparse.Namespace, pipe: Connection) -> None:
    """Compile one contender, and record and measure it when told to."""
    device = require_gpu()
    start_compiling(device)
    options = CaptureOptions(asked.spec, asked.mode, asked.batch, asked.dtype, asked.memory_format, "inductor",
                             "default" if name == OWN_GRAPH else name, command="styles")  # fmt: skip
    set_precision(options.dtype)
    step = build_step(options, device)
    recordings: dict[str, Recording] = {}
    facts: dict[str, Any] = {"style": name, "gpu": torch.cuda.get_device_name(device), "torch": str(torch.__version__)}
    if name == OWN_GRAPH:
        pipe.recv()
        recordings["sequential"] = OwnGraph(step)
    else:
        graph = joint_graph(step)
        torch.manual_seed(0)
        recorded = record(graph)
        fused = with_values(own_step(graph, recorded, options.mode == "train", options.style), recorded)
        trace = bare_trace(options, step, fused)
        say(f"{name}: lowered")
        pipe.recv()
        found = profiled(trace, fused, asked.policies)
        recordings = {policy: make() for policy, make in found.recorders.items()}
        moved = [kernel for kernel in found.kernels if any(part in kernel.name for part in TRANSPOSES)]
        facts |= {
            "kernels": len(found.kernels),
            "kernels_us": sum(kernel.dur_ns for kernel in found.kernels) / 1e3,
            "transposes": len(moved),
            "transposes_us": sum(kernel.dur_ns for kernel in moved) / 1e3,
            "predicted_us": found.predicted_us,
        }
    say(f"{name}: recorded")
    pipe.send(facts)
    while True:
        pipe.recv()
        timings = time_interleaved({policy: each.replay for policy, each in recordings.items()}, 5)
        pipe.send({policy: timing.median_ns / 1e3 for policy, timing in timings.items()})


def measured(pipes: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each contender: its facts, and the median of its times in us by schedule."""
    rows = []
    for pipe in pipes.values():
        with contextlib.suppress(BrokenPipeError):  # it has failed, and says so
            pipe.send(True)
        rows.append(pipe.recv())
    turns: dict[str, list[dict[str, float]]] = {row["style"]: [] for row in rows if "problem" not in row}
    for _ in range(TURNS):
        for name, times in turns.items():
            pipes[name].send(True)
            times.append(pipes[name].recv())
    for row in rows:
        times = turns.get(row["style"]) or [{}]
        row["us"] = {name: round(statistics.median(turn[name] for turn in times), 1) for name in times[0]}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("spec")
    parser.add_argument("mode", choices=("infer", "train"))
    parser.add_argument("batch", type=int)
    parser.add_argument("--dtype", default="tf32")
    parser.add_argument("--memory-format", default="contiguous")
    parser.add_argument("--styles", nargs="*", default=["given_layout", "default", "channels_last"])
    parser.add_argument("--policies", nargs="*", default=["critical_path:4", "critical_path:8"])
    parser.add_argument("-o", dest="out", metavar="FILE", help="write the rows as JSON")
    asked = parser.parse_args()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(COMPILERS)
    spawn = multiprocessing.get_context("spawn")
    pipes: dict[str, Any] = {}
    for name in (OWN_GRAPH, *asked.styles):
        pipes[name], theirs = spawn.Pipe()
        spawn.Process(target=work, args=(name, asked, theirs)).start()
        theirs.close()  # so that the end of the process is seen here
    try:
        rows = measured(pipes)
    finally:
        for pipe in pipes.values():
            pipe.close()  # which ends the processes
    for row in rows:
        print(json.dumps(row), flush=True)
    if asked.out:
        given = {key: getattr(asked, key) for key in ("spec", "mode", "batch", "dtype", "memory_format")}
        with open(asked.out, "w", encoding="utf-8") as file:
            json.dump({**given, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
