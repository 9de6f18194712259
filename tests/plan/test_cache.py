"""Risk of losing the L2 cache on several streams, worked out by hand, and its reports."""

from __future__ import annotations

import msgspec
import pytest

from gpusim.bounds.bounds import bounds
from gpusim.formats.hardware import HardwareModel, load_hardware
from gpusim.plan.graph import OpGraph
from gpusim.plan.l2_cache import Touched, touched
from gpusim.plan.schedule import Schedule
from gpusim.rules.l2_cache import USABLE_SHARE
from gpusim.search.explored import Row, conclude
from gpusim.search.verdict import Verdict, verdict
from gpusim.trace.store import load_trace
from tests.support.helpers import make_hardware, make_trace, op

H200 = load_hardware("h200")
#: Bytes of each tensor below.
KIB = 1024
#: One input, and four results, of which two are live at a time.
STEPS = [op("a", "x", "p"), op("b", "p", "q"), op("c", "q", "r"), op("d", "r x", "s")]


def with_cache(l2_bytes: int, **fields: float) -> HardwareModel:
    """Return round hardware with an L2 cache of this size; `fields` are of its uncertainty."""
    model = make_hardware()
    return msgspec.structs.replace(
        model,
        memory=msgspec.structs.replace(model.memory, l2_bytes=l2_bytes),
        uncertainty=msgspec.structs.replace(model.uncertainty, **fields),
    )


def test_memory_that_a_step_touches_is_that_of_the_hand_worked_example() -> None:
    """x lives throughout; p and q, q and r, r and s are live together; at most, p, q, r and s have memory of
    their own.
    """
    found = touched(make_trace(STEPS, elements=KIB // 4))
    assert found == Touched(lasting_bytes=KIB, one_stream_bytes=3 * KIB, at_most_bytes=5 * KIB)


@pytest.mark.parametrize(("usable_kib", "wanted"), [(2.9, False), (3.0, True), (4.9, True), (5.0, False)])
def test_step_may_lose_a_cache_that_holds_it_on_one_stream_and_not_at_most(usable_kib: float, wanted: bool) -> None:
    memory = with_cache(round(usable_kib * KIB / USABLE_SHARE) + 1).memory
    assert touched(make_trace(STEPS, elements=KIB // 4)).may_lose_cache(memory) is wanted


def test_of_the_bundled_steps_only_googlenet_inference_may_lose_the_cache() -> None:
    """Its 27 MB of parameters stay in 60 MiB; Inception-v3's 97 MB never do, SqueezeNet's 26 MB in total always do."""
    found = {
        name: touched(load_trace(name)).may_lose_cache(H200.memory)
        for name in ("googlenet-infer-b1", "inception_v3-infer-b1", "squeezenet1_1-infer-b1", "googlenet-train-b8")
    }
    assert [name for name, exposed in found.items() if exposed] == ["googlenet-infer-b1"]


def test_interval_of_other_kernels_is_longer_on_the_slow_side_on_one_stream_too() -> None:
    """They are timed outside the step, and those that came out fast are chosen: 10 % more."""
    model = with_cache(1, sequential_frac=0.0, schedule_frac=0.2, variants_frac=0.1)
    assert model.interval_ns(1000, 1000, 1, other_kernels=True) == (1000, 1100)
    assert model.interval_ns(1000, 1000, 2, other_kernels=True) == (800, 1320)
    bound = bounds(OpGraph.build(make_trace(STEPS, elements=KIB // 4), model))
    found = verdict(model, 2000, 1000, "with variants", 2, bound, other_kernels=True)
    alone = verdict(model, 2000, 1000, "with variants", 1, bound, other_kernels=True)
    assert "with 2 streams (with variants)" in found.text
    assert "with 1 stream (with variants)" in alone.text
    assert found.other_kernels
    assert "other kernels, which are less well known: it may take 10.0% longer" in found.text
    assert "L2" not in found.text


def explored_verdict(model: HardwareModel, streams: int) -> Verdict:
    """Return the verdict on a schedule of `STEPS` on so many streams."""
    graph = OpGraph.build(make_trace(STEPS, elements=KIB // 4), model)
    assert graph.may_lose_cache
    schedule = Schedule(tuple(range(len(STEPS))), (0, 0, 0, streams - 1))
    row = Row("wavefront", streams, 1000, 2.0, 0, schedule)
    return conclude(graph, row, 2000, bounds(graph), None).verdict


def test_verdict_says_that_the_cost_of_a_lost_cache_is_not_predicted_where_it_is_not() -> None:
    """On several streams, and on a GPU whose cache was not measured. The interval is as wide as elsewhere."""
    measured = with_cache(round(3 * KIB / USABLE_SHARE) + 1, schedule_frac=0.25)
    model = msgspec.structs.replace(measured, memory=msgspec.structs.replace(measured.memory, l2_bytes_per_ns=0.0))
    found = explored_verdict(model, 2)
    assert "fits the L2 cache on one stream and may not on several; what that costs is not predicted" in found.text
    assert f"the model of {model.name} has no measured cache" in found.text
    assert found.low == pytest.approx(2 / 1.25)
    assert "L2" not in explored_verdict(model, 1).text
    assert "L2" not in explored_verdict(measured, 2).text
    assert explored_verdict(measured, 2).low == found.low
