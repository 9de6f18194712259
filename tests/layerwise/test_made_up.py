"""Kernels that no trace has, and what a concurrent collective costs them."""

from __future__ import annotations

import msgspec
import pytest

from gpusim.engine.base import engine_by_name
from gpusim.formats.hardware import load_hardware
from gpusim.layerwise.made_up import collective_kernel, made_up_kernel
from gpusim.plan.tasks import Plan, Task

H200 = load_hardware("h200")


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_beside_a_collective_a_kernel_loses_time_in_proportion_to_its_sms(engine: str) -> None:
    """A collective has 24 of 132 SMs: 100 us become 100 x 132 / 108 us, and up to a last wave more."""
    kernel = made_up_kernel("a", 1e5, 0.0, True, H200)
    collective = collective_kernel(1e6, 0.0, 24, H200, "sync")
    tasks: tuple[Task, ...] = (collective, msgspec.structs.replace(kernel, queue=1))
    timeline = engine_by_name(engine).run(Plan(tasks), H200)
    assert 1e5 * 132 / 108 <= timeline.end_ns[1] - timeline.start_ns[1] <= 1.3e5
