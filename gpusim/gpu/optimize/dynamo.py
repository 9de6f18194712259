"""`torch.compile(model, backend="gpusim")`: the forward and backward graphs of AOTAutograd, each optimized.

Both are lists of ATen calls on tensors only. Parameters and buffers keep their place, so a graph is bound to them;
other inputs are copied. Tensors that the forward saves for the backward are passed in place, packed (`packing.py`). The
next forward reuses their memory, so a forward runs as ATen calls while an earlier one's saved tensors are still held.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import torch

from gpusim.arguments import check_budget, memory_bytes
from gpusim.defaults import DEFAULT_SEED, DEFAULT_STREAMS
from gpusim.errors import OptionError
from gpusim.gpu.capture.options import CaptureOptions
from gpusim.gpu.capture.user_step import UserStep
from gpusim.gpu.device import current
from gpusim.gpu.optimize.alone import alone
from gpusim.gpu.optimize.choose import Wanted
from gpusim.gpu.optimize.executors import Executor
from gpusim.gpu.optimize.fronts import CANNOT
from gpusim.gpu.optimize.make import StepMaker
from gpusim.gpu.optimize.on_cuda import CudaExecutor
from gpusim.gpu.optimize.packing import Packing, Saved
from gpusim.gpu.optimize.steps import as_outside, dtype_of
from gpusim.gpu.optimize.variant import Variant
from gpusim.plan.schedule import check_streams
from gpusim.text import first_line

Part = Literal["inference", "forward", "backward"]
#: Calls in a row that cannot use the captured graph, before a warning.
WARNED_AFTER: Final = 4
#: Options of `torch.compile`, as for `gpusim.optimize`.
OPTIONS: Final = ("streams", "budget_s", "memory_limit")


def gpusim(
    module: torch.fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **others: Any
) -> Callable[..., Any]:
    """Compile a module, as torch calls a backend. `options` are those of `gpusim.optimize`.

    Without a GPU the module runs unchanged, with one warning. Raises `OptionError` for an unknown option.
    """
    wanted = _wanted({} if options is None else options)
    if others.get("mode") not in (None, "default"):
        raise OptionError("the backend gpusim has no modes; give options", argument="mode", value=others["mode"])
    if not torch.cuda.is_available():
        warnings.warn(f"gpusim: torch {torch.__version__} sees no GPU here; the model runs as it is", stacklevel=2)
        return module.forward
    return compiled(module, inputs, wanted, CudaExecutor())


def compiled(
    module: torch.fx.GraphModule, inputs: Sequence[Any], wanted: Wanted, executor: Executor
) -> Callable[..., Any]:
    """Return the module for AOTAutograd, with graphs that are optimized at their first call."""
    from torch._dynamo.backends.common import aot_autograd

    packing = Packing()
    lock = threading.RLock()

    def compiler(part: Part) -> Callable[..., Any]:
        def make(graph: torch.fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
            aten_graph = AtenGraph(graph, part, wanted, executor, packing, lock)

            def boxed(given: list[Any]) -> Any:
                return aten_graph(given)

            boxed._boxed_call = True  # type: ignore[attr-defined]  # inputs come as a list, which is to be emptied
            return boxed

        return make

    backend = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=packing.partition,
        keep_inference_input_mutations=True,  # batch norm's statistics change inside the graph
    )
    return backend(module, inputs)


def _wanted(options: object) -> Wanted:
    if not isinstance(options, Mapping):
        raise OptionError(f"a dict of {', '.join(OPTIONS)}", argument="options", value=options)
    unknown = next((key for key in options if key not in OPTIONS), None)
    if unknown is not None:
        raise OptionError(f"one of {', '.join(OPTIONS)}", argument="options", value=unknown)
    streams = check_streams(options.get("streams", DEFAULT_STREAMS))
    budget_s = options.get("budget_s")
    if budget_s is not None:
        check_budget(budget_s)
    return Wanted(streams, budget_s, memory_bytes(options.get("memory_limit")), DEFAULT_SEED)


#: Operators that view a tensor's memory, whatever part of it the tensor is.
_OF_MEMORY: Final = (
    torch.ops.aten.as_strided.default,
    torch.ops.aten.as_strided_copy.default,
    torch.ops.aten.as_strided_scatter.default,
)


class AtenGraph:
    """One graph of AOTAutograd's, called with a list of inputs, which it empties as torch's boxed functions do."""

    def __init__(
        self,
        graph: torch.fx.GraphModule,
        part: Part,
        wanted: Wanted,
        executor: Executor,
        packing: Packing,
        lock: threading.RLock,
    ) -> None:
        self.graph = packing.flat.get(part, graph)
        """The graph with all of its tensors: AOTAutograd's own has them packed."""
        self.part = part
        self._packing = packing
        self._lock = lock
        """For all graphs of a model, which may be called from several threads."""
        self._maker = StepMaker(executor, wanted, lambda _: None)
        self._static = _static(part)
        self._variant: Variant | None = None
        self._failed = False
        self._fixed: list[tuple[int, int]] = []
        """Parameters and buffers that the graph is bound to: their positions and addresses."""
        self._forward: Variant | None = None
        """Captured forward whose saved tensors a backward reads in place."""
        self._copied: list[int] = []
        self._unused = 0
        """Calls in a row that did not use the captured graph."""

    def __call__(self, inputs: list[Any]) -> Any:
        """Return the outputs as a list."""
        args = list(inputs)
        inputs.clear()
        with self._lock:
            saved: Saved | None = None
            if self.part == "backward" and self._packing.packed:
                saved = self._packing.unpack(args[0])
                args = [*saved.tensors, *args[1:]]
            if self._variant is None and not self._failed and not self._is_exception(saved):
                with alone(wait=False) as free, as_outside():
                    if free:
                        self._make(args, saved)
            variant = self._variant if self._fits(args, saved) else None
            self._count(variant)
            if variant is not None:
                results = variant.run([args[place] for place in self._copied])
            else:
                results = self.graph(*args)
                if saved is not None and saved.forward is not None:
                    results = _apart(results, saved.tensors)
            if self.part == "forward" and self._packing.packed:
                return self._packing.pack(list(results), args, variant)
            return results

    def _is_exception(self, saved: Saved | None) -> bool:
        """Whether these tensors are of a forward that ran as it is, but is captured, or is to be."""
        return saved is not None and saved.forward is None and not self._packing.forward_failed

    def _fits(self, args: Sequence[Any], saved: Saved | None) -> bool:
        """Whether the captured graph can run on these inputs."""
        if saved is not None and saved.forward is not self._forward:
            return False
        if self.part == "forward" and self._packing.in_use():
            return False
        return all(args[place].data_ptr() == pointer for place, pointer in self._fixed)

    def _count(self, variant: Variant | None) -> None:
        """Warn once where a captured graph is not used in several calls in a row."""
        if self._variant is None or variant is not None:
            self._unused = 0
            return
        self._unused += 1
        if self._unused == WARNED_AFTER:
            self._warn("results of earlier calls still need its memory, or parameters lie elsewhere since its capture")

    def _make(self, args: Sequence[Any], saved: Saved | None) -> None:
        """Optimize for these inputs; where that fails, the graph runs unchanged, with one warning."""
        places = [place for place, each in enumerate(args) if isinstance(each, torch.Tensor)]
        if len(places) != len(args):
            self._fail("shapes are symbolic, and a captured step has fixed ones: compile with dynamic=False")
            return
        if self.part != "inference" and not self._packing.packed:
            self._fail("hooks take each saved tensor, where gpusim passes one for all")
            return
        in_place = range(len(saved.tensors)) if saved is not None and saved.forward is not None else ()
        static = {*in_place, *(place for place in places if place in self._static)}
        self._copied = [place for place in places if place not in static]
        if _sees_memory(self.graph, self._copied):
            self._fail("it reads the memory of an input (as_strided), of which a captured step has a copy only")
            return
        # `data` has its own version: trials write to saved tensors, and restore them.
        fixed = [
            each.data if place in static else each.detach().clone(memory_format=torch.preserve_format)
            for place, each in enumerate(args)
        ]
        step = UserStep(
            self.part,
            [(None, lambda _: list(self.graph(*fixed)))],
            self._maker.executor.device,
            named={f"input.{place}": ("input", tensor) for place, tensor in enumerate(fixed)},
        )
        sizes = [tensor.shape[0] for tensor in fixed if tensor.dim()]
        options = CaptureOptions(
            spec=f"torch.compile {self.part}",
            mode="infer" if self.part == "inference" else "train",
            batch=max(1, sizes[0]) if sizes else 1,
            dtype=dtype_of(fixed, step.device),
        )
        kept = self._packing.saved_places if self.part == "forward" else frozenset()
        try:
            with torch.no_grad(), current(self._maker.executor.device):
                variant, gain = self._maker.make(step, options, [fixed[place] for place in self._copied], kept=kept)
        except CANNOT as cause:
            self._fail(first_line(cause))
            return
        sys.stderr.write(f"gpusim, {self.part}: {gain.text}\n")
        self._variant = variant
        self._forward = None if saved is None else saved.forward
        self._fixed = [(place, args[place].data_ptr()) for place in sorted(static)]

    def _fail(self, problem: str) -> None:
        self._failed = True
        if self.part == "forward":
            self._packing.forward_failed = True
        self._warn(problem)

    def _warn(self, problem: str) -> None:
        warnings.warn(f"gpusim: {problem}; the {self.part} runs as it is", stacklevel=2)


def _apart(results: Sequence[Any], saved: Sequence[Any]) -> list[Any]:
    """Copy results that lie in tensors saved by a captured forward: its next call writes there."""
    memory = {tensor.untyped_storage().data_ptr() for tensor in saved if isinstance(tensor, torch.Tensor)}
    return [
        each.clone() if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() in memory else each
        for each in results
    ]


def _sees_memory(graph: torch.fx.GraphModule, places: Sequence[int]) -> bool:
    """Whether a graph views the memory around one of these inputs: such a view counts from the memory's begin."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    seen = {inputs[place] for place in places}
    for node in graph.graph.nodes:
        if node.op != "call_function" or not seen.intersection(node.args[:1]):
            continue
        if node.target in _OF_MEMORY:
            return True
        if getattr(node.target, "is_view", False):
            seen.add(node)
    return False


def _static(part: Part) -> frozenset[int]:
    """Return the inputs with a fixed place: parameters and buffers. AOTAutograd knows them while it compiles."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    if metadata is None or part == "backward":
        return frozenset()
    return frozenset(metadata.static_input_indices)
