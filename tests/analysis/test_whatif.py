"""What-if questions: a step on changed hardware, with other launch costs, or with faster ops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

import gpusim
from gpusim.analysis.simulation import Simulated
from gpusim.analysis.simulation import simulate as simulate_schedule
from gpusim.analysis.whatif import (
    Change,
    changed_graph,
    changed_hardware,
    longest,
    policy_schedule,
    retimed,
    sensitivities,
)
from gpusim.cli import main
from gpusim.errors import OptionError
from gpusim.formats.hardware import load_hardware
from gpusim.formats.trace import Trace
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule
from gpusim.plan.tasks import LaunchMode, start_interval_ns
from gpusim.rules.start_interference import lost_ns
from gpusim.search.explore import explore
from gpusim.search.explored import Explored
from gpusim.trace.store import load_trace, write_trace
from tests.support.helpers import build_graph, chain_trace, make_hardware, make_trace, op, wide_trace

SMS = 132


def whole_gpu(waves: int = 1, dur_ns: int = 1000) -> Trace:
    """One kernel with `waves` full waves of blocks of 1024 threads, two to an SM."""
    return make_trace([op("a", "x", dur_ns=dur_ns, blocks=2 * SMS * waves)])


@pytest.mark.parametrize(
    ("change", "interval_ns"),
    [
        (Change(launch_cost=2.0), 1000),  # 2 ns a block are more than the kernel takes
        (Change(launch_cost=0.5), 0.5 * 1056),
        (Change(sms=4 * SMS), 0),  # one wave
        (Change(op_speed={0: 4.0}), 250),
    ],
)
def test_blocks_of_a_changed_step_hold_up_the_next_start_by_the_changed_rule(
    change: Change, interval_ns: float
) -> None:
    """1,056 blocks on 132 SMs, two on each at a time: four waves in 1000 ns, and 1 ns a block."""
    changed = changed_graph(build_graph(whole_gpu(waves=4), make_hardware(turnover_ns=1.0)), change)
    assert start_interval_ns(changed.tasks[0][0], changed.hardware, in_graph=True) == pytest.approx(interval_ns)


def explored(trace: Trace | None = None) -> Explored:
    return explore(build_graph(trace or wide_trace(), make_hardware()), streams=3, budget_s=60.0, evaluations=8)


def test_no_change_at_all_is_the_baseline_itself() -> None:
    graph = build_graph(wide_trace())
    assert changed_graph(graph, Change()) is graph
    assert changed_graph(graph, Change(sms=SMS, queues=8, op_speed={1: 1.0})) is graph
    assert changed_hardware(graph.hardware, Change()).calibrated


def simulate(graph: OpGraph, policy: str, streams: int, mode: LaunchMode = "graph") -> Simulated:
    return simulate_schedule(graph, policy_schedule(graph, policy, streams), mode)


def test_simulate_gives_what_the_command_gives(capsys: pytest.CaptureFixture[str]) -> None:
    main_with(["simulate", "googlenet-infer-b1", "--policy", "wavefront", "--streams", "3", "--json"])
    printed = json.loads(capsys.readouterr().out)
    graph = OpGraph.build(load_trace("googlenet-infer-b1"), load_hardware("h200"))
    found = simulate(graph, "wavefront", 3)
    assert (found.makespan_ns, found.sequential_ns) == (printed["makespan_ns"], printed["sequential_ns"])
    assert found.bounds.critical_path_ns == printed["bounds"]["critical_path_ns"]
    assert found.streams == printed["streams"]


def main_with(words: list[str]) -> None:
    from unittest.mock import patch

    with patch("sys.argv", ["gpusim", *words]):
        main()


@pytest.mark.parametrize(("sms", "expected"), [(66, 2000), (132, 1000), (264, 500)])
def test_a_kernel_of_many_waves_takes_time_with_the_number_of_waves(sms: int, expected: int) -> None:
    graph = changed_graph(build_graph(whole_gpu(waves=4)), Change(sms=sms))
    assert simulate(graph, "sequential", 1).makespan_ns == expected


def test_a_kernel_of_one_block_takes_as_long_on_fewer_sms_and_more_of_them() -> None:
    base = build_graph(make_trace([op("a", "x", blocks=1)]))
    graph = changed_graph(base, Change(sms=66))
    assert graph.tasks[0][0].dur_ns == base.tasks[0][0].dur_ns
    assert graph.tasks[0][0].demand.slots == pytest.approx(2 * base.tasks[0][0].demand.slots)


def test_bandwidth_scales_the_share_of_time_that_traffic_explains() -> None:
    elements = 64 * 2**20  # far over the L2 cache
    hardware = make_hardware(dram_bytes_per_ns=1000.0)
    base = build_graph(make_trace([op("a", "x", dur_ns=1_000_000)], elements=elements), hardware)
    memory_ns = base.tasks[0][0].dram_bytes / 1000.0
    assert 0 < memory_ns < 1_000_000
    graph = changed_graph(base, Change(bandwidth=2.0))
    assert graph.tasks[0][0].dur_ns == pytest.approx(1_000_000 - memory_ns / 2)


def test_launch_cost_scales_the_gaps() -> None:
    trace = chain_trace(4)
    graph = build_graph(trace, make_hardware(chain_ns=100.0))
    assert simulate(graph, "sequential", 1).makespan_ns == 4300
    assert simulate(changed_graph(graph, Change(launch_cost=2.0)), "sequential", 1).makespan_ns == 4600
    assert simulate(changed_graph(graph, Change(launch_cost=0.0)), "sequential", 1).makespan_ns == 4000


@pytest.mark.parametrize("factor", [0.0, 0.5, 2.0])
def test_launch_cost_scales_what_starts_cost_and_not_their_number(factor: float) -> None:
    graph = load_hardware("h200").graph
    assert graph.busy_starts > 0
    changed = changed_hardware(load_hardware("h200"), Change(launch_cost=factor))
    assert changed.graph.busy_starts == graph.busy_starts
    assert changed.stream.queues == load_hardware("h200").stream.queues
    for starts in (0, 1, 9):
        assert lost_ns(changed.graph, starts) == pytest.approx(factor * lost_ns(graph, starts))


def test_an_op_twice_as_fast_takes_half_its_time_and_the_model_stays_calibrated() -> None:
    graph = build_graph(chain_trace(4))
    changed = changed_graph(graph, Change(op_speed={2: 2.0}))
    assert simulate(changed, "sequential", 1).makespan_ns == 3500
    assert changed.hardware.calibrated


def test_contention_scales_how_much_kernels_slow_each_other() -> None:
    graph = build_graph(wide_trace(), make_hardware(slowdown=0.5))
    slower = simulate(changed_graph(graph, Change(contention=2.0)), "critical_path", 6).makespan_ns
    assert slower > simulate(graph, "critical_path", 6).makespan_ns


@pytest.mark.parametrize("change", [Change(sms=66), Change(bandwidth=2.0), Change(launch_cost=0.5)])
def test_changed_hardware_is_marked_as_uncalibrated(change: Change) -> None:
    hardware = changed_hardware(make_hardware(), change)
    assert not hardware.calibrated
    assert "(uncalibrated)" in hardware.label


def test_queues_are_a_setting_and_bind_in_stream_mode_only() -> None:
    # Launched in the order a, b (needs a, on another stream), c: in one queue c waits behind b.
    graph = build_graph(make_trace([op("a", "x", blocks=1), op("b", "a", blocks=1), op("c", "x", blocks=1)]))
    apart = Schedule(order=(0, 1, 2), streams=(0, 1, 2))
    one = changed_graph(graph, Change(queues=1))
    assert one.hardware.calibrated

    def ends(graph: OpGraph, mode: LaunchMode) -> int:
        return simulate_schedule(graph, apart, mode).timeline.end_ns[2]

    assert ends(one, "graph") == ends(graph, "graph") == 1000
    assert ends(graph, "stream") == 1000
    assert ends(one, "stream") == 2000


@pytest.mark.parametrize(
    "wrong",
    [
        {"sms": 0},
        {"bandwidth": 0.0},
        {"bandwidth": float("nan")},
        {"bandwidth": float("inf")},
        {"launch_cost": -1.0},
        {"queues": 0},
        {"op_speed": {0: 0.0}},
    ],
)
def test_changes_out_of_range_are_one_line(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="what-if"):
        Change(**wrong)


@pytest.mark.parametrize("factor", [1e-300, 1e7, 1e308])
def test_bandwidth_that_no_hardware_model_can_have_is_refused(factor: float) -> None:
    with pytest.raises(OptionError, match=r"what-if: .*x bandwidth is .* bytes/ns; simulated are from 1e-06 to 1e\+09"):
        changed_graph(build_graph(chain_trace(2)), Change(bandwidth=factor))


def test_queues_without_a_launch_that_has_them_are_refused() -> None:
    step = gpusim.Step(chain_trace(2), make_hardware())
    with pytest.raises(OptionError, match="queues=1: hardware queues count only where the host launches"):
        gpusim.whatif(step, queues=1)
    assert gpusim.whatif(step, queues=1, launch="stream").changed.graph.hardware.stream.queues == 1


def test_more_queues_than_the_gpu_has_and_unknown_ops_are_refused() -> None:
    graph = build_graph(chain_trace(2))
    with pytest.raises(OptionError, match="at most 32"):
        changed_graph(graph, Change(queues=33))
    with pytest.raises(OptionError, match="no op 9 among 2 ops"):
        changed_graph(graph, Change(op_speed={9: 2.0}))


@pytest.mark.parametrize("mode", ["graph", "stream"])
def test_a_retimed_plan_is_the_changed_step_lowered_again(mode: LaunchMode) -> None:
    graph = OpGraph.build(load_trace("googlenet-infer-b1"), load_hardware("h200"))
    base = simulate(graph, "critical_path", 4, mode)
    for change in (Change(sms=66), Change(bandwidth=0.5), Change(launch_cost=2.0), Change(op_speed={3: 2.0})):
        changed = changed_graph(graph, change)
        again = lower(changed, base.schedule, mode)
        assert retimed(base.timeline.plan, changed, base.schedule) == again


def test_contention_scales_both_rules_of_it() -> None:
    hardware = make_hardware(slowdown=0.5)
    pooled = changed_hardware(hardware, Change(contention=2.0)).contention
    assert (pooled.younger_slowdown, pooled.sharing_exponent) == (1.0, 0.0)
    contention = msgspec.structs.replace(hardware.contention, sharing_exponent=0.5)
    by_block = msgspec.structs.replace(hardware, contention=contention)
    assert changed_hardware(by_block, Change(contention=2.0)).contention.sharing_exponent == 1.0
    assert 0.0 < changed_hardware(by_block, Change(contention=0.0)).contention.sharing_exponent < 1e-3


def test_sensitivities_hold_the_schedule_and_name_ranges() -> None:
    graph = build_graph(chain_trace(4), make_hardware(chain_ns=100.0))
    rows = {name: (low, high, now) for name, low, high, now in sensitivities(simulate(graph, "sequential", 1), 1)}
    assert rows["launch cost, 0.5x to 2x"] == (4150, 4600, 4300)
    assert rows["SMs, 66 to 264"] == (4300, 4300, 4300)
    [op_row] = [row for name, row in rows.items() if name.startswith("speed of")]
    assert op_row == (5300, 3800, 4300)
    assert not any("queues" in name for name in rows)
    streams = sensitivities(simulate(graph, "sequential", 1, "stream"), 0)
    assert any("hardware queues, 1 to 32" in name for name, *_ in streams)


def test_longest_ops_come_longest_first() -> None:
    graph = build_graph(make_trace([op("a", "x", dur_ns=1), op("b", "a", dur_ns=3), op("c", "b", dur_ns=2)]))
    assert longest(graph, 2) == (1, 2)


def test_command_gives_what_the_library_gives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = wide_trace()
    write_trace(trace, tmp_path / "t.json")
    words = ["--policy", "wavefront", "--streams", "3", "--sms", "66", "--op", "stem", "2", "--json"]
    main_with(["whatif", str(tmp_path / "t.json"), *words])
    printed = json.loads(capsys.readouterr().out)
    graph = OpGraph.build(trace, load_hardware("h200"))
    found = simulate(changed_graph(graph, Change(sms=66, op_speed={0: 2.0})), "wavefront", 3)
    assert printed["whatif"]["makespan_ns"] == found.makespan_ns
    assert printed["whatif"]["calibrated"] is False
    assert printed["baseline"]["makespan_ns"] == simulate(graph, "wavefront", 3).makespan_ns


@pytest.mark.parametrize("kind", ["breakdown", "bounds", "gain", "front", "memory"])
def test_command_writes_every_figure(kind: str, tmp_path: Path) -> None:
    write_trace(wide_trace(), tmp_path / "t.json")
    main_with(["figure", kind, str(tmp_path / "t.json"), "--streams", "2", "--html", str(tmp_path / "f.html")])
    assert (tmp_path / "f.html").stat().st_size > 100_000
