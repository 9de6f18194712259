"""Comparison of the results of two runs of a step, with tolerances.

The rule for one tensor, in capture and in replay: ||result - wanted|| is at most the dtype's limit times a scale. The
scale is ||wanted||, or, where the tensor is the remainder of larger terms that cancel, the rounding error of those
terms (`scales`). A gradient that is zero in theory, such as that of a bias before batch norm, is pure rounding error:
two correct runs differ by its own size, and a wrong run by far more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from gpusim.errors import ReplayError
from gpusim.formats.measurement import OutputCheck
from gpusim.formats.trace import Dtype, Trace

#: Largest difference of a result from the sequential run over its scale, by dtype: the effect that the order of atomic
#: additions in a kernel can have on a gradient. Schedules whose kernels are deterministic agree bit for bit.
TOLERANCE: dict[Dtype, float] = {"fp32": 1e-3, "tf32": 1e-3, "bf16": 2e-2}

#: Largest difference of a result, in multiples of the noise of `gpusim.gpu.replay.rounding`. Noise comes from shifting
#: the terms of a sum; another order also rounds the partial sums differently. Measured on a CPU, with one thread
#: instead of two and without oneDNN: where results of 15 training steps differ by more than 1e-3 of their norm, the
#: difference is at most 14 times the noise in FP32 and 1.4 times in bf16, where sums are kept in FP32.
NOISE_FACTOR: dict[Dtype, float] = {"fp32": 32.0, "tf32": 32.0, "bf16": 4.0}

#: `TOLERANCE` of a schedule that runs variants, for all results of one role together: a gradient that is zero but for
#: rounding has no digits to compare. With TF32, `TIMES_AS_FAR` is a better measure.
VARIANT_TOLERANCE: dict[Dtype, float] = {"fp32": 2e-3, "tf32": 5e-2, "bf16": 2e-1}

#: Largest error of a schedule with variants against a run in FP32, in multiples of the captured kernels' error. TF32
#: rounds operands to 10 bits of mantissa, and another algorithm rounds other operands. A training step of Inception-v3
#: amplifies that until gradients of two correct runs differ by a third (measured on an H200).
TIMES_AS_FAR = 2.0

#: Error of a result that is not finite: JSON has no infinity.
NOT_FINITE = 1e300

#: No measured noise: a result's scale is its norm.
NO_NOISE: Mapping[int, float] = MappingProxyType({})

Results = dict[int, torch.Tensor]
"""Results of a run by tensor index."""


@dataclass(frozen=True)
class Comparison:
    """Differences between two sets of results."""

    bit_equal: bool
    worst_error: float
    compared: int


def scales(trace: Trace, wanted: Results, noise: Mapping[int, float], limit: float) -> dict[int, float]:
    """Return, for each result, the norm that divides its error before the comparison with `limit`.

    That is ||wanted||. Where `NOISE_FACTOR` times the noise exceeds `limit` times ||wanted||, the scale grows to allow
    that error, but not beyond the norm of all results of the role together: a larger difference is not rounding.
    """
    norms = {index: _norm(tensor) for index, tensor in wanted.items()}
    together: dict[str, float] = {}
    for index, norm in norms.items():
        role = trace.tensors[index].role
        together[role] = math.hypot(together.get(role, 0.0), norm)
    factor = NOISE_FACTOR[trace.model.dtype] / limit
    return {
        index: max(norm, min(factor * noise.get(index, 0.0), together[trace.tensors[index].role]))
        for index, norm in norms.items()
    }


def errors(
    trace: Trace, results: Results, wanted: Results, noise: Mapping[int, float], limit: float
) -> dict[int, float]:
    """Return ||result - wanted|| over its scale, for each result."""
    return {
        index: _over(distance(results[index], wanted[index]), scale)
        for index, scale in scales(trace, wanted, noise, limit).items()
    }


def compare(trace: Trace, results: Results, wanted: Results, noise: Mapping[int, float] = NO_NOISE) -> Comparison:
    """Compare results tensor by tensor. Raises `ReplayError` for NaN in the reference or a missing result."""
    for index, reference in wanted.items():
        if index not in results:
            raise ReplayError(f"the schedule did not produce tensor {index}")
        if not torch.isfinite(reference).all():
            name = trace.tensors[index].name or f"tensor {index} ({trace.tensors[index].role})"
            raise ReplayError(f"the sequential run gives values that are not finite in {name}; nothing to compare with")
    if all(torch.equal(results[index], reference) for index, reference in wanted.items()):
        return Comparison(True, 0.0, len(wanted))
    apart = errors(trace, results, wanted, noise, TOLERANCE[trace.model.dtype])
    return Comparison(False, max(apart.values()), len(wanted))


def errors_by_role(trace: Trace, results: Results, wanted: Results) -> dict[str, float]:
    """Return ||result - wanted|| / ||wanted|| over all elements of all results of a role (`output`, `grad`, ...)."""
    differences: dict[str, float] = {}
    norms: dict[str, float] = {}
    for index, reference in wanted.items():
        role = trace.tensors[index].role
        differences[role] = math.hypot(differences.get(role, 0.0), distance(results[index], reference))
        norms[role] = math.hypot(norms.get(role, 0.0), _norm(reference))
    return {role: _relative(differences[role], norms[role]) for role in norms}


def check_same_kernels(
    trace: Trace, results: Results, wanted: Results, repeated: Comparison, noise: Mapping[int, float] = NO_NOISE
) -> OutputCheck:
    """Check that a schedule of the captured kernels gives the sequential run's results; `repeated` compares two such
    runs.
    """
    comparison = compare(trace, results, wanted, noise)
    tolerance = max(TOLERANCE[trace.model.dtype], 3 * repeated.worst_error)
    return OutputCheck(
        equal=comparison.worst_error <= tolerance,
        bit_equal=comparison.bit_equal,
        sequential_repeats=repeated.bit_equal,
        worst_error=comparison.worst_error,
        sequential_error=repeated.worst_error,
        tolerance=tolerance,
        compared=comparison.compared,
    )


def check_variants(
    trace: Trace, results: Results, wanted: Results, repeated: Comparison, in_fp32: Results | None = None
) -> OutputCheck:
    """Check that a schedule with variants computes the step as well as the captured kernels do.

    With the captured ops' results `in_fp32`, role by role: the error against them may be `TIMES_AS_FAR` times that of
    the sequential run. Without, results are compared with the sequential run's, role by role.
    """
    comparison = compare(trace, results, wanted)
    apart = max(errors_by_role(trace, results, wanted).values(), default=0.0)
    tolerance = max(VARIANT_TOLERANCE[trace.model.dtype], 3 * repeated.worst_error)
    equal = apart <= tolerance
    fp32_error = sequential_fp32_error = None
    if in_fp32 is not None:
        own, captured = (errors_by_role(trace, each, in_fp32) for each in (results, wanted))
        least = max(TOLERANCE[trace.model.dtype], 3 * repeated.worst_error)
        equal = all(own[role] <= max(least, TIMES_AS_FAR * captured[role]) for role in own)
        worst = max(own, key=lambda role: own[role] / max(least, captured[role]), default=None)
        if worst is not None:
            fp32_error, sequential_fp32_error = own[worst], captured[worst]
            tolerance = max(least, TIMES_AS_FAR * captured[worst])
    return OutputCheck(
        equal=equal,
        bit_equal=comparison.bit_equal,
        sequential_repeats=repeated.bit_equal,
        worst_error=apart,
        sequential_error=repeated.worst_error,
        tolerance=tolerance,
        compared=comparison.compared,
        fp32_error=fp32_error,
        sequential_fp32_error=sequential_fp32_error,
    )


def in_double(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in 64 bits a number: complex ones keep their imaginary part."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the norm of the difference of two tensors; equal infinities, of masked scores, do not differ."""
    one, other = in_double(one), in_double(other)
    norm: float = torch.linalg.vector_norm(one - other).item()
    if not math.isfinite(norm):
        norm = torch.linalg.vector_norm(torch.where(one == other, 0.0, one - other)).item()
    return norm


def _norm(tensor: torch.Tensor) -> float:
    """Return the norm of all elements but infinities; NaN where there is one."""
    tensor = in_double(tensor)
    norm: float = torch.linalg.vector_norm(tensor).item()
    if norm == math.inf:
        norm = torch.linalg.vector_norm(torch.where(tensor.isinf(), 0.0, tensor)).item()
    return norm


def _over(difference: float, scale: float) -> float:
    """Return an error over its scale; a result with scale zero must match exactly."""
    if not difference:
        return 0.0
    error = difference / scale if scale else math.inf
    return error if math.isfinite(error) else NOT_FINITE


def _relative(difference: float, norm: float) -> float:
    error = difference / norm if norm else difference
    return error if math.isfinite(error) else NOT_FINITE
