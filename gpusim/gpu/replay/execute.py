"""Execution of a trace's ops, with tensors by id and calls resolved once."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch

from gpusim.errors import ReplayError
from gpusim.formats.arguments import tensor_refs
from gpusim.formats.trace import Op, Tensor, Trace, VariantSettings
from gpusim.gpu.inductor.kernels import functions_of
from gpusim.gpu.replay.allowlist import check_operators
from gpusim.gpu.replay.encode import DTYPES, decode
from gpusim.gpu.replay.fusion import Call, Kept
from gpusim.gpu.replay.operators import check_schemas, describe, resolve
from gpusim.gpu.replay.result_sizes import check_result_sizes
from gpusim.gpu.replay.saved_facts import VARYING
from gpusim.gpu.replay.size_rules import is_dense
from gpusim.gpu.replay.tensors import copy_sharing, flat_results, lies_in_storage, placed_results, restore_elements
from gpusim.gpu.replay.variants import call_chain, call_here, call_variant
from gpusim.text import first_line
from gpusim.trace.fusion import canonical_variants, covered_by
from gpusim.trace.trust import check_trace_code

#: Roles of a step's results.
_RESULTS: Final = ("output", "gradient")


def initial_bytes(trace: Trace) -> int:
    """Return the memory of the tensors from before a step, in bytes."""
    there = {tensor.storage for tensor in trace.tensors if tensor.init is not None}
    return sum(trace.storages[storage].bytes for storage in there)


class Runner:
    """Runner of a trace's ops on `device`; it holds every live tensor by id.

    `bind` sets the tensors from before the step. Memory that no op returns is allocated when an op first writes it.
    Raises `OperatorError` for a forbidden operator, and `TrustError` for code in the trace unless `trust_code`. `own`
    is for a step recorded from the user's own code in this run: nothing of it comes from a file, so it may call any
    operator. `functions` are its resolved calls, where they exist already.
    """

    def __init__(
        self,
        trace: Trace,
        device: torch.device,
        own: bool = False,
        trust_code: bool = False,
        functions: list[Callable[..., Any]] | None = None,
    ) -> None:
        self.trace = trace
        self.device = device
        check_trace_code(trace, trace.name, own or trust_code)
        if not own:
            check_operators(trace, trace.name)
        self.functions: list[Callable[..., Any]]
        if functions is not None:
            self.functions = functions
        elif trace.model.frontend == "inductor":
            self.functions = functions_of(trace)
        else:
            if not own:
                check_schemas(trace)
            self.functions = [resolve(op.target, own) for op in trace.ops]
        if not own and trace.model.frontend != "inductor":
            check_result_sizes(trace, self.functions, device)
        self.variants: Sequence[int] = ()
        """Variant that `run` uses for each op, counted from 1; 0: as captured. Empty: all as captured."""
        self.covered: dict[int, int] = {}
        """Fused op -> the op whose variant does its work, so that `run` skips it."""
        self._kept: dict[tuple[tuple[int, ...], VariantSettings], Kept] = {}
        self.tensors: list[torch.Tensor | None] = [None] * len(trace.tensors)
        self.initial_bytes = initial_bytes(trace)
        self._of_storage: dict[int, list[int]] = {}
        for index, tensor in enumerate(trace.tensors):
            self._of_storage.setdefault(tensor.storage, []).append(index)
        self._lazy = trace.model.frontend == "inductor"
        self._result_views = _result_views(trace) if self._lazy else {}

    def bind(self, tensors: dict[int, torch.Tensor]) -> None:
        """Set tensors by id; they are used in place and kept. Results in their memory are views from now on."""
        for index, tensor in tensors.items():
            self.tensors[index] = tensor
        self._show_results({self.trace.tensors[index].storage for index in tensors})

    def choose(self, variants: Sequence[int]) -> None:
        """Set the `variants` for later calls of `run`."""
        self.variants, self.covered = canonical_variants(self.trace, variants), covered_by(self.trace, variants)

    def run(self, op: int) -> None:
        """Run one op on the current stream, unless another op's variant covers it."""
        if op in self.covered:
            return
        variant = self.trace.ops[op].variants[self.variants[op] - 1] if self.variants and self.variants[op] else None
        if variant is None or not variant.covers:
            self.store(op, self.call(op, *self.arguments(op)))
            return
        self.run_chain(sorted((op, *variant.covers)), variant.settings)

    def run_chain(self, chain: Sequence[int], settings: VariantSettings) -> None:
        """Run ops, in recorded order, as one fused call, and keep their results. Raises `ReplayError`."""
        for each, results in zip(chain, self.call_chain(chain, settings), strict=True):
            for index, part in zip(self.trace.ops[each].outputs, results, strict=True):
                if index is not None and part is not None:
                    self._keep(each, index, part)

    def call_chain(self, chain: Sequence[int], settings: VariantSettings) -> list[list[Any]]:
        """Call ops, in recorded order, as one fused call; returns the results of each, None for unused ones.

        Raises `ReplayError` with the first op and the reason where fusion fails.
        """
        calls: list[Call] = []
        made_before: set[int] = set()
        for op in chain:
            calls.append(self.arguments(op, without=made_before))
            made_before.update(tensor for tensor in self.trace.ops[op].outputs if tensor is not None)
        kept = self._kept.setdefault((tuple(chain), settings), {})
        targets = tuple(self.trace.ops[op].target for op in chain)
        outputs = [self._outputs(op) for op in chain]
        return self._tried(chain[0], lambda: call_chain(targets, calls, settings, outputs, kept))

    def arguments(self, op: int, without: Container[int] = ()) -> Call:
        """Return an op's decoded arguments; None for the tensors `without`."""
        node = self.trace.ops[op]
        if self._lazy:
            self._make_views(op, without)
        kwargs = {key: decode(value, self.tensors, self.device, without) for key, value in node.kwargs.items()}
        args = decode(list(node.args), self.tensors, self.device, without)
        if torch.Tag.inplace_view in getattr(self.functions[op], "tags", ()):
            args[0] = args[0].detach()  # it changes a tensor's shape; the tensor under that id keeps its own
        return args, kwargs

    def call(self, op: int, args: list[Any], kwargs: dict[str, Any], settings: VariantSettings | None = None) -> Any:
        """Call an op's operator under these settings in this thread, or as the variant that `variants` names.

        Raises `ReplayError` with the op and the reason of a failure.
        """
        node = self.trace.ops[op]
        call = call_here
        if settings is None and self.variants and self.variants[op]:
            call, settings = call_variant, node.variants[self.variants[op] - 1].settings
        if settings is None:
            return self._tried(op, lambda: self.functions[op](*args, **kwargs))
        return self._tried(op, lambda: call(self.functions[op], args, kwargs, settings, self._outputs(op)))

    def _outputs(self, op: int) -> list[Tensor | None]:
        """Return the results of an op as declared in the trace."""
        return [None if index is None else self.trace.tensors[index] for index in self.trace.ops[op].outputs]

    def _tried(self, op: int, call: Callable[[], Any]) -> Any:
        """Run `call`, a call of this op, and return its results. Raises `ReplayError`."""
        try:
            with torch.no_grad():
                return call()
        except torch.cuda.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as cause:
            problem = first_line(cause)
            raise ReplayError(f"op {describe(self.trace.ops[op])} failed: {problem}") from cause

    def store(self, op: int, result: Any) -> None:
        """Keep an op's results by tensor id."""
        node = self.trace.ops[op]
        results = placed_results(node.target, result, len(node.outputs))
        if results is None:
            results = flat_results(result)
            if not _uses_fixed_results_only(node):
                problem = f"op {describe(node)} returned {len(results)} results, its trace has {len(node.outputs)}"
                raise ReplayError(f"{problem} (torch {torch.__version__})")
        for written in set(node.writes) - set(node.outputs):
            tensor = self.tensors[written]
            # Some operators enlarge an argument that is too small for their result.
            if tensor is not None and tuple(tensor.shape) != self.trace.tensors[written].shape:
                raise ReplayError(f"op {describe(node)} has changed the shape of tensor {written}, which it writes")
        for place, (index, part) in enumerate(zip(node.outputs, results, strict=False)):
            if index is not None and (part is not None or self.trace.tensors[index].storage in self._used):
                self._keep(op, index, part)
                if place not in VARYING.get(node.target, ()):
                    self._check_declared(op, index, part)
        if self._result_views:
            self._show_results({self.trace.tensors[written].storage for written in node.writes})

    def _show_results(self, storages: Iterable[int]) -> None:
        """Make the step's results in this memory, where no op returns them: Inductor leaves views out."""
        for storage in storages:
            for index in self._result_views.get(storage, ()):
                if self.tensors[index] is None:
                    self.tensors[index] = self._memory_view(index, writing=False)

    @cached_property
    def _used(self) -> set[int]:
        """Storages that an op takes, that are there before the step, or that hold a result of the step.

        Where its result is absent, an op of a step that was recorded without memory may have a tensor that nobody uses.
        """
        trace = self.trace
        taken = {index for op in trace.ops for index in (*tensor_refs([*op.args, *op.kwargs.values()]), *op.reads)}
        lasting = (i for i, tensor in enumerate(trace.tensors) if tensor.init is not None or tensor.role in _RESULTS)
        return {trace.tensors[index].storage for index in (*taken, *lasting)}

    def _keep(self, op: int, index: int, part: Any) -> None:
        """Keep one result. Raises `ReplayError` for an object that is not a tensor, and for a tensor beyond its
        memory.
        """
        if type(part) is not torch.Tensor:
            problem = f"returned a {type(part).__name__} where its trace has tensor {index}"
            raise ReplayError(f"op {describe(self.trace.ops[op])} {problem}")
        if not lies_in_storage(part):
            problem = f"returned a tensor of shape {list(part.shape)} that reaches beyond its memory"
            raise ReplayError(f"op {describe(self.trace.ops[op])} {problem}")
        self.tensors[index] = part

    def _check_declared(self, op: int, index: int, part: torch.Tensor) -> None:
        """Raise `ReplayError` where a result differs from its declaration, which later ops were checked against."""
        declared = self.trace.tensors[index]
        if tuple(part.shape) != declared.shape or part.dtype != DTYPES[declared.dtype]:
            returned = f"{str(part.dtype).removeprefix('torch.')} of shape {list(part.shape)}"
            problem = f"returned a {returned}, its trace has {declared.dtype} of shape {list(declared.shape)}"
            raise ReplayError(f"op {describe(self.trace.ops[op])} {problem}")
        if is_dense(declared.shape, declared.stride) and not is_dense(part.shape, part.stride()):
            problem = f"returned tensor {index} with gaps, its trace has strides {list(declared.stride)}"
            raise ReplayError(f"op {describe(self.trace.ops[op])} {problem}")
        if part.device.type != self.device.type:
            raise ReplayError(f"op {describe(self.trace.ops[op])} returned a tensor on {part.device.type}")
        memory = part.untyped_storage().data_ptr()
        for other in set(tensor_refs([*self.trace.ops[op].args, *self.trace.ops[op].kwargs.values()])):
            tensor = self.tensors[other]
            same = memory and tensor is not None and tensor.untyped_storage().data_ptr() == memory
            if same and self.trace.tensors[other].storage != declared.storage:
                problem = f"returned tensor {index} in the memory of tensor {other}, and its trace does not say so"
                raise ReplayError(f"op {describe(self.trace.ops[op])} {problem}")

    def reserve(self, storages: Iterable[int]) -> None:
        """Allocate storages that no op returns, on the current stream."""
        for storage in storages:
            index = self._of_storage[storage][0]
            if self.tensors[index] is None:
                self.tensors[index] = self._memory_view(index, writing=True)

    def _make_views(self, op: int, without: Container[int] = ()) -> None:
        """Make the arguments of an op that are further views of existing memory, or of memory that the op writes; none
        for the tensors `without`.
        """
        node = self.trace.ops[op]
        written = {self.trace.tensors[index].storage for index in node.writes}
        for index in tensor_refs([*node.args, *node.kwargs.values()]):
            if self.tensors[index] is None and index not in without:
                self.tensors[index] = self._memory_view(index, writing=self.trace.tensors[index].storage in written)

    def _memory_view(self, index: int, writing: bool) -> torch.Tensor:
        declared = self.trace.tensors[index]
        dtype = DTYPES[declared.dtype]
        living = (self.tensors[other] for other in self._of_storage[declared.storage])
        memory = next((tensor.untyped_storage() for tensor in living if tensor is not None), None)
        if memory is None and not writing:
            raise ReplayError(f"tensor {index} is missing when an op takes it")
        if memory is None:
            size = self.trace.storages[declared.storage].bytes
            memory = torch.empty(size, dtype=torch.uint8, device=self.device).untyped_storage()
        view = torch.empty(0, dtype=dtype, device=self.device)
        return view.set_(memory, declared.offset, declared.shape, declared.stride)

    def run_in_order(self, releases: Sequence[Iterable[int]] | None = None) -> None:
        """Run all ops in recorded order on the current stream, and free storages as in `releases`."""
        for op in range(len(self.trace.ops)):
            if releases is not None:
                self.release(releases[op])
            self.run(op)

    def release(self, storages: Iterable[int]) -> None:
        """Drop every tensor of these storages."""
        for storage in storages:
            for index in self._of_storage[storage]:
                self.tensors[index] = None

    def drop_temporaries(self) -> None:
        """Drop all tensors except those from before the step."""
        for index, tensor in enumerate(self.trace.tensors):
            if tensor.init is None:
                self.tensors[index] = None
        self._show_results({tensor.storage for tensor in self.trace.tensors if tensor.init is not None})


def _result_views(trace: Trace) -> dict[int, list[int]]:
    """Return, for each storage, the step's results in it."""
    results_in: dict[int, list[int]] = {}
    for index, tensor in enumerate(trace.tensors):
        if tensor.role in _RESULTS:
            results_in.setdefault(tensor.storage, []).append(index)
    return results_in


@dataclass(frozen=True)
class InitialState:
    """Tensors from before the step, with a copy to restore them."""

    tensors: dict[int, torch.Tensor]
    pristine: dict[int, torch.Tensor]

    @classmethod
    def of(cls, tensors: dict[int, torch.Tensor]) -> InitialState:
        """Wrap these tensors without a copy; the step changes them in place."""
        return cls(tensors, {index: tensor.clone() for index, tensor in tensors.items()})

    @classmethod
    def copy_of(cls, tensors: dict[int, torch.Tensor]) -> InitialState:
        """Copy these tensors; copies share memory where the originals do."""
        return cls.of(copy_sharing(tensors))

    def restore(self) -> None:
        """Undo all in-place changes."""
        for index, tensor in self.tensors.items():
            restore_elements(tensor, self.pristine[index])


def _uses_fixed_results_only(op: Op) -> bool:
    """Whether a call may return fewer results than the trace has: attention at inference leaves some out.

    The results that may be missing, and those after them, are unused.
    """
    varying = VARYING.get(op.target, ())
    return bool(varying) and all(index is None for index in op.outputs[min(varying) :])


def make_initial(trace: Trace, device: torch.device, seed: int) -> InitialState:
    """Make the tensors from before the step and fill them as in `init`; aliases share memory as in the trace."""
    generator = torch.Generator(device=device).manual_seed(seed)
    memory: dict[int, torch.Tensor] = {}
    result: dict[int, torch.Tensor] = {}
    for index, tensor in enumerate(trace.tensors):
        if tensor.init is None:
            continue
        try:
            result[index] = _made(trace, tensor, memory, generator, device)
        except torch.cuda.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError, OverflowError) as cause:
            problem = str(cause).partition("\n")[0]
            raise ReplayError(
                f"tensor {index} of '{trace.name}' cannot be filled as its trace says: {problem}"
            ) from cause
    return InitialState.of(result)


def _made(
    trace: Trace, tensor: Tensor, memory: dict[int, torch.Tensor], generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    """Make and fill a tensor from before the step; `memory` holds the storages made so far."""
    if tensor.dtype not in DTYPES:
        raise ReplayError(f"tensor of unknown dtype '{tensor.dtype[:80]}'")
    dtype = DTYPES[tensor.dtype]
    last = tensor.offset + sum((n - 1) * d for n, d in zip(tensor.shape, tensor.stride, strict=True))
    # Checked here because `set_` would enlarge the storage.
    if 0 not in tensor.shape and (last + 1) * dtype.itemsize > trace.storages[tensor.storage].bytes:
        raise ValueError(f"shape {list(tensor.shape)} reaches beyond its storage")
    if tensor.storage not in memory:
        size = trace.storages[tensor.storage].bytes
        memory[tensor.storage] = torch.empty(size, dtype=torch.uint8, device=device)
    view = memory[tensor.storage].view(dtype) if memory[tensor.storage].numel() else memory[tensor.storage]
    view = torch.empty(0, dtype=dtype, device=device).set_(
        view.untyped_storage(), tensor.offset, tensor.shape, tensor.stride
    )
    _fill(view, tensor, generator)
    return view


def _fill(view: torch.Tensor, tensor: Tensor, generator: torch.Generator) -> None:
    init = tensor.init
    assert init is not None
    if init.kind == "constant":
        view.fill_(init.a)
    elif init.kind == "values":
        view.copy_(torch.tensor(init.values, dtype=torch.float64).reshape(tensor.shape))
    elif init.kind == "integers":
        view.copy_(torch.randint(int(init.a), int(init.b) + 1, tensor.shape, generator=generator, device=view.device))
    elif init.kind == "uniform":
        view.copy_(torch.empty(tensor.shape, device=view.device).uniform_(init.a, init.b, generator=generator))
    else:
        view.copy_(torch.empty(tensor.shape, device=view.device).normal_(init.a, init.b, generator=generator))


def results_of(trace: Trace, tensors: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor]:
    """Copy the results of the step by tensor id: outputs, gradients, and states changed in place."""
    written = {trace.tensors[t].storage for op in trace.ops for t in op.writes}
    wanted: dict[int, torch.Tensor] = {}
    for index, tensor in enumerate(trace.tensors):
        changed = tensor.init is not None and tensor.storage in written
        value: Any = tensors[index]
        if (changed or tensor.role in _RESULTS) and value is not None:
            wanted[index] = value.detach().clone()
    return wanted
