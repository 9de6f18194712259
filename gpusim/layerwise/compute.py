"""Times of a share of a layer: measured, scaled from the captured shape, or by a roofline.

`TraceTimes` scales what a trace has measured of a layer at the batch of one GPU. `Roofline` needs no trace. Both are
replaced share by share by `MeasuredTimes`, where a share has been run alone on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple, Protocol

import msgspec

from gpusim.engine.placement import waves
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.trace import Dtype
from gpusim.layerwise.layers import Layer, LayerGraph
from gpusim.layerwise.shares import Share, Work, backward_work, forward_work, whole
from gpusim.plan.graph import OpGraph
from gpusim.plan.tasks import Task


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Time of a share's forward and backward pass in ns, and how far off that may be, as a share of it."""

    forward_ns: float
    backward_ns: float
    error: float = 0.0

    @property
    def total_ns(self) -> float:
        return self.forward_ns + self.backward_ns


class Times(Protocol):
    """What a share of a layer takes on one GPU."""

    basis: str
    """What that rests on, in a few words."""
    by_shape: bool
    """Whether layers of one kind and shape take the same time."""

    def share_ns(self, index: int, layer: Layer, share: Share) -> PassTimes:
        """Time of a share of layer `index`; `layer` is that of the whole batch."""
        ...

    def optimizer_ns(self, weights: float) -> float:
        """Time to update so many weights."""
        ...


#: A kernel takes no less, however little it does: an empty kernel of a CUDA graph has 1.5 us by the profiler.
LATENCY_NS: Final = 1500.0
#: Error of a share's time scaled from another shape, as a share of it, by whether matrices are multiplied: from the
#: captures of GoogLeNet and Inception-v3 at 8 images to those at 32 (research/2026-11-23-layerwise.md).
SCALED_ERROR_MATRIX: Final = 0.35
SCALED_ERROR_OTHER: Final = 0.15
#: Of a roofline, which knows nothing of kernels: as far as that is from the two captures.
ROOFLINE_ERROR: Final = 0.6


@dataclass(frozen=True)
class TraceTimes:
    """A captured layer's kernels at another shape.

    Kernels that multiply matrices take more waves of blocks where there is more arithmetic, or more time for more
    bytes where memory bounds them. Others move bytes in proportion to the output.
    """

    graph: OpGraph
    layers: LayerGraph
    """As captured: the batch of one GPU."""

    basis = "captured layers, scaled"
    by_shape = False

    def share_ns(self, index: int, layer: Layer, share: Share) -> PassTimes:
        """See `Times`."""
        if not all(share.output):
            return PassTimes(0.0, 0.0)
        captured = self.layers.layers[index]
        full = whole(captured)
        times, error, matrix_ns = [], 0.0, 0.0
        for ops, work in ((captured.forward, forward_work), (captured.backward, backward_work)):
            tasks = [task for op in ops for task in self.graph.tasks[op]]
            sizes = self._sizes(tasks, work(captured, full), work(layer, share), _elements(share, full))
            durations_ns = [size.dur_ns for size in sizes]
            each = zip(tasks, durations_ns, strict=True)
            times.append(sum(dur_ns + task.extra_ns + self.graph.chain_ns for task, dur_ns in each))
            matrix_ns += sum(dur_ns for task, dur_ns in zip(tasks, durations_ns, strict=True) if task.matrix)
        if share != full:
            part = matrix_ns / sum(times) if sum(times) else 0.0
            error = SCALED_ERROR_MATRIX * part + SCALED_ERROR_OTHER * (1 - part)
        return PassTimes(times[0], times[1], error)

    def tasks(self, index: int, layer: Layer, share: Share, backward: bool) -> list[Task]:
        """The kernels of one pass of a share, for the engines."""
        if not all(share.output):
            return []
        captured = self.layers.layers[index]
        full, work = whole(captured), backward_work if backward else forward_work
        tasks = [task for op in (captured.backward if backward else captured.forward) for task in self.graph.tasks[op]]
        return self.scaled(tasks, work(captured, full), work(layer, share), _elements(share, full))

    def scaled(self, tasks: Sequence[Task], before: Work, after: Work, elements: float) -> list[Task]:
        """Kernels with their blocks, times and traffic at another amount of work; `elements` is that of the output."""
        if before == after and elements == 1.0:
            return list(tasks)
        sizes = self._sizes(tasks, before, after, elements)
        return [_resized(task, size) for task, size in zip(tasks, sizes, strict=True)]

    def _sizes(self, tasks: Sequence[Task], before: Work, after: Work, elements: float) -> list[_Size]:
        if before == after and elements == 1.0:
            return [_Size(task.dur_ns, task.blocks, 1.0) for task in tasks]
        hardware = self.graph.hardware
        roof, by_memory = _roof_ratio(before, after, hardware, self.graph.trace.model.dtype)
        sizes = []
        for task in tasks:
            ratio = roof if task.matrix else elements
            blocks = max(1, round(task.blocks * ratio)) if task.blocks else 0
            by_waves = task.matrix and blocks and not by_memory
            factor = _wave_ratio(task, blocks, hardware) if by_waves else ratio
            fixed = min(LATENCY_NS, task.dur_ns)
            sizes.append(_Size(fixed + (task.dur_ns - fixed) * factor, blocks, ratio))
        return sizes

    def optimizer_ns(self, weights: float) -> float:
        """See `Times`: the optimizer's kernels stream through weights, so a share of the weights takes that share."""
        fixed, moving, total = self._optimizer
        return fixed * (weights > 0) + moving * weights / total if total else 0

    @cached_property
    def _optimizer(self) -> tuple[float, float, int]:
        """What the optimizer takes for each layer with weights, for all weights together beyond that, and weights."""
        tasks = self.optimizer_tasks
        whole_ns = sum(task.dur_ns + self.graph.chain_ns for task in tasks)
        fixed = min(LATENCY_NS * len(tasks), whole_ns)
        with_weights = sum(layer.weight_elements > 0 for layer in self.layers.layers)
        return fixed / max(1, with_weights), whole_ns - fixed, sum(each.weight_elements for each in self.layers.layers)

    @cached_property
    def optimizer_tasks(self) -> tuple[Task, ...]:
        """Kernels of the optimizer."""
        trace = self.graph.trace
        ops = [index for index, op in enumerate(trace.ops) if op.phase == "optimizer"]
        return tuple(task for op in ops for task in self.graph.tasks[op])


class _Size(NamedTuple):
    """A kernel at another amount of work: its time, blocks, and how many times the work."""

    dur_ns: float
    blocks: int
    ratio: float


def _resized(task: Task, size: _Size) -> Task:
    traffic = task.dram_bytes * size.ratio
    return msgspec.structs.replace(task, dur_ns=size.dur_ns, blocks=size.blocks, dram_bytes=traffic)


def _elements(share: Share, full: Share) -> float:
    return math.prod(share.output) / math.prod(full.output)


def _roof_ratio(before: Work, after: Work, hardware: HardwareModel, dtype: Dtype) -> tuple[float, bool]:
    """How much more time a roofline gives the new work, and whether memory bounds the old one."""
    peak, bandwidth = hardware.rates.of(dtype), hardware.memory.dram_bytes_per_ns
    old = max(before.flops / peak, before.bytes / bandwidth)
    new = max(after.flops / peak, after.bytes / bandwidth)
    return new / old if old else 1.0, before.bytes / bandwidth > before.flops / peak


def _wave_ratio(task: Task, blocks: int, hardware: HardwareModel) -> float:
    sms = hardware.limits.sms
    return waves(msgspec.structs.replace(task, blocks=blocks), sms, hardware) / waves(task, sms, hardware)


#: Side of the square of outputs that a block of a matrix product or convolution computes.
_TILE: Final = 64
#: What a kernel reaches of the data sheet's arithmetic and of the bandwidth.
_REACHED: Final = 0.6
#: Accesses to memory of the optimizer for each weight: weight, gradient and momentum are read, two of them written.
_OPTIMIZER_ACCESSES: Final = 5


@dataclass(frozen=True)
class Roofline:
    """Times by arithmetic and traffic, for networks without a trace; `factor` scales all of them.

    Arithmetic runs at the share of the SMs that tiles of the output fill.
    """

    hardware: HardwareModel
    dtype: Dtype = "tf32"
    factor: float = 1.0
    optimizer: bool = True
    """Whether GPUs update their weights; a parameter server does it for them."""

    basis = "roofline"
    by_shape = True

    def share_ns(self, index: int, layer: Layer, share: Share) -> PassTimes:
        """See `Times`."""
        if not all(share.output):
            return PassTimes(0.0, 0.0)
        matrix = layer.kind in ("convolution", "linear", "attention")
        fill = self._fill(share) if matrix else 1.0
        peak = self.hardware.rates.of(self.dtype) if matrix else self.hardware.rates.fp32
        times = []
        for work in (forward_work(layer, share), backward_work(layer, share)):
            arithmetic = work.flops / (peak * _REACHED * fill)
            memory = work.bytes / (self.hardware.memory.dram_bytes_per_ns * _REACHED)
            times.append((max(arithmetic, memory) + LATENCY_NS * max(1, len(layer.ops))) * self.factor)
        return PassTimes(times[0], times[1], ROOFLINE_ERROR)

    def optimizer_ns(self, weights: float) -> float:
        """See `Times`."""
        if not self.optimizer:
            return 0.0
        moved = _OPTIMIZER_ACCESSES * 4 * weights
        return moved / (self.hardware.memory.dram_bytes_per_ns * _REACHED) * self.factor if weights else 0.0

    def _fill(self, share: Share) -> float:
        """Share of the SMs in use, averaged over waves of tiles."""
        n, c, h, w = share.output
        tiles = math.ceil(n * h * w / _TILE) * math.ceil(c / _TILE)
        sms = self.hardware.limits.sms
        return tiles / (sms * math.ceil(tiles / sms)) if tiles > sms else max(tiles / sms, 0.25)

    def scaled_to(self, graph: LayerGraph, step_ns: float) -> Roofline:
        """The same with the step of one GPU (without optimizer) taking a known time."""
        total = sum(
            self.share_ns(index, layer, whole(layer)).total_ns
            if graph.training
            else self.share_ns(index, layer, whole(layer)).forward_ns
            for index, layer in enumerate(graph.layers)
        )
        return replace(self, factor=self.factor * step_ns / total)


def share_key(layer: Layer, share: Share) -> str:
    """What a share's time depends on: operations, extents of its part, and how much it reads."""
    ops = "+".join(f"{op.kind}{sorted(op.options.items())}" for op in layer.ops) or layer.name
    gradient = "" if layer.input_gradient else ", no gradient of its input"
    return f"{ops} -> {'x'.join(map(str, share.output))} of {share.input_elements}{gradient}"


@dataclass(frozen=True)
class MeasuredTimes:
    """Shares measured alone on a GPU; others from the measured shares of the same layer, else from `otherwise`.

    A share that was not measured is scaled from each that was, by `otherwise`'s ratio. The estimate is their mean,
    weighted towards the nearest in size, and its error half of how far they are apart.
    """

    measured: Mapping[str, PassTimes]
    """By `share_key`."""
    shares: Mapping[int, Sequence[Share]]
    """Layer -> its measured shares."""
    otherwise: Times

    by_shape = False

    @property
    def basis(self) -> str:
        """See `Times`."""
        return f"{len(self.measured)} shares measured; else {self.otherwise.basis}"

    def share_ns(self, index: int, layer: Layer, share: Share) -> PassTimes:
        """See `Times`."""
        exact = self.measured.get(share_key(layer, share))
        if exact is not None or not all(share.output):
            return exact or PassTimes(0.0, 0.0)
        guess = self.otherwise.share_ns(index, layer, share)
        known = [(near, self.measured.get(share_key(layer, near))) for near in self.shares.get(index, ())]
        estimates = []
        for near, time in known:
            if time is None:
                continue
            there = self.otherwise.share_ns(index, layer, near)
            distance = abs(math.log(math.prod(share.output) / math.prod(near.output)))
            distance += abs(math.log((share.input_elements + 1) / (near.input_elements + 1)))
            forward = time.forward_ns * _over(guess.forward_ns, there.forward_ns)
            backward = time.backward_ns * _over(guess.backward_ns, there.backward_ns)
            estimates.append((1.0 / (distance + 1e-3), forward, backward))
        if not estimates:
            return guess
        weight = sum(each[0] for each in estimates)
        forward = sum(each[0] * each[1] for each in estimates) / weight
        backward = sum(each[0] * each[2] for each in estimates) / weight
        totals = [each[1] + each[2] for each in estimates]
        if not forward + backward:  # a layer of views: nothing runs
            return PassTimes(0.0, 0.0)
        spread = (max(totals) - min(totals)) / 2 / (forward + backward) if len(totals) > 1 else guess.error
        return PassTimes(forward, backward, spread)

    def optimizer_ns(self, weights: float) -> float:
        """See `Times`."""
        return self.otherwise.optimizer_ns(weights)


def _over(value: float, by: float) -> float:
    return value / by if by else 1.0
