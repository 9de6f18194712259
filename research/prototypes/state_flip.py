"""Actions that bring the GPU's launches into their fast state, and into their slow one.

    python research/prototypes/state_flip.py OUT.json [TRACE...]

`state_switch.py` showed that all graphs of a process change together. Here each action begins in the slow state, made
by new graphs, or in the fast one, made by replays for a second. A graph, and the same kernels launched one by one, are
timed before and after it. Then the sequential graph of each trace and that of `critical_path`, in both states.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

import msgspec
import torch
from graph_states import KERNELS, SPIN_CYCLES, Driver, captured, replay_ns
from state_switch import CONTEXT, Contexts, process, replays
from two_processes import STREAMS, recorder_of, sequential

from gpusim.gpu.device import provenance, require_gpu
from gpusim.gpu.replay.timing import time_interleaved
from gpusim.policies.registry import policy_by_name
from gpusim.units import MIB

NEW, TRIES = 4, 5
CYCLES_PER_MS = 1_980_000
SPIN_MS = (1, 3, 10, 30, 100, 300, 1000)
#: Replays of a graph, or launches of kernels, without a wait between them.
LAUNCHES = (10, 30, 100, 300, 1000, 3000)
BETWEEN_NS = 1370
Action = Callable[[], object]


def plain() -> None:
    for _ in range(KERNELS):
        torch.cuda._sleep(SPIN_CYCLES)


def times_of(graph: torch.cuda.CUDAGraph) -> dict[str, float]:
    """Return the ns a kernel of a graph, and of the same kernels launched one by one."""
    return {
        "graph": round(replay_ns(graph.replay, KERNELS) / KERNELS, 1),
        "plain": round(replay_ns(plain, KERNELS) / KERNELS, 1),
    }


class States:
    """Graphs that are alive, and ways into either state."""

    def __init__(self) -> None:
        self.graphs = [captured(KERNELS) for _ in range(NEW)]

    def is_slow(self) -> bool:
        return replay_ns(self.graphs[0].replay, KERNELS) / KERNELS > BETWEEN_NS

    def make_slow(self) -> None:
        for _ in range(TRIES):
            self.graphs = [captured(KERNELS) for _ in range(NEW)]
            for graph in self.graphs:
                graph.replay()
            if self.is_slow():
                return

    def make_fast(self) -> None:
        for _ in range(TRIES):
            replays(self.graphs[-1])
            if not self.is_slow():
                return


def several(launch: Action, count: int, wait: bool = False) -> None:
    for _ in range(count):
        launch()
        if wait:
            torch.cuda.synchronize()


def main() -> None:
    """Write the times around each action, then those of the traces."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("out", type=Path)
    arguments.add_argument("traces", type=Path, nargs="*")
    given = arguments.parse_args()
    require_gpu()
    command = "python research/prototypes/state_flip.py OUT.json TRACE..."
    result: dict[str, Any] = provenance(command, partial(torch.cuda._sleep, 2_000_000))
    for part in ("from slow", "from fast", "steps"):
        result[part] = {}
    states = States()
    contexts = Contexts()

    def note(part: str, name: str, row: dict[str, Any]) -> None:
        result[part][name] = row
        print(part, name, row, flush=True)
        given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    def around(part: str, name: str, action: Action) -> None:
        (states.make_slow if part == "from slow" else states.make_fast)()
        graph = states.graphs[0]
        before = times_of(graph)
        action()
        torch.cuda.synchronize()
        note(part, name, {"before": before, "after": times_of(graph), "again": times_of(graph)})

    def context() -> None:
        with contexts.context():
            pass

    def other_process() -> None:
        with process(CONTEXT):
            pass

    def last() -> torch.cuda.CUDAGraph:
        return states.graphs[-1]

    def replayed(count: int, wait: bool = False) -> None:
        several(last().replay, count, wait)

    def instantiated(upload: bool) -> None:
        Driver().launcher(captured(KERNELS, keep=True), 1, upload)

    def made_and_replayed() -> None:
        states.graphs.append(captured(KERNELS))
        last().replay()

    def let_go() -> None:
        del states.graphs[1:]

    def memory() -> None:
        torch.cuda.empty_cache()
        held = torch.zeros(512 * MIB, dtype=torch.uint8, device="cuda")
        held.zero_()

    slow: list[tuple[str, Action]] = [("nothing", lambda: None)]
    slow += [(f"spin {ms} ms", partial(torch.cuda._sleep, ms * CYCLES_PER_MS)) for ms in SPIN_MS]
    slow += [(f"{count} replays", partial(replayed, count)) for count in LAUNCHES]
    slow += [("3000 replays, a wait after each", partial(replayed, LAUNCHES[-1], wait=True))]
    slow += [(f"{count * KERNELS} kernels", partial(several, plain, count)) for count in (100, 1000)]
    slow += [("context", context), ("pause of 2 s", partial(sleep, 2.0)), ("another process", other_process)]
    fast: list[tuple[str, Action]] = [
        ("nothing", lambda: None),
        ("pause of 2 s", partial(sleep, 2.0)),
        ("capture only", lambda: captured(KERNELS, keep=True)),
        ("instantiate", partial(instantiated, False)),
        ("instantiate and upload", partial(instantiated, True)),
        ("a graph is made", lambda: states.graphs.append(captured(KERNELS))),
        ("a graph is made and replayed", made_and_replayed),
        ("graphs are let go", let_go),
        ("memory is taken", memory),
        ("memory is given back", torch.cuda.empty_cache),
        ("streams", lambda: [torch.cuda.Stream() for _ in range(8)]),
        ("10 replays, a wait after each", partial(replayed, 10, wait=True)),
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
        for state in ("as recorded", "fast", "slow", "fast again"):
            if state.startswith("fast"):
                replays(graphs["sequential"].graph)
            elif state == "slow":
                states.make_slow()
            times = time_interleaved({name: each.replay for name, each in graphs.items()}, launches=lambda: None)
            row[state] = {name: msgspec.to_builtins(each) for name, each in times.items()}
            row[state]["chain"] = times_of(states.graphs[0])
            print(graph.trace.name, state, {name: each.median_ns for name, each in times.items()}, flush=True)
        note("steps", graph.trace.name, row)


if __name__ == "__main__":
    main()
