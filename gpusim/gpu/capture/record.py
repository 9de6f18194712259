"""Turn a joint graph into a trace's ops, tensors and storages by running it once on real tensors.

Shared memory and in-place changes are observed on the tensors themselves. Storages are told apart by weak references,
which keep no memory alive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from gpusim.errors import CaptureError
from gpusim.formats.trace import Op, Role, Source, Storage, Tensor, TensorInit
from gpusim.gpu.capture.calls import Call, JointGraph, State, Value, shape_from_data
from gpusim.gpu.replay.allowlist import allowed_operators, not_listed
from gpusim.gpu.replay.encode import encode
from gpusim.gpu.replay.operators import is_random, written_arguments
from gpusim.gpu.replay.tensors import copy_sharing, equal_elements, flat_results

#: Operators that return a view although their schema does not declare one.
UNDECLARED_VIEWS = ("aten::_unsafe_view", "aten::_reshape_alias")
#: Operators that fail on the GPU where an element is not true.
_ASSERTIONS = ("aten::_assert_async", "aten::_functional_assert_async")
#: Largest constant or integer tensor, in elements, that is kept element by element.
MAX_KEPT_VALUES = 4096


@dataclass
class Recorded:
    """Ops, tensors and storages of a step, the ids of its results, and the tensors from before it."""

    ops: list[Op]
    tensors: list[Tensor]
    storages: list[Storage]
    outputs: list[int]
    gradients: list[int]
    initial: dict[int, torch.Tensor]
    """Tensor id -> copy of the tensor before the step."""
    final: dict[int, torch.Tensor]
    """Tensor id -> elements after the step: outputs, gradients and tensors changed in place."""
    named: dict[int, str] = field(default_factory=dict)
    """Tensor id -> name of its joint graph input, for tensors from before the step."""
    sources: list[Source] = field(default_factory=list)
    """Kernel sources, where the ops are Inductor's."""
    returned: list[int | None] = field(default_factory=list)
    """Tensor id of each tensor that the user's step returns; None: the step does not touch the tensor."""
    results: dict[str, tuple[int | None, ...]] = field(default_factory=dict)
    """Call name -> tensor ids of its results by position; None for an absent result, which the op's outputs omit."""
    alike: list[tuple[int, int, str]] = field(default_factory=list)
    """In a step that Inductor has compiled: a tensor, a tensor of the same step as ATen calls, and the call at whose
    end that one has the elements that this one gets."""


@dataclass
class _Recorder:
    device: torch.device
    tensors: list[Tensor] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    ids: dict[tuple[Any, ...], int] = field(default_factory=dict)
    storage_ids: dict[int, int] = field(default_factory=dict)
    keep: list[StorageWeakRef] = field(default_factory=list)
    results: dict[str, tuple[int | None, ...]] = field(default_factory=dict)

    def storage(self, tensor: torch.Tensor) -> tuple[int, bool]:
        """Return the index of the tensor's storage, and whether it is new."""
        weak = StorageWeakRef(tensor.untyped_storage())
        if weak.cdata in self.storage_ids:
            return self.storage_ids[weak.cdata], False
        # The weak reference keeps the storage's address from reuse, not its memory.
        self.keep.append(weak)
        self.storage_ids[weak.cdata] = len(self.storages)
        self.storages.append(Storage(bytes=tensor.untyped_storage().nbytes()))
        return len(self.storages) - 1, True

    def tensor(self, tensor: torch.Tensor, role: Role = "activation", **fields: Any) -> int:
        """Return the tensor's index; a new view of the storage is entered first."""
        storage, _ = self.storage(tensor)
        shape, stride, offset = tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset()
        key = (storage, shape, stride, offset, tensor.dtype)
        if key not in self.ids:
            self.ids[key] = len(self.tensors)
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.tensors.append(
                Tensor(shape=shape, stride=stride, offset=offset, dtype=dtype, storage=storage, role=role, **fields)
            )
        return self.ids[key]


def record(graph: JointGraph, own: bool = False) -> Recorded:
    """Run the calls in order and record them. Raises `CaptureError` for an undeclared in-place change.

    `own` is for steps that only this process runs. Their operators need not be on the allow-list, and they draw as many
    random numbers as eager. One that asserts something of elements is refused: an assertion has no result that a
    schedule could wait for.
    """
    calls = live_calls(graph, own)
    asserts = next((call for call in graph.calls if own and call.function._schema.name in _ASSERTIONS), None)
    if asserts is not None:
        raise CaptureError(f"{asserts.at}the step asserts something of a tensor, which a captured step would not")
    for call in calls:
        if (
            not own
            and isinstance(call.function, torch._ops.OpOverload)
            and str(call.function) not in allowed_operators()
        ):
            raise CaptureError(f"{call.at}{not_listed(str(call.function))}")
    recorder = _Recorder(next((state.tensor.device for state in graph.inputs.values()), torch.device("cuda")))
    env: dict[str, Any] = {}
    states: dict[int, torch.Tensor] = {}
    named: dict[int, str] = {}
    used = _used_names(calls, graph)
    for name, state in graph.inputs.items():
        if name not in used:
            continue
        tensor = state.tensor
        env[name] = tensor
        index = recorder.tensor(tensor, state.role, name=state.name, init=initial_values(tensor, state))
        states[index] = tensor.detach()
        named[index] = name
    initial = copy_sharing(states)
    last_use = _last_uses(calls, graph)
    ops: list[Op] = []
    for position, call in enumerate(calls):
        ops.append(_run(call, env, recorder))
        for name in last_use.get(position, ()):
            env.pop(name, None)
    outputs = [recorder.tensor(_get(value, env)) for value in graph.outputs]
    gradients = [recorder.tensor(_get(value, env)) for value in graph.gradients]
    final = {recorder.tensor(_get(v, env)): _get(v, env).detach().clone() for v in (*graph.outputs, *graph.gradients)}
    written = {recorder.tensors[t].storage for op in ops for t in op.writes}
    for name, state in graph.inputs.items():
        if name in used:
            index = recorder.tensor(state.tensor)
            if index not in initial:
                raise CaptureError(f"the step gives '{state.name}' other memory, which a captured step would not")
            changed = not state.tensor.is_meta and not equal_elements(state.tensor, initial[index])
            if changed and recorder.tensors[index].storage not in written:
                raise CaptureError(f"an operator changes '{state.name}' in place without declaring it")
            if recorder.tensors[index].storage in written:
                final[index] = state.tensor.detach().clone()
    set_roles(recorder.tensors, outputs, "output")
    set_roles(recorder.tensors, gradients, "gradient")
    returned = [None if value is None else recorder.tensor(_get(value, env)) for value in graph.returned]
    return Recorded(
        ops,
        recorder.tensors,
        recorder.storages,
        outputs,
        gradients,
        initial,
        final,
        named=named,
        returned=returned,
        results=recorder.results,
    )


def _draws(call: Call) -> bool:
    """Whether a call draws random numbers: attention and recurrent layers do for dropout only, others in training."""
    if not is_random(call.function):
        return False
    names = [argument.name for argument in call.function._schema.arguments]
    defaults = {argument.name: argument.default_value for argument in call.function._schema.arguments}
    given = {**defaults, **dict(zip(names, call.args, strict=False)), **call.kwargs}
    without_dropout = any(given.get(name, 1.0) == 0.0 for name in ("dropout_p", "dropout"))
    return not without_dropout and all(given.get(name) is not False for name in ("train", "training"))


def live_calls(graph: JointGraph, draws: bool = False) -> list[Call]:
    """Return the live calls: their results are used, or they change memory that is used later or outlives the step.

    With `draws` also those that draw random numbers, so that later draws are eager's. Memory is followed through views:
    writing to a slice of a tensor counts as writing to the tensor.
    """
    group = _alias_groups(graph)
    needed = {value.node for value in (*graph.outputs, *graph.gradients)} | set(graph.inputs)
    needed_groups = {group(name) for name in needed}
    kept: list[Call] = []
    for call in reversed(graph.calls):
        changed = any(
            a.alias_info is not None and a.alias_info.is_write for a in call.function._schema.arguments
        ) and any(group(name) in needed_groups for name in _arguments(call))
        if call.name in needed or changed or (draws and _draws(call)):
            kept.append(call)
            needed |= _arguments(call)
            needed_groups |= {group(name) for name in _arguments(call)}
    return kept[::-1]


def _arguments(call: Call) -> set[str]:
    """Return the names of the calls and inputs among a call's arguments."""
    return {v.node for v in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(v, Value)}


def _alias_groups(graph: JointGraph) -> Callable[[str], str]:
    """Return a function from a name to the representative of all names that may share its memory."""
    parent: dict[str, str] = {}

    def find(name: str) -> str:
        while parent.get(name, name) != name:
            name = parent[name]
        return name

    for call in graph.calls:
        schema = call.function._schema
        if any(result.alias_info is not None for result in schema.returns) or schema.name in UNDECLARED_VIEWS:
            for name in _arguments(call):
                parent[find(name)] = find(call.name)
    return find


def _used_names(calls: list[Call], graph: JointGraph) -> set[str]:
    used = {v.node for call in calls for v in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(v, Value)}
    return used | {value.node for value in (*graph.outputs, *graph.gradients)}


def _last_uses(calls: list[Call], graph: JointGraph) -> dict[int, list[str]]:
    """Return, for each call, the names without any later use."""
    last: dict[str, int] = {}
    for position, call in enumerate(calls):
        last[call.name] = position
        for value in pytree.tree_leaves((call.args, call.kwargs)):
            if isinstance(value, Value):
                last[value.node] = position
    for value in (*graph.outputs, *graph.gradients):
        last.pop(value.node, None)
    result: dict[int, list[str]] = {}
    for name, position in last.items():
        if name not in graph.inputs:
            result.setdefault(position, []).append(name)
    return result


def _get(value: Value, env: dict[str, Any]) -> Any:
    result = env[value.node]
    return result if value.index is None else result[value.index]


def _run(call: Call, env: dict[str, Any], recorder: _Recorder) -> Op:
    """Run one call and describe it as an op."""
    args, kwargs = pytree.tree_map_only(Value, lambda v: _get(v, env), (call.args, call.kwargs))
    if not isinstance(call.function, torch._ops.OpOverload):
        raise CaptureError(f"{call.at}the step calls {call.function}, which is not an ATen operator")
    read = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    written = written_arguments(call.function, args, kwargs)
    try:
        encoded_args = tuple(encode(arg, recorder.tensor, recorder.device) for arg in args)
        encoded_kwargs = {key: encode(arg, recorder.tensor, recorder.device) for key, arg in kwargs.items()}
    except CaptureError as cause:
        raise CaptureError(f"{call.at}{cause}") from cause
    reads = list(dict.fromkeys(recorder.tensor(t) for t in read))
    writes = list(dict.fromkeys(recorder.tensor(t) for t in written))
    known, known_tensors = len(recorder.storages), len(recorder.tensors)
    if problem := shape_from_data(call.function, args):
        raise CaptureError(call.at + problem)
    try:
        with torch.no_grad():
            result = call.function(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError) as cause:
        if isinstance(cause, torch.cuda.OutOfMemoryError):
            raise
        problem = str(cause).partition("\n")[0]
        raise CaptureError(
            f"{call.at}op '{call.name}' ({call.function}) cannot be called on its own: {problem}"
        ) from cause
    env[call.name] = result
    outputs: list[int | None] = []
    for part in flat_results(result):
        if not isinstance(part, torch.Tensor):
            outputs.append(None)
            continue
        index = recorder.tensor(part)
        outputs.append(index)
        storage = recorder.tensors[index].storage
        # `squeeze_` may undo an earlier `unsqueeze`: its result is then the tensor before that.
        undone = index < known_tensors and storage in [recorder.tensors[t].storage for t in writes]
        if (storage >= known or undone) and index not in writes:
            writes.append(index)
    parts = result if isinstance(result, list | tuple) else [result]
    recorder.results[call.name] = tuple(recorder.tensor(p) if isinstance(p, torch.Tensor) else None for p in parts)
    if not writes:
        reads = []  # a view reads no element
    return Op(
        name=call.name,
        target=str(call.function),
        args=encoded_args,
        kwargs=encoded_kwargs,
        outputs=tuple(outputs),
        reads=tuple(reads),
        writes=tuple(writes),
        cut=tuple(recorder.tensor(_get(value, env)) for value in call.cut),
        other_gradient=tuple(recorder.tensor(_get(value, env)) for value in call.other_gradient),
        random=is_random(call.function),
        phase=call.phase,
        layer=call.layer,
    )


def initial_values(tensor: torch.Tensor, state: State) -> TensorInit:
    """Return the recipe for a tensor like this one in replay: exact if small and integral or constant, else a
    distribution.

    A tensor without elements, on the device `meta` or of length 0, is a constant.
    """
    if tensor.numel() == 0 or tensor.is_meta:
        return TensorInit(kind="constant")
    numbers = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    values = numbers.double().flatten()
    low, high = values.min().item(), values.max().item()
    if low == high:
        return TensorInit(kind="constant", a=low)
    exact = (state.role == "constant" or not tensor.is_floating_point()) and not tensor.is_complex()
    if exact and state.role != "target" and tensor.numel() <= MAX_KEPT_VALUES:
        return TensorInit(kind="values", values=tuple(values.tolist()))
    if not numbers.is_floating_point():
        return TensorInit(kind="integers", a=low, b=high)
    if low >= 0:
        return TensorInit(kind="uniform", a=low, b=high)
    return TensorInit(kind="normal", a=values.mean().item(), b=values.std().item())


def set_roles(tensors: list[Tensor], indices: list[int], role: Role) -> None:
    """Set the role of activations at the end of the step, in place."""
    import msgspec

    for index in indices:
        if tensors[index].role == "activation":
            tensors[index] = msgspec.structs.replace(tensors[index], role=role)
