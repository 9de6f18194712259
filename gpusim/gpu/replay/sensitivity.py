"""Check that a step's outputs depend on its ops.

A trace keeps the distribution of its weights, not the weights. Where that lets a signal die out (GoogLeNet as
initialized by torchvision: 0.01 for every convolution, and at inference no batch statistics to compensate), the outputs
are the last layer's bias whatever the ops before it compute, and comparing them shows nothing. Nor does it where the
last layer's weights are zero, as in torchvision's vision transformers.
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
    up to it, or drawn where all are zero. Training steps are left alone: gradients depend on everything.
    """
    if runner.trace.model.mode != "infer" or _change(runner, state, releases, seed) >= _least(runner.trace):
        return True
    generator = torch.Generator(device=runner.device).manual_seed(seed)
    for index, tensor in enumerate(runner.trace.tensors):
        if tensor.role == "parameter" and tensor.init is not None and len(tensor.shape) > 1:
            enlarge(state.pristine[index], generator)
            state.tensors[index].copy_(state.pristine[index])
    return _change(runner, state, releases, seed) >= _least(runner.trace)


def _least(trace: Trace) -> float:
    """Return the least relative change of outputs with the input, so that no error of this size passes for equal."""
    return TOLERANCE[trace.model.dtype]


def enlarge(weight: torch.Tensor, generator: torch.Generator) -> None:
    """Scale a weight of two dimensions or more up to He initialization, in place; draw it where all of it is zero."""
    if weight.is_floating_point() and weight.numel():
        spread = weight.double().square().mean().sqrt().item()
        wanted = math.sqrt(2.0 / math.prod(weight.shape[1:]))
        if spread == 0.0:
            weight.normal_(0.0, wanted, generator=generator)
        elif spread < wanted:
            weight.mul_(wanted / spread)


def _change(runner: Runner, state: InitialState, releases: Sequence[Iterable[int]], seed: int) -> float:
    """Return the largest relative change of an output with another input: ||other - output|| / ||output||."""
    outputs = _outputs(runner, state, releases)
    generator = torch.Generator(device=runner.device).manual_seed(seed + 1)
    ordered = ordered_inputs(runner.trace)
    for index, tensor in state.tensors.items():
        if runner.trace.tensors[index].role == "input" and index not in ordered:
            shuffle(tensor, generator)
    others = _outputs(runner, state, releases, restore=False)
    state.restore()
    return largest_change((output, others[index]) for index, output in outputs.items())


def largest_change(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return the largest relative change of an output, ||other - output|| / ||output||; infinity if none is finite.

    An output that is zero in both has not changed.
    """
    changes = [
        _norm(other.double() - output.double()) / (_norm(output) or _norm(other) or 1.0) for output, other in pairs
    ]
    return max((change for change in changes if math.isfinite(change)), default=math.inf)


def _norm(tensor: torch.Tensor) -> float:
    return torch.linalg.vector_norm(tensor.double()).item()


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


def shuffle(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Shuffle the elements: other values with the same distribution."""
    order = torch.randperm(tensor.numel(), generator=generator, device=tensor.device)
    tensor.copy_(tensor.reshape(-1)[order].reshape(tensor.shape))
