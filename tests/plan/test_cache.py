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
from gpusim.search.explore import choose
from gpusim.search.explored import Row
from gpusim.search.verdict import verdict
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


def test_interval_of_a_step_that_may_lose_the_cache_is_longer_on_the_slow_side() -> None:
    model = with_cache(1, sequential_frac=0.0, schedule_frac=0.2, cache_frac=0.1)
    assert model.interval_ns(1000, 1000, 2, may_lose_cache=False) == (800, 1200)
    assert model.interval_ns(1000, 1000, 2, may_lose_cache=True) == (800, 1320)
    assert model.interval_ns(1000, 1000, 1, may_lose_cache=True) == (1000, 1000)


def test_interval_of_other_kernels_is_longer_on_the_slow_side_on_one_stream_too() -> None:
    """They are timed outside the step, and those that came out fast are chosen: 10 % more, on top of the cache's."""
    model = with_cache(1, sequential_frac=0.0, schedule_frac=0.2, cache_frac=0.1, variants_frac=0.1)
    assert model.interval_ns(1000, 1000, 1, may_lose_cache=True, other_kernels=True) == (1000, 1100)
    assert model.interval_ns(1000, 1000, 2, may_lose_cache=False, other_kernels=True) == (800, 1320)
    assert model.interval_ns(1000, 1000, 2, may_lose_cache=True, other_kernels=True)[1] == pytest.approx(
        1200 * 1.21, abs=1
    )
    bound = bounds(OpGraph.build(make_trace(STEPS, elements=KIB // 4), model))
    found = verdict(model, 2000, 1000, "with variants", 2, bound, other_kernels=True)
    alone = verdict(model, 2000, 1000, "with variants", 1, bound, other_kernels=True)
    assert "with 2 streams (with variants)" in found.text
    assert "with 1 stream (with variants)" in alone.text
    assert found.other_kernels
    assert "other kernels, which are less well known: it may take 10.0% longer" in found.text
    assert "L2" not in found.text


def test_gain_that_the_cache_may_cost_is_none_to_recommend() -> None:
    """Wide enough for 2 streams to win 5 %, but 10 % may be lost: the sequential schedule is kept."""
    sequential = Row("sequential", 1, 1000, 1.0, 0, Schedule((), ()))
    on_two = Row("wavefront", 2, 950, 1000 / 950, 0, Schedule((), ()))
    model = with_cache(1, schedule_frac=0.0, cache_frac=0.1)
    assert choose([sequential, on_two], model, 1000) == on_two
    assert choose([sequential, on_two], model, 1000, may_lose_cache=True) == sequential


def test_verdict_says_what_the_cache_may_cost() -> None:
    """2.00x, less a tenth: 1.82x at worst. One stream loses nothing."""
    model = with_cache(round(3 * KIB / USABLE_SHARE) + 1, schedule_frac=0.0, cache_frac=0.1)
    graph = OpGraph.build(make_trace(STEPS, elements=KIB // 4), model)
    assert graph.may_lose_cache
    bound = bounds(graph)
    found = verdict(model, 2000, 1000, "wavefront", 2, bound, graph.may_lose_cache)
    assert (round(found.low, 2), found.high, found.may_lose_cache) == (1.82, 2.0, True)
    assert "may not on several: it may take 10% longer than predicted" in found.text
    assert not verdict(model, 2000, 1000, "sequential", 1, bound, graph.may_lose_cache).may_lose_cache
    assert "L2" not in verdict(model, 2000, 1000, "wavefront", 2, bound).text
