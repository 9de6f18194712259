"""A recorded step as a flat list of ATen calls: the output of recording and the input of `record`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gpusim.formats.trace import Phase, Role


@dataclass(frozen=True)
class Value:
    """Reference to the result (or its `index`-th part) of the call or input named `node`."""

    node: str
    index: int | None = None


@dataclass(frozen=True)
class Call:
    """One ATen call; `args` and `kwargs` hold `Value`s where tensors go."""

    name: str
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    phase: Phase
    layer: str
    line: str = ""
    """`file:line` of the user's code that made the call, or "" where unknown."""
    cut: tuple[Value, ...] = ()
    """Tensors that depend on trained parameters, but of which the step computes no gradient."""
    other_gradient: tuple[Value, ...] = ()
    """Tensors with another gradient: that of the user's own `torch.autograd.Function`, or taken once with and once
    without one."""

    @property
    def at(self) -> str:
        """The line as the beginning of a message."""
        return f"{self.line}: " if self.line else ""


@dataclass(frozen=True)
class State:
    """A tensor that exists before the step."""

    name: str
    role: Role
    tensor: torch.Tensor


@dataclass(frozen=True)
class OwnResults:
    """Results of the model's own step, and the random number states at its start."""

    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor]
    states: dict[str, torch.Tensor] = field(default_factory=dict)
    """Name of a state that the step changed -> its elements after the step."""
    rng: tuple[torch.Tensor, torch.Tensor | None] | None = None
    """States of the default generators of the CPU and the GPU (None without a GPU) before the step."""


@dataclass(frozen=True)
class JointGraph:
    """A step as calls in execution order; `inputs` maps graph inputs, in graph order, to states and constants."""

    calls: tuple[Call, ...]
    inputs: dict[str, State]
    outputs: tuple[Value, ...]
    gradients: tuple[Value, ...]
    own: OwnResults | None = None
    """None where the model's own step has not run yet."""
    fixed: tuple[str, ...] = field(default=())
    """Values that the user's code would change from step to step but the trace keeps constant, in words."""
    live: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Graph input -> the original tensor, of which `inputs` has a copy; only for the user's own step."""
    returned: tuple[Value | None, ...] = ()
    """Graph value of each tensor that the user's step returned; None: the step did not touch the tensor."""
    gradient_names: tuple[str, ...] = ()
    """Parameter name of each of `gradients`; only for the user's own step."""


def shape_from_data(function: Any, args: tuple[Any, ...]) -> str | None:
    """Return the problem of a call whose result has a shape that depends on values, as with a mask as index; or None.

    An index of whole numbers has a result of the index's shape.
    """
    if torch.Tag.dynamic_output_shape not in getattr(function, "tags", ()):
        return None
    masks = any(getattr(part, "dtype", None) in (torch.bool, torch.uint8) for part in pytree.tree_leaves(args[1:]))
    if function._schema.name == "aten::index" and not masks:
        return None
    return f"the result shape of {function} depends on data; gpusim captures steps of fixed shape"


WGRAD = "_wgrad"


def split_convolution_backward(call: Call) -> list[Call]:
    """Split `convolution_backward` into the gradient of the input (same name) and of weight and bias (`..._wgrad`)."""
    if call.function is not torch.ops.aten.convolution_backward.default:
        return [call]
    mask = call.args[10]
    if not (mask[0] and (mask[1] or mask[2])):
        return [call]
    data = replace(call, args=(*call.args[:10], [True, False, False]))
    weight = replace(call, name=call.name + WGRAD, args=(*call.args[:10], [False, mask[1], mask[2]]))
    return [data, weight]


def with_split_convolutions(graph: JointGraph) -> JointGraph:
    """Return the graph with each `convolution_backward` as two independent calls."""
    calls = [part for call in graph.calls for part in split_convolution_backward(call)]
    split = {call.name.removesuffix(WGRAD) for call in calls if call.name.endswith(WGRAD)}

    def renamed(value: Value) -> Value:
        """Redirect results 1 and 2 of a split convolution_backward to its second half."""
        later = value.node in split and value.index in (1, 2)
        return Value(value.node + WGRAD, value.index) if later else value

    return replace(
        graph,
        calls=tuple(
            replace(call, **pytree.tree_map_only(Value, renamed, {"args": call.args, "kwargs": call.kwargs}))
            for call in calls
        ),
        outputs=tuple(map(renamed, graph.outputs)),
        gradients=tuple(map(renamed, graph.gradients)),
        returned=tuple(None if value is None else renamed(value) for value in graph.returned),
    )
