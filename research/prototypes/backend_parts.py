"""Parts of a training step's call by `backend="gpusim"`: its two graphs, and the host's time. Needs a GPU.

    python research/prototypes/backend_parts.py torchvision:googlenet 8 BUDGET_S

Below a budget of 5 s only ATen's kernels are tried. *Without graphs* only copies run on the GPU: the host
remains.
"""

from __future__ import annotations

import copy
import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpusim.gpu.capture.models import load_step
from gpusim.gpu.device import require_gpu, set_precision
from gpusim.gpu.optimize import cache, dynamo
from gpusim.gpu.optimize.choose import Wanted
from gpusim.gpu.optimize.make import StepMaker
from gpusim.gpu.optimize.measure import batches_of
from gpusim.gpu.optimize.on_cuda import CudaExecutor

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from backend import forward_and_backward, say, whole

STEPS = 30
GRAPHS: list[dynamo.AtenGraph] = []
SPENT_S: Counter[str] = Counter()


class Timed(dynamo.AtenGraph):
    """A graph that tells what it does, and adds up the host's time in its calls."""

    def __init__(self, graph: Any, part: Any, wanted: Wanted, executor: Any, *others: Any) -> None:
        super().__init__(graph, part, wanted, executor, *others)
        self._maker = StepMaker(executor, wanted, lambda text: say(part, text))
        GRAPHS.append(self)

    def __call__(self, inputs: list[Any]) -> Any:
        begin = time.perf_counter()
        results = super().__call__(inputs)
        SPENT_S[self.part] += time.perf_counter() - begin
        return results


class Idle:
    """A captured step that does nothing."""

    def __init__(self, ready: Any) -> None:
        self.tensors, self.peak_bytes = ready.tensors, ready.peak_bytes

    def run(self) -> None:
        """Do nothing."""


def times(call: Callable[[int], object]) -> str:
    """Return the time of a call and that of the host alone, in us, means over some in a row."""
    SPENT_S.clear()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for number in range(STEPS):
        call(number)
    host = time.perf_counter() - begin
    torch.cuda.synchronize()
    whole_s = time.perf_counter() - begin
    parts = {part: f"{1e6 * spent / STEPS:.0f}" for part, spent in SPENT_S.items()}
    return f"{1e6 * whole_s / STEPS:.0f} us, host {1e6 * host / STEPS:.0f}, within {parts}"


def main() -> None:
    spec, batch, budget_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    os.environ[cache.VARIABLE] = ""
    device, executor = require_gpu(), CudaExecutor()
    set_precision("tf32")
    step = load_step(spec, mode="train", batch=batch, dtype="tf32", memory_format="contiguous", device=device, seed=0)
    dynamo.AtenGraph = Timed  # type: ignore[misc]
    model = copy.deepcopy(step.module)
    compiled = torch.compile(
        whole(step, model),
        backend=lambda graph, inputs: dynamo.compiled(graph, inputs, Wanted(8, budget_s, None), executor),
    )
    train, data = forward_and_backward(step, model, compiled), batches_of(step)
    for batch_of in (*data, *data):
        train(*batch_of)
    gc.collect()
    gc.disable()
    for _ in range(2):
        say("a step:", times(lambda number: train(*data[number % len(data)])))
    for graph in GRAPHS:
        variant = graph._variant
        if variant is not None:
            inputs = [tensor.clone() for tensor in variant.captured.inputs]
            say(graph.part, variant.captured.label, "graph:", times(lambda _, run=variant.ready.run: run()))
            say(graph.part, "with copies:", times(lambda _, run=variant.run, given=inputs: run(given)))
            variant.ready = Idle(variant.ready)
    for _ in range(2):
        say("a step without graphs:", times(lambda number: train(*data[number % len(data)])))


if __name__ == "__main__":
    main()
