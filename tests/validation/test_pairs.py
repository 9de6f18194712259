"""Pairs and triples of concurrent kernels: selection, prediction, and results."""

from __future__ import annotations

import json
import math
import random
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusim.errors import MeasurementError
from gpusim.formats.pairs import PairCase
from gpusim.formats.results import results_name
from gpusim.formats.trace import Trace
from gpusim.gpu.calibrate import pairs as pairs_module
from gpusim.gpu.calibrate.pairs import (
    MAX_NS,
    MAX_RATIO,
    MIN_NS,
    TRIPLE_EVERY,
    _Stages,
    draw,
    measure_pairs,
    predict,
    unlike_the_step,
)
from gpusim.trace.store import load_trace
from gpusim.validation.pair_results import pair_errors, pairs_markdown, read_pairs, write_pairs
from tests.support.helpers import Step, kernel, make_hardware, make_trace, memset, op, task, traces
from tests.support.made_results import make_results

# --- Which are drawn ---


def independent(*durations_ns: int) -> Trace:
    """Make ops that each read an input of their own."""
    return make_trace([op(f"a{i}", f"x{i}", dur_ns=ns) for i, ns in enumerate(durations_ns)])


def drawn(trace: Trace, count: int, seed: int = 0) -> list[tuple[int, ...]]:
    return draw(trace, count, random.Random(seed))


def storages(trace: Trace, tensors: tuple[int, ...]) -> set[int]:
    return {trace.tensors[t].storage for t in tensors}


@pytest.mark.parametrize("name", ["googlenet-infer-b1", "googlenet-train-b8", "densenet121-train-b8"])
def test_drawn_are_as_many_as_asked_for_all_distinct_and_every_fourth_a_triple(name: str) -> None:
    found = drawn(load_trace(name), 30)
    assert len(set(found)) == len(found) == 30
    assert [len(ops) for ops in found] == [3 if n % TRIPLE_EVERY == TRIPLE_EVERY - 1 else 2 for n in range(30)]
    assert all(len(set(ops)) == len(ops) for ops in found)


def test_same_seed_draws_the_same_and_another_seed_others() -> None:
    trace = load_trace("googlenet-train-b8")
    assert drawn(trace, 20, seed=1) == drawn(trace, 20, seed=1)
    assert drawn(trace, 20, seed=1) != drawn(trace, 20, seed=2)


def test_both_orders_of_a_pair_are_two_cases() -> None:
    """The older one is served first, so the launch order matters."""
    assert set(drawn(independent(5000, 5000), 2)) == {(0, 1), (1, 0)}


def test_kernels_too_short_or_too_long_to_be_measured_are_left_out() -> None:
    trace = independent(MIN_NS - 1, MIN_NS, MIN_NS, MAX_NS, MAX_NS, MAX_NS + 1)
    assert {op for ops in drawn(trace, 8) for op in ops} == {1, 2, 3, 4}


def test_longest_is_at_most_the_ratio_longer_than_the_shortest() -> None:
    edge = round(10_000 * MAX_RATIO)
    assert drawn(independent(10_000, edge + 1), 5) == []
    assert drawn(independent(10_000, edge), 1) != []


def test_op_with_several_kernels_none_or_a_memset_is_left_out() -> None:
    trace = make_trace(
        [
            op("one", "x", dur_ns=5000),
            Step("two", "y", "two", kernels=(kernel(5000), kernel(5000))),
            Step("none", "z", "none"),
            Step("fill", makes="fill", kernels=(memset(5000),)),
            op("other", "w", dur_ns=5000),
        ]
    )
    assert set(drawn(trace, 5)) == {(0, 4), (4, 0)}


def test_op_that_changes_a_parameter_or_state_is_left_out_even_through_a_view() -> None:
    """Ops are repeated while pairs are measured; an update would drift away."""
    trace = make_trace(
        [
            op("one", "x", dur_ns=5000),
            Step("update", "g", changes="weight", kernels=(kernel(5000),)),
            Step("look", looks_at="running", views="slice"),
            Step("count", "g", changes="slice", kernels=(kernel(5000),)),
            op("other", "w", dur_ns=5000),
        ]
    )
    assert set(drawn(trace, 9)) == {(0, 4), (4, 0)}


def test_op_that_changes_an_activation_in_place_may_be_drawn() -> None:
    changing = Step("relu", "a", changes="a", kernels=(kernel(5000),))
    trace = make_trace([op("a", "x", dur_ns=1), changing, op("b", "y", dur_ns=5000)])
    assert set(drawn(trace, 5)) == {(1, 2), (2, 1)}


def test_ops_that_would_race_are_not_run_together() -> None:
    """b reads a's result, and d changes what a and b read; readers of the same tensor may run together."""
    trace = make_trace(
        [
            op("x", "input", dur_ns=1),
            op("a", "x", dur_ns=5000),
            op("b", "x a", dur_ns=5000),
            Step("d", "x", changes="x", kernels=(kernel(5000),)),
            op("c", "x", dur_ns=5000),
        ]
    )
    a, b, d, c = range(1, 5)
    found = drawn(trace, 100)
    assert {tuple(sorted(ops)) for ops in found if len(ops) == 2} == {tuple(sorted(pair)) for pair in ((a, c), (b, c))}
    assert d not in {op for ops in found for op in ops}


@given(traces(), st.integers(0, 12), st.integers(0, 5))
def test_whatever_is_drawn_of_any_trace_is_fit_to_be_measured(trace: Trace, count: int, seed: int) -> None:
    found = drawn(trace, count, seed)
    assert len(set(found)) == len(found) <= count
    lasting = {tensor.storage for tensor in trace.tensors if tensor.init is not None}
    for ops in found:
        launched = [trace.ops[op].kernels for op in ops]
        assert all(len(kernels) == 1 and kernels[0].kind == "kernel" for kernels in launched)
        durations = [kernels[0].dur_ns for kernels in launched]
        assert MIN_NS <= min(durations) <= max(durations) <= min(MAX_NS, MAX_RATIO * min(durations))
        for one, other in combinations([trace.ops[index] for index in ops], 2):
            for writer, also in ((one, other), (other, one)):
                assert not storages(trace, writer.writes) & (storages(trace, (*also.reads, *also.writes)) | lasting)


def test_nothing_to_draw_is_no_pair_and_no_endless_search() -> None:
    assert drawn(independent(5000), 3) == []
    assert drawn(independent(5000, 5000), 0) == []


# --- What is predicted ---

#: A gap of 100 after every kernel; between two stamps with nothing between them 600: a stamp takes 500.
GAP_NS, EMPTY_NS = 100.0, 600.0


def alone(dur_ns: float) -> float:
    """Return the time between stamps of a kernel by itself: the first stamp, a gap, the kernel, a gap."""
    return EMPTY_NS + dur_ns + GAP_NS


def test_one_kernel_takes_what_it_took_alone() -> None:
    hardware = make_hardware(chain_ns=GAP_NS, join_ns=30, front_end_ns=10, slowdown=0.5)
    assert predict([task(1.0)], [alone(4000)], EMPTY_NS, hardware) == alone(4000)


def test_two_that_fit_side_by_side_take_the_longer_one_and_the_join() -> None:
    """500 stamp + 100 gap + 4000 + 100 gap + 30 for the join of the last stamp."""
    hardware = make_hardware(chain_ns=GAP_NS, join_ns=30)
    tasks = [task(1.0, part=0.5), task(1.0, part=0.5)]
    found = predict(tasks, [alone(4000), alone(3000)], EMPTY_NS, hardware)
    assert found == 500 + 100 + 4000 + 100 + 30
    assert found == predict(tasks[::-1], [alone(3000), alone(4000)], EMPTY_NS, hardware)


def test_each_start_waits_for_the_front_end() -> None:
    """The second kernel starts 250 after the first, the third 500: it ends last, at 600 + 500 + 4000."""
    hardware = make_hardware(chain_ns=GAP_NS, front_end_ns=250)
    found = predict([task(1.0, part=0.1)] * 3, [alone(4000)] * 3, EMPTY_NS, hardware)
    assert found == 600 + 500 + 4000 + 100


def test_two_that_fill_the_gpu_take_the_sum() -> None:
    """500 stamp + 100 gap + 4000 + 3000 + 100 gap + 30 join: no gap between them, as both have been started."""
    hardware = make_hardware(chain_ns=GAP_NS, join_ns=30)
    tasks = [task(1.0, part=1.0), task(1.0, part=1.0)]
    assert predict(tasks, [alone(4000), alone(3000)], EMPTY_NS, hardware) == 500 + 100 + 4000 + 3000 + 100 + 30


def test_younger_one_is_slowed_beside_its_elder() -> None:
    """Slow-down 1: until 4000 the second has done 2000 of its 4000, then runs alone to 6000."""
    hardware = make_hardware(chain_ns=GAP_NS, slowdown=1.0)
    tasks = [task(1.0, part=0.25), task(1.0, part=0.25)]
    assert predict(tasks, [alone(4000), alone(4000)], EMPTY_NS, hardware) == 600 + 6000 + 100


def test_triple_joins_once() -> None:
    hardware = make_hardware(chain_ns=GAP_NS, join_ns=30)
    found = predict([task(1.0, part=0.25)] * 3, [alone(4000), alone(3000), alone(2500)], EMPTY_NS, hardware)
    assert found == 500 + 100 + 4000 + 100 + 30


def test_duration_of_the_trace_does_not_count_only_the_one_measured_in_place() -> None:
    hardware = make_hardware(chain_ns=GAP_NS)
    long, short = (predict([task(ns, part=0.5)] * 2, [alone(4000)] * 2, EMPTY_NS, hardware) for ns in (9000.0, 1.0))
    assert long == short


def test_kernel_that_took_less_than_its_stamps_alone_takes_no_time() -> None:
    """Noise of the clock must not become a negative duration."""
    hardware = make_hardware(chain_ns=GAP_NS)
    assert predict([task(1.0)], [EMPTY_NS], EMPTY_NS, hardware) == 500 + 100 + 100
    assert predict([task(1.0)], [10.0], 10.0, hardware) == 200


def test_stages_of_the_same_ops_are_averaged_over_places_and_replays() -> None:
    import torch

    stages = _Stages(((0, 1), (), (0,), ()))
    samples = torch.tensor([[100, 10, 50, 20], [200, 10, 60, 40]])
    assert stages.times(samples) == {(0, 1): 150.0, (): 20.0, (0,): 55.0}


def test_state_of_the_cache_is_judged_by_the_ops_alone() -> None:
    """By hand: 4 and 5 us where the step has 5 and 5, less 1 us for the stamps: ratios 0.6 and 0.8; and 1 for all."""
    trace = independent(5000, 5000)
    warm = {(): 1000.0, (0,): 4000.0, (1,): 5000.0, (0, 1): 99_000.0}
    assert unlike_the_step(trace, warm) == pytest.approx(math.sqrt((math.log(0.6) ** 2 + math.log(0.8) ** 2) / 2))
    assert unlike_the_step(trace, {(): 1000.0, (0,): 6000.0, (1,): 6000.0}) == 0.0
    assert unlike_the_step(trace, {(): 1000.0}) == 0.0


def test_measured_and_predicted_times_of_a_trace_are_put_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the GPU: every stage takes 700 per op and 600 for the stamps."""
    import torch

    class Runner:
        def __init__(self, trace: Trace, device: object, *, trust_code: bool) -> None:
            self.trace = trace

        def bind(self, tensors: object) -> None:
            pass

    measured: list[tuple[tuple[int, ...], ...]] = []

    def measure(runner: Runner, stages: _Stages, cold: bool) -> dict[tuple[int, ...], float]:
        measured.append(stages.stages)
        return {stage: EMPTY_NS + (4100.4 if cold else 3000.0) * len(stage) for stage in stages.stages}

    monkeypatch.setattr(pairs_module, "require_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(pairs_module, "check_operators", lambda trace, name: None)
    monkeypatch.setattr(pairs_module, "set_precision", lambda dtype: None)
    monkeypatch.setattr(pairs_module, "Runner", Runner)
    monkeypatch.setattr(pairs_module, "_measure", measure)
    trace = independent(*[5000] * 6)
    found = measure_pairs(trace, make_hardware(chain_ns=GAP_NS), 4, 0)
    assert [len(pair.ops) for pair in found] == [2, 2, 2, 3]
    for pair in found:
        assert pair.trace == trace.name
        assert pair.cold  # alone, 4.1 us are closer to the step's 5 than 3 are
        assert pair.kernels == ("k5000",) * len(pair.ops)
        assert pair.alone_ns == (4700,) * len(pair.ops)
        assert pair.together_ns == round(EMPTY_NS + 4100.4 * len(pair.ops))
        assert pair.predicted_ns == round(EMPTY_NS + 4000.4 + GAP_NS)  # small kernels: all fit side by side
    stages, again = measured
    assert stages == again
    assert stages.count(()) == pairs_module.EMPTY_PIECES
    assert {op for stage in stages for op in stage} == {op for stage in stages if len(stage) == 1 for op in stage}
    assert measure_pairs(trace, make_hardware(chain_ns=GAP_NS), 4, 0) == found


# --- What is kept ---


def pair(
    together_ns: int, predicted_ns: int, *alone_ns: int, trace: str = "a-infer-b1", fitted: bool = False
) -> PairCase:
    names = tuple(f"op{i}" for i in range(len(alone_ns)))
    return PairCase(
        trace=trace,
        ops=names,
        kernels=names,
        alone_ns=alone_ns,
        together_ns=together_ns,
        predicted_ns=predicted_ns,
        fitted=fitted,
    )


RESULTS = make_results()
CASES = (
    pair(1500, 1650, 900, 1000),
    pair(3000, 2400, 1000, 1500, 1200),
    pair(1000, 1010, 800, 700, trace="b-infer-b1"),
)


def test_slowdown_is_over_the_longest_alone_and_error_over_the_measured_time() -> None:
    assert (CASES[0].slowdown, CASES[1].slowdown) == (1.5, 2.0)
    assert (CASES[0].error, CASES[1].error) == pytest.approx((0.1, -0.2))


def test_errors_of_pairs_are_median_95th_percentile_and_bias() -> None:
    # 10, 20, 1 %: median 10 %, 95 % of three are all three; bias (10 - 20 + 1) / 3 = -3 %
    assert pair_errors(CASES) == pytest.approx((0.1, 0.2, -0.03))
    many = [pair(1000, 1000 + error, 1000, 1000) for error in range(1, 21)]
    assert pair_errors(many)[1] == pytest.approx(0.019)  # nineteen of twenty


def test_pairs_come_back_from_their_file_as_they_were(tmp_path: Path) -> None:
    path = write_pairs(RESULTS, CASES, tmp_path)
    assert path.name == f"{results_name(RESULTS)}.pairs.json"
    found = read_pairs(path)
    assert found.cases == CASES
    for field in ("recipe", "gpu", "date", "command", "hardware", "versions"):
        assert getattr(found, field) == getattr(RESULTS, field)


def test_page_of_pairs_has_a_row_for_each_trace_and_one_for_all(tmp_path: Path) -> None:
    path = write_pairs(RESULTS, CASES, tmp_path)
    text = path.with_suffix(".md").read_text(encoding="utf-8")
    assert text == pairs_markdown(read_pairs(path), path.name)
    assert f"Generated from `{path.name}`" in text
    assert f"Command: `{RESULTS.command}`" in text
    rows = [line for line in text.splitlines() if line.startswith("|")][2:]
    assert rows == [
        "| a-infer-b1 | warm | 2 | 1.75 | 15.0% | 20.0% | -5.0% |",
        "| b-infer-b1 | warm | 1 | 1.25 | 1.0% | 1.0% | +1.0% |",
        "| all | warm | 3 | 1.50 | 10.0% | 20.0% | -3.0% |",
    ]


@pytest.mark.parametrize("text", ["", "{}", '{"schema": "gpusim-results/1"}', '{"schema": "gpusim-pairs/1"}'])
def test_broken_file_of_pairs_is_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pairs.json"
    path.write_text(text)
    with pytest.raises(MeasurementError) as caught:
        read_pairs(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_unknown_field_of_a_pair_is_refused_with_its_place(tmp_path: Path) -> None:
    path = write_pairs(RESULTS, CASES, tmp_path)
    document = json.loads(path.read_bytes())
    document["cases"][1]["colour"] = "red"
    path.write_text(json.dumps(document))
    with pytest.raises(MeasurementError, match=r"\$\.cases\[1\]"):
        read_pairs(path)
