"""All state that a user's step may change, for restoration after a trial."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gpusim.errors import CaptureError
from gpusim.gpu.capture.user_step import PLAIN_VALUES, UserStep, rng_state, set_rng_state
from gpusim.gpu.optimize.optimizers import held_by
from gpusim.gpu.optimize.python_state import ModuleState, PythonState
from gpusim.gpu.replay.tensors import restore_elements

#: End of the names of a module's dicts of hooks, and of the options of these.
_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")


@dataclass(frozen=True)
class _Copy:
    """A tensor, with its elements, memory, shape and strides from before a trial."""

    tensor: torch.Tensor
    elements: torch.Tensor
    storage: torch.UntypedStorage
    offset: int
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Copy:
        elements = tensor.detach().clone()
        return cls(tensor, elements, tensor.untyped_storage(), int(tensor.storage_offset()), tensor.stride())

    def is_reshaped(self) -> bool:
        """Whether the tensor has another shape or other strides. Other memory alone is no trace of a change: cuDNN's
        layers move their weights together.
        """
        return self.tensor.shape != self.elements.shape or self.tensor.stride() != self.strides

    def restore(self) -> None:
        """Restore shape, strides and elements. Call it where no gradients are recorded."""
        if self.is_reshaped():
            self.tensor.set_(self.storage, self.offset, self.elements.shape, self.strides)
        restore_elements(self.tensor, self.elements)


class Snapshot:
    """A step's current tensors, gradients, optimizers, attributes and random number states.

    Raises `CaptureError` where a gradient could not be put back: it is from before its parameter had another type.
    """

    def __init__(self, step: UserStep, roots: Sequence[Any] = ()) -> None:
        _check_gradients(step)
        self.step = step
        _check_states(step)
        self._python = PythonState((*roots, step.arguments))
        self._of_own = PythonState(held_by(step.optimizers))
        self._modules = list(dict.fromkeys(m for module in step.modules.values() for m in module.modules()))
        self._buffers = [dict(module._buffers) for module in self._modules]
        self._plain, self._hooks = self._attributes(), self._all_hooks()
        self._modes = [{key: plain[key] for key in plain.keys() & {"training"}} for plain in self._plain]
        self._others = ModuleState(self._modules)
        self._unprepared = self._buffers, self._plain, self._hooks, self._others
        self._parameters = list(step.parameters().values())
        found = (*self._parameters, *self._python.tensors, *self._of_own.tensors, *self._others.tensors)
        self._with_gradients = list({id(each): each for each in found if each.is_leaf}.values())
        self._gradients = [each.grad for each in self._with_gradients]
        self._of_optimizers = [_plain(optimizer) for optimizer in step.optimizers]
        self._counted = self._counts()
        self._groups = [[dict(group) for group in optimizer.param_groups] for optimizer in step.optimizers]
        self._states = [{p: dict(state) for p, state in optimizer.state.items()} for optimizer in step.optimizers]
        self._inputs = [tensor for _, tensor in step.named.values()]
        self._copies = [_Copy.of(tensor) for tensor in self._tensors()]
        self._rng = rng_state(step.device)
        self._generators = [
            (g, g.get_state()) for g in (*self._python.generators, *self._of_own.generators, *self._others.generators)
        ]

    def _tensors(self) -> list[torch.Tensor]:
        leaves = [
            *self._python.tensors,
            *self._of_own.tensors,
            *self._others.tensors,
            *self._parameters,
            *(buffer for buffers in self._buffers for buffer in buffers.values()),
            *self._inputs,
        ]
        leaves += [gradient for gradient in self._gradients if gradient is not None]
        for groups, states in zip(self._groups, self._states, strict=True):
            leaves += [value for values in (*groups, *states.values()) for value in values.values()]
        return list({id(each): each for each in leaves if _is_restorable(each)}.values())

    def _attributes(self) -> list[dict[str, Any]]:
        return [_plain(module) for module in self._modules]

    def _counts(self) -> list[dict[Any, Any]]:
        """Return the plain values of each optimizer: its attributes, and those in its states."""
        counts: list[dict[Any, Any]] = [dict(_plain(optimizer)) for optimizer in self.step.optimizers]
        for optimizer, values in zip(self.step.optimizers, counts, strict=True):
            for parameter, state in optimizer.state.items():
                plain = ((key, value) for key, value in state.items() if isinstance(value, PLAIN_VALUES))
                values.update(((key, id(parameter)), value) for key, value in plain)
        return counts

    def _all_hooks(self) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
        """Return each dict of a module's hooks, with its contents."""
        dicts = (value for module in self._modules for key, value in vars(module).items() if key.endswith(_HOOKS))
        return [(hooks, dict(hooks)) for hooks in dicts if isinstance(hooks, dict)]

    def keep_prepared(self) -> bool:
        """Take the attributes, buffers and hooks of modules that the first run leaves as those to restore.

        Returns whether attributes or buffers are others than before: a table, say, or a note that it was the first.
        """
        before, others = (self._plain, _ids(self._buffers)), self._others.changed()
        self._others = ModuleState(self._modules)
        self._buffers = [dict(module._buffers) for module in self._modules]
        self._plain, self._hooks = self._attributes(), self._all_hooks()
        self._counted = self._counts()
        known = {id(copy.tensor) for copy in self._copies}
        self._copies += [_Copy.of(tensor) for tensor in self._tensors() if id(tensor) not in known]
        return others is not None or before != (self._plain, _ids(self._buffers))

    def forget_prepared(self) -> None:
        """Restore what was there before the first run, instead."""
        self._buffers, self._plain, self._hooks, self._others = self._unprepared

    def check_modules(self) -> None:
        """Raise `CaptureError` where a run after the first has changed a plain attribute or replaced a buffer, or where
        an optimizer counts in Python.
        """
        for optimizer, counted, now in zip(self.step.optimizers, self._counted, self._counts(), strict=True):
            for key in now:
                if key not in counted or now[key] != counted[key]:
                    name = key[0] if isinstance(key, tuple) else key
                    raise CaptureError(
                        f"the step changes the Python value '{name}' of {type(optimizer).__name__}, which a captured "
                        "step would not"
                    )
        for module, buffers, before in zip(self._modules, self._buffers, self._plain, strict=True):
            name, now = type(module).__name__, _plain(module)
            for key, tensor in buffers.items():
                if module._buffers.get(key) is not tensor:
                    raise CaptureError(f"the step replaces the buffer '{key}' of {name}; change it in place instead")
            for key in before.keys() | now.keys():
                if key not in before or key not in now or before[key] != now[key]:
                    raise CaptureError(
                        f"the step changes the Python attribute '{key}' of {name}, which a captured step would not"
                    )

    def restore(self) -> None:
        """Restore everything."""
        with torch.no_grad():
            for copy in self._copies:
                copy.restore()
        for tensor, gradient in zip(self._with_gradients, self._gradients, strict=True):
            if tensor.grad is not gradient:
                tensor.grad = gradient
        kept = zip(self._modules, self._buffers, self._plain, self._modes, strict=True)
        for module, buffers, plain, mode in kept:
            if _ids([module._buffers]) != _ids([buffers]):
                module._buffers.clear()
                module._buffers.update(buffers)
            for key in _plain(module).keys() - plain.keys():
                delattr(module, key)
            vars(module).update(plain | mode)  # a mode is no preparation: each run sets it
        for hooks, before in self._hooks:
            if hooks != before:
                hooks.clear()
                hooks.update(before)
        self._python.restore()
        self._of_own.restore()
        self._others.restore()
        kept_ones = zip(self.step.optimizers, self._groups, self._states, self._of_optimizers, strict=True)
        for optimizer, groups, states, attributes in kept_ones:
            for key in _plain(optimizer).keys() - attributes.keys():
                delattr(optimizer, key)
            vars(optimizer).update(attributes)
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                group.clear()
                group.update(options)
            optimizer.state.clear()
            optimizer.state.update({parameter: dict(state) for parameter, state in states.items()})
        for generator, state in self._generators:
            generator.set_state(state)
        set_rng_state(self._rng)

    def check_objects(self) -> None:
        """Raise `CaptureError` where Python objects have changed: a graph on the GPU changes none."""
        for optimizer, groups in zip(self.step.optimizers, self._groups, strict=True):
            for group, before in zip(optimizer.param_groups, groups, strict=True):
                for key, value in before.items():
                    if isinstance(value, PLAIN_VALUES) and group.get(key) != value:
                        kind = type(optimizer).__name__
                        raise CaptureError(
                            f"the step changes '{key}' of {kind}; do that between steps (scheduler.step())"
                        )
        for copy in self._copies:
            if copy.is_reshaped():
                shape = list(copy.elements.shape)
                raise CaptureError(f"the step changes the shape or strides of a tensor of shape {shape} in place")
        # A captured step leaves those of parameters, and each step of an optimizer makes its own anew.
        parameters = {*map(id, self._parameters), *map(id, self._of_own.tensors)}
        pairs = zip(self._with_gradients, self._gradients, strict=True)
        if any(tensor.grad is not gradient for tensor, gradient in pairs if id(tensor) not in parameters):
            raise CaptureError(
                "the step leaves a gradient in a tensor that is no parameter of a module or optimizer, which a "
                "captured step would not"
            )
        changed = self._python.changed() or self._of_own.changed()
        if changed is not None:
            raise CaptureError(f"the step changes the Python value '{changed}', which a captured step would not")


def _check_states(step: UserStep) -> None:
    for optimizer in step.optimizers:
        for key, state in optimizer.state.items():
            if not isinstance(state, dict):
                shown = key if isinstance(key, str) else type(key).__name__
                raise CaptureError(
                    f"{type(optimizer).__name__} has '{shown}' in its state, which is no dict of a parameter's values"
                )


def _check_gradients(step: UserStep) -> None:
    for name, parameter in step.parameters().items():
        try:
            parameter.grad = parameter.grad  # torch compares types and shapes
        except RuntimeError as cause:
            raise CaptureError(
                f"the gradient of '{name}' has another type or shape than '{name}': call zero_grad() first"
            ) from cause


def _is_restorable(value: Any) -> bool:
    """Whether it is a tensor whose elements can be copied back; none that a step can record is of another kind."""
    if not isinstance(value, torch.Tensor):
        return False
    return value.layout is torch.strided and not value.is_nested and not value.is_quantized


def _ids(buffers: Sequence[dict[str, Any]]) -> list[dict[str, int]]:
    return [{key: id(tensor) for key, tensor in each.items()} for each in buffers]


def _plain(owner: torch.nn.Module | torch.optim.Optimizer) -> dict[str, Any]:
    return {key: value for key, value in vars(owner).items() if isinstance(value, PLAIN_VALUES)}


@contextmanager
def put_back(step: UserStep, roots: Sequence[Any] = ()) -> Iterator[Snapshot]:
    """Restore the user's objects, and those reachable from `roots`, at the end of this context in any case."""
    snapshot = Snapshot(step, roots)
    try:
        yield snapshot
    finally:
        snapshot.restore()
