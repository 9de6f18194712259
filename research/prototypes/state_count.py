"""How many streams or recordings end the fast state of launches, and whether a step's replays and copies do.

    python research/prototypes/state_count.py OUT.json [TRACE...]
    CUDA_DEVICE_MAX_CONNECTIONS=1 python research/prototypes/state_count.py OUT.json

Each action begins in the fast state, which a second context brings (`state_kick.py`).
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from graph_states import KERNELS, SPIN_CYCLES, captured, replay_ns
from state_kick import Calls
from state_switch import replays
from two_processes import STREAMS, recorder_of, sequential

from gpusim.gpu.device import provenance, require_gpu
from gpusim.gpu.replay.cudagraph import GraphRecorder
from gpusim.plan.graph import OpGraph
from gpusim.policies.registry import policy_by_name
from gpusim.units import MIB

COUNTS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)
RECORDED = (1, 2, 3, 4, 6, 12)
KICKS = 10
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
Action = Callable[[], object]


def on_one_lane(lane: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """Record a graph with a given stream."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=lane, capture_error_mode="thread_local"):
        for _ in range(KERNELS):
            torch.cuda._sleep(SPIN_CYCLES)
    return graph


def main() -> None:
    """Write the time a kernel of one graph after each action."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("out", type=Path)
    arguments.add_argument("traces", type=Path, nargs="*")
    given = arguments.parse_args()
    require_gpu()
    command = "python research/prototypes/state_count.py OUT.json TRACE..."
    result: dict[str, Any] = provenance(command, partial(torch.cuda._sleep, 2_000_000))
    result["connections"] = os.environ.get(CONNECTIONS, "")
    result["ns"] = {}
    calls = Calls()
    chain = captured(KERNELS)
    chain.replay()
    kept: list[Any] = []

    def ns() -> float:
        return round(replay_ns(chain.replay, KERNELS) / KERNELS, 1)

    def after(name: str, action: Action) -> None:
        calls.made()
        before = ns()
        action()
        torch.cuda.synchronize()
        result["ns"][name] = [before, ns(), ns()]
        print(name, result["ns"][name], flush=True)
        given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    result["ns"]["at the start"] = [ns(), ns()]
    print(result["ns"], flush=True)
    lanes = [torch.cuda.Stream() for _ in range(max(COUNTS))]
    urgent = [torch.cuda.Stream(priority=-1) for _ in range(max(COUNTS))]

    def used(streams: list[torch.cuda.Stream]) -> None:
        for lane in streams:
            with torch.cuda.stream(lane):
                torch.cuda._sleep(1000)

    def recorded(count: int, one_lane: bool, keep: bool) -> None:
        for _ in range(count):
            graph = on_one_lane(lanes[0]) if one_lane else captured(KERNELS)
            graph.replay()
            torch.cuda.synchronize()
            if keep:
                kept.append(graph)

    def recorded_again(graph: OpGraph, recorder: GraphRecorder) -> None:
        kept.append(sequential(graph, recorder))

    host = torch.zeros(16 * MIB // 4, pin_memory=True)
    device = torch.zeros(16 * MIB // 4, device="cuda")

    def copies(lane: torch.cuda.Stream) -> None:
        with torch.cuda.stream(lane):
            device.copy_(host, non_blocking=True)
            host.copy_(device, non_blocking=True)

    actions: list[tuple[str, Action]] = [("nothing", lambda: None)]
    actions += [(f"{count} streams", partial(used, lanes[:count])) for count in COUNTS]
    actions += [(f"{count} streams of high priority", partial(used, urgent[:count])) for count in COUNTS]
    for one_lane, keep in ((True, True), (False, True), (False, False)):
        name = ("on one stream" if one_lane else "on a stream each") + (", kept" if keep else "")
        actions += [(f"{count} recordings {name}", partial(recorded, count, one_lane, keep)) for count in RECORDED]
    actions += [("recordings are let go", kept.clear)]
    actions += [
        ("copies", partial(copies, torch.cuda.current_stream())),
        ("copies on a stream", partial(copies, lanes[0])),
    ]
    for name, action in actions:
        after(name, action)
    for number in range(KICKS):
        used(lanes + urgent)
        slow = ns()
        calls.made()
        result["ns"][f"kick {number}"] = [slow, ns()]
        print(number, result["ns"][f"kick {number}"], flush=True)
    for path in given.traces:
        graph, recorder = recorder_of(path)
        runs = {
            "sequential": sequential(graph, recorder),
            "critical_path": recorder.record(policy_by_name("critical_path")(graph, STREAMS), warm=True),
        }
        for name, each in runs.items():
            after(f"{path.name}, {name}, replays for a second", partial(replays, each.graph))
            after(f"{path.name}, {name}, one replay", each.replay)
        for _ in range(4):
            after(f"{path.name}, recorded", partial(recorded_again, graph, recorder))
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
