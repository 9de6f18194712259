"""Small matrix products: what counts as one, and how much longer the interval of such a step is."""

from __future__ import annotations

import msgspec
import pytest

from gpusim.bounds.bounds import bounds
from gpusim.formats.hardware import HardwareModel, load_hardware
from gpusim.plan.graph import OpGraph
from gpusim.plan.products import small_products_share
from gpusim.plan.schedule import Schedule
from gpusim.plan.tasks import Task
from gpusim.search.explore import choose
from gpusim.search.explored import Row
from gpusim.search.verdict import verdict
from gpusim.trace.store import load_trace
from tests.support.helpers import make_hardware, wide_trace


def with_products(frac: float) -> HardwareModel:
    model = make_hardware()
    uncertainty = msgspec.structs.replace(model.uncertainty, sequential_frac=0.0, schedule_frac=0.2, products_frac=frac)
    return msgspec.structs.replace(model, uncertainty=uncertainty)


def test_share_is_the_time_in_matrix_kernels_of_few_blocks_that_are_no_convolutions() -> None:
    """Of 100 ns: 10 elementwise, 20 in a product of 131 blocks, 30 in one of 132, and 40 in a convolution."""
    trace = wide_trace(1, depth=2)
    ops = [
        msgspec.structs.replace(op, target=target)
        for op, target in zip(
            trace.ops,
            ("aten.relu.default", "aten.mm.default", "aten.mm.default", "aten.convolution.default"),
            strict=True,
        )
    ]
    tasks = [
        [Task(name="k", dur_ns=10.0, blocks=4)],
        [Task(name="k", dur_ns=20.0, blocks=131, matrix=True)],
        [Task(name="k", dur_ns=30.0, blocks=132, matrix=True)],
        [Task(name="k", dur_ns=40.0, blocks=4, matrix=True)],
    ]
    assert small_products_share(msgspec.structs.replace(trace, ops=tuple(ops)), tasks, 132) == pytest.approx(0.2)


def test_interval_is_longer_on_the_slow_side_by_the_share_of_small_products_and_only_on_several_streams() -> None:
    model = with_products(0.1)
    assert model.interval_ns(1000, 2, False, small_products=0.5) == (833, round(1250 * 1.05))
    assert model.interval_ns(1000, 1, False, small_products=0.5) == (1000, 1000)


def test_gain_that_small_products_may_cost_is_none_to_recommend() -> None:
    sequential = Row("sequential", 1, 1000, 1.0, 0, Schedule((), ()))
    on_two = Row("wavefront", 2, 800, 1.25, 0, Schedule((), ()))
    model = with_products(0.1)
    assert choose([sequential, on_two], model, 1000) == on_two
    assert choose([sequential, on_two], model, 1000, small_products=1.0) == sequential


def test_verdict_says_what_small_products_may_cost() -> None:
    bound = bounds(OpGraph.build(wide_trace(2), with_products(0.1)))
    found = verdict(with_products(0.1), 2000, 1000, "wavefront", 2, bound, small_products=0.5)
    assert "Small matrix products lose time next to each other: it may take 5% longer" in found.text
    assert found.low == pytest.approx(2.0 / 1.2 / 1.05)
    assert "products" not in verdict(with_products(0.1), 2000, 1000, "wavefront", 2, bound).text


def test_bundled_steps_of_products_have_a_share_and_convolutional_ones_have_none() -> None:
    hardware = load_hardware("h200")
    shares = {
        name: OpGraph.build(load_trace(name), hardware).small_products
        for name in ("experts_small-infer-b2", "googlenet-infer-b1")
    }
    assert shares["experts_small-infer-b2"] > 0.5
    assert shares["googlenet-infer-b1"] < 0.05
