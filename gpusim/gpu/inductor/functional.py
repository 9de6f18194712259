"""A recorded step as a graph for Inductor: ATen without in-place changes, with call names on the nodes.

torch.compile gets such a graph from AOTAutograd. Here the recorded calls of the whole step, backward and optimizer
included, go through the same functionalization and decompositions, and become one graph.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from gpusim.errors import CaptureError
from gpusim.gpu.capture.calls import Call, JointGraph, Value
from gpusim.gpu.capture.record import live_calls
from gpusim.gpu.inductor.embedding_bags import with_embedding_bags
from gpusim.gpu.replay.size_rules import is_dense

#: Key of a node's `meta["custom"]` for the name of its call.
CALL: Final = "gpusim_call"
#: Key of a traced node's `meta` for the results of calls that have its value.
_VALUES: Final = "gpusim_values"


@dataclass(frozen=True)
class Given:
    """An input of the graph: one tensor of the step, or the memory of several that alias."""

    names: tuple[str, ...]
    """Names of the recorded graph's inputs."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class FunctionalGraph:
    """A graph without in-place changes except those of its inputs, at its end."""

    module: fx.GraphModule
    fake_mode: FakeTensorMode
    fake_inputs: tuple[torch.Tensor, ...]
    inputs: tuple[Given, ...]
    outputs: tuple[Value, ...]
    """Results of the graph, in order: outputs, then gradients."""
    values: Mapping[fx.Node, tuple[Value, ...]]
    """Node -> results of recorded calls that had its elements, in its sequence, when the call ended. Other results have
    no node."""


class Traced:
    """The functional form of one step, made at first use: a trace of its calls takes a quarter of Inductor's lowering,
    which changes only a copy.
    """

    def __init__(self) -> None:
        self._made: tuple[fx.GraphModule, FakeTensorMode, tuple[torch.Tensor, ...]] | None = None

    def of(
        self, graph: JointGraph, calls: Sequence[Call], inputs: Sequence[Given], outputs: Sequence[Value], own: bool
    ) -> tuple[fx.GraphModule, FakeTensorMode, tuple[torch.Tensor, ...]]:
        """Return a graph to change, and the fake tensors that it was traced with.

        `own`: operators may be decomposed that torch.compile leaves whole.
        """
        if self._made is None:
            recorded, device = _as_module(graph, calls, inputs, outputs), _device(graph)
            mode = FakeTensorMode(allow_non_fake_inputs=False)
            fake = tuple(_fake(given, device, mode) for given in inputs)
            self._made = _functionalized(recorded, fake, own), mode, fake
        module, mode, fake = self._made
        return fx.GraphModule(module, copy.deepcopy(module.graph)), mode, fake


def functional_graph(graph: JointGraph, apart: bool = False, traced: Traced | None = None) -> FunctionalGraph:
    """Functionalize and decompose a recorded step. Raises `CaptureError` for unsupported aliases.

    With `apart` each result has memory of its own, with the strides of the user's code: others will write to it. The
    gradient of an embedding bag then is decomposed, too.
    `traced` is of an earlier call for this step, if any.
    """
    calls = live_calls(graph)
    outputs = (*graph.outputs, *graph.gradients)
    inputs = _inputs(graph, calls, outputs)
    module, mode, fake = (traced or Traced()).of(graph, calls, inputs, outputs, own=apart)
    values = {node: tuple(node.meta.pop(_VALUES)) for node in module.graph.nodes if _VALUES in node.meta}
    values |= _keep_order_of_random_numbers(module, values)
    if apart:
        _copy_repeated(module)
    _mark_visible(module, len(outputs) if apart else len(graph.outputs))
    return FunctionalGraph(module, mode, fake, inputs, outputs, values)


def _device(graph: JointGraph) -> torch.device:
    return next((state.tensor.device for state in graph.inputs.values()), torch.device("cuda"))


def _inputs(graph: JointGraph, calls: Sequence[Call], outputs: Sequence[Value]) -> tuple[Given, ...]:
    """Return the calls' inputs from before the step; tensors that share memory come in as that memory."""
    used = {v.node for call in calls for v in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(v, Value)}
    used |= {value.node for value in outputs}
    sharing: dict[int, list[str]] = {}
    for name, state in graph.inputs.items():
        if name in used:
            sharing.setdefault(state.tensor.untyped_storage()._cdata, []).append(name)
    return tuple(_given(graph, names) for names in sharing.values())


def _given(graph: JointGraph, names: Sequence[str]) -> Given:
    tensors = [graph.inputs[name].tensor for name in names]
    first = tensors[0]
    if len(tensors) == 1:
        return Given(tuple(names), tuple(first.shape), tuple(first.stride()), first.storage_offset(), first.dtype)
    if any(tensor.dtype != first.dtype for tensor in tensors):
        listed = ", ".join(f"'{graph.inputs[name].name}'" for name in names)
        raise CaptureError(f"{listed} share memory under different data types; use the front end 'aten'")
    elements = first.untyped_storage().nbytes() // first.element_size()
    return Given(tuple(names), (elements,), (1,), 0, first.dtype)


def _fake(given: Given, device: torch.device, mode: FakeTensorMode) -> torch.Tensor:
    with mode:
        # Inductor uses the offset to decide whether kernels may load 16 bytes at a time.
        last = given.offset + sum((n - 1) * d for n, d in zip(given.shape, given.stride, strict=True))
        memory = torch.empty(last + 1, dtype=given.dtype, device=device)
        return memory.as_strided(given.shape, given.stride, given.offset)


def _as_module(
    graph: JointGraph, calls: Sequence[Call], inputs: Sequence[Given], outputs: Sequence[Value]
) -> fx.GraphModule:
    """Return the calls as an fx graph."""
    fx_graph = fx.Graph()
    env: dict[str, fx.Node] = {}
    for number, given in enumerate(inputs):
        node = fx_graph.placeholder(f"given_{number}")
        if len(given.names) == 1:
            env[given.names[0]] = node
            continue
        for name in given.names:
            tensor = graph.inputs[name].tensor
            place = (tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset())
            env[name] = fx_graph.call_function(torch.ops.aten.as_strided.default, (node, *place))

    parts: dict[Value, fx.Node] = {}

    def node_of(value: Value) -> fx.Node:
        if value.index is None:
            return env[value.node]
        if value not in parts:
            import operator

            parts[value] = fx_graph.call_function(operator.getitem, (env[value.node], value.index))
            parts[value].meta["custom"] = {CALL: value.node}
        return parts[value]

    for call in calls:
        args, kwargs = pytree.tree_map_only(Value, node_of, (call.args, call.kwargs))
        node = fx_graph.call_function(call.function, tuple(args), dict(kwargs))
        node.meta["custom"] = {CALL: call.name}
        env[call.name] = node
    fx_graph.output([node_of(value) for value in outputs])
    return fx.GraphModule({}, fx_graph)


def _functionalized(recorded: fx.GraphModule, fake: Sequence[torch.Tensor], own: bool) -> fx.GraphModule:
    import torch._inductor.lowering  # decompositions use it before anything else imports it
    from torch._inductor.decomposition import select_decomp_table

    def run(*inputs: torch.Tensor) -> Any:
        with torch.no_grad(), fx.traceback.preserve_node_meta():
            return _Noting(recorded).run(*inputs)

    table = select_decomp_table()
    # Views stay views: Inductor resolves them.
    traced = make_fx(
        torch.func.functionalize(run, remove="mutations"),
        decomposition_table=with_embedding_bags(table) if own else table,
        tracing_mode="fake",
    )(*fake)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return _without_repeats(traced)


class _Noting(fx.Interpreter):
    """Interpreter that notes on each traced node which results of the calls it is."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        name = calls_of(n)
        if n.op == "call_function" and name and isinstance(n.target, torch._ops.OpOverload):
            several = isinstance(result, list | tuple)
            for place, part in enumerate(result if several else [result]):
                node = _traced(part) if isinstance(part, torch.Tensor) else None
                while node is not None:
                    node.meta.setdefault(_VALUES, []).append(Value(name, place if several else None))
                    node = node.all_input_nodes[0] if node.target in _reshapes() else None
        return result


@functools.cache
def _reshapes() -> frozenset[Any]:
    """Return the operators whose result has the elements of their argument in the same sequence."""
    aten = torch.ops.aten
    packets = (aten.view, aten._unsafe_view, aten.reshape, aten.squeeze, aten.unsqueeze, aten.alias, aten.detach)
    return frozenset(getattr(packet, overload) for packet in packets for overload in packet.overloads())


def _traced(tensor: torch.Tensor) -> fx.Node | None:
    """Return the traced node with the present value of a tensor, or None where it has none."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

    mode = get_proxy_mode()
    if mode is None:
        return None
    if torch._is_functional_tensor(tensor):
        torch._sync(tensor)
        tensor = torch._from_functional_tensor(tensor)
    node: Any = get_proxy_slot(tensor, mode.tracer, None, lambda slot: slot.proxy.node)
    return node if isinstance(node, fx.Node) else None


def _without_repeats(module: fx.GraphModule) -> fx.GraphModule:
    """Remove repeated computations from the graph, as torch.compile's partitioner does."""
    from torch._functorch.compile_utils import fx_graph_cse

    return fx.GraphModule(module, fx_graph_cse(module.graph))


def _keep_order_of_random_numbers(
    module: fx.GraphModule, values: Mapping[fx.Node, tuple[Value, ...]]
) -> dict[fx.Node, tuple[Value, ...]]:
    """Bind arguments of random operators, which draw in the order of memory, to eager's strides.

    Inductor itself may make such an image channels last. Returns `values` of inserted nodes.
    """
    added: dict[fx.Node, tuple[Value, ...]] = {}
    for node in list(module.graph.nodes):
        if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            continue
        for argument in node.all_input_nodes:
            tensor = argument.meta["val"]
            made_here = not argument.all_input_nodes and tensor.is_contiguous()
            if tensor.dim() < 3 or made_here or not is_dense(tensor.shape, tensor.stride()):
                continue
            bound = with_strides(module.graph, argument, tensor.stride(), node)
            node.replace_input_with(argument, bound)
            if argument in values:
                added[bound] = values[argument]
    return added


def with_strides(graph: fx.Graph, argument: fx.Node, stride: Sequence[int], user: fx.Node) -> fx.Node:
    """Add a node for `user` with an argument's elements and these strides.

    Inductor copies only what it cannot write with them in the first place.
    """
    from torch._inductor.inductor_prims import force_stride_order

    with graph.inserting_before(user):
        bound = graph.call_function(force_stride_order, (argument, list(stride)))
    bound.meta.update({key: value for key, value in user.meta.items() if key == "custom"})
    tensor = argument.meta["val"]
    bound.meta["val"] = tensor.new_empty_strided(tensor.shape, stride)
    return bound


def _copy_repeated(module: fx.GraphModule) -> None:
    """Return copies of results in the memory of another result: two equal gradients are computed once."""
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    seen: set[int] = set()
    returned: list[fx.Node] = []
    with module.graph.inserting_before(output):
        for result in output.args[0]:
            memory = result.meta["val"].untyped_storage()._cdata
            if memory in seen:
                again = module.graph.call_function(torch.ops.aten.clone.default, (result,))
                again.meta.update(result.meta, val=result.meta["val"].clone())
                returned.append(again)
            else:
                returned.append(result)
            seen.add(memory)
    output.args = (returned,)
    module.recompile()


def _mark_visible(module: fx.GraphModule, n_outputs: int) -> None:
    """Mark outputs, which keep their strides; gradients may get others, as in torch.compile's backward."""
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    output.meta["user_visible_output_idxs"] = list(range(n_outputs))


def calls_of(node: fx.Node) -> str:
    """Return the name of the recorded call that a node came from, or ""."""
    custom: Mapping[str, Any] = node.meta.get("custom") or {}
    return str(custom.get(CALL, ""))
