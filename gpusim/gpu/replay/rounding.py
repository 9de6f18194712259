"""Effect of rounding on each result of a step.

Two correct runs of a step differ: atomic additions come in another order, another kernel sums other parts first. The
difference is measured: the step runs again with every new tensor perturbed by one unit in the last place, up or down at
random (Monte Carlo arithmetic: Parker, "Monte Carlo Arithmetic", UCLA 1997). A small result of large terms that cancel
moves by far more than one unit of its own: its noise is as large as the rounding of its terms.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from gpusim.formats.trace import Trace
from gpusim.gpu.replay.compare import distance
from gpusim.gpu.replay.execute import InitialState, Runner, results_of

#: Perturbed runs; the noise is the largest over them and one plain repetition.
SHAKEN_RUNS = 2


def rounding_noise(
    runner: Runner, state: InitialState, releases: Sequence[Iterable[int]], seed: int
) -> dict[int, float]:
    """Return, for each result of the step by tensor id, the norm of the change from rounding.

    `state` is bound to `runner`; it is restored afterwards, and the runner holds no temporaries.
    """
    plain = _results(runner, state, releases, seed, None)
    noise = dict.fromkeys(plain, 0.0)
    for number in range(SHAKEN_RUNS + 1):
        generator = torch.Generator(device=runner.device).manual_seed(seed + number) if number else None
        for index, tensor in _results(runner, state, releases, seed, generator).items():
            noise[index] = max(noise[index], distance(tensor, plain[index]))
    return noise


def _results(
    runner: Runner,
    state: InitialState,
    releases: Sequence[Iterable[int]],
    seed: int,
    shaking: torch.Generator | None,
) -> dict[int, torch.Tensor]:
    """Return the results of one run from the initial state; with a generator, every new tensor is perturbed."""
    new_tensors = _made(runner.trace)
    state.restore()
    torch.manual_seed(seed)
    for op in range(len(runner.trace.ops)):
        runner.release(releases[op])
        runner.run(op)
        for index in new_tensors[op] if shaking is not None else ():
            _shake(runner.tensors[index], shaking)
    results = results_of(runner.trace, runner.tensors)
    runner.drop_temporaries()
    state.restore()
    return results


def _made(trace: Trace) -> list[list[int]]:
    """Return, for each op, the results in memory of their own: neither views nor changed in place."""
    known = {tensor.storage for tensor in trace.tensors if tensor.init is not None}
    new_tensors: list[list[int]] = []
    for op in trace.ops:
        new: list[int] = []
        for index in (*op.outputs, *op.writes):
            if index is not None and trace.tensors[index].storage not in known:
                known.add(trace.tensors[index].storage)
                new.append(index)
        new_tensors.append(new)
    return new_tensors


def _shake(tensor: torch.Tensor | None, generator: torch.Generator) -> None:
    """Perturb each element by one unit in the last place, up or down at random."""
    if tensor is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return  # several elements share memory
    eps = torch.finfo(tensor.dtype).eps
    factors = torch.empty_like(tensor, dtype=tensor.dtype.to_real()).bernoulli_(0.5, generator=generator)
    tensor.mul_(factors.mul_(2 * eps).add_(1 - eps))
