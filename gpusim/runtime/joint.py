"""One step of a model as a flat list of ATen calls: forward, loss, backward and optimizer in one graph.

`make_fx` records what the dispatcher sees, so the calls are the ones eager PyTorch makes. Hooks on modules and on
autograd nodes tell which layer and phase each call belongs to. `aten.convolution_backward` becomes two ops, one for
the gradient of the input and one for that of the weight: they do not need each other.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils import _pytree as pytree

from gpusim.errors import CaptureError
from gpusim.runtime.models import Step
from gpusim.runtime.tensors import copy_sharing
from gpusim.trace.schema import Phase, Role

#: SGD with momentum, as torch.optim.SGD(lr, momentum) does it from the second step on. The rate is small so that
#: thousands of steps on one batch of random data stay finite.
LEARNING_RATE = 1e-4
MOMENTUM = 0.9
#: Parameters that one fused update takes. A launch of torch's multi-tensor kernels takes at most this many pairs
#: (depth_to_max_tensors in ATen/native/cuda/MultiTensorApply.cuh), so smaller lists would add launches and larger ones
#: would only make early gradients wait for late ones.
OPTIMIZER_BUCKET = 64


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


@dataclass(frozen=True)
class State:
    """A tensor that exists before the step."""

    name: str
    role: Role
    tensor: torch.Tensor


@dataclass(frozen=True)
class JointGraph:
    """Calls in execution order. `inputs` are the names of the states (and constants) in graph order."""

    calls: tuple[Call, ...]
    inputs: dict[str, State]
    outputs: tuple[Value, ...]
    gradients: tuple[Value, ...]
    parameter_names: tuple[str, ...]


@dataclass
class _Marks:
    """Which layer and phase begin at which number of recorded nodes."""

    at: list[int] = field(default_factory=list)
    what: list[tuple[Phase, str]] = field(default_factory=list)

    def mark(self, phase: Phase, layer: str) -> None:
        mode = get_proxy_mode()
        if mode is not None:
            self.at.append(len(mode.tracer.graph.nodes))
            self.what.append((phase, layer))

    def find(self, position: int) -> tuple[Phase, str]:
        index = bisect.bisect_right(self.at, position) - 1
        return self.what[index] if index >= 0 else ("forward", "")


def joint_graph(step: Step) -> JointGraph:
    """Record one step. Raises `CaptureError` where the step depends on data values or does what a trace cannot hold."""
    module = step.module
    parameters = dict(module.named_parameters())
    buffers = dict(module.named_buffers())
    trained = [name for name, p in parameters.items() if p.requires_grad] if step.loss else []
    flat_inputs, input_spec = pytree.tree_flatten(step.inputs)
    held = [*parameters.values(), *buffers.values(), *(t for t in flat_inputs if isinstance(t, torch.Tensor))]
    copies = iter(copy_sharing(dict(enumerate(tensor.detach() for tensor in held))).values())
    states = [State(name, "parameter", next(copies)) for name in parameters]
    states += [State(name, "buffer", next(copies)) for name in buffers]
    states += [State(f"momentum.{n}", "optimizer_state", torch.zeros_like(parameters[n])) for n in trained]
    states += [
        State(f"input.{i}", "input", next(copies)) for i, t in enumerate(flat_inputs) if isinstance(t, torch.Tensor)
    ]
    if step.target is not None:
        states.append(State("target", "target", step.target))
    marks = _Marks()

    def function(*tensors: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        given = {state.name: tensor for state, tensor in zip(states, tensors, strict=True)}
        inputs = pytree.tree_unflatten(
            [given.get(f"input.{i}", value) for i, value in enumerate(flat_inputs)], input_spec
        )
        if step.loss is None:
            with torch.no_grad(), _forward_hooks(module, marks):
                output = torch.func.functional_call(module, _named(given, parameters, buffers), inputs)
            return [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)], []
        leaves = {name: given[name].detach().requires_grad_(name in trained) for name in parameters}
        with _forward_hooks(module, marks) as ranges:
            marks.mark("forward", "")
            output = torch.func.functional_call(module, {**leaves, **{n: given[n] for n in buffers}}, inputs)
            loss = step.loss(output, given.get("target"))
        _backward_hooks(loss, ranges, marks)
        marks.mark("backward", "")
        wanted = [leaves[name] for name in trained]
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
        marks.mark("optimizer", "")
        with torch.no_grad():
            _sgd(
                [
                    (given[n], g, given[f"momentum.{n}"])
                    for n, g in zip(trained, gradients, strict=True)
                    if g is not None
                ]
            )
        return [loss.detach()], [g for g in gradients if g is not None]

    before = [state.tensor.clone() for state in states]
    try:
        traced = make_fx(function, tracing_mode="real")(*[state.tensor for state in states])
    except (RuntimeError, TypeError, ValueError) as cause:
        if isinstance(cause, torch.cuda.OutOfMemoryError):
            raise
        raise CaptureError(f"the step of '{step.network}' cannot be recorded: {str(cause).splitlines()[0]}") from cause
    for state, tensor in zip(states, before, strict=True):
        state.tensor.copy_(tensor)  # recording has run the step, updates included
    return _convert(traced, states, marks, tuple(trained))


def sgd_step(parameters: list[torch.Tensor], gradients: list[torch.Tensor], momenta: list[torch.Tensor]) -> None:
    """One update of torch.optim.SGD with momentum, on lists, in place."""
    torch._foreach_mul_(momenta, MOMENTUM)
    torch._foreach_add_(momenta, gradients)
    torch._foreach_add_(parameters, momenta, alpha=-LEARNING_RATE)


def _sgd(triples: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
    """The update in buckets, the last layers (whose gradients come first) first."""
    triples = triples[::-1]
    for begin in range(0, len(triples), OPTIMIZER_BUCKET):
        parameters, gradients, momenta = zip(*triples[begin : begin + OPTIMIZER_BUCKET], strict=True)
        sgd_step(list(parameters), list(gradients), list(momenta))


def _named(
    given: dict[str, torch.Tensor], parameters: dict[str, Any], buffers: dict[str, Any]
) -> dict[str, torch.Tensor]:
    return {name: given[name] for name in (*parameters, *buffers)}


@contextmanager
def _forward_hooks(module: torch.nn.Module, marks: _Marks) -> Iterator[list[tuple[int, str]]]:
    """Mark the nodes of each module; yields (autograd sequence number, layer) pairs in the order of execution."""
    stack = [""]
    ranges: list[tuple[int, str]] = []
    handles = []

    def note() -> None:
        ranges.append((torch.autograd._get_sequence_nr(), stack[-1]))
        marks.mark("forward", stack[-1])

    def enter(path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            stack.append(path)
            note()

        return hook

    def leave(*_: Any) -> None:
        stack.pop()
        note()

    for path, child in module.named_modules():
        if path:
            handles.append(child.register_forward_pre_hook(enter(path)))
            handles.append(child.register_forward_hook(leave))
    try:
        yield ranges
    finally:
        for handle in handles:
            handle.remove()


def _backward_hooks(loss: torch.Tensor, ranges: list[tuple[int, str]], marks: _Marks) -> None:
    """Let each autograd node mark the layer whose forward made it."""
    numbers = [number for number, _ in ranges]

    def layer_of(number: int) -> str:
        index = bisect.bisect_right(numbers, number) - 1
        return ranges[index][1] if index >= 0 else ""

    def marker(layer: str) -> Callable[..., None]:
        return lambda *_: marks.mark("backward", layer)

    seen: set[Any] = set()
    todo = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        node.register_prehook(marker(layer_of(node._sequence_nr())))
        todo.extend(after for after, _ in node.next_functions)


def _convert(traced: fx.GraphModule, states: list[State], marks: _Marks, trained: tuple[str, ...]) -> JointGraph:
    """fx nodes to calls: getitem and detach fold into references, convolution_backward splits."""
    alias: dict[fx.Node, Value] = {}
    inputs: dict[str, State] = {}
    calls: list[Call] = []
    results: Any = ([], [])
    remaining = iter(states)
    for position, node in enumerate(traced.graph.nodes):
        if node.op == "placeholder":
            inputs[node.name] = next(remaining)
        elif node.op == "get_attr":
            inputs[node.name] = State(node.name, "constant", getattr(traced, str(node.target)))
        elif node.op == "output":
            results = node.args[0]
        elif node.op == "call_function":
            if node.target is operator.getitem:
                base = _value(node.args[0], alias)
                alias[node] = Value(base.node, node.args[1])
                continue
            if node.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
                alias[node] = _value(node.args[0], alias)
                continue
            args = fx.node.map_aggregate(node.args, lambda a: _value(a, alias) if isinstance(a, fx.Node) else a)
            kwargs = fx.node.map_aggregate(node.kwargs, lambda a: _value(a, alias) if isinstance(a, fx.Node) else a)
            phase, layer = marks.find(position)
            calls.append(Call(node.name, node.target, args, dict(kwargs), phase, layer))
        else:
            raise CaptureError(
                f"the recorded step has a node '{node.name}' of kind {node.op}, which a trace cannot hold"
            )
    calls = [part for call in calls for part in split_convolution_backward(call)]
    outputs, gradients = (tuple(_value(n, alias) for n in nodes if n is not None) for nodes in results)
    outputs, gradients = (tuple(_renamed(v, calls) for v in values) for values in (outputs, gradients))
    calls = [replace(c, args=_rename_in(c.args, calls), kwargs=_rename_in(c.kwargs, calls)) for c in calls]
    return JointGraph(tuple(calls), inputs, outputs, gradients, trained)


def _value(node: Any, alias: dict[fx.Node, Value]) -> Value:
    return alias.get(node) or Value(node.name)


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


def _renamed(value: Value, calls: list[Call]) -> Value:
    """Results 1 and 2 of a split convolution_backward come from its second half."""
    if value.index in (1, 2):
        split = value.node + WGRAD
        if any(call.name == split for call in calls):
            return Value(split, value.index)
    return value


def _rename_in(args: Any, calls: list[Call]) -> Any:
    split = {call.name.removesuffix(WGRAD) for call in calls if call.name.endswith(WGRAD)}
    return pytree.tree_map_only(
        Value, lambda v: Value(v.node + WGRAD, v.index) if v.node in split and v.index in (1, 2) else v, args
    )
