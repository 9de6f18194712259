"""Results of a schedule with variants: compared by role, and with TF32 by each run's distance from one in FP32."""

from __future__ import annotations

import msgspec
import pytest
import torch

from gpusim.formats.trace import Trace
from gpusim.gpu.replay.compare import (
    TIMES_AS_FAR,
    TOLERANCE,
    VARIANT_TOLERANCE,
    Comparison,
    check_same_kernels,
    check_variants,
    compare,
    errors_by_role,
)
from tests.support.helpers import chain_trace


def results_trace(dtype: str) -> Trace:
    """Make a trace of two gradients and an output."""
    made = chain_trace(3)
    roles = ("gradient", "gradient", "output", "output")
    tensors = tuple(
        msgspec.structs.replace(tensor, role=role) for tensor, role in zip(made.tensors, roles, strict=True)
    )
    model = msgspec.structs.replace(made.model, dtype=dtype)  # type: ignore[arg-type]
    return msgspec.structs.replace(made, tensors=tensors, model=model)


def results(first: float, second: float, output: float) -> dict[int, torch.Tensor]:
    return {0: torch.tensor([first, 4.0]), 1: torch.tensor([second]), 2: torch.tensor([output])}


EXACT = Comparison(bit_equal=True, worst_error=0.0, compared=3)


def test_results_of_variants_are_compared_by_role_within_a_wider_tolerance() -> None:
    """A gradient that is pure rounding does not decide; a wrong one does."""
    made = results_trace("fp32")
    wanted, found = results(3.0, 1e-9, 1.0), results(3.0, 2e-9, 1.0)
    assert compare(made, found, wanted).worst_error == pytest.approx(1.0)
    assert errors_by_role(made, found, wanted) == {"gradient": pytest.approx(2e-10), "output": 0.0}
    assert check_variants(made, found, wanted, EXACT).equal
    assert not check_same_kernels(made, found, wanted, EXACT).equal
    found[2] = torch.tensor([1.2])
    assert not check_variants(made, found, wanted, EXACT).equal
    assert all(VARIANT_TOLERANCE[dtype] > TOLERANCE[dtype] for dtype in TOLERANCE)


def test_with_tf32_a_variant_may_be_twice_as_far_from_fp32_as_the_captured_kernels() -> None:
    """Two correct runs may differ widely; their distance to the FP32 run counts, in each role."""
    made = results_trace("tf32")
    in_fp32, wanted = results(3.0, 1.0, 1.0), results(3.3, 1.0, 1.0)
    captured = errors_by_role(made, wanted, in_fp32)["gradient"]
    near = check_variants(made, results(2.5, 1.0, 1.0), wanted, EXACT, in_fp32)
    assert near.equal
    assert near.worst_error > VARIANT_TOLERANCE["tf32"]
    assert near.sequential_fp32_error == captured
    assert near.fp32_error == pytest.approx(captured * 5 / 3)
    assert near.tolerance == pytest.approx(TIMES_AS_FAR * captured)
    assert not check_variants(made, results(2.3, 1.0, 1.0), wanted, EXACT, in_fp32).equal
    # The captured kernels' output is exact, so the plain tolerance applies to a variant's.
    assert check_variants(made, results(3.3, 1.0, 1.0009), wanted, EXACT, in_fp32).equal
    assert not check_variants(made, results(3.3, 1.0, 1.1), wanted, EXACT, in_fp32).equal
