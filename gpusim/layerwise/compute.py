"""Times of a share of a layer: measured, scaled from the captured shape, or by a roofline.

`TraceTimes` scales the times measured in a trace at the batch of one GPU. `Roofline` needs no trace. `MeasuredTimes`
overrides both for shares that were run alone on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, NamedTuple, Protocol

import msgspec

from gpusim.engine.placement import waves
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.trace import Dtype
from gpusim.layerwise.layers import Layer, LayerGraph
from gpusim.layerwise.made_up import LATENCY_NS
from gpusim.layerwise.shares import PassWork, Share, backward_work, forward_work, whole
from gpusim.notebook import ShortRepr
from gpusim.plan.graph import OpGraph
from gpusim.plan.tasks import Task


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Time of a share's forward and backward pass in ns, and its relative error."""

    forward_ns: float
    backward_ns: float
    error: float = 0.0
    product_ns: float | None = None
    """Part of the backward pass for the weights of the layer's product (`Layer.product`); None if not known."""

    @property
    def late_ns(self) -> float:
        """Part of the backward pass that can wait, in a layer with a product.

        If it is not known, half: the weights' gradient takes as much arithmetic as the input's.
        """
        return self.backward_ns / 2 if self.product_ns is None else min(self.product_ns, self.backward_ns)

    @property
    def total_ns(self) -> float:
        return self.forward_ns + self.backward_ns


class Times(Protocol):
    """Times of shares of layers on one GPU."""

    basis: str
    """Source of the times, in a few words."""
    by_shape: bool
    """Whether layers of one kind and shape take the same time."""

    def share_ns(self, index: int, layer: Layer, share: Share) -> PassTimes:
        """Time of a share of layer `index`; `layer` is that of the whole batch."""
        ...

    def optimizer_ns(self, weights: float) -> float:
        """Time in ns to update this many weights."""
        ...


#: Relative error of a share's time scaled from another shape, with and without matrix products: from the captures of
#: GoogLeNet and Inception-v3 at 8 images to those at 32 (research/2026-11-23-layerwise.md).
SCALED_ERROR_MATRIX: Final = 0.35
SCALED_ERROR_OTHER: Final = 0.15
#: Relative error of a roofline, which knows no kernels: its error on the same two networks.
ROOFLINE_ERROR: Final = 0.6


@dataclass(frozen=True, repr=False)
class TraceTimes(ShortRepr):
    """A captured layer's kernels, scaled to another shape.

    Matrix kernels need more waves of blocks for more arithmetic, or more time for more bytes if bound by memory. Others
    move bytes in proportion to the output.
    """

    graph: OpGraph
    layers: LayerGraph
    """Captured layers, at the batch of one GPU."""
    _passes: dict[object, _PassNs] = field(default_factory=dict, repr=False, compare=False)

    basis = "captured layers, scaled"
    by_shape = False

    def share_ns(self, index: int, layer: Layer, share: Share) -> PassTimes:
        """See `Times`."""
        if not all(share.output):
            return PassTimes(0.0, 0.0)
        captured = self.layers.layers[index]
        full = whole(captured)
        elements = _elements(share, full)
        forward = self._pass_ns(index, False, forward_work(captured, full), forward_work(layer, share), elements)
        backward = self._pass_ns(index, True, backward_work(captured, full), backward_work(layer, share), elements)
        error = 0.0
        if share != full:
            total_ns = forward.all_ns + backward.all_ns
            part = (forward.matrix_ns + backward.matrix_ns) / total_ns if total_ns else 0.0
            error = SCALED_ERROR_MATRIX * part + SCALED_ERROR_OTHER * (1 - part)
        return PassTimes(forward.all_ns, backward.all_ns, error)

    def _pass_ns(self, index: int, backward: bool, before: PassWork, after: PassWork, elements: float) -> _PassNs:
        """Return the time of one pass of a share; cached, as many shares of a layer have the same ratios of work."""
        same = before == after and elements == 1.0
        hardware, dtype = self.graph.hardware, self.graph.trace.model.dtype
        key = (index, backward, elements, None if same else _roof_ratio(before, after, hardware, dtype))
        if key not in self._passes:
            captured = self.layers.layers[index]
            ops = captured.backward if backward else captured.forward
            tasks = [task for op in ops for task in self.graph.tasks[op]]
            durations_ns = [size.dur_ns for size in self._sizes(tasks, before, after, elements)]
            each = list(zip(tasks, durations_ns, strict=True))
            self._passes[key] = _PassNs(
                sum(dur_ns + task.extra_ns + self.graph.chain_ns for task, dur_ns in each),
                sum(dur_ns for task, dur_ns in each if task.matrix),
            )
        return self._passes[key]

    def tasks(self, index: int, layer: Layer, share: Share, backward: bool) -> list[Task]:
        """Return the kernels of one pass of a share, for the engines."""
        if not all(share.output):
            return []
        captured = self.layers.layers[index]
        full, work = whole(captured), backward_work if backward else forward_work
        tasks = [task for op in (captured.backward if backward else captured.forward) for task in self.graph.tasks[op]]
        return self.scaled(tasks, work(captured, full), work(layer, share), _elements(share, full))

    def backward_tasks(self, index: int, layer: Layer, share: Share) -> tuple[list[Task], list[Task]]:
        """Return the kernels of a share's backward pass in two parts: the second, gradients of weights, can wait."""
        captured = self.layers.layers[index]
        full, late = whole(captured), self._late_ops[index]
        before, after = backward_work(captured, full), backward_work(layer, share)
        parts: tuple[list[Task], list[Task]] = [], []
        for op in captured.backward:
            tasks = self.scaled(self.graph.tasks[op], before, after, _elements(share, full))
            parts[op in late].extend(tasks)
        return parts

    @cached_property
    def _late_ops(self) -> tuple[frozenset[int], ...]:
        """For each layer, ops of the backward pass whose results only the optimizer and each other read."""
        trace = self.graph.trace
        readers: dict[int, set[int]] = {}
        for number, op in enumerate(trace.ops):
            for tensor in op.reads:
                readers.setdefault(trace.tensors[tensor].storage, set()).add(number)
        found = []
        for layer in self.layers.layers:
            late: set[int] = set()
            for number in reversed(layer.backward):
                storages = {trace.tensors[tensor].storage for tensor in trace.ops[number].writes}
                after = {each for storage in storages for each in readers.get(storage, ()) if each > number}
                if all(each in late or trace.ops[each].phase == "optimizer" for each in after):
                    late.add(number)
            found.append(frozenset(late))
        return tuple(found)

    def scaled(self, tasks: Sequence[Task], before: PassWork, after: PassWork, elements: float) -> list[Task]:
        """Scale the blocks, times and traffic of kernels to another amount of work; `elements` is the output's
        ratio.
        """
        if before == after and elements == 1.0:
            return list(tasks)
        sizes = self._sizes(tasks, before, after, elements)
        return [_resized(task, size) for task, size in zip(tasks, sizes, strict=True)]

    def _sizes(self, tasks: Sequence[Task], before: PassWork, after: PassWork, elements: float) -> list[_Size]:
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
        """See `Times`: the optimizer's kernels stream through weights, so time is proportional to them."""
        fixed, moving, total = self._optimizer
        return fixed * (weights > 0) + moving * weights / total if total else 0

    @cached_property
    def _optimizer(self) -> tuple[float, float, int]:
        """The optimizer's time per layer with weights, its further time for all weights together, and the number of
        weights.
        """
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


class _PassNs(NamedTuple):
    """Time of one pass over a share in ns, and that of its matrix kernels."""

    all_ns: float
    matrix_ns: float


class _Size(NamedTuple):
    """A kernel at another amount of work: time, blocks, and ratio of work."""

    dur_ns: float
    blocks: int
    ratio: float


def _resized(task: Task, size: _Size) -> Task:
    traffic = task.dram_bytes * size.ratio
    return msgspec.structs.replace(task, dur_ns=size.dur_ns, blocks=size.blocks, dram_bytes=traffic)


def _elements(share: Share, full: Share) -> float:
    return math.prod(share.output) / math.prod(full.output)


def _roof_ratio(before: PassWork, after: PassWork, hardware: HardwareModel, dtype: Dtype) -> tuple[float, bool]:
    """Ratio of roofline times of the new and old work, and whether memory bounds the old work."""
    peak, bandwidth = hardware.rates.of(dtype), hardware.memory.dram_bytes_per_ns
    old = max(before.flops / peak, before.bytes / bandwidth)
    new = max(after.flops / peak, after.bytes / bandwidth)
    return new / old if old else 1.0, before.bytes / bandwidth > before.flops / peak


def _wave_ratio(task: Task, blocks: int, hardware: HardwareModel) -> float:
    sms = hardware.limits.sms
    return waves(msgspec.structs.replace(task, blocks=blocks), sms, hardware) / waves(task, sms, hardware)


#: Side of the square tile of outputs that a block of a matrix product or convolution computes.
_TILE: Final = 64
#: Share of the data sheet's arithmetic and bandwidth that a kernel attains.
_REACHED: Final = 0.6
#: Memory accesses of the optimizer per weight: reads of weight, gradient and momentum, writes of two.
_OPTIMIZER_ACCESSES: Final = 5


@dataclass(frozen=True)
class Roofline:
    """Times by arithmetic and traffic, for networks without a trace; `factor` scales all of them.

    Arithmetic runs on the share of the SMs that tiles of the output occupy.
    """

    hardware: HardwareModel
    dtype: Dtype = "tf32"
    factor: float = 1.0
    optimizer: bool = True
    """Whether GPUs update their weights, rather than a parameter server."""

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
        """Mean share of the SMs in use over waves of tiles."""
        n, c, h, w = share.output
        tiles = math.ceil(n * h * w / _TILE) * math.ceil(c / _TILE)
        sms = self.hardware.limits.sms
        return tiles / (sms * math.ceil(tiles / sms)) if tiles > sms else max(tiles / sms, 0.25)

    def scaled_to(self, graph: LayerGraph, step_ns: float) -> Roofline:
        """Return these times scaled so that the step of one GPU (without optimizer) takes a known time."""
        total = sum(
            self.share_ns(index, layer, whole(layer)).total_ns
            if graph.training
            else self.share_ns(index, layer, whole(layer)).forward_ns
            for index, layer in enumerate(graph.layers)
        )
        return replace(self, factor=self.factor * step_ns / total)


def share_key(layer: Layer, share: Share) -> str:
    """Key of a share's time: operations, extents of its part, and elements read."""
    ops = "+".join(f"{op.kind}{sorted(op.options.items())}" for op in layer.ops) or layer.name
    gradient = "" if layer.input_gradient else ", no gradient of its input"
    return f"{ops} -> {'x'.join(map(str, share.output))} of {share.input_elements}{gradient}"


@dataclass(frozen=True)
class MeasuredTimes:
    """Shares measured alone on a GPU; others scaled from measured shares of the layer, else from `otherwise`.

    An unmeasured share is scaled from each measured one by `otherwise`'s ratio. The estimate is their mean, weighted
    towards the nearest in size; its error is half of their spread.
    """

    measured: Mapping[str, PassTimes]
    """Times by `share_key`."""
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
