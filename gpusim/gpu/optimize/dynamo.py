"""`torch.compile(model, backend="gpusim")`: the forward and backward graphs of AOTAutograd, each optimized.

Both are lists of ATen calls on tensors only. Parameters and buffers keep their place, so a graph is bound to them;
other inputs are copied. Tensors that the forward saves for the backward are passed in place. The next forward reuses
their memory, so a forward runs as ATen calls while an earlier one's saved tensors are still held.
"""

from __future__ import annotations

import gc
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
from gpusim.gpu.optimize.callable import CANNOT
from gpusim.gpu.optimize.choose import Wanted
from gpusim.gpu.optimize.executors import Executor
from gpusim.gpu.optimize.make import StepMaker
from gpusim.gpu.optimize.on_cuda import CudaExecutor
from gpusim.gpu.optimize.steps import as_outside, dtype_of
from gpusim.gpu.optimize.variant import Variant
from gpusim.plan.schedule import check_streams
from gpusim.text import first_line

Part = Literal["inference", "forward", "backward"]
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

    saved_at: dict[int, Saved] = {}
    lock = threading.RLock()

    def compiler(part: Part) -> Callable[..., Any]:
        def make(graph: torch.fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
            aten_graph = AtenGraph(graph, part, wanted, executor, saved_at, lock)

            def boxed(given: list[Any]) -> Any:
                return aten_graph(given)

            boxed._boxed_call = True  # type: ignore[attr-defined]  # inputs come as a list, which is to be emptied
            return boxed

        return make

    backend = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
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


class Saved:
    """Memory of a forward's saved tensors, with its holders."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._storages = list({t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values())
        gc.collect()
        self._own = self.holders()

    def addresses(self) -> list[int]:
        """Return the start addresses of the memory."""
        return [storage.data_ptr() for storage in self._storages]

    def holders(self) -> list[int]:
        """Return the number of tensors in each piece of the memory."""
        return [torch._C._storage_Use_Count(storage._cdata) for storage in self._storages]

    def bind(self, before: Sequence[int]) -> None:
        """Count a backward that was bound to this memory as a holder of its own, given the holders `before`."""
        gc.collect()
        self._own = [own + now - then for own, now, then in zip(self._own, self.holders(), before, strict=True)]

    def in_use(self) -> bool:
        """Whether anything except the graphs holds a tensor in this memory."""
        now = self.holders()
        self._own = list(map(min, self._own, now))
        return now != self._own


class AtenGraph:
    """One graph of AOTAutograd's, called with a list of inputs, which it empties as torch's boxed functions do."""

    def __init__(
        self,
        graph: torch.fx.GraphModule,
        part: Part,
        wanted: Wanted,
        executor: Executor,
        saved_at: dict[int, Saved],
        lock: threading.RLock,
    ) -> None:
        self.graph, self.part = graph, part
        self._saved_at, self._lock = saved_at, lock
        """Tensors that a forward passes to its backward, by memory address: they stay in place. The lock is for all
        graphs of a model, which may be called from several threads.
        """
        self._maker = StepMaker(executor, wanted, lambda _: None)
        self._static, self._returned = _of_tracing(part)
        self._variant: Variant | None = None
        self._failed = False
        self._fixed: list[tuple[int, int]] = []
        """Inputs that the graph is bound to, by position, with their addresses."""
        self._copied: list[int] = []
        self._saved: Saved | None = None

    def __call__(self, inputs: list[Any]) -> Any:
        """Return the outputs as a list."""
        args = list(inputs)
        inputs.clear()
        with self._lock:
            if self._variant is None and not self._failed:
                with alone(wait=False) as free, as_outside():
                    if free:
                        self._make(args)
            variant = self._variant
            if variant is not None and self._fits(args) and not (self._saved is not None and self._saved.in_use()):
                return variant.run([args[place] for place in self._copied])
        return self.graph(*args)

    def _fits(self, args: Sequence[Any]) -> bool:
        return all(args[place].data_ptr() == pointer for place, pointer in self._fixed)

    def _make(self, args: Sequence[Any]) -> None:
        """Optimize for these inputs; where that fails, the graph runs unchanged, with one warning."""
        places = [place for place, each in enumerate(args) if isinstance(each, torch.Tensor)]
        if len(places) != len(args):
            self._fail("shapes are symbolic, and a captured step has fixed ones: compile with dynamic=False")
            return
        saved = {place: memory for place in places if (memory := self._saved_at.get(_memory(args[place])))}
        static = {place for place in places if place in self._static or place in saved}
        self._copied = [place for place in places if place not in static]
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
        count = len(next(node for node in self.graph.graph.nodes if node.op == "output").args[0])
        kept = frozenset(range(self._returned, count)) if self.part == "forward" else frozenset()
        gc.collect()
        holders = {memory: memory.holders() for memory in saved.values()}
        try:
            with torch.no_grad(), current(self._maker.executor.device):
                variant, _ = self._maker.make(step, options, [fixed[place] for place in self._copied], kept=kept)
        except CANNOT as cause:
            self._fail(first_line(cause))
            return
        self._variant = variant
        self._fixed = [(place, args[place].data_ptr()) for place in sorted(static)]
        for memory, before in holders.items():
            memory.bind(before)
        if kept:
            self._saved = Saved(variant.memory_of(kept))
            self._saved_at.update(dict.fromkeys(self._saved.addresses(), self._saved))

    def _fail(self, problem: str) -> None:
        self._failed = True
        warnings.warn(f"gpusim: {problem}; the {self.part} runs as it is", stacklevel=2)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _of_tracing(part: Part) -> tuple[frozenset[int], int]:
    """Return the inputs with a fixed place (parameters and buffers), and the number of the user's outputs.

    AOTAutograd knows them while it compiles; the backward's inputs are identified when they come.
    """
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    if metadata is None or part == "backward":
        return frozenset(), 0
    return frozenset(metadata.static_input_indices), int(metadata.num_forward)
