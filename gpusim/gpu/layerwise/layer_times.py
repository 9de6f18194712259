"""Times of a plan's layers on its ranks, beside those predicted.

A rank's step is cut where it goes on from one part to the next (`Rank.mark`), by events on a GPU and by the clock on a
CPU. A transfer includes packing, unpacking and waiting for peers; steps are launched one kernel at a time.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, Final

import torch
import torch.distributed as dist

from gpusim.gpu.layerwise.batch import Data
from gpusim.gpu.layerwise.rank import Part, Rank
from gpusim.layerwise.costs import Problem
from gpusim.layerwise.explore import layer_rows
from gpusim.layerwise.fixed_plans import Choice
from gpusim.layerwise.shares import shares_of

PARTS: Final[tuple[Part, ...]] = ("forward", "backward", "transfer", "sums")
_WARM_UP: Final = 2


def time_layers(rank: Rank, data: Data, gpus: int, steps: int) -> torch.Tensor:
    """Return the median time in ns of each layer's `PARTS` on each rank: ranks x layers x parts, on all ranks.

    Needs torch.distributed. Sums of gradients count for the last layer of their bucket, waiting for them for the first
    layer.
    """
    layers = len(rank.states)
    samples: list[list[list[float]]] = []
    for number in range(_WARM_UP + steps):
        rank.clear()
        dist.barrier()
        clock = _Clock(rank.device)
        rank.mark = clock.mark
        rank.step(data)
        rank.mark = None
        if number >= _WARM_UP:
            samples.append(clock.times_ns(layers))
    times = torch.zeros(gpus, layers, len(PARTS), dtype=torch.float64, device=rank.device)
    medians = [
        [statistics.median(sample[layer][part] for sample in samples) for part in range(len(PARTS))]
        for layer in range(layers)
    ]
    times[rank.transport.rank] = torch.tensor(medians, dtype=torch.float64)
    dist.all_reduce(times)
    return times


def layer_documents(problem: Problem, choice: Choice, times_ns: torch.Tensor) -> list[dict[str, Any]]:
    """Return a plan's layers with measured and predicted times in ns, each a list over ranks.

    `predicted_transfer_ns` is that of the busiest rank. Sums are measured by bucket, so none is predicted for a layer.
    """
    rows = layer_rows(problem, choice)
    documents = []
    for index, (layer, config) in enumerate(zip(problem.graph.layers, choice, strict=True)):
        shares = shares_of(layer, config, range(problem.gpus))
        predicted = [problem.times.share_ns(index, layer, share) for share in shares]
        document: dict[str, Any] = {"name": layer.name, "kind": layer.kind, "split": str(config)}
        for part, name in enumerate(PARTS):
            document[f"{name}_ns"] = [round(float(value)) for value in times_ns[:, index, part]]
        document["predicted_forward_ns"] = [round(each.forward_ns) for each in predicted]
        document["predicted_backward_ns"] = [round(each.backward_ns * problem.training) for each in predicted]
        document["predicted_transfer_ns"] = round(rows[index].transfer_ns)
        documents.append(document)
    return documents


class _Clock:
    """Times between the marks of one step."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.marks: list[tuple[Part, int, Any]] = [("forward", 0, self._now())]

    def mark(self, part: Part, layer: int) -> None:
        """The time since the last mark was spent on a part of a layer."""
        self.marks.append((part, layer, self._now()))

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def times_ns(self, layers: int) -> list[list[float]]:
        """Return the sums by layer and part."""
        if self.on_gpu:
            torch.cuda.synchronize()
        sums = [[0.0] * len(PARTS) for _ in range(layers)]
        for (_, _, before), (part, layer, now) in zip(self.marks, self.marks[1:], strict=False):
            took = before.elapsed_time(now) * 1e6 if self.on_gpu else float(now - before)
            sums[layer][PARTS.index(part)] += took
        return sums
