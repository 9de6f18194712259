"""Memory plans whose ops run on several streams: waits by hand, engines equal, missing waits found, the file."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import msgspec
import pytest

import gpusim
from gpusim.api import gpu
from gpusim.defaults import MEMORY_ACTIONS
from gpusim.engine.base import engine_by_name
from gpusim.errors import PlanError, ScheduleError
from gpusim.formats.trace import GroundTruth, HostLink, Timing
from gpusim.memplan.checks import check_timeline
from gpusim.memplan.evaluate import MemoryEvaluator
from gpusim.memplan.lowering import lower_program, schedule_of
from gpusim.memplan.memory import memory_of
from gpusim.memplan.plan import MemoryPlan, Offload, Redo, read_memory_plan, write_memory_plan
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.policies.least_time import LeastTime
from gpusim.memplan.program import program_of
from gpusim.memplan.waits import waits_of
from gpusim.plan.sync import StepSync
from gpusim.search import events
from gpusim.search.events import events_of
from gpusim.search.explore import explore
from gpusim.search.memory_actions import search_memory_actions
from gpusim.step import load
from tests.support.helpers import make_hardware
from tests.support.memory_steps import SIZE, chain_step, graph_of, op_of, storage_of, storages_of

GOOGLENET = "googlenet-train-b8"


def moving(streams: tuple[int, ...] = ()) -> MemoryPlan:
    """a1 of the chain moves to the host after f2, and comes back before b3."""
    trace = chain_step()
    move = Offload(storage_of(trace, "a1"), *(op_of(trace, name) for name in ("f2", "f3", "b3")))
    return MemoryPlan(offloads=(move,), op_streams=streams)


def test_waits_of_a_chain_on_two_streams_by_hand() -> None:
    """f3 alone is on stream 1; a1 goes out after its users f1 and f2, and its memory is stream 0's again after that.

    Places: f0 f1 f2 out free f3 loss back b3 ...; a1 is needed by b2, which is the first op to wait for its copy back.
    """
    trace = chain_step()
    streams = tuple(int(op.name == "f3") for op in trace.ops)
    storages = storages_of(trace)
    program = program_of(storages, moving(streams))
    waits = waits_of(storages, program)
    place = {trace.ops[i.op].name if i.op >= 0 else i.kind: n for n, i in enumerate(program) if i.kind != "free"}
    assert waits.queues == 4
    assert [waits.queue[place[name]] for name in ("f2", "f3", "out", "back")] == [0, 1, 2, 3]
    assert waits.before[place["out"]] == (place["f2"],)
    assert waits.before[place["f3"]] == (place["f2"],)
    # loss needs f3's result; it is the next on stream 0, whose memory the copy out has left.
    assert waits.before[place["loss"]] == (place["f3"], place["out"])
    assert waits.before[place["back"]] == (place["loss"],)
    assert waits.before[place["b3"]] == ()
    assert waits.before[place["b2"]] == (place["back"],)


def test_one_stream_for_all_ops_is_the_plan_without_streams() -> None:
    evaluator = MemoryEvaluator(graph_of(chain_step(), d2h=1.0, h2d=1.0))
    one = evaluator.evaluate(moving())
    same = evaluator.evaluate(moving((0,) * len(evaluator.graph)))
    assert (one.step_ns, one.peak_bytes, one.program) == (same.step_ns, same.peak_bytes, same.program)


@pytest.mark.parametrize("seed", range(6))
def test_engines_are_equal_and_memory_is_that_of_the_launch_order(seed: int) -> None:
    """Random streams for the ops of plans that move and recompute; both checks of a timeline pass."""
    trace = chain_step(6)
    graph = graph_of(trace, d2h=8.0, h2d=8.0)
    evaluators = [MemoryEvaluator(graph, engine) for engine in ("fast", "reference")]
    setting = Setting(graph, evaluators[0].storages)
    dice = random.Random(seed)
    one = LeastTime(setting, evaluators[0]).plan_for(round(setting.keep_all_bytes * 0.7))
    plan = dataclasses.replace(one, op_streams=tuple(dice.randrange(3) for _ in trace.ops))
    fast, slow = (each.evaluate(plan) for each in evaluators)
    assert (fast.step_ns, fast.live_bytes) == (slow.step_ns, slow.live_bytes)
    storages = evaluators[0].storages
    assert fast.use.peak.allocated_bytes == memory_of(storages, program_of(storages, one)).peak.allocated_bytes


def test_a_timeline_without_a_wait_is_refused() -> None:
    """Each wait of the plan is left out in turn: the check sees it by the times alone, or nothing ran too early."""
    graph = load(GOOGLENET).graph
    evaluator = MemoryEvaluator(graph)
    storages = evaluator.storages
    setting = Setting(graph, storages)
    plan = LeastTime(setting, evaluator).plan_for(setting.keep_all_bytes // 2)
    dice = random.Random(0)
    plan = dataclasses.replace(plan, op_streams=tuple(dice.randrange(4) for _ in range(len(graph))))
    lowered = lower_program(graph, storages, evaluator.program(plan))
    engine, refused = engine_by_name("fast"), 0
    waiting = [number for number, task in enumerate(lowered.plan.tasks) if task.deps]
    for number in waiting[:: len(waiting) // 20]:
        tasks = list(lowered.plan.tasks)
        tasks[number] = msgspec.structs.replace(tasks[number], deps=())
        without = dataclasses.replace(lowered, plan=dataclasses.replace(lowered.plan, tasks=tuple(tasks)))
        timeline = engine.run(without.plan, graph.hardware)
        try:
            check_timeline(without, timeline.start_ns, timeline.end_ns, storages)
        except PlanError:
            refused += 1
    assert refused >= 10


def test_plan_file_has_the_streams(tmp_path: Path) -> None:
    trace = chain_step()
    plan = moving(tuple(number % 2 for number in range(len(trace.ops))))
    write_memory_plan(plan, trace, tmp_path / "plan.json")
    assert read_memory_plan(tmp_path / "plan.json", trace) == plan
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "bad.json").write_text(text.replace('"op_streams": [', '"op_streams": [500,'))
    with pytest.raises(ScheduleError, match="op_streams"):
        read_memory_plan(tmp_path / "bad.json", trace)


def test_streams_for_another_number_of_ops_are_refused() -> None:
    evaluator = MemoryEvaluator(graph_of(chain_step()))
    with pytest.raises(PlanError, match="has streams for 2 ops, of 9"):
        evaluator.evaluate(moving((0, 1)))


def test_recomputation_runs_on_the_stream_of_the_op_that_needs_it() -> None:
    """And the copy of its value is not there before it has ended."""
    trace = chain_step()
    storages = storages_of(trace)
    redo = Redo(op_of(trace, "b2"), (op_of(trace, "f1"),), (storage_of(trace, "a1"),))
    streams = tuple(int(op.name == "b2") for op in trace.ops)
    program = program_of(storages, MemoryPlan(redos=(redo,), op_streams=streams))
    (again,) = [place for place, each in enumerate(program) if each.kind == "again"]
    assert program[again].stream == 1
    waits = waits_of(storages, program)
    assert waits.queue[again] == 1
    MemoryEvaluator(graph_of(trace)).evaluate(MemoryPlan(redos=(redo,), op_streams=streams))


def test_search_keeps_the_limit_and_is_faster_than_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """GoogLeNet has branches: half the memory, and less time than our policy on one stream; the same by each engine.

    Where an event counts for more than any predicted time, the plan without events stays: all ops on one stream.
    """
    graph = load(GOOGLENET).graph
    evaluator = MemoryEvaluator(graph)
    setting = Setting(graph, evaluator.storages)
    limit = setting.keep_all_bytes * 6 // 10
    acting = search_memory_actions(graph, (), limit, 4, budget_s=60, seed=0, evaluations=8)
    assert (acting.evaluations, acting.interrupted) == (8, False)
    found = acting.outcome
    assert found.peak_bytes <= limit
    one = evaluator.evaluate(LeastTime(setting, evaluator).plan_for(limit))
    assert found.step_ns < one.step_ns
    slow = MemoryEvaluator(graph, "reference").evaluate(found.plan)
    assert (slow.step_ns, slow.peak_bytes) == (found.step_ns, found.peak_bytes)
    step = StepSync.of(graph.trace, graph.preds, {})
    assert acting.events == events_of(graph, schedule_of(found.program), step) > 0
    monkeypatch.setattr(events, "EVENT_NS", 10**9)
    held = search_memory_actions(graph, (), limit, 4, budget_s=60, seed=0, evaluations=2)
    assert (held.events, held.outcome.plan) == (0, one.plan)


def test_an_interrupted_search_keeps_the_best_so_far() -> None:
    graph = graph_of(chain_step(6, dur_ns=100_000), d2h=8.0, h2d=8.0)
    limit = Setting(graph, MemoryEvaluator(graph).storages).keep_all_bytes * 8 // 10

    def stop(share: float, best_ns: float) -> None:
        raise KeyboardInterrupt

    acting = search_memory_actions(graph, (), limit, 2, budget_s=60, seed=0, progress=stop)
    assert acting.interrupted
    assert acting.outcome.peak_bytes <= limit


def test_explore_within_a_limit_recommends_memory_actions() -> None:
    """Where no schedule keeps the limit as it is; parts of the gain add up, and the time is the file's."""
    graph = graph_of(chain_step(6, dur_ns=100_000), d2h=8.0, h2d=8.0)
    free = explore(graph, streams=2, evaluations=20)
    limit = min(row.peak_bytes for row in free.rows) - SIZE
    found = explore(graph, streams=2, evaluations=20, memory_limit_bytes=limit)
    assert found.best.policy == MEMORY_ACTIONS
    assert found.memory_plan is not None
    assert found.best.peak_bytes <= limit
    assert found.best.schedule.searched, "its interval ends later by as much as a search may find it overrated"
    assert found.verdict.searched
    gain = found.attribution
    total = gain.concurrency_ns + gain.kernels_ns + gain.order_ns + gain.memory_ns
    assert total == found.sequential_ns - found.best.makespan_ns
    assert found.timeline.makespan_ns == found.best.makespan_ns
    assert MemoryEvaluator(graph).evaluate(found.memory_plan).step_ns == found.best.makespan_ns


def test_interval_of_searched_memory_actions_ends_later() -> None:
    """As that of any searched schedule; a policy's plan has none of that."""
    graph = graph_of(chain_step(2), searched_frac=0.1)
    plan = MemoryPlan()
    ends_ns = [plan.made(policy).interval_ns(graph, 1000)[1] for policy in ("vdnn", MEMORY_ACTIONS)]
    assert ends_ns == [1000, 1100]


def test_recommended_schedule_has_all_that_simulating_and_replaying_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a value and as a file: the memory actions are part of it, and nothing leaves them out without a word."""
    step = load(chain_step(6, dur_ns=100_000), make_hardware(d2h=8.0, h2d=8.0))
    free = gpusim.explore(step, streams=2, evaluations=20)
    limit = min(row.peak_bytes for row in free.rows) - SIZE
    best = gpusim.explore(step, streams=2, evaluations=20, memory_limit=limit)
    assert best.schedule == best.memory_plan
    best.save(tmp_path / "best.json")
    replayed: list[MemoryPlan] = []

    def run(step: gpusim.Step, plan: MemoryPlan, *_: object) -> None:
        replayed.append(plan)

    monkeypatch.setattr(gpu, "_replay_memory", run)
    for schedule in (best.schedule, tmp_path / "best.json", str(tmp_path / "best.json")):
        for engine in ("fast", "reference"):
            found = gpusim.simulate(step, schedule, engine=engine)
            assert (found.makespan_ns, found.peak_bytes) == (best.best.makespan_ns, best.best.peak_bytes)
            assert (found.plan, found.streams) == (best.memory_plan, best.best.streams)
            assert found.timeline.makespan_ns == found.makespan_ns
        gpusim.replay(step, schedule, check_outputs=False)
        with pytest.raises(gpusim.OptionError, match="one CUDA graph"):
            gpusim.simulate(step, schedule, launch="stream")
        with pytest.raises(gpusim.OptionError, match=r"^schedule=.*memory actions"):
            gpusim.explain(step, schedule)
    assert replayed == [best.memory_plan] * 3
    other = load(chain_step(5, dur_ns=100_000), make_hardware())
    with pytest.raises(ScheduleError, match="of another trace"):
        gpusim.simulate(other, tmp_path / "best.json")
    with pytest.raises(ScheduleError):
        gpusim.simulate(other, best.schedule)


def test_explore_has_no_memory_actions_where_every_schedule_keeps_the_limit() -> None:
    graph = graph_of(chain_step(6))
    found = explore(graph, streams=2, evaluations=20, memory_limit_bytes=1 << 40)
    assert MEMORY_ACTIONS not in {row.policy for row in found.rows}


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_copies_of_a_plan_take_the_link_measured_with_its_step(engine: str) -> None:
    """Each direction at its own measured rate, both together at the model's sum scaled alike; every engine the same.

    The model has 8 bytes per ns each way and 12 both ways, the step's own link 4 out and 2 back: both ways 12 * 6 / 16.
    """
    trace = chain_step()
    timing = Timing(median_ns=0, lo_ns=0, hi_ns=0, rounds=1)
    link = HostLink(d2h_bytes_per_ns=4.0, h2d_bytes_per_ns=2.0)
    truth = GroundTruth(eager=timing, graph=timing, attributed_frac=1.0, link=link)
    graph = graph_of(msgspec.structs.replace(trace, ground_truth=truth), d2h=8.0, h2d=8.0, both=12.0)
    assert graph.hardware.copies.both_bytes_per_ns == 12.0 * 6 / 16
    evaluator = MemoryEvaluator(graph, engine)
    lowered = lower_program(graph, evaluator.storages, evaluator.program(moving()))
    timeline = evaluator.engine.run(lowered.plan, graph.hardware)
    spans = zip(lowered.plan.tasks, timeline.start_ns, timeline.end_ns, strict=True)
    took = {task.kind: end - start for task, start, end in spans if task.kind in ("d2h", "h2d")}
    latency = graph.hardware.copies.latency_ns
    assert took["d2h"] == pytest.approx(SIZE / 4.0 + latency, abs=2)
    assert took["h2d"] == pytest.approx(SIZE / 2.0 + latency, abs=2)
