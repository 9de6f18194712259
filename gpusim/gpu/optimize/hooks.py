"""Hooks of the user's on modules, parameters and optimizers: a captured step runs those of its capture.

Hooks are Python code that may do anything, so a step whose hooks have changed runs as the user wrote it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch.nn.modules import module as modules_of_torch
from torch.optim import optimizer as optimizers_of_torch
from torch.utils.hooks import RemovableHandle

from gpusim.gpu.capture.layers import is_layers
from gpusim.gpu.capture.user_step import UserStep
from gpusim.gpu.optimize.unchanged import Contents, KeyedValues

_OF_MODULES: Final = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_TENSORS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_OPTIMIZERS: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OF_ALL: Final = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)
_OF_ALL_OPTIMIZERS: Final = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


class Hooks:
    """The hooks of a step at its capture; `others` are modules beside those of the step."""

    def __init__(self, step: UserStep, others: Iterable[torch.nn.Module] = ()) -> None:
        modules = dict.fromkeys(m for top in step.modules.values() for m in top.modules())
        self._holders: list[tuple[Any, tuple[str, ...]]] = [
            (modules_of_torch, _OF_ALL),
            (optimizers_of_torch, _OF_ALL_OPTIMIZERS),
            *((module, _OF_MODULES) for module in (*modules, *others)),
            *((optimizer, _OF_OPTIMIZERS) for optimizer in step.optimizers),
            *((parameter, _OF_TENSORS) for parameter in step.parameters().values()),
        ]
        self._in_dicts = [(vars(each), names) for each, names in self._holders if not isinstance(each, torch.Tensor)]
        self._before = list(self._now())
        self._keep()

    def functions(self) -> list[Any]:
        """Return the hooks of now."""
        return [hook for *_, hook in self._now()]

    def hold(self) -> bool:
        """Whether they are those of the capture.

        A tensor has no dict of hooks before its first one, and each new hook of torch's takes a number.
        """
        if self._known == RemovableHandle.next_id and self._dicts.hold() and self._hooks.hold():
            return True
        now = list(self._now())
        same = len(now) == len(self._before) and all(
            place == before and hook is its for (*place, hook), (*before, its) in zip(now, self._before, strict=True)
        )
        if same:
            self._keep()
        return same

    def _keep(self) -> None:
        """Take the dicts of now, with their hooks, as those to compare with."""
        self._known = RemovableHandle.next_id
        owners = [owner for owner, names in self._in_dicts for _ in names]
        self._dicts = KeyedValues(owners, [name for _, names in self._in_dicts for name in names])
        dicts = [hooks for _, _, hooks in self._all()]
        self._hooks = Contents(dicts)

    def _now(self) -> Iterator[tuple[int, str, Any]]:
        for number, name, hooks in self._all():
            yield from ((number, name, hook) for hook in list(hooks.values()) if not is_layers(hook))

    def _all(self) -> Iterator[tuple[int, str, dict[int, Any]]]:
        for number, (holder, names) in enumerate(self._holders):
            for name in names:
                hooks = getattr(holder, name, None)
                if hooks is not None:
                    yield number, name, hooks
