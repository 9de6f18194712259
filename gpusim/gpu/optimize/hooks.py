"""Hooks of the user's on modules, parameters and optimizers: a captured step runs those of its capture.

Hooks are Python code that may do anything, so a step whose hooks have changed runs as the user wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from torch.nn.modules import module as modules_of_torch
from torch.optim import optimizer as optimizers_of_torch
from torch.utils.hooks import RemovableHandle

from gpusim.gpu.capture.user_step import UserStep

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
    """The hooks of a step at its capture."""

    def __init__(self, step: UserStep) -> None:
        self._holders: list[tuple[Any, tuple[str, ...]]] = [
            (modules_of_torch, _OF_ALL),
            (optimizers_of_torch, _OF_ALL_OPTIMIZERS),
            *((m, _OF_MODULES) for m in dict.fromkeys(m for top in step.modules.values() for m in top.modules())),
            *((parameter, _OF_TENSORS) for parameter in step.parameters().values()),
            *((optimizer, _OF_OPTIMIZERS) for optimizer in step.optimizers),
        ]
        self._before = list(self._now())
        self._known = RemovableHandle.next_id
        self._may_go = bool(self._before)

    def functions(self) -> list[Any]:
        """Return the hooks of now."""
        return [hook for *_, hook in self._now()]

    def hold(self) -> bool:
        """Whether they are those of the capture. Each new hook of torch's takes a number, so few calls look at all."""
        if self._known == RemovableHandle.next_id and not self._may_go:
            return True
        now = list(self._now())
        same = len(now) == len(self._before) and all(
            place == before and hook is its for (*place, hook), (*before, its) in zip(now, self._before, strict=True)
        )
        self._known, self._may_go = RemovableHandle.next_id, bool(now) or not same
        return same

    def _now(self) -> Iterator[tuple[int, str, Any]]:
        for number, (holder, names) in enumerate(self._holders):
            for name in names:
                hooks = getattr(holder, name, None)
                if hooks:
                    yield from ((number, name, hook) for hook in list(hooks.values()))
