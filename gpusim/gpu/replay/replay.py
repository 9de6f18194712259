"""`gpusim replay`: run a schedule on the GPU from its trace alone, check its outputs, time it."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import torch

from gpusim.defaults import DEFAULT_SEED
from gpusim.engine.fast import FastEngine
from gpusim.errors import ReplayError
from gpusim.formats.measurement import SCHEMA, Measurement
from gpusim.formats.trace import Trace
from gpusim.gpu.device import explain_out_of_memory, gpu_facts, gpu_id, require_gpu, set_precision
from gpusim.gpu.replay.allowlist import check_operators
from gpusim.gpu.replay.compare import check_same_kernels, check_variants, compare
from gpusim.gpu.replay.cudagraph import GraphRecorder, RecordedGraph
from gpusim.gpu.replay.execute import InitialState, Runner, make_initial, results_of
from gpusim.gpu.replay.rounding import rounding_noise
from gpusim.gpu.replay.sensitivity import make_sensitive
from gpusim.gpu.replay.timing import RECORDINGS, ROUNDS, time_typical
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule
from gpusim.plan.sync import plan_sync
from gpusim.trace.store import structure_hash
from gpusim.trace.trust import check_trace_code
from gpusim.version import code_version


@explain_out_of_memory
def replay(
    graph: OpGraph,
    schedules: Sequence[Schedule],
    *,
    command: str = "",
    seed: int = DEFAULT_SEED,
    recordings: int = RECORDINGS,
    rounds: int = ROUNDS,
    say: Callable[[str], None] = lambda _: None,
    trust_code: bool = False,
) -> list[Measurement]:
    """Replay schedules of one step, all timed in turns with the sequential graph; predictions are for its hardware.

    Raises `ScheduleError` for an illegal schedule, `OperatorError` for a forbidden operator, `TrustError` for a trace
    with code where not `trust_code`, `GpuError` without a GPU or memory. Outputs that differ are reported in the
    measurement; `require_equal` raises for them.
    """
    trace, hardware = graph.trace, graph.hardware
    check_trace_code(trace, trace.name, trust_code)
    check_operators(trace, trace.name)
    device = require_gpu()
    legal = [schedule.check(graph) for schedule in schedules]
    set_precision(trace.model.dtype)
    say("rebuilding the step")
    runner = Runner(trace, device, trust_code=trust_code)
    state = make_initial(trace, device, seed)
    runner.bind(state.tensors)
    recorder = GraphRecorder(runner, graph.preds)
    alone = Schedule.in_recorded_order(len(graph))
    releases = plan_sync(trace, graph.preds, alone.order, alone.streams).releases
    sensitive = make_sensitive(runner, state, releases, seed)
    all_of_them = (alone, *legal)
    say("comparing outputs")
    noise = rounding_noise(runner, state, releases, seed)
    sequential = _record(recorder, state, all_of_them[0])
    wanted = _results(trace, sequential, state, seed)
    repeated = compare(trace, _results(trace, sequential, state, seed), wanted, noise)
    gpu = gpu_facts(sequential.replay)
    peaks, events, checks = [sequential.peak_bytes], [sequential.sync.events], []
    in_fp32 = None
    recorded = sequential
    for each in legal:
        # Not kept for the timing: a GPU may not hold all of them at once.
        recorded = _record(recorder, state, each)
        peaks.append(recorded.peak_bytes)
        events.append(recorded.sync.events)
        results = _results(trace, recorded, state, seed)
        if not each.has_variants:
            checks.append(check_same_kernels(trace, results, wanted, repeated, noise))
            continue
        if in_fp32 is None and trace.model.dtype == "tf32":
            set_precision("fp32")
            in_fp32 = _results(trace, _record(recorder, state, all_of_them[0]), state, seed)
            set_precision("tf32")
        checks.append(check_variants(trace, results, wanted, repeated, in_fp32))
    say("timing")
    del sequential, recorded
    state.restore()
    contenders = {str(number): partial(recorder.record, each) for number, each in enumerate(all_of_them)}
    times = time_typical(contenders, recordings, rounds)
    engine = FastEngine()
    predicted = [engine.run(lower(graph, each), graph.hardware).makespan_ns for each in all_of_them]
    return [
        Measurement(
            schema=SCHEMA,
            trace=trace.name,
            trace_hash=structure_hash(trace),
            policy=schedule.policy,
            streams=schedule.stream_count,
            schedule=times[str(index)],
            sequential=times["0"],
            predicted_ns=predicted[index],
            predicted_interval_ns=schedule.interval_ns(graph, predicted[index]),
            predicted_sequential_ns=predicted[0],
            hardware=hardware.label,
            outputs=msgspec.structs.replace(checks[index - 1], sensitive=sensitive),
            peak_bytes=peaks[index],
            sequential_peak_bytes=peaks[0],
            events=events[index],
            gpu=gpu,
            gpu_id=gpu_id(),
            date=datetime.date.today().isoformat(),
            command=command,
            gpusim=code_version(),
        )
        for index, schedule in enumerate(legal, start=1)
    ]


#: Recordings and rounds of a trial: enough to tell schedules apart that differ by one or two percent.
TRIAL_RECORDINGS, TRIAL_ROUNDS = 3, 7


def trial_ns(
    graph: OpGraph, schedules: Sequence[Schedule], *, seed: int = DEFAULT_SEED, trust_code: bool = False
) -> list[int]:
    """Measure schedules against each other quickly, to choose one for `replay`; returns median times in ns.

    Raises as `replay` does. Outputs are not compared here.
    """
    times_ns: list[int] = []
    try_groups(graph, [schedules], seed=seed, trust_code=trust_code, done=lambda _, each_ns: times_ns.extend(each_ns))
    return times_ns


@explain_out_of_memory
def try_groups(
    graph: OpGraph,
    groups: Sequence[Sequence[Schedule]],
    *,
    done: Callable[[int, list[int]], None],
    seed: int = DEFAULT_SEED,
    trust_code: bool = False,
) -> None:
    """Measure the schedules of each group against each other, as `trial_ns`, group by group.

    After each group, `done` is called with its number and the times in ns. Raises as `replay` does, before the first.
    """
    trace = graph.trace
    check_trace_code(trace, trace.name, trust_code)
    check_operators(trace, trace.name)
    device = require_gpu()
    legal = [[schedule.check(graph) for schedule in group] for group in groups]
    set_precision(trace.model.dtype)
    runner = Runner(trace, device, trust_code=trust_code)
    state = make_initial(trace, device, seed)
    runner.bind(state.tensors)
    recorder = GraphRecorder(runner, graph.preds)
    for group_number, group in enumerate(legal):
        for each in group:
            _record(recorder, state, each)  # libraries initialize on first use of a stream
        contenders = {str(number): partial(recorder.record, each) for number, each in enumerate(group)}
        times = time_typical(contenders, TRIAL_RECORDINGS, TRIAL_ROUNDS)
        done(group_number, [times[str(number)].median_ns for number in range(len(group))])


def require_equal(measurement: Measurement) -> None:
    """Raise `ReplayError` where the schedule's outputs differ from those of the sequential run."""
    outputs = measurement.outputs
    if not outputs.equal:
        raise ReplayError(
            f"replay of '{measurement.trace}', policy {measurement.policy}: outputs differ from the sequential run by "
            f"{outputs.worst_error:.2g} (tolerance {outputs.tolerance:g}); the times are meaningless"
        )


def _record(recorder: GraphRecorder, state: InitialState, schedule: Schedule) -> RecordedGraph:
    state.restore()
    return recorder.record(schedule, warm=True)


def _results(trace: Trace, recorded: RecordedGraph, state: InitialState, seed: int) -> dict[int, torch.Tensor]:
    """Return the results of one run from the initial state, with the generator reset."""
    state.restore()
    torch.cuda.manual_seed(seed)
    recorded.replay()
    torch.cuda.synchronize()
    return results_of(trace, recorded.tensors)
