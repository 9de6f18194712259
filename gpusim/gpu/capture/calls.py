"""A step as a flat list of ATen calls, before it has run on its own: what recording gives and `record` takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gpusim.formats.trace import Phase, Role


@dataclass(frozen=True)
class Value:
    """What an argument refers to: the result (or its `index`-th part) of the call or input named `node`."""

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
    """`file:line` of the user's code that made it, where that is known."""


@dataclass(frozen=True)
class State:
    """A tensor that exists before the step."""

    name: str
    role: Role
    tensor: torch.Tensor


@dataclass(frozen=True)
class OwnResults:
    """What the model's own code computed while it was recorded, and the random numbers that it began with."""

    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor]
    states: dict[str, torch.Tensor] = field(default_factory=dict)
    """Name of a state that the step has changed -> its elements afterwards."""
    rng: tuple[torch.Tensor, torch.Tensor | None] | None = None
    """States of the default generators of the CPU and, where there is one, of the GPU, before the step."""


@dataclass(frozen=True)
class JointGraph:
    """Calls in execution order. `inputs` are the names of the states (and constants) in graph order."""

    calls: tuple[Call, ...]
    inputs: dict[str, State]
    outputs: tuple[Value, ...]
    gradients: tuple[Value, ...]
    own: OwnResults | None = None
    """None where the model's own step is still to be run."""
    fixed: tuple[str, ...] = field(default=())
    """What stays as it was in this step although the user's code would change it, in words."""
    live: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Input of the graph -> the tensor itself, of which `inputs` has a copy; known where the step is the user's own."""
    returned: tuple[Value | None, ...] = ()
    """What each tensor that the user's step returned is in the graph; None: a tensor that the step did not touch."""
    gradient_names: tuple[str, ...] = ()
    """The parameter of each of `gradients`, where the step is the user's own."""


WGRAD = "_wgrad"


def split_convolution_backward(call: Call) -> list[Call]:
    """Gradient of the input (keeps the name) and gradient of the weight and bias (`..._wgrad`) as two calls."""
    if call.function is not torch.ops.aten.convolution_backward.default:
        return [call]
    mask = call.args[10]
    if not (mask[0] and (mask[1] or mask[2])):
        return [call]
    data = replace(call, args=(*call.args[:10], [True, False, False]))
    weight = replace(call, name=call.name + WGRAD, args=(*call.args[:10], [False, mask[1], mask[2]]))
    return [data, weight]


def with_split_convolutions(graph: JointGraph) -> JointGraph:
    """The graph with each `convolution_backward` as two calls that do not need each other."""
    calls = [part for call in graph.calls for part in split_convolution_backward(call)]
    split = {call.name.removesuffix(WGRAD) for call in calls if call.name.endswith(WGRAD)}

    def renamed(value: Value) -> Value:
        """Results 1 and 2 of a split convolution_backward come from its second half."""
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
