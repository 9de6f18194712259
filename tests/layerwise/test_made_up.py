"""Kernels that no trace has: what they take together, and what a collective beside them costs."""

from __future__ import annotations

import msgspec
import pytest

from gpusim.engine.base import engine_by_name
from gpusim.formats.hardware import load_hardware
from gpusim.layerwise.layers import Layer
from gpusim.layerwise.made_up import ONE_WAVE, collective_kernel, made_up_pass
from gpusim.plan.tasks import Plan, Task

H200 = load_hardware("h200")


def layer(kind: str) -> Layer:
    return Layer(name="a", kind=kind, output=(32, 64, 28, 28), inputs=())


@pytest.mark.parametrize("kind", ["convolution", "linear", "pool"])
@pytest.mark.parametrize("gpu", ["h200", "p100"])
def test_the_kernels_of_a_pass_take_its_time_and_traffic(kind: str, gpu: str) -> None:
    """100 us and 1 MB: in two kernels where captured steps say so, else in one."""
    tasks = made_up_pass(layer(kind), 1e5, 1e6, load_hardware(gpu))
    assert sum(task.dur_ns for task in tasks) == pytest.approx(1e5)
    assert sum(task.dram_bytes for task in tasks) == pytest.approx(1e6)
    assert len(tasks) == (2 if gpu == "h200" and kind in ONE_WAVE else 1)


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_beside_a_collective_a_kernel_of_one_wave_takes_two(engine: str) -> None:
    """132 blocks, one on an SM; 24 SMs are a collective's, so 24 blocks run after the other 108: 100 us become 200."""
    kernel = made_up_pass(layer("linear"), 1e5 / ONE_WAVE["linear"], 0.0, H200)[0]
    assert (kernel.blocks, kernel.blocks_per_sm, kernel.dur_ns) == (132, 1, pytest.approx(1e5))
    collective = collective_kernel(1e6, 0.0, 24, H200, "sync")
    tasks: tuple[Task, ...] = (collective, msgspec.structs.replace(kernel, queue=1))
    timeline = engine_by_name(engine).run(Plan(tasks), H200)
    assert timeline.end_ns[1] - timeline.start_ns[1] == pytest.approx(2e5, rel=0.02)
