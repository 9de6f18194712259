"""`gpusim replay`: run a schedule on the GPU from its trace alone, check its outputs, time it."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from gpusim.engine.fast import FastEngine
from gpusim.errors import ReplayError
from gpusim.hardware.model import HardwareModel
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.measurement import SCHEMA, Measurement
from gpusim.plan.partitions import Partition
from gpusim.plan.schedule import Schedule, check_partitions, check_schedule, chosen_variants
from gpusim.plan.sync import plan_sync
from gpusim.runtime.allowlist import check_operators
from gpusim.runtime.compare import check_same_kernels, check_variants, compare
from gpusim.runtime.cudagraph import GraphRecorder, RecordedGraph
from gpusim.runtime.device import explain_out_of_memory, gpu_facts, require_gpu, set_precision
from gpusim.runtime.execute import InitialState, Runner, make_initial, results_of
from gpusim.runtime.rounding import rounding_noise
from gpusim.runtime.sensitivity import make_sensitive
from gpusim.runtime.timing import RECORDINGS, time_typical
from gpusim.trace.schema import Trace
from gpusim.trace.store import structure_hash
from gpusim.trace.trust import check_trace_code
from gpusim.version import code_version


@dataclass(frozen=True)
class Arrangement:
    """A legal schedule, ready to be recorded: op indices in launch order, streams and variants by op, partitions."""

    order: Sequence[int]
    streams: Sequence[int]
    variants: Sequence[int] = ()
    partitions: Sequence[Partition] = ()

    @classmethod
    def of(cls, schedule: Schedule, graph: OpGraph) -> Arrangement:
        """A schedule, checked. Raises `ScheduleError`."""
        order, streams = check_schedule(schedule, graph.trace, graph.preds)
        check_partitions(schedule, graph.hardware)
        return cls(order, streams, chosen_variants(schedule, graph.trace), schedule.partitions)

    def record(self, recorder: GraphRecorder, warm: bool = False) -> RecordedGraph:
        """One recording of it."""
        return recorder.record(self.order, self.streams, warm, variants=self.variants, partitions=self.partitions)


@explain_out_of_memory
def replay(
    trace: Trace,
    schedules: Sequence[Schedule],
    hardware: HardwareModel,
    *,
    command: str = "",
    seed: int = 0,
    recordings: int = RECORDINGS,
    say: Callable[[str], None] = lambda _: None,
    trust_code: bool = False,
) -> list[Measurement]:
    """Replay schedules of one trace, all timed in turns with the sequential graph.

    Raises `ScheduleError` for an illegal schedule, `OperatorError` for a forbidden operator, `TrustError` for a trace
    with code where not `trust_code`, `GpuError` without a GPU or memory. Outputs that differ are reported in the
    measurement, not raised; `require_equal` raises.
    """
    check_trace_code(trace, trace.name, trust_code)
    check_operators(trace, trace.name)
    device = require_gpu()
    graph = OpGraph.build(trace, hardware)
    legal = [Arrangement.of(schedule, graph) for schedule in schedules]
    set_precision(trace.model.dtype)
    say("rebuilding the step")
    runner = Runner(trace, device)
    state = make_initial(trace, device, seed)
    runner.bind(state.tensors)
    recorder = GraphRecorder(runner, graph.preds)
    n = len(trace.ops)
    releases = plan_sync(trace, graph.preds, range(n), [0] * n).releases
    sensitive = make_sensitive(runner, state, releases, seed)
    all_of_them = (Arrangement(range(n), [0] * n), *legal)
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
        found = _results(trace, recorded, state, seed)
        if not any(each.variants):
            checks.append(check_same_kernels(trace, found, wanted, repeated, noise))
            continue
        if in_fp32 is None and trace.model.dtype == "tf32":
            set_precision("fp32")
            in_fp32 = _results(trace, _record(recorder, state, all_of_them[0]), state, seed)
            set_precision("tf32")
        checks.append(check_variants(trace, found, wanted, repeated, in_fp32))
    say("timing")
    del sequential, recorded
    state.restore()
    times = time_typical({str(i): partial(each.record, recorder) for i, each in enumerate(all_of_them)}, recordings)
    engine = FastEngine()
    predicted = [
        engine.run(
            lower(graph, each.order, each.streams, variants=each.variants, partitions=each.partitions), graph.hardware
        ).makespan_ns
        for each in all_of_them
    ]
    return [
        Measurement(
            schema=SCHEMA,
            trace=trace.name,
            trace_hash=structure_hash(trace),
            policy=schedule.policy,
            streams=schedule.streams,
            schedule=times[str(index)],
            sequential=times["0"],
            predicted_ns=predicted[index],
            predicted_interval_ns=hardware.interval_ns(
                predicted[index], schedule.streams, graph.may_lose_cache, schedule.has_variants
            ),
            predicted_sequential_ns=predicted[0],
            hardware=hardware.label,
            outputs=msgspec.structs.replace(checks[index - 1], sensitive=sensitive),
            peak_bytes=peaks[index],
            sequential_peak_bytes=peaks[0],
            events=events[index],
            gpu=gpu,
            date=datetime.date.today().isoformat(),
            command=command,
            gpusim=code_version(),
        )
        for index, schedule in enumerate(schedules, start=1)
    ]


#: Recordings and rounds of a trial: enough to tell schedules apart by a percent or two, and no more.
TRIAL_RECORDINGS, TRIAL_ROUNDS = 3, 7


@explain_out_of_memory
def trial_ns(
    trace: Trace, schedules: Sequence[Schedule], hardware: HardwareModel, *, seed: int = 0, trust_code: bool = False
) -> list[int]:
    """A quick measurement of schedules against each other, to choose one that `replay` then measures by itself.

    Raises as `replay` does. Outputs are not compared here.
    """
    check_trace_code(trace, trace.name, trust_code)
    check_operators(trace, trace.name)
    device = require_gpu()
    graph = OpGraph.build(trace, hardware)
    legal = [Arrangement.of(schedule, graph) for schedule in schedules]
    set_precision(trace.model.dtype)
    runner = Runner(trace, device)
    state = make_initial(trace, device, seed)
    runner.bind(state.tensors)
    recorder = GraphRecorder(runner, graph.preds)
    for each in legal:
        _record(recorder, state, each)  # libraries set up on first use of a stream
    contenders = {str(number): partial(each.record, recorder) for number, each in enumerate(legal)}
    times = time_typical(contenders, TRIAL_RECORDINGS, TRIAL_ROUNDS)
    return [times[str(number)].median_ns for number in range(len(legal))]


def require_equal(measurement: Measurement) -> None:
    """Raise `ReplayError` where the schedule's outputs were not those of the sequential run."""
    outputs = measurement.outputs
    if not outputs.equal:
        raise ReplayError(
            f"replay of '{measurement.trace}', policy {measurement.policy}: outputs differ from the sequential run by "
            f"{outputs.worst_error:.2g} (tolerance {outputs.tolerance:g}); the times mean nothing"
        )


def _record(recorder: GraphRecorder, state: InitialState, arrangement: Arrangement) -> RecordedGraph:
    state.restore()
    return arrangement.record(recorder, warm=True)


def _results(trace: Trace, recorded: RecordedGraph, state: InitialState, seed: int) -> dict[int, torch.Tensor]:
    """Results of one run from the initial state, with the generator set back."""
    state.restore()
    torch.cuda.manual_seed(seed)
    recorded.replay()
    torch.cuda.synchronize()
    return results_of(trace, recorded.tensors)
