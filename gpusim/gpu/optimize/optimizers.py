"""The user's optimizers in a CUDA graph: rates and step counts that a replay reads from the GPU.

A graph repeats the numbers of its capture. So while a step is recorded, SGD, Adam, AdamW and Adagrad run their fused
kernels, which take the learning rate as a tensor, and count their steps on the GPU. The user's own options and states
are restored afterwards: rates stay numbers, counts stay in host memory.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import is_
from typing import Any, Final

import torch
from torch.optim import Optimizer

from gpusim.gpu.capture.optimizers import counting_on
from gpusim.gpu.optimize.unchanged import Contents, Items, KeyedValues
from gpusim.gpu.reach.names import is_users
from gpusim.gpu.reach.raw import attributes_of

#: Optimizers whose fused kernels take the rate as a tensor.
FUSED: Final = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
#: Options that affect the launch of an update, not its result.
_LAUNCHING: Final = ("params", "foreach", "fused", "capturable")
STEP: Final = "step"


class LearningRates:
    """Learning rates of optimizers as GPU tensors, for groups whose kernels take one."""

    def __init__(self, optimizers: Sequence[Optimizer], device: torch.device) -> None:
        self.optimizers = list(optimizers)
        self.device = device
        self.fused = [_can_be_fused(optimizer, device) for optimizer in self.optimizers]
        self.tensors: list[list[torch.Tensor | None]] = [
            [
                torch.tensor(float(group["lr"]), dtype=torch.float32, device=device)
                if fused and _is_number(group)
                else None
                for group in optimizer.param_groups
            ]
            for optimizer, fused in zip(self.optimizers, self.fused, strict=True)
        ]
        self._last = self._numbers()
        self.counts_on_device = {
            id(p)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            if group.get("fused") or group.get("capturable")
            for p in group["params"]
        }
        """Parameters, by id, whose optimizer counts its steps on the GPU by the user's choice."""

    def update(self) -> None:
        """Update the tensors to the user's current rates."""
        numbers = self._numbers()
        if numbers == self._last:
            return
        for tensors, optimizer in zip(self.tensors, self.optimizers, strict=True):
            for tensor, group in zip(tensors, optimizer.param_groups, strict=True):
                if tensor is not None:
                    tensor.fill_(float(group["lr"]))
        self._last = numbers

    def _numbers(self) -> list[float]:
        """Return the user's current rates of the tensors; a rate in a tensor may have been changed in place."""
        return [
            float(group["lr"])
            for tensors, optimizer in zip(self.tensors, self.optimizers, strict=True)
            for tensor, group in zip(tensors, optimizer.param_groups, strict=True)
            if tensor is not None
        ]

    def other_options(self) -> tuple[Any, ...]:
        """Return the options that a captured step holds: numbers, and where rates on the GPU lie; hashable."""
        options: list[Any] = []
        for tensors, optimizer in zip(self.tensors, self.optimizers, strict=True):
            for number, group in enumerate(optimizer.param_groups):
                tensor = tensors[number] if number < len(tensors) else None
                for key in optimizer.defaults:  # schedulers keep their own numbers next to these
                    value = group.get(key)
                    if key in _LAUNCHING or (key == "lr" and tensor is not None):
                        continue
                    if key == "lr" and isinstance(value, torch.Tensor):
                        options.append(value.item() if value.device.type == "cpu" else value.data_ptr())
                    else:
                        options.append(value if isinstance(value, _HASHABLE) else repr(value)[:200])
                options.append(len(group["params"]))
        return tuple(options)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within this context optimizers run their fused kernels with rates and counts on the device; then they are
        restored.
        """
        checked = [vars(optimizer).get(_CHECKED) for optimizer in self.optimizers]
        with counting_on(self.device, self.optimizers), ExitStack() as hooks:
            for optimizer, fused, tensors in zip(self.optimizers, self.fused, self.tensors, strict=True):
                if not fused:
                    continue
                for group, tensor in zip(optimizer.param_groups, tensors, strict=True):
                    if _adds_momenta(optimizer, group):
                        hooks.callback(optimizer.register_step_post_hook(partial(_add_momenta, group)).remove)
                    group.update(fused=True, foreach=False)
                    _complete_momenta(optimizer, group)
                    if tensor is not None:
                        group["lr"] = tensor
                    for parameter in group["params"]:
                        count = optimizer.state.get(parameter, {}).get(STEP)
                        if isinstance(count, torch.Tensor) and id(parameter) not in self.counts_on_device:
                            state = dict(optimizer.state[parameter])
                            state[STEP] = count.to(self.device, dtype=torch.float32, copy=True)
                            optimizer.state[parameter] = state
            try:
                yield
            finally:
                for optimizer, value in zip(self.optimizers, checked, strict=True):
                    vars(optimizer).pop(_CHECKED, None)
                    if value is not None:
                        setattr(optimizer, _CHECKED, value)


class PlainStates:
    """Plain values in the states of optimizers of the user's classes, as they are now: their code may read any."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = of_users(optimizers)
        self._before = self._now()
        self._keep()

    def hold(self) -> bool:
        """Whether they are the same, whichever dicts hold them."""
        if not self._optimizers or (self._states.hold() and self._values.hold()):
            return True
        same = self._now() == self._before
        if same:
            self._keep()
        return same

    def _keep(self) -> None:
        self._states = Contents([optimizer.state for optimizer in self._optimizers])
        held = [(state, key) for state, key, _ in self._plain()]
        self._values = KeyedValues([state for state, _ in held], [key for _, key in held])

    def _now(self) -> list[tuple[Any, Any]]:
        return [(key, value) for _, key, value in self._plain()]

    def _plain(self) -> Iterator[tuple[dict[Any, Any], Any, Any]]:
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                yield from ((state, key, value) for key, value in state.items() if isinstance(value, _HASHABLE))


class Groups:
    """Parameters by group, the methods, and plain values of states of the user's own, of optimizers as they are now."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._plain = PlainStates(optimizers)
        self._before = self._now()
        self._keep()

    def hold(self) -> bool:
        """Whether they are the same, whichever lists and dicts hold them."""
        if not self._plain.hold():
            return False
        if not self._optimizers or (self._held.hold() and self._items.hold()):
            return True
        now = self._now()
        same = len(now) == len(self._before) and all(map(is_, now, self._before))
        if same:
            self._keep()
        return same

    def stepped(self) -> None:
        """Note a step as the wrapper of torch's schedulers does, which warn before a first step."""
        for optimizer in self._optimizers:
            if "step" in vars(optimizer):
                optimizer._opt_called = True

    def _keep(self) -> None:
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        holders: list[tuple[dict[Any, Any], str]] = [(group, "params") for group in groups]
        for optimizer in self._optimizers:
            holders += [(vars(optimizer), key) for key in ("param_groups", *_METHODS)]
            users = [each for each in type(optimizer).__mro__ if issubclass(each, Optimizer)]
            holders += [(attributes_of(each), key) for each in users for key in _METHODS]
        self._held = KeyedValues([holder for holder, _ in holders], [key for _, key in holders])
        self._items = Items(
            [*(optimizer.param_groups for optimizer in self._optimizers), *(group["params"] for group in groups)]
        )

    def _now(self) -> list[Any]:
        found: list[Any] = []
        for optimizer in self._optimizers:
            found += [_own(getattr(optimizer, key)) for key in _METHODS]
            for group in optimizer.param_groups:
                found += [None, *group["params"]]
        return found


def of_users(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Return the optimizers whose class is the user's: their code may read and change any Python value."""
    return [each for each in optimizers if is_users(type(each).__module__)]


def with_steps(optimizers: Iterable[Optimizer]) -> list[Any]:
    """Return the optimizers of the user's classes, with the methods that take their steps."""
    own = of_users(optimizers)
    return [*own, *(types.MethodType(_own(each.step), each) for each in own)]


def held_by(optimizers: Iterable[Optimizer]) -> list[dict[str, Any]]:
    """Return what optimizers of the user's classes hold by name: attributes, further options, and states."""
    held: list[dict[str, Any]] = []
    for each in of_users(optimizers):
        name = type(each).__name__
        attributes = {key: value for key, value in vars(each).items() if key not in _OF_TORCH}
        groups = [{key: group[key] for key in group.keys() - {"params"}} for group in each.param_groups]
        states = list(map(dict, each.state.values()))
        held.append({name: attributes, f"{name}.param_groups": groups, f"{name}.state": states})
    return held


def _own(method: Any) -> Any:
    """Return the function of a method, without what torch's schedulers wrap around it."""
    while getattr(method, "_wrapped_by_lr_sched", False):
        method = method.__wrapped__
    return getattr(method, "__func__", method)


_METHODS: Final = ("step", "zero_grad")
#: Attributes of torch's own in each optimizer, its states, groups and hooks among them.
_OF_TORCH: Final = frozenset((*vars(torch.optim.SGD([torch.zeros(1)], lr=0.1)), *_METHODS))
_MOMENTUM: Final = "momentum_buffer"
_CHECKED: Final = "_need_device_dtype_check_for_fused"
_HASHABLE: Final = (bool, int, float, str, type(None))


def _can_be_fused(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether an optimizer of the user's has fused kernels for all its parameters."""
    if type(optimizer) not in FUSED:
        return False
    groups = optimizer.param_groups
    plain = not any(group.get("differentiable") for group in groups)
    kinds = {(p.device.type, p.dtype) for group in groups for p in group["params"]}
    return plain and all(where == device.type and dtype in _FLOATS for where, dtype in kinds)


def _complete_momenta(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Give all parameters of a group a momentum where some have one, as after thawing the others: SGD's fused kernel
    takes all or none.
    """
    if type(optimizer) is not torch.optim.SGD or not group["momentum"]:
        return
    without = [p for p in group["params"] if optimizer.state.get(p, {}).get(_MOMENTUM) is None]
    if len(without) < len(group["params"]):
        for parameter in without:
            optimizer.state[parameter] = {_MOMENTUM: torch.zeros_like(parameter)}


def _adds_momenta(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether the user's own update adds momenta to the gradients in `.grad`, as torch's loop over lists does."""
    if type(optimizer) is not torch.optim.SGD or not group["nesterov"] or group["weight_decay"] or group["maximize"]:
        return False
    if group["foreach"] is None and group["fused"] is None:
        asked = importlib.import_module("torch.optim.optimizer")
        return bool(asked._default_to_fused_or_foreach(group["params"], differentiable=False)[1])
    return bool(group["foreach"])


def _add_momenta(group: dict[str, Any], optimizer: Optimizer, *_: Any) -> None:
    """Change gradients as the user's own update does: the fused kernel leaves them."""
    updated = [p for p in group["params"] if p.grad is not None]
    if updated:
        gradients, momenta = [p.grad for p in updated], [optimizer.state[p][_MOMENTUM] for p in updated]
        with torch.no_grad():
            torch._foreach_add_(gradients, momenta, alpha=group["momentum"])


def _is_number(group: dict[str, Any]) -> bool:
    return not isinstance(group["lr"], torch.Tensor) or group["lr"].device.type == "cpu"
