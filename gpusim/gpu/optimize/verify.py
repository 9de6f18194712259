"""Comparison of a fast step with the user's own step: results, gradients and changed state, once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gpusim.errors import CaptureError, ReplayError
from gpusim.formats.trace import Dtype
from gpusim.gpu.capture.optimizers import named_states
from gpusim.gpu.capture.user_step import UserStep
from gpusim.gpu.optimize.captured import Captured, Computed, flattened
from gpusim.gpu.optimize.executors import UserRunner, state_of
from gpusim.gpu.replay.compare import NOISE_FACTOR, TIMES_AS_FAR, TOLERANCE, VARIANT_TOLERANCE, in_double
from gpusim.gpu.replay.rounding import rounding_noise
from gpusim.plan.sync import program_order_releases
from gpusim.text import short_value

Results = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Verified:
    """Deviation of results from eager's, by kind; `eager` is the deviation between two eager runs."""

    worst: float
    eager: float
    compared: int
    bit_equal: bool


def results_of_step(step: UserStep, returned: Any) -> Results:
    """Copy all that a step leaves: its return value, gradients, parameters, buffers, states of optimizers."""
    leaves = [leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, torch.Tensor)]
    results = {f"output {place}": leaf for place, leaf in enumerate(leaves)}
    parameters = step.parameters()
    results |= {f"parameter {name}": parameter for name, parameter in parameters.items()}
    results |= {f"gradient {name}": p.grad for name, p in parameters.items() if p.grad is not None}
    for prefix, module in step.modules.items():
        named = module.named_buffers()
        results |= {f"buffer {'.'.join(filter(None, (prefix, name)))}": buffer for name, buffer in named}
    names = {id(parameter): name for name, parameter in parameters.items()}
    results |= {f"state {name}": tensor for name, tensor in named_states(step.optimizers, names)}
    return {name: tensor.detach().clone() for name, tensor in results.items()}


def noise_of_step(captured: Captured, device: torch.device) -> dict[str, float]:
    """Return the effect of rounding on each result, by the names of `results_of_step`.

    The user's tensors are as recorded afterwards.
    """
    trace, recorded = captured.trace, captured.recorded
    runner, state = UserRunner(captured, trace, device), state_of(captured)
    noise = rounding_noise(runner, state, program_order_releases(trace), captured.options.seed)
    kinds = {"parameter": "parameter", "buffer": "buffer", "optimizer_state": "state"}
    named = {
        f"{kinds[tensor.role]} {tensor.name}": noise[index]
        for index, tensor in enumerate(trace.tensors)
        if tensor.init is not None and tensor.role in kinds and index in noise
    }
    places = [leaf.tensor for leaf in captured.returned.leaves if isinstance(leaf, Computed)]
    named |= {f"output {place}": noise.get(index, 0.0) for place, index in enumerate(places)}
    gradients = zip(captured.gradient_names, recorded.gradients, strict=True)
    return named | {f"gradient {name}": noise.get(index, 0.0) for name, index in gradients}


def apart(results: Results, wanted: Results, before: Results, noise: Mapping[str, float]) -> tuple[float, str]:
    """Return the largest distance of results of one kind, over that kind's norm or change; and the kind.

    Kinds are outputs, gradients, parameters, buffers and states. Changed state is compared by its change: a parameter
    moves by little, and all of that may be wrong. A difference that `noise` explains counts as nothing. Raises
    `ReplayError` for a missing result.
    """
    by_kind = shares(results, wanted, before, noise)
    worst = max(by_kind, key=lambda kind: by_kind[kind], default="")
    return by_kind.get(worst, 0.0), worst


def shares(results: Results, wanted: Results, before: Results, noise: Mapping[str, float]) -> dict[str, float]:
    """Return the distance of each kind."""
    missing = wanted.keys() ^ results.keys()
    if missing:
        raise ReplayError(f"'{min(missing)}' is there after one of the two steps only")
    differences: dict[str, float] = {}
    norms: dict[str, float] = {}
    for name, reference in wanted.items():
        kind = name.partition(" ")[0]
        start = before.get(name) if kind in ("parameter", "buffer", "state") else None
        changed = start is not None and start.shape == reference.shape
        moved = in_double(reference) - in_double(start) if changed and start is not None else reference
        distance = _distance(results[name], reference) - noise.get(name, 0.0)
        distance = 0.0 if distance <= 0.0 else distance  # NaN stays
        differences[kind] = math.hypot(differences.get(kind, 0.0), distance)
        # Stored values cannot be compared more finely than their own rounding.
        rounded = changed and (reference.is_floating_point() or reference.is_complex())
        eps = torch.finfo(reference.dtype).eps if rounded else 0.0
        norms[kind] = math.hypot(norms.get(kind, 0.0), _norm(moved), eps * _norm(reference))
    return {kind: _share(differences[kind], norms[kind]) for kind in differences}


def verify(
    step: UserStep,
    eager: Callable[[], Any],
    fast: Callable[[], Any],
    restore: Callable[[], None],
    dtype: Dtype,
    noise: Callable[[], Mapping[str, float]],
    exact: Callable[[], Any],
) -> Verified:
    """Run the user's step twice and the fast one once, each from the same state, and compare.

    `noise` is measured where results differ by more than the limit. With TF32 they may still be `TIMES_AS_FAR` times as
    far from those of `exact`, the user's step without it, as eager's are. Raises `CaptureError` where the user's step
    differs from run to run, `ReplayError` where the fast one differs.
    """
    limit = VARIANT_TOLERANCE[dtype]
    restore()
    before = results_of_step(step, None)
    eagers = eager()
    wanted = results_of_step(step, eagers)
    restore()
    again = results_of_step(step, eager())
    restore()
    returned = fast()
    check_returned(returned, eagers)
    results = results_of_step(step, returned)
    bit_equal = equal_bits(results, wanted)
    explained: dict[str, float] = {}
    repeated, kind = apart(again, wanted, before, explained)
    error, worst = apart(results, wanted, before, explained)
    if not max(repeated, error) <= limit:
        restore()
        factor = NOISE_FACTOR[dtype]
        explained = {name: factor * moved for name, moved in noise().items()}
        repeated, kind = apart(again, wanted, before, explained)
        error, worst = apart(results, wanted, before, explained)
    if not repeated <= limit:
        raise CaptureError(f"two runs of the step from the same state differ in its {kind}s by {repeated:.2g}")
    if not error <= limit and dtype == "tf32":
        restore()
        reference = results_of_step(step, exact())
        own, others = (shares(each, reference, before, {}) for each in (results, wanted))
        if all(own[kind] <= max(TOLERANCE[dtype], TIMES_AS_FAR * others[kind]) for kind in own):
            return Verified(error, repeated, len(wanted), bit_equal)
    if not error <= limit:
        raise ReplayError(f"the {worst}s are {error:.2g} away from eager's (limit {limit:.2g})")
    return Verified(error, repeated, len(wanted), bit_equal)


def check_returned(returned: Any, wanted: Any) -> None:
    """Raise `ReplayError` where a step returns another structure, or other values than tensors, than the user's own."""
    (leaves, spec), (wanted_leaves, wanted_spec) = flattened(returned), flattened(wanted)
    if spec != wanted_spec:
        raise ReplayError("captured, the step returns another structure: does it ask an optimizer for options?")
    for leaf, other in zip(leaves, wanted_leaves, strict=True):
        if isinstance(leaf, torch.Tensor) != isinstance(other, torch.Tensor) or (
            not isinstance(leaf, torch.Tensor) and (type(leaf) is not type(other) or repr(leaf) != repr(other))
        ):
            given, own = ("a tensor" if isinstance(each, torch.Tensor) else short_value(each) for each in (leaf, other))
            raise ReplayError(f"captured, the step returns {given} in place of {own}")


def equal_bits(one: Results, other: Results) -> bool:
    """Whether two sets of results are equal bit for bit, NaN included."""
    return one.keys() == other.keys() and all(
        torch.equal(_bits(tensor), _bits(other[name])) for name, tensor in one.items()
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the norm of the difference; equal infinities, or NaN in both, do not differ."""
    if not one.numel():
        return 0.0
    one, other = in_double(one), in_double(other)
    same = (one == other) | (one.isnan() & other.isnan())
    return torch.linalg.vector_norm(torch.where(same, 0.0, one - other)).item()


def _norm(tensor: torch.Tensor) -> float:
    """Return the norm of the finite elements."""
    return torch.linalg.vector_norm(in_double(tensor).nan_to_num(0.0, 0.0, 0.0)).item() if tensor.numel() else 0.0


def _share(difference: float, norm: float) -> float:
    share = difference / norm if norm else difference
    return share if math.isfinite(share) else math.inf
