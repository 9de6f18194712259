"""A step's graph with images channels last throughout: forward, backward, and all between convolutions.

Inductor makes images channels last by itself, but on the way forward only: `convolution_backward` is bound to the
strides that its arguments have in the graph (`constrain_to_fx_strides` in `torch/_inductor/lowering.py`). torch.compile
traces the backward pass after the forward is compiled, so these are the forward's real strides. One graph of the whole
step has eager's, and each activation is copied back. Here the graph itself is given the strides that convolutions on
channels-last images make; what is bound to eager's strides keeps them.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import Any, Final

import torch
from torch import fx
from torch.utils import _pytree as pytree

from gpusim.errors import CaptureError
from gpusim.gpu.inductor.functional import FunctionalGraph, with_strides

_ATEN: Final = torch.ops.aten
#: Convolutions, with the places of their images and weights among the arguments.
CONVOLUTIONS: Final = {_ATEN.convolution.default: (0, 1), _ATEN.convolution_backward.default: (0, 1, 2)}
#: Views that need strides which images channels last may lack.
_VIEWS: Final = frozenset({_ATEN.view.default, _ATEN._unsafe_view.default})
#: Operators that find elements by their place in memory.
_BY_PLACE: Final = frozenset({_ATEN.as_strided, _ATEN.as_strided_copy, _ATEN.as_strided_scatter})


def channels_last(graph: FunctionalGraph) -> FunctionalGraph:
    """Return the graph, changed in place, with its convolutions channels last.

    Results that the user sees keep their strides. Raises `CaptureError` where an image is addressed by strides.
    """
    from torch._dispatch.python import enable_python_dispatcher

    with graph.fake_mode, enable_python_dispatcher(), torch.no_grad():
        change = _Change(graph)
        change.propagate()
        change.keep_visible()
    graph.module.graph.lint()
    graph.module.recompile()
    return replace(graph, values={**graph.values, **change.values})


class _Change:
    """Propagation of strides through a graph, with copies where an operator needs others."""

    def __init__(self, graph: FunctionalGraph) -> None:
        self.module, self.known = graph.module, graph.values
        self.values: dict[fx.Node, Any] = {}
        """Inserted node -> results of calls that have its elements."""
        self._before: dict[fx.Node, Any] = {node: node.meta.get("val") for node in self.module.graph.nodes}
        self._moved: set[int] = set()
        """Storages of tensors with other strides than before."""
        self._copies: dict[tuple[fx.Node, tuple[int, ...]], fx.Node] = {}

    def propagate(self) -> None:
        """Give each node the value that it has after its arguments, in the order of the graph."""
        for node in list(self.module.graph.nodes):
            if node.op != "call_function":
                continue
            self._adapt(node)
            node.meta["val"] = value = self._value(node)
            for old, new in zip(*map(pytree.tree_leaves, (self._before[node], value)), strict=True):
                if isinstance(new, torch.Tensor) and _strides(old) != _strides(new):
                    self._moved.add(new.untyped_storage()._cdata)

    def keep_visible(self) -> None:
        """Return results that the user sees with the strides that they had."""
        (output,) = self.module.graph.find_nodes(op="output")
        results = list(output.args[0])
        for place in output.meta["user_visible_output_idxs"]:
            results[place] = self._as_before(results[place], output)
        output.args = (results,)

    def _adapt(self, node: fx.Node) -> None:
        """Change a node's operator or arguments so that it takes the values that there are now."""
        operator: Any = node.target
        if operator in _VIEWS:
            node.target = _ATEN.reshape.default
        elif operator in CONVOLUTIONS:
            for place in CONVOLUTIONS[operator]:
                argument: Any = node.args[place]
                node.update_arg(place, self._channels_last(argument, node))
        elif getattr(operator, "overloadpacket", None) in _BY_PLACE and self._are_moved(node.all_input_nodes):
            raise CaptureError("the step addresses memory of images by strides; use another style")

    def _are_moved(self, arguments: list[fx.Node]) -> bool:
        values = pytree.tree_leaves([argument.meta.get("val") for argument in arguments])
        tensors = (value for value in values if isinstance(value, torch.Tensor))
        return any(tensor.untyped_storage()._cdata in self._moved for tensor in tensors)

    def _channels_last(self, argument: fx.Node, user: fx.Node) -> fx.Node:
        image = argument.meta["val"]
        if image.dim() != 4 or image.is_contiguous(memory_format=torch.channels_last):
            return argument
        return self._copied(argument, torch.empty_like(image, memory_format=torch.channels_last).stride(), user)

    def _as_before(self, argument: fx.Node, user: fx.Node) -> fx.Node:
        """Return a node with the elements of another and its strides before."""
        old, new = self._before[argument], argument.meta["val"]
        if not isinstance(new, torch.Tensor) or _strides(old) == _strides(new):
            return argument
        return self._copied(argument, old.stride(), user)

    def _copied(self, argument: fx.Node, stride: tuple[int, ...], user: fx.Node) -> fx.Node:
        if (argument, stride) not in self._copies:
            copied = with_strides(self.module.graph, argument, stride, user)
            if argument in self.known:
                self.values[copied] = self.known[argument]
            self._copies[argument, stride] = copied
        return self._copies[argument, stride]

    def _value(self, node: fx.Node) -> Any:
        operator: Any = node.target
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._fake)
        return operator(*args, **kwargs)

    def _fake(self, node: fx.Node) -> Any:
        return attrgetter(str(node.target))(self.module) if node.op == "get_attr" else node.meta["val"]


def _strides(tensor: torch.Tensor) -> list[int]:
    """Return the strides of the dimensions in which a tensor has several elements."""
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
