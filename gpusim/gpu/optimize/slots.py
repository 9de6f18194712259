"""Tensors of a captured step in the user's objects, and their adoption when the user replaces them.

A captured step reads and writes fixed memory. Parameters and buffers are the user's own; replaced ones need a new
capture. Optimizers create their states late and replace them when a checkpoint is loaded, and gradients come and go:
those are copied into the step's memory, which then replaces them in the user's objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, Final

import torch
from torch.optim import Optimizer

from gpusim.gpu.capture.user_step import UserStep
from gpusim.gpu.optimize.layouts import Layouts
from gpusim.gpu.optimize.optimizers import STEP, LearningRates
from gpusim.gpu.optimize.unchanged import Contents, KeyedValues, Natures, all_same

#: Names of the dicts in which a module has its modules and tensors.
_OF_MODULE: Final = ("_modules", "_parameters", "_buffers")
_VERSION: Final = attrgetter("_version")
_REQUIRES_GRAD: Final = attrgetter("requires_grad")
_GRAD: Final = attrgetter("grad")
_STATE: Final = attrgetter("state")


@dataclass(frozen=True)
class _State:
    """A tensor of an optimizer's state: `tensor` is the step's, `shown` the user's."""

    optimizer: Optimizer
    parameter: torch.Tensor
    key: str
    tensor: torch.Tensor
    shown: torch.Tensor


class States:
    """Optimizer states that a captured step uses."""

    def __init__(self, slots: Sequence[_State], counts: torch.Tensor, per_step: torch.Tensor) -> None:
        self._slots = list(slots)
        self._counts, self._per_step = counts, per_step
        self._version = counts._version
        self._optimizers = list(dict.fromkeys(slot.optimizer for slot in slots))
        self._adopted: tuple[list[Any], Contents, KeyedValues] | None = None
        """At adoption: each optimizer's dict of states, its own dicts in there, and the values that these must show."""

    @classmethod
    def of(cls, step: UserStep, rates: LearningRates, used: Mapping[int, float]) -> States:
        """Find the states of the current optimizers; `used` has, by id, the step's states and the increments of counts.

        Call it while `rates.in_use()`: counts are then on the device, and the user's show copies in host memory.
        """
        states: list[tuple[Optimizer, torch.Tensor, str, torch.Tensor, bool]] = []
        for optimizer in step.optimizers:
            for parameter, state in optimizer.state.items():
                others = [id(value) for key, value in state.items() if key != STEP and isinstance(value, torch.Tensor)]
                updated = not others or not used.keys().isdisjoint(others)  # not where it has no gradient now
                for key, value in state.items():
                    count = updated and key == STEP and id(parameter) not in rates.counts_on_device
                    if isinstance(value, torch.Tensor) and (id(value) in used or count):
                        states.append((optimizer, parameter, key, value, count))
        counted = [value for *_, value, count in states if count]
        counts = torch.zeros(len(counted))
        # A count that the step does not use is the host's own.
        per_step = torch.tensor([used.get(id(value), 1.0) for value in counted])
        views = iter(counts.unbind())
        slots = [_State(o, p, key, value, next(views) if count else value) for o, p, key, value, count in states]
        return cls(slots, counts, per_step)

    def adopt(self) -> bool:
        """Adopt the current states of the user's optimizers; False where one has no state yet.

        Raises `RuntimeError` where a state has another shape.
        """
        return not self._slots or self._is_known() or self._adopt()

    def _is_known(self) -> bool:
        """Whether all states are as adopted, or as the step itself left them."""
        if self._counts._version != self._version or self._adopted is None:
            return False
        holders, states, shown = self._adopted
        return all_same(map(_STATE, self._optimizers), holders) and states.hold() and shown.hold()

    def _adopt(self) -> bool:
        counted = self._counts._version != self._version
        current_states: list[tuple[_State, dict[str, Any], torch.Tensor]] = []
        for slot in self._slots:
            state = slot.optimizer.state.get(slot.parameter)
            current = None if state is None else state.get(slot.key)
            if state is None or current is None:
                return False
            current_states.append((slot, state, current))
        with torch.no_grad():
            for slot, state, current in current_states:
                if current is slot.shown and (slot.shown is slot.tensor or not counted):
                    continue
                slot.tensor.copy_(current)
                if slot.shown is not slot.tensor and current is not slot.shown:
                    slot.shown.copy_(current)
                state[slot.key] = slot.shown
        self._version = self._counts._version
        shown = KeyedValues([state for _, state, _ in current_states], [slot.key for slot in self._slots])
        holders = list(map(_STATE, self._optimizers))
        self._adopted = holders, Contents(holders), shown
        return True

    def stepped(self) -> None:
        """Advance the host's counts after a run of the captured step."""
        if self._per_step.numel():
            self._counts.add_(self._per_step)
            self._version = self._counts._version


class Places:
    """Parameters, buffers and modules at their places when a step was captured.

    In a step that `trains`, also one that leaves no gradients, which of them have gradients must stay, too. `others`
    are tensors of the user's elsewhere; of those `copied` the step has its own copies.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        used: Mapping[int, Any],
        trains: bool,
        others: Sequence[torch.Tensor] = (),
        copied: Sequence[torch.Tensor] = (),
    ) -> None:
        holders: list[dict[str, Any]] = []
        tensors: dict[int, torch.Tensor] = {}
        for module in modules:
            holders += [module._modules, module._parameters, module._buffers]
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and id(tensor) in used:
                    tensors[id(tensor)] = tensor
        self._contents = Contents(holders)
        self._natures = Natures(modules)
        owners = [vars(module) for module in modules for _ in _OF_MODULE]
        self._dicts = KeyedValues(owners, _OF_MODULE * len(modules))
        """A module's own dicts, which `__setstate__` replaces."""
        tensors |= {id(tensor): tensor for tensor in others}
        self._tensors = list(tensors.values())
        self._layouts = Layouts(self._tensors)
        self._copied = [tensor for tensor in copied if not tensor.is_inference()]
        self._versions = list(map(_VERSION, self._copied))
        self._trainable = [t for t in self._tensors if trains and (t.is_floating_point() or t.is_complex())]
        self._trained = [tensor.requires_grad for tensor in self._trainable]

    def hold(self) -> bool:
        """Whether all are still there, with the same memory and shape. Checked at each call, so no loop is Python's."""
        if not (self._natures.hold() and self._dicts.hold() and self._contents.hold()):
            return False
        if not all_same(map(_REQUIRES_GRAD, self._trainable), self._trained):
            return False
        return self._layouts.hold() and list(map(_VERSION, self._copied)) == self._versions


@dataclass(frozen=True)
class Presence:
    """Parameters by what a step finds in `.grad` and does with it; others have their gradient from the step itself."""

    absent: Sequence[torch.Tensor]
    """Without a gradient before and after: the step would clear one, or use it."""
    present: Sequence[torch.Tensor]
    """With one to which no backward of the step adds, or that it reads before."""
    cleared: Sequence[torch.Tensor]
    """With one that the step removes."""

    def holds(self) -> bool:
        """Whether the same parameters have gradients as at the capture."""
        absent = all_same(map(_GRAD, self.absent), repeat(None))
        return absent and not any(map(is_, map(_GRAD, self.present), repeat(None)))


class Gradients:
    """Gradients that a step leaves in `.grad`, and those that it reads or adds to."""

    def __init__(
        self,
        given: Sequence[tuple[torch.Tensor, torch.Tensor]],
        left: Sequence[tuple[Any, torch.Tensor]],
        presence: Presence,
    ) -> None:
        self.presence = presence
        self._given = list(given)
        """Parameter and the memory in which the step expects its gradient."""
        self._left = list(left)
        """Parameter and the memory in which the step leaves its gradient."""
        self._expected, self._computed = _columns(given), _columns(left)

    def adopt(self) -> None:
        """Copy gradients that the step adds to into its memory."""
        if _lie_in(*self._expected):
            return
        others = [(p, tensor, p.grad) for p, tensor in self._given if p.grad is not tensor]
        with torch.no_grad():
            missing = [tensor for _, tensor, current in others if current is None]
            if missing:
                torch._foreach_zero_(missing)
            for parameter, tensor, current in others:
                if current is not None:
                    tensor.copy_(current)
                parameter.grad = tensor

    def leave(self) -> None:
        """Put the computed gradients into `.grad`, as after `backward`, and remove those that the step removes."""
        if not _lie_in(*self._computed):
            for parameter, tensor in self._left:
                parameter.grad = tensor
        for parameter in self.presence.cleared:
            parameter.grad = None


def _columns(pairs: Sequence[tuple[Any, torch.Tensor]]) -> tuple[list[Any], list[torch.Tensor]]:
    return [parameter for parameter, _ in pairs], [tensor for _, tensor in pairs]


def _lie_in(parameters: Sequence[Any], tensors: Sequence[torch.Tensor]) -> bool:
    """Whether these are the gradients of the parameters; the common case, and no loop is Python's."""
    return all_same(map(_GRAD, parameters), tensors)
