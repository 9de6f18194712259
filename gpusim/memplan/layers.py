"""A step in the view of the memory planners of 2016 to 2020: a chain of layers with forward and backward parts.

A layer is a forward op that works on the GPU. A backward op belongs to the forward op with which it shares most: first
the parameters and saved tensors that it reads, then the module, then the kind. One that shares nothing (adding two
gradients) belongs to the layer of the backward op before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

from gpusim.memplan.storages import Storages

LayerKind = Literal["conv", "fc", "activation", "norm", "pool", "dropout", "join", "loss", "attention", "other"]

_KINDS: Final[tuple[tuple[LayerKind, tuple[str, ...]], ...]] = (
    ("conv", ("convolution", "convolution_backward")),
    ("attention", ("scaled_dot_product",)),
    ("fc", ("addmm", "mm", "bmm", "baddbmm", "linear")),
    ("loss", ("log_softmax", "nll_loss", "cross_entropy", "mse_loss", "binary_cross_entropy")),
    ("norm", ("batch_norm", "layer_norm", "group_norm")),
    ("pool", ("max_pool", "avg_pool", "mean")),
    ("dropout", ("dropout", "bernoulli")),
    ("join", ("cat", "stack", "add")),
    (
        "activation",
        (
            "relu",
            "threshold_backward",
            "gelu",
            "silu",
            "sigmoid",
            "tanh",
            "hardswish",
            "hardsigmoid",
            "hardtanh",
            "softplus",
            "elu",
            "softmax",
        ),
    ),
)


def kind_of(target: str) -> LayerKind:
    """Return the layer kind of an operator, forward or backward: `aten.relu_.default` is an activation."""
    name = target.removeprefix("aten.").partition(".")[0].strip("_")
    for kind, words in _KINDS:
        for word in words:
            if name == word or name.removesuffix("_backward") == word:
                return kind
            if len(word) > 3 and word in name:  # `cudnn_batch_norm`; a short word such as `cat` must be the name
                return kind
    return "other"


@dataclass(frozen=True, slots=True)
class Layer:
    """A forward op with its backward ops, in recorded order."""

    op: int
    kind: LayerKind
    backward: tuple[int, ...]


@dataclass(frozen=True)
class Layers:
    """The layers of a step in the order of the forward pass."""

    storages: Storages
    layers: tuple[Layer, ...]

    @classmethod
    def of(cls, storages: Storages) -> Layers:
        """Find the layers of a training step."""
        turn = storages.first_backward
        forward = [op for op in range(turn) if storages.working[op] and not _changes_only_states(storages, op)]
        backward: dict[int, list[int]] = {op: [] for op in forward}
        users: dict[int, list[int]] = {}
        for op in forward:
            for storage in storages.touched[op]:
                users.setdefault(storage, []).append(op)
        owner = forward[-1] if forward else -1
        for op in range(turn, len(storages.trace.ops)):
            if storages.trace.ops[op].phase == "backward" and storages.working[op] and owner >= 0:
                owner = _owner(storages, op, users, owner)
                backward[owner].append(op)
        return cls(
            storages,
            tuple(Layer(op, kind_of(storages.trace.ops[op].target), tuple(backward[op])) for op in forward),
        )

    @cached_property
    def number_of(self) -> dict[int, int]:
        """Op, forward or backward -> number of its layer."""
        return {op: n for n, layer in enumerate(self.layers) for op in (layer.op, *layer.backward)}

    def inputs(self, number: int) -> tuple[int, ...]:
        """Return the feature maps that a layer reads: activations of the forward pass, or the step's input."""
        storages = self.storages
        op = self.layers[number].op
        return tuple(
            sorted(s for s in storages.reads[op] if storages.category[s] == "activation" and s not in storages.initial)
        )

    @cached_property
    def backward_order(self) -> tuple[int, ...]:
        """Layers with a backward part, in the order of their first backward op."""
        numbers = [n for n, layer in enumerate(self.layers) if layer.backward]
        return tuple(sorted(numbers, key=lambda n: self.layers[n].backward[0]))


def _changes_only_states(storages: Storages, op: int) -> bool:
    """Whether an op changes only states, such as a count of batches."""
    return storages.writes[op] <= storages.initial


def _owner(storages: Storages, op: int, users: dict[int, list[int]], before: int) -> int:
    ops = storages.trace.ops
    shared: dict[int, int] = {}
    for storage in storages.touched[op]:
        for user in users.get(storage, ()):
            if len(users[storage]) <= 64:  # a storage that all ops use identifies none
                shared[user] = shared.get(user, 0) + 1
    if not shared:
        return before
    kind, layer = kind_of(ops[op].target), ops[op].layer
    return max(
        shared,
        key=lambda f: (shared[f], kind_of(ops[f].target) == kind, ops[f].layer == layer, -abs(f - before), f),
    )
