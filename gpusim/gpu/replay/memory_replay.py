"""Replay of memory plans on the GPU: each as a CUDA graph of its own, its results and its peak memory checked."""

from __future__ import annotations

import datetime
import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from gpusim.defaults import DEFAULT_SEED
from gpusim.formats.measurement import SCHEMA, Measurement
from gpusim.formats.trace import Trace
from gpusim.gpu.calibrate.copies import own_link
from gpusim.gpu.device import explain_out_of_memory, gpu_facts, gpu_id, require_gpu, set_precision
from gpusim.gpu.replay.allowlist import check_operators
from gpusim.gpu.replay.compare import check_same_kernels, check_variants, compare
from gpusim.gpu.replay.cudagraph import own_workspaces
from gpusim.gpu.replay.execute import InitialState, make_initial, results_of
from gpusim.gpu.replay.memory_run import CudaLanes, HostBuffers, MemoryRunner, ProgramRunner
from gpusim.gpu.replay.memory_streams import StreamLanes, run_on_streams
from gpusim.gpu.replay.rounding import rounding_noise
from gpusim.gpu.replay.sensitivity import make_sensitive
from gpusim.gpu.replay.timing import RECORDINGS, ROUNDS, Recorder, time_typical
from gpusim.memplan.evaluate import MemoryEvaluator, Outcome
from gpusim.memplan.pinned import within_pinned
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.program import Program, needed, op_streams_of
from gpusim.memplan.waits import waits_of
from gpusim.plan.graph import OpGraph
from gpusim.plan.sync import program_order_releases
from gpusim.trace.store import structure_hash
from gpusim.trace.trust import check_trace_code
from gpusim.units import counted, format_bytes
from gpusim.version import code_version

#: GPU time for timing one plan in turns with the step that keeps all, in ns, and the least number of rounds.
TIMED_NS, FEWEST_ROUNDS = 2e9, 9
#: Calls of a long step in a round, as `gpusim.gpu.replay.timing` has them at least.
CALLS_IN_ROUND = 3


@dataclass
class RecordedProgram:
    """A CUDA graph of one program. `tensors` are its results' memory, valid until the next replay."""

    graph: torch.cuda.CUDAGraph
    tensors: list[torch.Tensor | None]
    peak_bytes: int
    """Most that was allocated: the state before the step, and what recording took at most."""
    reserved_bytes: int
    events: int

    def replay(self) -> None:
        """Run it once."""
        self.graph.replay()


class ProgramRecorder:
    """Records programs of one step; streams and host buffers are made once.

    With `own_workspaces` a graph has cuBLAS's workspaces in its own memory, as in `GraphRecorder`.
    """

    def __init__(
        self, evaluator: MemoryEvaluator, runner: MemoryRunner, initial_bytes: int, *, own_workspaces: bool = False
    ) -> None:
        self.own_workspaces = own_workspaces
        self.storages = evaluator.storages
        self.runner = runner
        self.initial_bytes = initial_bytes
        self.lanes = CudaLanes()
        self.streams = StreamLanes(self.lanes.ops)
        self.programs = ProgramRunner(runner, HostBuffers(pinned=True), self.lanes)

    def record(self, program: Program, variants: Sequence[int] = (), warm: bool = False) -> RecordedProgram:
        """Record a program whose host buffers are there, with its plan's variants. `warm` runs it once before, eagerly:
        libraries set up.
        """
        self.runner.choose(variants)
        streams = op_streams_of(program)
        if streams > 1:
            waits = waits_of(self.storages, program)
            run = partial(run_on_streams, program, waits, self.runner, self.programs.buffers, self.streams)
        else:
            needs = [needed(self.storages, instruction) for instruction in program]
            run = partial(self.programs.run, program, needs)
        torch.cuda.synchronize()
        if warm:
            with torch.cuda.stream(self.lanes.ops):
                run()
            torch.cuda.synchronize()
            self.runner.drop_temporaries()
        gc.collect()
        with own_workspaces(streams) if self.own_workspaces else nullcontext():
            torch.cuda.empty_cache()
            before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            torch.cuda.reset_peak_memory_stats()
            self.lanes.events = self.streams.events = 0
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.lanes.ops, capture_error_mode="thread_local"):
                run()
        peak = torch.cuda.max_memory_allocated() - before + self.initial_bytes
        reserved = torch.cuda.max_memory_reserved() - reserved + self.initial_bytes
        recorded = RecordedProgram(
            graph, list(self.runner.tensors), peak, reserved, self.lanes.events + self.streams.events
        )
        self.runner.drop_temporaries()
        return recorded


def state_on_gpu(trace: Trace, device: torch.device, seed: int) -> tuple[InitialState, int]:
    """Return the step's initial state, its copy on the host, and the bytes that it has allocated on the GPU."""
    before = torch.cuda.memory_allocated()
    initial = make_initial(trace, device, seed)
    pristine = {index: tensor.cpu() for index, tensor in initial.pristine.items()}
    state = InitialState(initial.tensors, pristine)
    del initial
    gc.collect()
    return state, torch.cuda.memory_allocated() - before


@explain_out_of_memory
def replay_memory(
    graph: OpGraph,
    plans: Sequence[MemoryPlan],
    *,
    command: str = "",
    seed: int = DEFAULT_SEED,
    recordings: int = RECORDINGS,
    say: Callable[[str], None] = lambda _: None,
    on_plan: Callable[[int, MemoryPlan, Measurement], None] = lambda *_: None,
    trust_code: bool = False,
) -> list[Measurement]:
    """Replay memory plans of one step, each timed in turns with the one that keeps all.

    In the measurements, `sequential` is that one, and `peak_bytes` is what PyTorch says was allocated at most.
    `on_plan` gets each plan's number, the plan that ran, and its measurement as soon as it is made. Where the host has
    too little pinned memory, storages stay on the GPU, and `say` is told. Raises `PlanError` for a plan that cannot
    run, `OperatorError`, `TrustError`, `GpuError` as `replay` does.
    """
    trace, hardware = graph.trace, graph.hardware
    check_trace_code(trace, trace.name, trust_code)
    check_operators(trace, trace.name)
    device = require_gpu()
    evaluator = MemoryEvaluator(graph)
    base, *outcomes = [evaluator.evaluate(plan) for plan in (MemoryPlan(policy="keep_all"), *plans)]
    set_precision(trace.model.dtype)
    say("rebuilding the step")
    host_link = own_link()
    runner = MemoryRunner(trace, device)
    state, initial_bytes = state_on_gpu(trace, device, seed)
    runner.bind(state.tensors)
    recorder = ProgramRecorder(evaluator, runner, initial_bytes)
    releases = program_order_releases(trace)
    sensitive = make_sensitive(runner, state, releases, seed)
    say("comparing outputs")
    noise = rounding_noise(runner, state, releases, seed)
    state.restore()
    kept = recorder.record(base.program, warm=True)
    wanted = _results(trace, kept, state, seed)
    repeated = compare(trace, _results(trace, kept, state, seed), wanted, noise)
    gpu = gpu_facts(kept.replay)
    measured: list[Measurement] = []
    in_fp32 = None
    for number, planned in enumerate(outcomes):
        outcome = with_buffers(recorder, evaluator, planned, say)
        say(f"timing plan {number + 1} of {len(outcomes)}: {outcome.plan.policy}")
        state.restore()
        recorded = recorder.record(outcome.program, outcome.plan.variants, warm=True)
        results = _results(trace, recorded, state, seed)
        if not outcome.plan.has_variants:
            check = check_same_kernels(trace, results, wanted, repeated, noise)
        else:
            if in_fp32 is None and trace.model.dtype == "tf32":
                set_precision("fp32")
                state.restore()
                in_fp32 = _results(trace, recorder.record(base.program, warm=True), state, seed)
                set_precision("tf32")
            check = check_variants(trace, results, wanted, repeated, in_fp32)
        del results
        state.restore()
        recorders = {
            name: _first_then(first, partial(recorder.record, each.program, each.plan.variants))
            for name, first, each in (("kept", kept, base), ("plan", recorded, outcome))
        }
        times = time_typical(recorders, recordings, rounds_for(base.step_ns + outcome.step_ns))
        measured.append(
            Measurement(
                schema=SCHEMA,
                trace=trace.name,
                trace_hash=structure_hash(trace),
                policy=outcome.plan.policy,
                streams=outcome.plan.streams,
                schedule=times["plan"],
                sequential=times["kept"],
                predicted_ns=outcome.step_ns,
                predicted_interval_ns=outcome.plan.interval_ns(graph, outcome.step_ns),
                predicted_sequential_ns=base.step_ns,
                hardware=hardware.label,
                outputs=msgspec.structs.replace(check, sensitive=sensitive),
                peak_bytes=recorded.peak_bytes,
                sequential_peak_bytes=kept.peak_bytes,
                events=recorded.events,
                link=host_link,
                gpu=gpu,
                gpu_id=gpu_id(),
                date=datetime.date.today().isoformat(),
                command=command,
                gpusim=code_version(),
            )
        )
        on_plan(number, outcome.plan, measured[-1])
        del recorded, recorders
    return measured


def rounds_for(both_ns: int) -> int:
    """Return the timing rounds of a plan and the step that keeps all, which take `both_ns` together.

    Intervals of steps of 30 to 60 ms are within 0.6 % with `ROUNDS`; a long step needs no more than `FEWEST_ROUNDS`.
    """
    return min(ROUNDS, max(FEWEST_ROUNDS, round(TIMED_NS / (CALLS_IN_ROUND * max(both_ns, 1)))))


def _first_then(first: RecordedProgram, make: Recorder) -> Recorder:
    """Return a recorder that hands out an existing recording before it makes more."""
    there = [first]
    return lambda: there.pop() if there else make()


def with_buffers(
    recorder: ProgramRecorder, evaluator: MemoryEvaluator, outcome: Outcome, say: Callable[[str], None]
) -> Outcome:
    """Return the outcome itself, or where the host gives less pinned memory that of as much of its plan as has room."""
    had_bytes = recorder.programs.prepare(outcome.program)
    while had_bytes is not None:
        plan, kept = within_pinned(evaluator.storages, outcome.plan, had_bytes)
        say(
            f"{plan.policy}: the host has pinned memory for {format_bytes(had_bytes)} of "
            f"{format_bytes(outcome.pinned_bytes)}; {counted(kept, 'storage')} stay on the GPU"
        )
        outcome = evaluator.evaluate(plan)
        had_bytes = recorder.programs.prepare(outcome.program)
    return outcome


def _results(trace: Trace, recorded: RecordedProgram, state: InitialState, seed: int) -> dict[int, torch.Tensor]:
    """Results of one run from the initial state, with the generator set back."""
    state.restore()
    torch.cuda.manual_seed(seed)
    recorded.replay()
    torch.cuda.synchronize()
    return results_of(trace, recorded.tensors)
