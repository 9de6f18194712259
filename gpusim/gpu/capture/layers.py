"""Layers of a step: whose forward is running, and whose forward made a node of autograd."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

#: Autograd nodes without a place in the forward, which add to `.grad`, have a number beyond all others.
_NO_NUMBER: Final = 2**62


class Layers:
    """The current layer, and the layer of each autograd node."""

    def __init__(self, names: Mapping[torch.nn.Module, str], owners: Mapping[int, str]) -> None:
        self.names = names
        self.owners = owners
        """Layer of a parameter, by the parameter's id."""
        self._thread = threading.get_ident()
        self._stack = [""]
        self._numbers: list[int] = []
        self._paths: list[str] = []

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Track the calls of all modules."""
        handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        if self._is_own(module):
            self._stack.append(self.names.get(module) or self._stack[-1])
            self._note()

    def _leave(self, module: torch.nn.Module, *_: Any) -> None:
        if self._is_own(module):
            self._stack.pop()
            self._note()

    def _is_own(self, module: torch.nn.Module) -> bool:
        """Whether this is a call of the step: threads of the user's may call modules, too.

        Threads of autograd run modules that a checkpoint runs again.
        """
        ours = threading.get_ident() == self._thread or torch._C._current_graph_task_id() != -1
        return ours and module in self.names

    def _note(self) -> None:
        self._numbers.append(torch.autograd._get_sequence_nr())
        self._paths.append(self._stack[-1])

    def now(self) -> str:
        """Return the layer whose forward is running."""
        return self._stack[-1]

    def of_node(self, node: Any) -> str:
        """Return the layer whose forward made an autograd node."""
        number = node._sequence_nr()
        if number >= _NO_NUMBER:
            return self.owners.get(id(getattr(node, "variable", None)), "")
        index = bisect.bisect_right(self._numbers, number) - 1
        return self._paths[index] if index >= 0 else ""


def is_layers(hook: Any) -> bool:
    """Whether a hook on all modules is one of `Layers`."""
    return isinstance(getattr(hook, "__self__", None), Layers)
