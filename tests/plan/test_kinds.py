"""Steps that are not mostly convolutional: which they are, and how much wider their interval is."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from gpusim.bounds.bounds import bounds
from gpusim.engine.fast import FastEngine
from gpusim.formats.hardware import HardwareModel, load_hardware
from gpusim.plan.graph import OpGraph
from gpusim.plan.kinds import mostly_convolutional
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule
from gpusim.plan.tasks import Task
from gpusim.policies.sequential import sequential
from gpusim.search.explore import choose
from gpusim.search.explored import Row
from gpusim.search.verdict import verdict
from gpusim.trace.store import load_trace
from tests.support.helpers import make_hardware, wide_trace


def with_saving(frac: float, schedule_frac: float = 0.0, less_known_frac: float = 0.0) -> HardwareModel:
    model = make_hardware()
    uncertainty = msgspec.structs.replace(
        model.uncertainty,
        sequential_frac=0.0,
        schedule_frac=schedule_frac,
        less_known_frac=less_known_frac,
        saving_frac=frac,
    )
    return msgspec.structs.replace(model, uncertainty=uncertainty)


@pytest.mark.parametrize(("pool_ns", "wanted"), [(9.0, False), (10.0, True)])
def test_step_is_mostly_convolutional_from_seven_tenths_of_its_kernel_time(pool_ns: float, wanted: bool) -> None:
    """Convolution backward 30, batch norm 30, pooling 9 or 10, and 30 others: seven tenths of 100 are 70."""
    targets = ("aten.convolution_backward.default", "aten.cudnn_batch_norm.default", "aten.max_pool2d.default")
    trace = wide_trace(1, depth=2)
    ops = [
        msgspec.structs.replace(op, target=target)
        for op, target in zip(trace.ops, (*targets, "aten.mm.default"), strict=True)
    ]
    tasks = [[Task(name="k", dur_ns=dur_ns)] for dur_ns in (30.0, 30.0, pool_ns, 30.0)]
    assert mostly_convolutional(msgspec.structs.replace(trace, ops=tuple(ops)), tasks) is wanted
    assert mostly_convolutional(msgspec.structs.replace(trace, ops=()), [])


def test_saving_of_a_less_known_step_is_in_doubt_both_ways_and_only_on_several_streams() -> None:
    """1500 ns in sequence, 1000 predicted: 500 are saved, half of the time; two fifths of that are 20 %."""
    model = with_saving(0.4)
    assert model.interval_ns(1000, 1500, 2) == (1000, 1000)
    assert model.interval_ns(1000, 1500, 2, less_known=True) == (800, 1200)
    assert model.interval_ns(1000, 1500, 1, less_known=True) == (1000, 1000)
    assert with_saving(0.4, 0.1).interval_ns(1000, 1500, 2, less_known=True) == (720, 1320)


def test_time_of_a_less_known_step_is_in_doubt_where_more_than_that_of_others() -> None:
    """10 or 30 % of 1000 ns for less known steps, 20 % for all: the larger one counts, on several streams alone."""
    wide, narrow = with_saving(0.0, 0.2, 0.3), with_saving(0.0, 0.2, 0.1)
    assert wide.interval_ns(1000, 1000, 2, less_known=True) == (700, 1300)
    assert wide.interval_ns(1000, 1000, 2) == narrow.interval_ns(1000, 1000, 2, less_known=True) == (800, 1200)
    assert wide.interval_ns(1000, 1000, 1, less_known=True) == (1000, 1000)


@pytest.mark.parametrize(
    ("sequential_ns", "interval_ns"), [(900, (1000, 1000)), (2000, (600, 1400)), (9000, (600, 1400))]
)
def test_no_saving_is_not_in_doubt_and_at_most_the_predicted_time_counts(
    sequential_ns: int, interval_ns: tuple[int, int]
) -> None:
    assert with_saving(0.4).interval_ns(1000, sequential_ns, 2, less_known=True) == interval_ns


def test_gain_in_doubt_is_none_to_recommend() -> None:
    """10 % of 900 ns in doubt alone leave a gain; 90 % of the saving less do as well, but not both."""
    sequential_row = Row("sequential", 1, 1000, 1.0, 0, Schedule((), ()))
    on_two = Row("wavefront", 2, 900, 1000 / 900, 0, Schedule((), ()))
    model = with_saving(0.9, 0.1)
    assert choose([sequential_row, on_two], model, 1000) == on_two
    assert choose([sequential_row, on_two], with_saving(0.9), 1000, less_known=True) == on_two
    assert choose([sequential_row, on_two], model, 1000, less_known=True) == sequential_row


def test_verdict_says_what_is_in_doubt() -> None:
    """1.5 ms over 1 ms are 1.50x; with 0.2 ms less or more 1.25 to 1.88. A bound of 0.9 ms leaves 1.67x of it."""
    model = with_saving(0.4)
    bound = bounds(OpGraph.build(wide_trace(2), model))
    found = verdict(model, 1_500_000, 1_000_000, "wavefront", 2, bound, less_known=True)
    assert (round(found.low, 3), round(found.high, 3), found.less_known) == (1.25, 1.875, True)
    assert "not mostly convolutional, so less well known: 20% of its time is in doubt" in found.text
    near = dataclasses.replace(bound, critical_path_ns=900_000)
    assert verdict(model, 1_500_000, 1_000_000, "wavefront", 2, near, less_known=True).high == pytest.approx(1.5 / 0.9)
    assert not verdict(model, 1000, 1000, "sequential", 1, bound, less_known=True).less_known
    assert "doubt" not in verdict(model, 1500, 1000, "wavefront", 2, bound).text


def test_what_an_estimate_leaves_in_doubt_is_not_said_of_the_kind_of_step() -> None:
    """20 % less saving by the kind of step; 40 % by the estimate, and with both 1 - 0.6 x 0.8 of the time."""
    model = with_saving(0.4)
    bound = bounds(OpGraph.build(wide_trace(2), model))
    found = verdict(model, 1_500_000, 1_000_000, "wavefront", 2, bound, estimated=True, less_known=True)
    assert "so less well known: 20% of its time is in doubt" in found.text
    assert "kernels are estimated, so 40% of its time is in doubt: capture" in found.text
    assert found.high == pytest.approx(1.5 / (0.6 * 0.8))
    assert "kernels are estimated: capture" in verdict(model, 1000, 1000, "sequential", 1, bound, estimated=True).text


def test_bundled_networks_of_other_kinds_are_less_known_and_convolutional_ones_are_not() -> None:
    hardware = load_hardware("h200")
    names = ("experts_small-infer-b2", "unet_small-infer-b2", "googlenet-infer-b1", "densenet121-train-b8")
    found = [OpGraph.build(load_trace(name), hardware).less_known for name in names]
    assert found == [True, True, False, False]


def test_time_in_sequence_is_that_of_the_engine() -> None:
    """Memory nodes and gaps included, in a step with both."""
    graph = OpGraph.build(load_trace("googlenet-train-b8"), load_hardware("h200"))
    ran = FastEngine().run(lower(graph, sequential(graph, 1)), graph.hardware)
    assert graph.sequential_ns == pytest.approx(ran.makespan_ns, rel=1e-3)
