"""Check that a step's outputs depend on its ops.

A trace keeps the distribution of its weights, not the weights. Where that lets a signal die out (GoogLeNet as
initialized by torchvision: 0.01 for every convolution, and at inference no batch statistics to compensate), the outputs
are the last layer's bias whatever the ops before it compute, and comparing them shows nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from gpusim.formats.trace import Trace
from gpusim.gpu.replay.compare import TOLERANCE
from gpusim.gpu.replay.execute import InitialState, Runner, results_of
from gpusim.gpu.replay.saved import ordered_inputs


def make_sensitive(runner: Runner, state: InitialState, releases: Sequence[Iterable[int]], seed: int) -> bool:
    """Return whether the outputs of an inference step depend on its input; weights too small for that are enlarged.

    `state` is bound to `runner`, and is restored at the end except for such weights: those with two dimensions or more,
    and elements smaller on average than He initialization (root of 2 / inputs of an output; He et al. 2015), are scaled
    up to it. Training steps are left alone: gradients depend on everything.
    """
    if runner.trace.model.mode != "infer" or _change(runner, state, releases, seed) >= _least(runner.trace):
        return True
    for index, tensor in enumerate(runner.trace.tensors):
        if tensor.role == "parameter" and tensor.init is not None and len(tensor.shape) > 1:
            _enlarge(state, index)
    return _change(runner, state, releases, seed) >= _least(runner.trace)


def _least(trace: Trace) -> float:
    """Return the least relative change of outputs with the input, so that no error of this size passes for equal."""
    return TOLERANCE[trace.model.dtype]


def _enlarge(state: InitialState, index: int) -> None:
    for weight in (state.tensors[index], state.pristine[index]):
        if weight.is_floating_point() and weight.numel():
            spread = weight.double().square().mean().sqrt().item()
            wanted = math.sqrt(2.0 / math.prod(weight.shape[1:]))
            if 0.0 < spread < wanted:
                weight.mul_(wanted / spread)


def _change(runner: Runner, state: InitialState, releases: Sequence[Iterable[int]], seed: int) -> float:
    """Return the largest relative change of an output with another input: ||other - output|| / ||output||."""
    outputs = _outputs(runner, state, releases)
    generator = torch.Generator(device=runner.device).manual_seed(seed + 1)
    ordered = ordered_inputs(runner.trace)
    for index, tensor in state.tensors.items():
        if runner.trace.tensors[index].role == "input" and index not in ordered:
            _shuffle(tensor, generator)
    others = _outputs(runner, state, releases, restore=False)
    state.restore()
    changes = [
        (torch.linalg.vector_norm(others[index].double() - output.double()) / _norm(output)).item()
        for index, output in outputs.items()
    ]
    return max((change for change in changes if math.isfinite(change)), default=math.inf)


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(tensor.double())


def _outputs(
    runner: Runner, state: InitialState, releases: Sequence[Iterable[int]], restore: bool = True
) -> dict[int, torch.Tensor]:
    if restore:
        state.restore()
    runner.run_in_order(releases)
    tensors = runner.trace.tensors
    outputs = {i: t for i, t in results_of(runner.trace, runner.tensors).items() if tensors[i].role == "output"}
    runner.drop_temporaries()
    return outputs


def _shuffle(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Shuffle the elements: other values with the same distribution."""
    order = torch.randperm(tensor.numel(), generator=generator, device=tensor.device)
    tensor.copy_(tensor.reshape(-1)[order].reshape(tensor.shape))
