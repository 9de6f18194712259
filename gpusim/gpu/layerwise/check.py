"""Comparison of a plan with one device: the loss, and each rank's gradients."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch

from gpusim.defaults import DEFAULT_SEED, BatchNorm
from gpusim.gpu.layerwise.batch import make_data
from gpusim.gpu.layerwise.one_device import run_on_one_device
from gpusim.gpu.layerwise.rank import Rank
from gpusim.gpu.layerwise.sharing import groups_of
from gpusim.gpu.layerwise.transport import Distributed, Transport
from gpusim.layerwise.costs import BUCKET_BYTES
from gpusim.layerwise.fixed_plans import Choice
from gpusim.layerwise.layers import LayerGraph

#: Largest error relative to the largest value of the tensor: sums in another order round differently.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-3, torch.bfloat16: 5e-2}
#: Errors of small gradients are relative to this share of the step's largest gradient: by rounding, a gradient that is
#: zero has about the dtype's precision of that one.
SMALL = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 1e-1}


@dataclass(frozen=True, slots=True)
class Compared:
    """A plan's step compared with one device's."""

    loss: float
    loss_difference: float
    """Relative error of the loss."""
    gradient_difference: float
    """Largest error over this rank's gradients, relative to the largest value of each."""
    gradient: str
    """Name of the gradient with that error."""
    equal: bool


def compare_plan(
    graph: LayerGraph,
    choice: Choice,
    gpus: int,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float64,
    seed: int = DEFAULT_SEED,
    transport: Transport | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Compared:
    """Run a plan on this rank and compare it with one device; needs torch.distributed with `gpus` ranks.

    `graph` is that of the whole batch. Statistics of BatchNorm are synchronised, as one device has them.
    """
    batch_norm: BatchNorm = "synchronised"
    transport = transport or Distributed(groups_of(graph, choice, gpus, batch_norm))
    data = make_data(graph, seed, dtype, device)
    rank = Rank(
        graph,
        choice,
        gpus,
        transport,
        device=device,
        dtype=dtype,
        seed=seed,
        batch_norm=batch_norm,
        same_dropout=True,
        bucket_bytes=bucket_bytes,
    )
    loss = rank.step(data).clone()
    transport.all_reduce(loss, tuple(range(gpus)))
    expected_loss, expected = run_on_one_device(graph, data, dtype=dtype, seed=seed, device=device)
    worst, whose = 0.0, ""
    typical = max(float(gradient.abs().max()) for gradient in expected.values())
    shares = rank.shares()
    found = rank.gradients()
    for name, (state, parameter) in shares.items():
        whole, gradient = expected.get(name), found.get(name)
        if not state.active:
            continue
        if whole is None or gradient is None:  # zero, if it is that of a layer that nothing uses
            if any(each is not None and bool(each.any()) for each in (whole, gradient)):
                worst, whose = inf, name
            continue
        wanted = parameter.part(whole, state.low[1], state.high[1])
        # Some gradients are zero except for rounding: of a bias before BatchNorm, or of attention's keys.
        scale = max(float(whole.abs().max()), SMALL[dtype] * typical)
        difference = float((gradient - wanted).abs().max()) / scale
        if not difference <= worst:  # NaN is worse than any
            worst, whose = difference, name
    loss_difference = abs(float(loss - expected_loss)) / max(abs(float(expected_loss)), 1e-12)
    equal = worst <= TOLERANCE[dtype] and loss_difference <= TOLERANCE[dtype]  # false for NaN, which `max` may drop
    return Compared(float(loss), loss_difference, worst, whose, equal)
