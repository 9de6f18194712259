"""`gpusim.optimize`: a callable for a model, a training step or a function, or the user's own with one warning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gpusim.defaults import DEFAULT_SEED, DEFAULT_STREAMS
from gpusim.errors import CaptureError, GpuError, OptionError
from gpusim.formats.results import Ablation
from gpusim.formats.trace import Frontend
from gpusim.gpu.device import current, without_autocast
from gpusim.gpu.optimize.callable import Gain, OptimizedStep
from gpusim.gpu.optimize.choose import FRONTENDS, Wanted
from gpusim.gpu.optimize.executors import Executor
from gpusim.gpu.optimize.fronts import CANNOT
from gpusim.gpu.optimize.make import StepMaker
from gpusim.gpu.optimize.on_cuda import CudaExecutor
from gpusim.gpu.optimize.steps import Given, as_outside, attribute_problem, autocast_of, casting, fixed_copies
from gpusim.gpu.optimize.variant import Variant
from gpusim.gpu.reach.search import BEHIND
from gpusim.text import first_line

Say = Callable[[str], None]


def optimize(
    target: Any,
    example_inputs: Any,
    *,
    loss: Callable[..., torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    streams: int = DEFAULT_STREAMS,
    budget_s: float | None = None,
    memory_limit_bytes: int | None = None,
    seed: int = DEFAULT_SEED,
    frontends: tuple[Frontend, ...] = FRONTENDS,
    ablation: Ablation | None = None,
    limit_s: float | None = None,
    executor: Executor | None = None,
    say: Say = lambda _: None,
    warn: Say | None = None,
) -> Any:
    """Return the optimized step, or the user's own with one warning. `executor` defaults to the GPU's.

    `frontends` are the kernels to choose from, `ablation` a freedom not to use, `limit_s` the time to make the step
    ready in place of its mode's. `warn` is called instead of a warning.

    Raises `OptionError` for a target that is neither a module nor callable, and for a loss that is not callable.
    """
    if not callable(target):
        raise OptionError("a torch.nn.Module or a step function is needed", argument="target", value=target)
    if loss is not None and not callable(loss):
        raise OptionError("a function of outputs and targets is needed", argument="loss", value=loss)
    given = Given(target, loss, optimizer)
    if executor is None:
        try:
            executor = CudaExecutor()
        except GpuError:
            return _as_it_is(given, torch.device("cpu"), f"torch {torch.__version__} sees no GPU here", warn)
    wanted = Wanted(streams, budget_s, memory_limit_bytes, seed, frontends, limit_s=limit_s)
    if ablation is not None:
        wanted = wanted.without(ablation)
    maker = StepMaker(executor, wanted, say)

    def make(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Variant, Gain]:
        cast = autocast_of(maker.executor.device)
        with as_outside(), without_autocast(maker.executor.device), current(maker.executor.device):
            problem = attribute_problem(pytree.tree_leaves((args, kwargs)), given.names)
            if problem is not None:
                raise CaptureError(problem)
            fixed = fixed_copies(args, kwargs)
            step = casting(given.step(*fixed, maker.executor.device), cast)
            inputs = [leaf for leaf in pytree.tree_leaves(fixed) if isinstance(leaf, torch.Tensor)]
            return maker.make(step, given.options(step, seed, cast), inputs, (given.target, given.loss))

    args = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    try:
        modules = list(given.step(args, {}, executor.device).modules.values())
        fast = OptimizedStep(given, executor.device, modules, make)
        fast.prepare(args, {})
    except CANNOT as cause:
        return _as_it_is(given, executor.device, first_line(cause), warn)
    assert fast.gain is not None
    sys.stderr.write(f"gpusim.optimize: {fast.gain.text}\n")
    return fast


def _as_it_is(given: Given, device: torch.device, problem: str, warn: Say | None) -> Any:
    """Return the user's own, with one warning: the model or function, or a step that calls model, loss and
    optimizer.
    """
    if warn is not None:
        warn(problem)
    else:
        warnings.warn(f"gpusim.optimize: {problem}; the step runs as it is", stacklevel=4)
    if not given.trains:
        return given.target

    def eager(*args: Any, **kwargs: Any) -> Any:
        return given.eager(args, kwargs, device)

    vars(eager)[BEHIND] = given.behind
    return eager
