"""Calls of the driver that bring launches into their fast state, their cost, and the uploads that end it.

    python research/prototypes/state_kick.py OUT.json [TRACE...]

A context that is made brings the fast state (`state_switch.py`), an upload of a graph ends it (`state_flip.py`). Here
cheaper calls are tried, each from the slow state, then uploads of several sizes and other calls, each from the fast
one. Then the sequential graph of each trace and that of `critical_path` are timed in both states.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import torch
from graph_states import captured
from state_flip import States, times_of
from state_switch import CONTEXT, Contexts, process
from two_processes import STREAMS, recorder_of, sequential

from gpusim.gpu.device import provenance, require_gpu
from gpusim.gpu.replay.timing import time_interleaved
from gpusim.policies.registry import policy_by_name
from gpusim.units import MIB

STACK_BYTES = 0  # CU_LIMIT_STACK_SIZE
PTX = b".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry nothing() { ret; }\n\0"
UPLOADED = (1, 10, 120, 1200)
Action = Callable[[], object]


class Calls(Contexts):
    """Calls of the driver that may change the state."""

    def allocation(self) -> None:
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(64 * MIB))
        self.call("cuMemFree_v2", address)

    def host_allocation(self) -> None:
        address = ctypes.c_void_p()
        self.call("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(64 * MIB), ctypes.c_uint(0))
        self.call("cuMemFreeHost", address)

    def stack(self) -> None:
        size = ctypes.c_size_t()
        self.call("cuCtxGetLimit", ctypes.byref(size), ctypes.c_int(STACK_BYTES))
        for wanted in (size.value + 4096, size.value):
            self.call("cuCtxSetLimit", ctypes.c_int(STACK_BYTES), ctypes.c_size_t(wanted))

    def module(self) -> None:
        module = ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), PTX)
        self.call("cuModuleUnload", module)

    def made(self) -> None:
        with self.context():
            pass

    def empty_graph(self) -> None:
        """Make a graph of one empty node, launch it, and destroy it."""
        graph, node, execution = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuGraphCreate", ctypes.byref(graph), ctypes.c_uint(0))
        self.call("cuGraphAddEmptyNode", ctypes.byref(node), graph, None, ctypes.c_size_t(0))
        self.call("cuGraphInstantiateWithFlags", ctypes.byref(execution), graph, ctypes.c_ulonglong(0))
        self.call("cuGraphLaunch", execution, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        torch.cuda.synchronize()
        self.call("cuGraphExecDestroy", execution)
        self.call("cuGraphDestroy", graph)


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0]


def main() -> None:
    """Write the times around each call, then those of the traces."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("out", type=Path)
    arguments.add_argument("traces", type=Path, nargs="*")
    given = arguments.parse_args()
    require_gpu()
    command = "python research/prototypes/state_kick.py OUT.json TRACE..."
    result: dict[str, Any] = provenance(command, partial(torch.cuda._sleep, 2_000_000))
    for part in ("from slow", "from fast", "steps"):
        result[part] = {}
    calls, states = Calls(), States()
    again = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(again):
        torch.cuda._sleep(1)
    kept: list[Any] = []

    def note(part: str, name: str, row: dict[str, Any]) -> None:
        result[part][name] = row
        print(part, name, row, flush=True)
        given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    def around(part: str, name: str, action: Action) -> None:
        if part == "from slow":
            states.make_slow()
        else:
            calls.made()
        graph = states.graphs[0]
        before = times_of(graph)
        begin = perf_counter()
        try:
            action()
            torch.cuda.synchronize()
        except (RuntimeError, AttributeError) as error:
            note(part, name, {"error": str(error)})
            return
        taken_ms = round((perf_counter() - begin) * 1e3, 3)
        note(part, name, {"before": before, "after": times_of(graph), "ms": taken_ms})

    def held_context() -> None:
        begin = free_bytes()
        with calls.context():
            result["bytes of a context"] = begin - free_bytes()

    def process_on(device: int) -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(device)
        with process(CONTEXT):
            pass
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"

    def event_handle() -> None:
        event = torch.cuda.Event(interprocess=True)
        event.record()
        kept.append(event.ipc_handle())

    def streams() -> None:
        lanes = [torch.cuda.Stream(priority=each) for each in (0, -1) for _ in range(32)]
        for lane in lanes:
            with torch.cuda.stream(lane):
                torch.cuda._sleep(1000)
        kept.append(lanes)

    def uploaded(kernels: int) -> None:
        graph = captured(kernels)
        graph.replay()
        kept.append(graph)

    def instantiated_again() -> None:
        again.instantiate()
        again.replay()

    def new_kernels() -> None:
        tensor = torch.rand(1000, device="cuda")
        kept.append(torch.special.bessel_j0(tensor) + torch.erfinv(tensor).cumsum(0))

    def memory() -> None:
        torch.zeros(2048 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()

    slow: list[tuple[str, Action]] = [
        ("nothing", lambda: None),
        ("context", held_context),
        ("context again", calls.made),
        ("allocation", calls.allocation),
        ("host allocation", calls.host_allocation),
        ("stack size", calls.stack),
        ("module", calls.module),
        ("handle of an event", event_handle),
        ("streams", streams),
        ("process on another GPU", partial(process_on, 1)),
    ]
    fast: list[tuple[str, Action]] = [
        ("nothing", lambda: None),
        ("empty graph", calls.empty_graph),
        ("instantiated again, 1 kernel", instantiated_again),
        ("instantiated once more, 1 kernel", instantiated_again),
        *((f"upload of {kernels} kernels", partial(uploaded, kernels)) for kernels in UPLOADED),
        ("memory taken and given back", memory),
        ("host allocation", calls.host_allocation),
        ("new kernels", new_kernels),
        ("module", calls.module),
        ("streams", streams),
        ("stack size", calls.stack),
        ("graphs are let go", kept.clear),
    ]
    for name, action in slow:
        around("from slow", name, action)
    for name, action in fast:
        around("from fast", name, action)
    for path in given.traces:
        graph, recorder = recorder_of(path)
        concurrent = policy_by_name("critical_path")(graph, STREAMS)
        graphs = {"sequential": sequential(graph, recorder), "critical_path": recorder.record(concurrent, warm=True)}
        row: dict[str, Any] = {}
        for state in ("as recorded", "fast", "slow", "fast again", "one kernel uploaded"):
            if state.startswith("fast"):
                calls.made()
            elif state == "slow":
                states.make_slow()
            elif state == "one kernel uploaded":
                instantiated_again()
            times = time_interleaved({name: each.replay for name, each in graphs.items()}, launches=lambda: None)
            row[state] = {name: msgspec.to_builtins(each) for name, each in times.items()}
            row[state]["chain"] = times_of(states.graphs[0])
            print(graph.trace.name, state, {name: each.median_ns for name, each in times.items()}, flush=True)
        note("steps", graph.trace.name, row)


if __name__ == "__main__":
    main()
