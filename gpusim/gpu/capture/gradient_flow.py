"""Where gradients of a recorded step end although its data goes on: `detach`, `no_grad`, functions with their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gpusim.gpu.capture.calls import Call, Value


@dataclass(frozen=True)
class _Read:
    """What a call of the forward pass takes and makes, as autograd sees it."""

    taken: tuple[tuple[Value, bool], ...]
    """Tensors of numbers, each with whether autograd computes its gradient."""
    recorded: bool
    """Whether autograd records the call: not under `no_grad`, nor within a function with its own gradient."""
    numbers: bool
    """Whether it makes numbers, which may have a gradient; truth values and indices have none."""


class GradientFlow:
    """Notes on the calls of a forward pass. Gradients of parameters are known at the end of the step."""

    def __init__(self) -> None:
        self._reads: dict[str, _Read] = {}

    def note(self, name: str, taken: Sequence[tuple[Value, bool]], made: Sequence[torch.Tensor]) -> None:
        """Note a call with the tensors of numbers that it takes, as they were before it."""
        self._reads[name] = _Read(tuple(taken), torch.is_grad_enabled(), any(map(is_numbers, made)))

    def noted(self, calls: Sequence[Call]) -> tuple[Call, ...]:
        """Return the calls with the tensors that they take without a gradient, or with one of the user's own."""
        dependent = {value.node for read in self._reads.values() for value, has in read.taken if has}
        unrecorded: set[str] = set()
        for call in calls:
            read = self._reads.get(call.name)
            if read is None or not read.numbers or _is_new(call):
                continue
            if any(value.node in dependent for value, _ in read.taken):
                dependent.add(call.name)
                if not read.recorded:
                    unrecorded.add(call.name)
        return tuple(self._with_notes(call, dependent, unrecorded) for call in calls)

    def _with_notes(self, call: Call, dependent: set[str], unrecorded: set[str]) -> Call:
        read = self._reads.get(call.name)
        if read is None or not read.recorded:
            return call
        with_one = {value for value, has in read.taken if has}
        without = {value for value, has in read.taken if not has and value.node in dependent}
        own = {value for value in with_one if value.node in unrecorded}
        if not without and not own:
            return call
        order = dict.fromkeys(value for value, _ in read.taken)
        other = (with_one & without) | own
        return replace(
            call,
            cut=tuple(value for value in order if value in without - other),
            other_gradient=tuple(value for value in order if value in other),
        )


def is_numbers(tensor: torch.Tensor) -> bool:
    """Whether a tensor may have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def _is_new(call: Call) -> bool:
    """Whether a call takes only the type of its tensor, or its shape."""
    name = call.function.overloadpacket.__name__
    return bool(name.startswith("new_") or name.endswith("_like"))
