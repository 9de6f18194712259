"""Baselines of an optimized step: the eager step and torch.compile in its strictest forms, called alike.

Each is called with the tensors of a batch, and returns results that stay valid: copies into fixed inputs and copies of
results count, as for the optimized step.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from gpusim.formats.results import Baseline
from gpusim.gpu.capture.joint_graph import LEARNING_RATE, MOMENTUM
from gpusim.gpu.capture.models import ModelStep
from gpusim.gpu.inductor.kernels import all_loaded_code
from gpusim.gpu.optimize.choose import MORE_RECORDINGS, RECORDING_S, ROOM
from gpusim.gpu.optimize.copies import Copies
from gpusim.gpu.optimize.on_cuda import TRIAL_MS, TRIAL_ROUNDS, CudaExecutor
from gpusim.gpu.reach.search import BEHIND
from gpusim.gpu.replay.cudagraph import own_workspaces
from gpusim.gpu.replay.timing import brief_ns, interleaved_ns, time_interleaved

Call = Callable[..., Any]

WARMUP_CALLS: Final = 3
#: Recordings of a hand-made graph, of which the fastest counts: as many as of the optimized step, made and compared in
#: the same time and the same rounds.
RECORDINGS: Final = MORE_RECORDINGS * CudaExecutor.recordings


@dataclass(frozen=True)
class Contender:
    """A way to run a step, with its model and the peak memory of making and running it."""

    call: Call
    model: nn.Module
    peak_bytes: int = 0
    code: Sequence[Any] = ()
    """Code of its kernels, which a later torch.compile of the same model might unload."""


def tensors_of(step: ModelStep) -> tuple[Any, ...]:
    """Return the arguments of a call of the step: the model's inputs, and the target if any."""
    return (*step.inputs, *(() if step.target is None else (step.target,)))


def user_step(step: ModelStep, model: nn.Module, called: Call) -> Call:
    """Return the step as a user writes it, on `model`, which is run by calling `called`."""
    if step.loss is None:

        def infer(*args: Any) -> Any:
            with torch.no_grad():
                return called(*args)

        vars(infer)[BEHIND] = model, called
        return infer
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE, momentum=MOMENTUM)
    loss_of, targets = step.loss, 0 if step.target is None else 1

    def train(*args: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(called(*args[: len(args) - targets]), args[-1] if targets else None)
        loss.backward()
        optimizer.step()
        return loss.detach()

    vars(train)[BEHIND] = model, called, loss_of, optimizer
    return train


def make(peer: Baseline, step: ModelStep) -> Contender:
    """Return a contender on a copy of the step's model, warmed up."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = copy.deepcopy(step.module)
    call = _CALLS[peer](step, model)
    for _ in range(WARMUP_CALLS):
        call(*tensors_of(step))
    torch.cuda.synchronize()
    peak_bytes = call.peak_bytes if isinstance(call, _HandMade) else torch.cuda.max_memory_allocated()
    return Contender(call, model, peak_bytes - before, () if peer == "eager" else all_loaded_code())


def _eager(step: ModelStep, model: nn.Module) -> Call:
    return user_step(step, model, model)


def _reduce_overhead(step: ModelStep, model: nn.Module) -> Call:
    return _in_steps(user_step(step, model, torch.compile(model, mode="reduce-overhead")))


def _max_autotune(step: ModelStep, model: nn.Module) -> Call:
    from torch._inductor import select_algorithm

    # It prints hundreds of lines: the times of all choices, and each choice that does not fit.
    if hasattr(select_algorithm, "PRINT_AUTOTUNE"):
        select_algorithm.PRINT_AUTOTUNE = False
    logging.getLogger(select_algorithm.__name__).setLevel(logging.CRITICAL)
    return _in_steps(user_step(step, model, torch.compile(model, mode="max-autotune")))


def _combo_kernels(step: ModelStep, model: nn.Module) -> Call:
    options = {"combo_kernels": True, "triton.cudagraphs": True}
    return _in_steps(user_step(step, model, torch.compile(model, options=options)))


def _in_steps(call: Call) -> Call:
    """Make each call a step of its own for torch's CUDA graphs, with copied results."""

    def stepped(*args: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return _copied(call(*args))

    return stepped


def _own_graph(step: ModelStep, model: nn.Module) -> Call:
    """Return the compiled step, with its optimizer, in one hand-made CUDA graph: the fastest of a few recordings."""
    call = user_step(step, model, torch.compile(model))
    fixed = pytree.tree_map_only(torch.Tensor, torch.clone, tensors_of(step))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUP_CALLS):
            call(*fixed)
    torch.cuda.current_stream().wait_stream(side)

    def record() -> tuple[torch.cuda.CUDAGraph, Any, list[Any]]:
        graph = torch.cuda.CUDAGraph()
        with own_workspaces(1), torch.cuda.graph(graph):
            result = call(*fixed)
        return graph, result, [parameter.grad for parameter in model.parameters()]

    begin, free_bytes = perf_counter(), _free_bytes()
    recordings = [record()]
    peak_bytes = torch.cuda.max_memory_allocated()  # before others hold results and gradients besides
    graph_bytes = free_bytes - _free_bytes()
    timing_s = interleaved_ns(round(brief_ns(recordings[0][0].replay)), TRIAL_ROUNDS, TRIAL_MS) / 1e9
    while len(recordings) < RECORDINGS and _free_bytes() >= ROOM * graph_bytes:
        if perf_counter() - begin + timing_s * (len(recordings) + 1) > RECORDING_S:
            break
        try:
            recordings.append(record())
        except torch.cuda.OutOfMemoryError:
            break
    replays = {str(n): recording[0].replay for n, recording in enumerate(recordings)}
    timed = time_interleaved(replays, TRIAL_ROUNDS, TRIAL_MS)
    graph, result, gradients = recordings[min(range(len(recordings)), key=lambda n: timed[str(n)].median_ns)]
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient  # of the counted recording: each has gradients of its own
    return _HandMade(graph, fixed, result, peak_bytes, held=(call, gradients))


def _free_bytes() -> int:
    """Return the GPU's free memory, in bytes, once torch has given back what it holds for nobody."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


class _HandMade:
    """A step in a hand-made CUDA graph: a call copies its arguments in and its results out.

    A graph keeps no memory from before it alive. `held` does: the compiled step with its code and its optimizer's
    states. Without it torch returns the states' memory to the driver when it next records a graph.
    """

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        fixed: tuple[Any, ...],
        result: Any,
        peak_bytes: int,
        held: tuple[Any, ...],
    ) -> None:
        self.peak_bytes = peak_bytes
        """Peak memory of the process when the first recording was made, in bytes."""
        self._graph, self._result, self._held = graph, result, held
        self._copy_in = Copies([each for each in fixed if isinstance(each, torch.Tensor)])

    def __call__(self, *args: Any) -> Any:
        """Run one step."""
        with torch.no_grad():
            self._copy_in([each for each in args if isinstance(each, torch.Tensor)])
        self._graph.replay()
        return _copied(self._result)


_CALLS: Final[dict[Baseline, Callable[[ModelStep, nn.Module], Call]]] = {
    "eager": _eager,
    "torch_compile_reduce_overhead": _reduce_overhead,
    "torch_compile_own_graph": _own_graph,
    "torch_compile_max_autotune": _max_autotune,
    "torch_compile_combo_kernels": _combo_kernels,
}


def _copied(result: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.clone, result)


class Exact:
    """One step in FP64 from the current state of the step's model, computed when first requested.

    Images are contiguous in it: cuDNN's batch norm does not support FP64 channels last.
    """

    def __init__(self, step: ModelStep) -> None:
        self._step = step
        self._initial = copy.deepcopy(step.module.state_dict())

    @cached_property
    def _wanted(self) -> tuple[list[Any], list[Any]]:
        """Results and gradients of the FP64 step."""
        step = self._step
        reference = copy.deepcopy(step.module).double().to(memory_format=torch.contiguous_format)
        reference.load_state_dict(self._initial)
        exact = ModelStep(step.network, reference, _doubled(step.inputs), step.target, step.loss)
        returned = user_step(exact, reference, reference)(*tensors_of(exact))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return pytree.tree_leaves(returned), [p.grad for p in reference.parameters()]

    def deviation(self, contender: Contender) -> float | None:
        """Return the deviation of one step's outputs and gradients, over their norm; the larger of both.

        The contender's model is left in the initial state. None where dropout makes every step different.
        """
        if any(isinstance(m, _DropoutNd) and m.training and m.p > 0 for m in contender.model.modules()):
            return None
        contender.model.load_state_dict(self._initial)
        output = contender.call(*tensors_of(self._step))
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # attributes an error of the GPU to this contender, not to the reference
        returned, gradients = self._wanted
        errors = (
            _apart(pytree.tree_leaves(output), returned),
            _apart([p.grad for p in contender.model.parameters()], gradients),
        )
        contender.model.load_state_dict(self._initial)
        return max(errors)


def _doubled(inputs: Sequence[Any]) -> tuple[Any, ...]:
    def doubled(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.double().contiguous() if tensor.is_floating_point() else tensor

    inputs_doubled: tuple[Any, ...] = pytree.tree_map_only(torch.Tensor, doubled, tuple(inputs))
    return inputs_doubled


def _apart(computed: Sequence[Any], wanted: Sequence[Any]) -> float:
    pairs = [(a.double(), b.double()) for a, b in zip(computed, wanted, strict=True) if isinstance(a, torch.Tensor)]
    norm = sum(b.square().sum().item() for _, b in pairs) ** 0.5
    return sum((a - b).square().sum().item() for a, b in pairs) ** 0.5 / norm if norm else 0.0
