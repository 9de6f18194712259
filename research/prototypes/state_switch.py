"""Which events make recorded CUDA graphs faster, once and for all: another process, a pause, replays, a context, ...

    python research/prototypes/state_switch.py OUT.json

After each event the graphs of the events before are timed, then new ones are made and timed. An event that makes a
graph faster shows in the graphs made before it (`graph_states.py` has the two states: 1,253 and 1,435 ns a kernel).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
from graph_states import KERNELS, Driver, captured, replay_ns

from gpusim.gpu.device import provenance, require_gpu
from gpusim.units import MIB

#: Graphs made after each event.
NEW = 4
REPLAYED_S, PAUSE_S = 1.0, 6.0
READY = "ready"
#: Programs of another process; it says when it is ready and goes on until its input ends.
DRIVER_ALONE = "import ctypes; ctypes.CDLL('libcuda.so.1').cuInit(0)"
CONTEXT = "import torch; torch.zeros(1, device='cuda'); torch.cuda.synchronize()"
KERNELS_RUN = f"{CONTEXT}; [torch.cuda._sleep(100000) for _ in range(100)]; torch.cuda.synchronize()"
EPILOGUE = f"; print('{READY}', flush=True); import sys; sys.stdin.read()"

Event = Callable[[], object]


@contextmanager
def process(program: str) -> Iterator[None]:
    """Have another process run a program, and stay until the context ends."""
    words = [sys.executable, "-c", program + EPILOGUE]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        if child.stdout.readline().strip() != READY:
            raise SystemExit("the other process ended")
        yield
        assert child.stdin is not None
        child.stdin.close()


class Contexts(Driver):
    """Contexts by the driver's library, which torch has no function for."""

    @contextmanager
    def context(self) -> Iterator[None]:
        """Make a second context in this process, and leave torch's the current one."""
        context = ctypes.c_void_p()
        torch.cuda.synchronize()
        self.call("cuCtxCreate_v2", ctypes.byref(context), ctypes.c_uint(0), ctypes.c_int(torch.cuda.current_device()))
        self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        yield
        self.call("cuCtxDestroy_v2", context)


def replays(graph: torch.cuda.CUDAGraph) -> None:
    """Replay without a pause."""
    end = monotonic() + REPLAYED_S
    while monotonic() < end:
        for _ in range(100):
            graph.replay()
        torch.cuda.synchronize()


def main() -> None:
    """Write the time a kernel of each graph after each event."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("out", type=Path)
    out: Path = arguments.parse_args().out
    require_gpu()
    command = "python research/prototypes/state_switch.py OUT.json"
    graphs: list[tuple[str, torch.cuda.CUDAGraph]] = []
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {"kernels": KERNELS, "events": rows}

    def timed() -> dict[str, list[float]]:
        times: dict[str, list[float]] = {}
        for born, graph in graphs:
            times.setdefault(born, []).append(round(replay_ns(graph.replay, KERNELS) / KERNELS, 1))
        return times

    def after(event: str) -> None:
        row = {"event": event, "old": timed()}
        graphs[:] = graphs[-NEW:]
        for _ in range(NEW):
            graphs.append((event, captured(KERNELS)))
        row["new"] = timed()[event]
        rows.append(row)
        print(row, flush=True)
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    def new_streams() -> list[torch.cuda.Stream]:
        lanes = [torch.cuda.Stream(priority=each) for each in (0, -1) for _ in range(16)]
        for lane in lanes:
            with torch.cuda.stream(lane):
                torch.cuda._sleep(1000)
        return lanes

    def memory() -> None:
        torch.zeros(4096 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()

    contexts_of_driver = Contexts()
    after("nothing")
    events: list[tuple[str, Event]] = [
        ("nothing again", lambda: None),
        ("replays for a second", lambda: replays(graphs[-1][1])),
        ("a pause of six seconds", partial(sleep, PAUSE_S)),
        ("streams", new_streams),
        ("4 GiB taken and given back", memory),
        ("nvidia-smi", partial(subprocess.run, ["nvidia-smi"], capture_output=True, check=True)),
    ]
    for name, event in events:
        event()
        torch.cuda.synchronize()
        after(name)
    contexts = [
        ("a context in this process", contexts_of_driver.context),
        ("a process that initializes the driver", partial(process, DRIVER_ALONE)),
        ("a process with a context", partial(process, CONTEXT)),
        ("a process that runs kernels", partial(process, KERNELS_RUN)),
    ]
    for name, context in contexts:
        try:
            with context():
                after(name)
        except RuntimeError as error:
            rows.append({"event": name, "error": str(error)})
        after(f"the end of {name}")
    result |= provenance(command, partial(torch.cuda._sleep, 2_000_000))
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
