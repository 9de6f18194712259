"""Modes of modules, training or not, as one number that a captured step is found by."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from operator import attrgetter
from typing import Final

import torch

from gpusim.gpu.optimize.unchanged import KeyedValues

_TRAINING: Final = attrgetter("training")


class Modes:
    """Modes of all modules of some models: each combination has a number, whichever modules these are."""

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        self._numbers: dict[tuple[bool, ...], int] = {}
        self.watch(models)

    def watch(self, models: Iterable[torch.nn.Module]) -> None:
        """Take the modules of now; combinations keep their numbers."""
        self._modules = list(dict.fromkeys(module for model in models for module in model.modules()))
        # Where a class says what `training` is, the module's own dict may not.
        self._in_dicts = not any(hasattr(type(module), "training") for module in self._modules)
        self._known = KeyedValues(map(vars, self._modules), repeat("training", len(self._modules)))
        self._number = self._number_now()

    def number(self) -> int:
        """Return the number of the current combination."""
        if not self._in_dicts or not self._known.hold():
            self._known.keep(self._known.now())
            self._number = self._number_now()
        return self._number

    def _number_now(self) -> int:
        return self._numbers.setdefault(tuple(map(_TRAINING, self._modules)), len(self._numbers))
