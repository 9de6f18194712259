"""One tensor for all that a forward saves for its backward, as AOTAutograd sees it.

AOTAutograd saves each tensor by itself, and its wrapper, autograd and the backward touch each in turn. GoogLeNet saves
534 a step, which took the host longer than its kernels the GPU (research/2026-11-28-backend-training.md). So its two
graphs pass one empty tensor instead, a token, whose storage object holds the others: it stays the same for every view.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint

from gpusim.errors import ReplayError
from gpusim.gpu.optimize.variant import Variant


@dataclass(eq=False)
class Saved:
    """Tensors that one forward saved for its backward."""

    tensors: list[torch.Tensor]
    forward: Variant | None
    """Captured forward in whose memory they lie, if any."""
    versions: list[tuple[torch.Tensor, int]]
    """Those whose memory the user may have, too, as an argument or a result, with their numbers of changes so far."""

    def check(self) -> None:
        """Raise `RuntimeError`, as autograd does, where one was changed in place since the forward."""
        for tensor, version in self.versions:
            if tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a tensor of shape {list(tensor.shape)} is at version {tensor._version}, and the forward saw "
                    f"{version}"
                )


class Packing:
    """What the forward and the backward of one model share."""

    def __init__(self) -> None:
        self.flat: dict[str, torch.fx.GraphModule] = {}
        """Graphs with all of their tensors, by part."""
        self.packed = False
        self.forward_failed = False
        """Whether the forward cannot be captured: its backward can, all the same."""
        self.saved_places: frozenset[int] = frozenset()
        """Results of the flat forward that are saved, by position."""
        self._returned = 0
        self._given: list[tuple[int, int]] = []
        """Saved inputs of the forward, and views of them: positions among the saved ones, and among the inputs."""
        self._last: weakref.ref[Saved] | None = None

    def partition(
        self, joint: torch.fx.GraphModule, examples: Any, *, num_fwd_outputs: int, **others: Any
    ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        """Split a joint graph, as AOTAutograd asks for it, into a forward that returns a token and a backward that
        takes it. Symbolic sizes, and hooks on each saved tensor, leave the two as they are.
        """
        from torch._functorch.partitioners import default_partition

        forward, backward = default_partition(joint, examples, num_fwd_outputs=num_fwd_outputs, **others)
        saved = _outputs(forward)[num_fwd_outputs:]
        if _hooked() or not all(isinstance(node.meta.get("val"), torch.Tensor) for node in saved):
            return forward, backward
        self.packed = True
        self.flat = {"forward": forward, "backward": backward}
        self._returned = num_fwd_outputs
        self.saved_places = frozenset(range(num_fwd_outputs, num_fwd_outputs + len(saved)))
        inputs = enumerate(forward.graph.find_nodes(op="placeholder"))
        places = {_storage(node): place for place, node in inputs if isinstance(node.meta.get("val"), torch.Tensor)}
        self._given = [(number, places[_storage(n)]) for number, n in enumerate(saved) if _storage(n) in places]
        return _with_token_out(forward, num_fwd_outputs), _with_token_in(backward, len(saved))

    def pack(self, results: list[Any], args: Sequence[torch.Tensor], forward: Variant | None) -> list[Any]:
        """Return the user's results of a forward and the token. `forward` is the captured one, if that ran."""
        tensors = results[self._returned :]
        if forward is None:
            exposed = tensors
        else:  # it copies arguments and results, which leaves parameters
            own = [(tensors[number], args[place]) for number, place in self._given]
            exposed = [arg for mine, arg in own if _memory(mine) == _memory(arg)]
        saved = Saved(tensors, forward, [(tensor, _version(tensor)) for tensor in exposed])
        if forward is not None:
            self._last = weakref.ref(saved)
        token = torch.empty(0)
        token.untyped_storage().saved = saved
        return [*results[: self._returned], token]

    @staticmethod
    def unpack(token: torch.Tensor) -> Saved:
        """Return what a token holds. Raises `ReplayError` for another tensor, `RuntimeError` as `Saved.check`."""
        saved = getattr(token.untyped_storage(), "saved", None)
        if not isinstance(saved, Saved):
            raise ReplayError(
                "a hook on saved tensors copied them, and gpusim had packed them: compile the model inside of it, "
                "after torch._dynamo.reset()"
            )
        saved.check()
        return saved

    def in_use(self) -> bool:
        """Whether the tensors that the last captured forward saved are still needed."""
        return self._last is not None and self._last() is not None


def _hooked() -> bool:
    """Whether a hook wants each saved tensor: to store it elsewhere, or, as a graph, to become part of AOTAutograd's.

    Those of a checkpoint drop all and run the forward again: a token will do.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return bool(hooks) and getattr(hooks[0], "__module__", "") != checkpoint.__name__


def _version(tensor: torch.Tensor) -> int:
    """Return the number of changes in place so far. Raises `RuntimeError`, as autograd, where nobody counts them."""
    if tensor.is_inference():
        raise RuntimeError("Inference tensors cannot be saved for backward: clone them outside of inference mode")
    return tensor._version


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _storage(node: torch.fx.Node) -> StorageWeakRef:
    return StorageWeakRef(node.meta["val"].untyped_storage())


def _outputs(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    (output,) = graph.graph.find_nodes(op="output")
    return list(output.args[0])


def _token_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stand for the packing in a graph that AOTAutograd inspects, and nobody runs."""
    raise NotImplementedError


@torch.compiler.disable
def _tensors_of(token: torch.Tensor) -> list[torch.Tensor]:
    """Unpack in a graph that compiled autograd makes of AOTAutograd's backward, and runs; nobody else does."""
    return Packing.unpack(token).tensors


def _fake_token(like: torch.fx.GraphModule) -> torch.Tensor:
    """Return a token without memory, of the fake tensors' mode."""
    mode = next(node.meta["val"].fake_mode for node in like.graph.nodes if hasattr(node.meta.get("val"), "fake_mode"))
    with mode:
        return torch.empty(0)


def _with_token_out(flat: torch.fx.GraphModule, returned: int) -> torch.fx.GraphModule:
    """Return a forward whose outputs behind the user's are one token."""
    graph = torch.fx.Graph()
    nodes: dict[torch.fx.Node, torch.fx.Node] = {}
    outputs: Any = graph.graph_copy(flat.graph, nodes)
    token = graph.call_function(_token_of, (list(outputs[returned:]),))
    token.meta["val"] = _fake_token(flat)
    output = graph.output((*outputs[:returned], token))
    (before,) = flat.graph.find_nodes(op="output")
    output.meta = dict(before.meta)
    return torch.fx.GraphModule(flat, graph)


def _with_token_in(flat: torch.fx.GraphModule, saved: int) -> torch.fx.GraphModule:
    """Return a backward whose first inputs, the saved tensors, are one token."""
    graph = torch.fx.Graph()
    token = graph.placeholder("saved")
    token.meta["val"] = _fake_token(flat)
    nodes: dict[torch.fx.Node, torch.fx.Node] = {}
    inputs = flat.graph.find_nodes(op="placeholder")
    for node in inputs[saved:]:  # inputs come before any call: compiled autograd counts them so
        nodes[node] = graph.node_copy(node)
    tensors = graph.call_function(_tensors_of, (token,))
    for number, node in enumerate(inputs[:saved]):
        nodes[node] = graph.call_function(operator.getitem, (tensors, number))
        nodes[node].meta = dict(node.meta)
    for node in flat.graph.nodes:
        if node not in nodes:
            nodes[node] = graph.node_copy(node, nodes.__getitem__)
    return torch.fx.GraphModule(flat, graph)
