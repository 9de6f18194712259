"""All state that a user's step may change, for restoration after a trial."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from gpusim.errors import CaptureError
from gpusim.gpu.capture.user_step import UserStep, rng_state, set_rng_state
from gpusim.gpu.optimize.python_state import PythonState
from gpusim.gpu.replay.tensors import restore_elements

#: Types of module attributes that are compared.
_PLAIN = (bool, int, float, str, type(None))
#: End of the names of a module's dicts of hooks, and of the options of these.
_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")


class Snapshot:
    """A step's current tensors, gradients, optimizers, attributes and random number states."""

    def __init__(self, step: UserStep, roots: Sequence[Any] = ()) -> None:
        self.step = step
        self._python = PythonState(roots)
        self._modules = list(dict.fromkeys(m for module in step.modules.values() for m in module.modules()))
        self._buffers = [dict(module._buffers) for module in self._modules]
        self._plain, self._hooks = self._attributes(), self._all_hooks()
        self._unprepared = self._buffers, self._plain, self._hooks
        self._parameters = list(step.parameters().values())
        self._gradients = [parameter.grad for parameter in self._parameters]
        self._groups = [[dict(group) for group in optimizer.param_groups] for optimizer in step.optimizers]
        self._states = [{p: dict(state) for p, state in optimizer.state.items()} for optimizer in step.optimizers]
        self._inputs = [tensor for _, tensor in step.named.values()]
        self._copies = [(tensor, tensor.detach().clone()) for tensor in self._tensors()]
        self._rng = rng_state(step.device)

    def _tensors(self) -> list[torch.Tensor]:
        leaves = [
            *self._python.tensors,
            *self._parameters,
            *(buffer for buffers in self._buffers for buffer in buffers.values()),
            *self._inputs,
        ]
        leaves += [gradient for gradient in self._gradients if gradient is not None]
        for groups, states in zip(self._groups, self._states, strict=True):
            leaves += [value for values in (*groups, *states.values()) for value in values.values()]
        return list({id(each): each for each in leaves if isinstance(each, torch.Tensor)}.values())

    def _attributes(self) -> list[dict[str, Any]]:
        return [_plain(module) for module in self._modules]

    def _all_hooks(self) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
        """Return each dict of a module's hooks, with its contents."""
        dicts = (value for module in self._modules for key, value in vars(module).items() if key.endswith(_HOOKS))
        return [(hooks, dict(hooks)) for hooks in dicts if isinstance(hooks, dict)]

    def keep_prepared(self) -> bool:
        """Take the attributes, buffers and hooks of modules that the first run leaves as those to restore.

        Returns whether attributes or buffers are others than before: a table, say, or a note that it was the first.
        """
        before = self._plain, _ids(self._buffers)
        self._buffers = [dict(module._buffers) for module in self._modules]
        self._plain, self._hooks = self._attributes(), self._all_hooks()
        known = {id(tensor) for tensor, _ in self._copies}
        made = [tensor for tensor in self._tensors() if id(tensor) not in known]
        self._copies += [(tensor, tensor.detach().clone()) for tensor in made]
        return before != (self._plain, _ids(self._buffers))

    def forget_prepared(self) -> None:
        """Restore what was there before the first run, instead."""
        self._buffers, self._plain, self._hooks = self._unprepared

    def check_modules(self) -> None:
        """Raise `CaptureError` where a run after the first has changed a plain attribute or replaced a buffer."""
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
            for tensor, copy in self._copies:
                restore_elements(tensor, copy)
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        for module, buffers, plain in zip(self._modules, self._buffers, self._plain, strict=True):
            if _ids([module._buffers]) != _ids([buffers]):
                module._buffers.clear()
                module._buffers.update(buffers)
            for key in _plain(module).keys() - plain.keys():
                delattr(module, key)
            vars(module).update(plain)
        for hooks, before in self._hooks:
            if hooks != before:
                hooks.clear()
                hooks.update(before)
        self._python.restore()
        for optimizer, groups, states in zip(self.step.optimizers, self._groups, self._states, strict=True):
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                group.clear()
                group.update(options)
            optimizer.state.clear()
            optimizer.state.update({parameter: dict(state) for parameter, state in states.items()})
        set_rng_state(self._rng)

    def check_objects(self) -> None:
        """Raise `CaptureError` where Python objects have changed: a graph on the GPU changes none."""
        for optimizer, groups in zip(self.step.optimizers, self._groups, strict=True):
            for group, before in zip(optimizer.param_groups, groups, strict=True):
                for key, value in before.items():
                    if isinstance(value, _PLAIN) and group.get(key) != value:
                        kind = type(optimizer).__name__
                        raise CaptureError(
                            f"the step changes '{key}' of {kind}; do that between steps (scheduler.step())"
                        )
        changed = self._python.changed()
        if changed is not None:
            raise CaptureError(f"the step changes the Python value '{changed}', which a captured step would not")


def _ids(buffers: Sequence[dict[str, Any]]) -> list[dict[str, int]]:
    return [{key: id(tensor) for key, tensor in each.items()} for each in buffers]


def _plain(module: torch.nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if isinstance(value, _PLAIN)}


@contextmanager
def put_back(step: UserStep, roots: Sequence[Any] = ()) -> Iterator[Snapshot]:
    """Restore the user's objects, and those reachable from `roots`, at the end of this context in any case."""
    snapshot = Snapshot(step, roots)
    try:
        yield snapshot
    finally:
        snapshot.restore()
