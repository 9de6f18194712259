"""A captured step, ready for arguments of one shape and modules in one mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gpusim.gpu.optimize.captured import Captured, Computed, gradients_of
from gpusim.gpu.optimize.copies import Copies, fresh, share_memory
from gpusim.gpu.optimize.executors import CallCopies, Ready
from gpusim.gpu.optimize.optimizers import Groups, LearningRates
from gpusim.gpu.optimize.turns import Turns


class Variant:
    """A schedule that runs on the user's tensors; `run` takes the tensors among the arguments."""

    def __init__(
        self, captured: Captured, rates: LearningRates, ready: Ready, kept: frozenset[int] = frozenset()
    ) -> None:
        self.captured, self.rates, self.ready = captured, rates, ready
        self._kept = kept
        self.calls = 0
        """Number of calls so far."""
        self.trains = bool(captured.gradient_names) or bool(rates.optimizers)
        self._turns = Turns((*captured.inputs, *captured.live.values()))
        self.options = rates.other_options()
        self._groups = Groups(rates.optimizers)
        self._gradients = gradients_of(captured, ready.tensors)
        self._inputs = captured.inputs
        self._copy = Copies(captured.inputs)
        self._leaves = captured.returned.leaves
        self._to_copy = captured.returned.copied(kept)
        self._spec = captured.returned.spec
        self._one = len(self._leaves) == 1 and self._spec == pytree.tree_structure(0)
        self._listed = self._spec == pytree.tree_structure([0] * len(self._leaves))
        written = {captured.trace.tensors[t].storage for op in captured.trace.ops for t in op.writes}
        changed = [
            tensor for index, tensor in captured.live.items() if captured.trace.tensors[index].storage in written
        ]
        memory = {_memory(tensor) for tensor in changed}
        inputs = {_memory(tensor) for tensor in captured.inputs}
        self._changed = [tensor for tensor in changed if _memory(tensor) not in inputs]
        self._changes_input = [_memory(tensor) in memory for tensor in captured.inputs]
        self._may_mix = any(self._changes_input) and len(captured.inputs) > 1
        shared = captured.live.values() if any(self._changes_input) else self._changed
        left = [ready.tensors[index] for index in captured.gradients] if any(self._changes_input) else []
        self._own_memory = {_memory(tensor) for tensor in (*shared, *left) if tensor is not None and tensor.numel()}

    def is_current(self) -> bool:
        """Whether its modules, parameters, optimizer options, gradients and Python values are those of the capture."""
        captured = self.captured
        same = captured.places.hold() and self._groups.hold() and self.options == self.rates.other_options()
        return same and captured.presence.holds() and captured.reads.changed() is None

    def mixes(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether a change of one of these arguments would show in another, or in a tensor of the model's, or the other
        way round: the step's inputs have memory apart.
        """
        if self._may_mix and share_memory(tensors):
            return True
        return bool(self._own_memory) and not self._own_memory.isdisjoint(map(_memory, tensors))

    def adopt(self) -> bool:
        """Adopt changed states and gradients; False where an optimizer has no state yet."""
        if not self.captured.states.adopt():
            return False
        self._gradients.adopt()
        return True

    def run(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Run one step; returns the results of the user's own step, in memory that no later call touches."""
        self.calls += 1
        self._turns.take()
        self.rates.update()
        results = self.called(tensors)
        self.captured.states.stepped()
        self._groups.stepped()
        self._gradients.leave()
        for module, mode in self.captured.modes_left:
            vars(module)["training"] = mode
        if self._changed:
            torch.autograd.graph.increment_version(self._changed)
        if self._one:
            return results[0]
        return results if self._listed else pytree.tree_unflatten(results, self._spec)

    def called(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Run a call's work on the GPU, and return its results."""
        if self.ready.copies is None:
            return self.around(self.ready.run, tensors)
        return self.run_with(self.ready.copies, tensors)

    def run_with(self, copies: CallCopies, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Run a schedule with its own copies, and return a call's results."""
        with torch.no_grad():
            return self._results(copies.run(tensors), tensors)

    def around(self, graph: Callable[[], None], tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Copy a call's inputs, run `graph`, and copy and return the results."""
        with torch.no_grad():
            self._copy(tensors)
            graph()
            return self._results(fresh(self.results_to_copy()), tensors)

    def results_to_copy(self) -> list[torch.Tensor]:
        """Return the results that a call copies, where the step leaves them."""
        return list(map(self._lying, self._to_copy))

    def _results(self, copies: Iterable[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Return a call's results; inputs that the step changes are copied back."""
        copied = iter(copies)
        results = [self._result(place, leaf, copied) for place, leaf in enumerate(self._leaves)]
        if any(self._changes_input):
            for tensor, memory, changes in zip(tensors, self._inputs, self._changes_input, strict=True):
                if changes:
                    tensor.copy_(memory)
        return results

    def _result(self, place: int, leaf: Any, copied: Iterator[torch.Tensor]) -> Any:
        if not isinstance(leaf, Computed):
            return leaf
        return self._lying(leaf.tensor) if place in self._kept else next(copied)

    def _lying(self, number: int) -> torch.Tensor:
        """Return a result, by id, where the step leaves it."""
        tensor = self.ready.tensors[number]
        assert tensor is not None
        return tensor


def _memory(tensor: torch.Tensor) -> int:
    """Return the address of all memory that a tensor is a view of."""
    return tensor.untyped_storage().data_ptr()
