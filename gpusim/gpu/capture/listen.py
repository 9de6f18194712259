"""Recording of a running step: every ATen call at torch's dispatcher, with layer, phase and source line.

The calls are those of eager PyTorch, below autograd and autocast. They run on real tensors, so recording changes the
same state as the step; a tensor that exists before the step is copied when a call first takes it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import autograd_would_have_decomposed
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from gpusim.errors import CaptureError
from gpusim.formats.trace import Phase, Role
from gpusim.gpu.capture.calls import Call, JointGraph, State, Value, shape_from_data, with_split_convolutions
from gpusim.gpu.capture.constants import Constants
from gpusim.gpu.capture.gradient_flow import GradientFlow, is_numbers
from gpusim.gpu.capture.layers import Layers
from gpusim.gpu.capture.users_errors import GPUSIM, TORCH, is_users
from gpusim.gpu.device import is_another_gpu
from gpusim.gpu.replay.operators import is_random

_OPTIMIZERS: Final = os.path.join(TORCH, "optim", "")
_CLIPPING: Final = str(Path(TORCH) / "nn" / "utils" / "clip_grad.py")
_CHECKPOINT: Final = str(Path(TORCH) / "utils" / "checkpoint.py")
_AUTOGRAD: Final = str(Path(TORCH) / "autograd" / "__init__.py")
#: The command line calls no code of the user's but the model, so what called it is no place in the user's code.
_COMMANDS: Final = os.path.join(GPUSIM, "cli", "")
#: Operators that return their input unchanged.
_SAME: Final = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
#: Operators whose result is a view that torch reads in another way, by a bit that no address shows -> the same in
#: memory of its own.
_LAZY: Final = {
    torch.ops.aten._conj.default: torch.ops.aten._conj_physical.default,
    torch.ops.aten._neg_view.default: torch.ops.aten.neg.default,
}
#: Operators whose result is a number or a truth that depends on elements, which torch's tag does not say.
_READS_ELEMENTS: Final = (
    torch.ops.aten._nested_tensor_from_mask_left_aligned.default,
    torch.ops.aten._use_cudnn_ctc_loss.Tensor,
    torch.ops.aten._choose_qparams_per_tensor.default,
)
#: Functions that read elements without passing the dispatcher -> the place of the tensor that is read, and its name.
_READS_PAST: Final = {
    torch.Tensor.numpy: (0, "numpy()"),
    torch.Tensor.tolist: (0, "tolist()"),
    torch.Tensor.__array__: (0, "a conversion to a NumPy array"),
    torch.tensor_split: (1, "places of tensor_split()"),
    torch.Tensor.tensor_split: (1, "places of tensor_split()"),
}
#: Operators that put a tensor onto a storage.
_ONTO_STORAGE: Final = (
    torch.ops.aten.set_.source_Storage,
    torch.ops.aten.set_.source_Storage_storage_offset,
)
#: Roles of tensors whose memory is the user's own in each call: others are copied into the step's memory.
_FIXED: Final[frozenset[Role]] = frozenset({"parameter", "buffer", "constant"})


class Listener(TorchDispatchMode):
    """Recorder of the calls made while it is entered; `graph` returns them.

    `states` are tensors known before the step; they come first in the graph, in this order. Other tensors are named by
    `name`. Tensors of `host` hold numbers of the host, such as an optimizer's step count; computations on them are not
    recorded. Raises `CaptureError`, with the line of the user's code, for a step that depends on the elements of
    tensors.
    """

    supports_higher_order_operators = True  # they come to `__torch_dispatch__`

    def __init__(
        self,
        device: torch.device,
        states: Iterable[State] = (),
        *,
        layers: Layers | None = None,
        host: Sequence[torch.Tensor] = (),
        strict: bool = True,
    ) -> None:
        super().__init__()
        self.device = device
        self.layers = layers or Layers({}, {})
        self.strict = strict
        """Whether to refuse calls that a trace cannot hold; warm-up steps may make them."""
        self.phase: Phase | None = None
        """Phase of all calls; None: read from the call stack."""
        self.calls: list[Call] = []
        self.line = ""
        self._naming = fx.Graph()
        self._host = WeakTensorKeyDictionary()
        self._host.update((tensor, True) for tensor in host)
        self._constants = Constants(self._is_of_host, lambda tensor: self._place(tensor)[0])
        self._values = WeakTensorKeyDictionary()
        self._by_place: dict[tuple[Any, ...], Value] = {}
        self._storages: dict[int, StorageWeakRef] = {}
        self._copies: dict[int, torch.UntypedStorage] = {}
        self._gradients = GradientFlow()
        self._inputs: dict[str, State] = {}
        self._live: dict[str, torch.Tensor] = {}
        self._made: set[int] = set()
        """Numbers of the storages that calls made."""
        self._arrived = WeakTensorKeyDictionary()
        """Tensors copied from the host during the step."""
        for state in states:
            self._add_input(state.tensor, state.name, state.role)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(function, torch._ops.HigherOrderOperator):
            raise self.error(
                f"the step calls '{function.name()}', an operator that takes functions, which a trace cannot hold"
            )
        if args and isinstance(args[0], torch.Tensor):  # not a number
            function = _LAZY.get(function, function)
        if function.namespace == "profiler":  # torch.optim names its steps for the profiler
            return function(*args, **kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        if autograd_would_have_decomposed(function, leaves):
            with self:
                result = function.decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
        phase = self._look_at_stack()
        if function in _ONTO_STORAGE and not self._is_of_host(args[0]):
            return self._onto_storage(*args, **kwargs)
        if any(argument.is_out for argument in function._schema.arguments):
            return self._without_out(function, args, kwargs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        fixed = self._constants.makes_fixed(function, tensors)
        known = bool(tensors) and all(map(self._constants.is_known, tensors))
        reads = _reads_elements(function)
        from_host = known and any(self._is_of_host(tensor) for tensor in tensors)
        if (fixed and reads) or from_host or self._comes_in(function, args):
            return self._on_host(function, args, kwargs)
        if self.strict:
            self._refuse(function, args, leaves)
        node = torch._C._current_autograd_node()
        layer = self.layers.of_node(node) if node is not None else self.layers.now() if phase == "forward" else ""
        phase = self.phase or ("backward" if node is not None else phase)
        taken_args, taken_kwargs = pytree.tree_map_only(torch.Tensor, self._value, (args, kwargs))
        numbers = [(self._value(tensor), tensor.requires_grad) for tensor in tensors if is_numbers(tensor)]
        if function is torch.ops.aten.lift_fresh.default:
            # The constant itself must not change.
            function, known, fixed = torch.ops.aten.lift_fresh_copy.default, True, True
        if not fixed:
            self._constants.write(function, args, kwargs)
        result = function(*args, **kwargs)
        parts = [part for part in pytree.tree_leaves(result) if isinstance(part, torch.Tensor)]
        # Attention also returns its dropout seed, which is on the host while no graph is recorded.
        if parts and all(part.device.type != self.device.type for part in parts):
            self._refuse_copy_to_host(tensors)
            self._host.update((part, True) for part in parts)
            return result
        name = self._name(function)
        if function not in _SAME:
            self.calls.append(Call(name, function, taken_args, taken_kwargs, phase, layer, self.line))
            if phase == "forward":
                self._gradients.note(name, numbers, parts)
        self._keep(result, taken_args[0] if function in _SAME else Value(name), known and fixed, fixed)
        return result

    def _without_out(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Turn a call with an `out` argument into a call that returns a result and a copy of the result into `out`."""
        wanted = [(a.name, str(a.type)) for a in function._schema.arguments if not a.is_out]
        packet = function.overloadpacket
        for overload in (getattr(packet, name) for name in packet.overloads()):
            out = kwargs.get("out")
            if isinstance(out, torch.Tensor) and wanted == [(a.name, str(a.type)) for a in overload._schema.arguments]:
                with self:
                    result = overload(*args, **{name: value for name, value in kwargs.items() if name != "out"})
                    if result.shape == out.shape:
                        return out.copy_(result)
        raise self.error(f"{function} writes into tensors of another shape, or into several")

    def _onto_storage(
        self,
        tensor: torch.Tensor,
        source: torch.UntypedStorage,
        storage_offset: int = 0,
        size: Sequence[int] | None = None,
        stride: Sequence[int] = (),
    ) -> torch.Tensor:
        """Record a tensor put onto the memory of another one as a view of that one: so cuDNN's recurrent layers see
        their weights as one tensor.
        """
        if size is None:
            size = (source.nbytes() // tensor.element_size(),)
        if not stride:
            stride = torch.empty(size, device="meta").stride()
        with self:
            view = torch.ops.aten.as_strided.default(self._on(source, tensor.dtype), size, stride, storage_offset)
        torch.ops.aten.set_.source_Storage_storage_offset(tensor, source, storage_offset, size, stride)
        self._set(tensor, self._value(view))
        self._constants.keep(tensor, known=False, fixed=False)
        return tensor

    def _on(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor on a storage that has the same memory in all calls: its places count from the begin."""
        number = StorageWeakRef(storage).cdata
        known = [each for each in self._values if StorageWeakRef(each.untyped_storage()).cdata == number]
        roles = {self._inputs[node].role for node, each in self._live.items() if any(each is one for one in known)}
        if not roles <= _FIXED:
            raise self.error("the step puts a tensor onto the memory of an argument or a state (set_)")
        for each in known:
            if each.dtype == dtype:
                return each
        raise self.error("the step puts a tensor onto memory (set_) of which it knows no tensor of the same type")

    def _keep(self, result: Any, value: Value, known: bool, fixed: bool) -> None:
        """Register the results of a call."""
        many = isinstance(result, list | tuple)
        for index, part in enumerate(result if many else [result]):
            if isinstance(part, torch.Tensor):
                self._set(part, Value(value.node, index) if many else value)
                self._constants.keep(part, known, fixed)

    def __enter__(self) -> Listener:
        super().__enter__()
        return self

    def listen(self, step: Callable[[], Any]) -> Any:
        """Run `step` while recording, and return its result."""
        with self.layers.follow(), _Reads(self), self:
            return step()

    def value_of(self, tensor: torch.Tensor) -> Value | None:
        """Return the graph value of a tensor, or None where the step did not touch it."""
        value = self._values.get(tensor)
        return value if isinstance(value, Value) else self._by_place.get(self._place(tensor))

    def graph(
        self,
        outputs: Iterable[Value],
        gradients: Iterable[Value],
        returned: Iterable[Value | None] = (),
        gradient_names: Iterable[str] = (),
    ) -> JointGraph:
        """Return the calls so far, with `convolution_backward` split."""
        joint = JointGraph(
            self._gradients.noted(self.calls),
            dict(self._inputs),
            tuple(outputs),
            tuple(gradients),
            live=dict(self._live),
            returned=tuple(returned),
            gradient_names=tuple(gradient_names),
        )
        return with_split_convolutions(joint)

    @property
    def inputs(self) -> Mapping[str, State]:
        """Inputs of the graph, as they were before the step."""
        return self._inputs

    @property
    def live(self) -> Mapping[str, torch.Tensor]:
        """Input of the graph -> the original tensor, as the step left it."""
        return self._live

    # --- What is refused ---

    def _refuse(self, function: Any, args: tuple[Any, ...], leaves: Sequence[Any]) -> None:
        if any(isinstance(leaf, torch.ScriptObject) for leaf in leaves):
            raise self.error(f"{function} takes an object of C++, such as packed weights; a trace holds only tensors")
        if is_random(function) and _draws_again(sys._getframe(2)):
            raise self.error(
                "a part under torch.utils.checkpoint draws random numbers (dropout), and again in the backward; a "
                "captured step would draw others there"
            )
        tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        odd = next((t for t in tensors if type(t) not in (torch.Tensor, torch.nn.Parameter)), None)
        if odd is not None:
            raise self.error(f"a {type(odd).__name__} is not a plain tensor; a trace holds only those")
        if _reads_elements(function):
            raise self.error(
                f"the step reads the elements of a tensor ({_in_words(function)}), so what follows may depend on data; "
                "a captured step must not depend on it"
            )
        if problem := shape_from_data(function, args):
            raise self.error(problem)

    def _refuse_copy_to_host(self, tensors: Sequence[torch.Tensor]) -> None:
        if self.strict and tensors:
            raise self.error("the step copies a tensor to the host; a captured step must stay on the GPU")

    def error(self, problem: str) -> CaptureError:
        """Return an error at the current line of the user's code."""
        return CaptureError(f"{self.line}: {problem}" if self.line else problem)

    def check_read(self, tensor: torch.Tensor, how: str) -> None:
        """Raise `CaptureError` where the user's code reads a tensor's elements without the dispatcher."""
        self._look_at_stack()
        if self.strict and not self._constants.is_fixed(tensor):
            raise self.error(f"the step reads the elements of a tensor ({how}); a captured step must not depend on it")

    # --- Where a call comes from ---

    def _look_at_stack(self) -> Phase:
        """Set `line` to the user's current line, or to nothing where the stack has none of the user's code.

        Returns the phase of torch's code on the stack above it.
        """
        phase: Phase = "forward"
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            file = frame.f_code.co_filename
            if file == _AUTOGRAD:
                phase = "backward"
            elif file.startswith(_OPTIMIZERS) or file == _CLIPPING:
                phase = "optimizer"
            elif file.startswith(_COMMANDS):
                break
            elif is_users(file):
                self.line = f"{file}:{frame.f_lineno}"
                return phase
            frame = frame.f_back
        self.line = ""
        return phase

    def _name(self, function: Any) -> str:
        """Return a unique call name, made as in `torch.fx`."""
        name = self._naming._target_to_str(function.overloadpacket.__name__)
        name_of_call: str = self._naming._graph_namespace.create_name(name, None)
        return name_of_call

    # --- Tensors ---

    def _is_of_host(self, tensor: torch.Tensor) -> bool:
        return tensor in self._host or tensor.device.type != self.device.type

    def _comes_in(self, function: Any, args: tuple[Any, ...]) -> bool:
        """Whether a call copies host data into a tensor that the step has not touched yet: an arriving input."""
        if function is not torch.ops.aten.copy_.default or not self._is_of_host(args[1]) or self._is_of_host(args[0]):
            return False
        return args[0].numel() > 1 and self.value_of(args[0]) is None

    def _on_host(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run a call on host values without recording it."""
        result = function(*args, **kwargs)
        for part in pytree.tree_leaves(result):
            if isinstance(part, torch.Tensor):
                self._values.pop(part, None)
                self._by_place.pop(self._place(part), None)
                if part.device.type == self.device.type and not any(self._is_same_kind(part, arg) for arg in args):
                    self._arrived[part] = True  # a batch copied to the GPU
                else:
                    self._host[part] = True
        return result

    def _is_same_kind(self, part: torch.Tensor, arg: Any) -> bool:
        tensors = [t for t in pytree.tree_leaves(arg) if isinstance(t, torch.Tensor)]
        return any(tensor.device.type == part.device.type and tensor in self._host for tensor in tensors)

    def _set(self, tensor: torch.Tensor, value: Value) -> None:
        if tensor.layout is not torch.strided:
            layout = str(tensor.layout).removeprefix("torch.")
            raise self.error(f"the step makes a tensor of layout {layout}; a trace holds only strided ones")
        self._values[tensor] = value
        place = self._place(tensor)
        self._by_place[place] = value
        if place[0] not in self._copies:
            self._made.add(place[0])

    def _place(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """Identify a tensor by its storage's number and its view of the storage."""
        weak = StorageWeakRef(tensor.untyped_storage())
        self._storages.setdefault(weak.cdata, weak)  # keeps the number from reuse, not the memory
        return weak.cdata, tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.dtype

    def _value(self, tensor: torch.Tensor) -> Value:
        """Return the graph value of a tensor; an unknown tensor existed before the step and becomes an input."""
        value = self._values.get(tensor)
        if value is None:
            value = self._by_place.get(self._place(tensor))
        if value is None:
            value = self._add_input(tensor, "", "constant")
        self._values[tensor] = value
        return value

    def _add_input(self, tensor: torch.Tensor, name: str, role: Role) -> Value:
        """Add a tensor to the graph's inputs, with a copy from before any change."""
        number = StorageWeakRef(tensor.untyped_storage()).cdata
        if number in self._made:
            raise self.error("a tensor of the step is seen through one that torch's dispatcher did not show")
        if is_another_gpu(tensor.device, self.device):
            raise self.error(f"the step computes on {tensor.device}, too; all of it must be on the same GPU")
        if tensor.is_quantized:
            raise self.error("the step reads a quantized tensor; a trace holds only plain ones")
        if tensor.is_conj() or tensor.is_neg():
            raise self.error("the step reads a conjugate or negative view from before it; call resolve_conj() on it")
        if tensor in self._arrived:
            role = "input"
        node = self._naming._graph_namespace.create_name("state" if name else "_tensor_constant", None)
        if number not in self._copies:
            self._copies[number] = tensor.untyped_storage().clone()
        copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        copy.set_(self._copies[number], tensor.storage_offset(), tensor.shape, tensor.stride())
        if copy.device.type != self.device.type or tensor in self._host:
            copy = tensor.detach().to(self.device, copy=True)
        self._inputs[node] = State(name or node, role, copy)
        self._live[node] = tensor
        value = Value(node)
        self._set(tensor, value)
        return value


class _Reads(TorchFunctionMode):
    """Mode that refuses reads of a tensor's elements without the dispatcher."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self.listener = listener

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _READS_PAST:
            place, how = _READS_PAST[function]
            named = [value for name, value in (kwargs or {}).items() if name != "input"]
            for read in (*args[place : place + 1], *named):
                if isinstance(read, torch.Tensor):
                    self.listener.check_read(read, how)
        return function(*args, **(kwargs or {}))


def _draws_again(frame: FrameType | None) -> bool:
    """Whether torch recomputes a checkpointed part there, with the random numbers of its first run."""
    while frame is not None:
        if frame.f_code.co_filename == _CHECKPOINT and frame.f_code.co_name in ("backward", "recompute_fn"):
            of_function = getattr(frame.f_locals.get("ctx"), "preserve_rng_state", False)
            return bool(frame.f_locals.get("preserve_rng_state", of_function))
        frame = frame.f_back
    return False


def _reads_elements(function: Any) -> bool:
    return torch.Tag.data_dependent_output in function.tags or function in _READS_ELEMENTS


def _in_words(function: Any) -> str:
    return _WORDS.get(function, str(function))


_WORDS: Final = {
    torch.ops.aten._local_scalar_dense.default: "item(), or a condition",
    torch.ops.aten._nested_tensor_from_mask_left_aligned.default: (
        "nn.TransformerEncoder looks at its mask, unless made with enable_nested_tensor=False"
    ),
}
