"""Schedules as CUDA graphs on streams, timed and profiled on the current GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import msgspec
import torch

from gpusim.formats.hardware import HardwareModel, default_hardware, hardware_for_gpu
from gpusim.formats.trace import Trace
from gpusim.gpu import launch_state
from gpusim.gpu.capture.variants import TUNING_S, Known, with_variants_of
from gpusim.gpu.device import gpu_facts, require_gpu
from gpusim.gpu.inductor.kernels import loaded_code
from gpusim.gpu.optimize.captured import Captured
from gpusim.gpu.optimize.choose import without_kept_factors
from gpusim.gpu.optimize.executors import CallCopies, Ready, UserRunner, arena_runner, ground_truth, state_of
from gpusim.gpu.optimize.graph_copies import GraphCopies
from gpusim.gpu.profiling import host_times, profile_ops
from gpusim.gpu.replay.cudagraph import GraphRecorder, RecordedGraph
from gpusim.gpu.replay.timing import brief_ns, host_ns_behind, interleaved_ns, queued_ns, time_interleaved
from gpusim.plan.schedule import Schedule
from gpusim.plan.sync import program_order_releases
from gpusim.trace.dependencies import dependencies

#: Rounds of a comparison of schedules, and their length in ms.
TRIAL_ROUNDS, TRIAL_MS = 9, 4.0
#: Steps whose streams are kept for further recordings: the optimized one, with kernels of both kinds.
RECORDERS = 2
#: Timed calls of the user's own code; the median counts.
EAGER_CALLS = 7
#: Profiled runs of the step: kernels of a GPU that is held back vary little, and trials decide.
PROFILED_RUNS = 4
#: Rounds of short work whose time on the GPU is measured.
AROUND_ROUNDS = 5


@dataclass
class _Graph:
    """A recorded CUDA graph; it keeps the recorder's streams and the code of its kernels alive."""

    recorded: RecordedGraph
    recorder: GraphRecorder
    code: list[Any]
    copies: GraphCopies | None = None

    @classmethod
    def of(cls, recorder: GraphRecorder, schedule: Schedule, copies: GraphCopies | None = None) -> _Graph:
        """Record a schedule after one run on its streams: libraries initialize on first use."""
        recorded = recorder.record(schedule, warm=True, around=copies)
        return cls(recorded, recorder, loaded_code(recorder.runner.functions), copies)

    @property
    def tensors(self) -> list[torch.Tensor | None]:
        return self.recorded.tensors

    @property
    def peak_bytes(self) -> int:
        return self.recorded.peak_bytes

    def run(self) -> None:
        (self.copies or self.recorded).replay()


class CudaExecutor:
    """Executor with CUDA graphs; with `poison` in an arena of their own, to find races.

    Raises `GpuError` where there is no GPU.
    """

    recordings = 3

    def __init__(self, poison: bool = False) -> None:
        self.device = require_gpu()
        self.poison = poison
        self._known: Known = {}
        """Measured kernels of calls, for other steps with equal ones."""
        self._recorders: list[tuple[Captured, Any, GraphRecorder]] = []
        """Recorders of the steps under trial: a captured step, its ops, and the recorder."""

    def facts(self) -> dict[str, str]:
        """Return the GPU, its libraries, and the precision of products."""
        backends = torch.backends
        return {
            "gpu": torch.cuda.get_device_name(self.device),
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda or "",
            "cudnn": str(backends.cudnn.version() or ""),
            "tf32": f"{backends.cuda.matmul.allow_tf32} {backends.cudnn.allow_tf32}",
            "cudnn settings": f"{backends.cudnn.enabled} {backends.cudnn.benchmark} {backends.cudnn.deterministic}",
        }

    def hardware(self) -> tuple[HardwareModel, bool]:
        """Return this GPU's model, or the default one where there is none."""
        model = hardware_for_gpu(torch.cuda.get_device_name(self.device))
        return (model, model.calibrated) if model is not None else (default_hardware(""), False)

    def measured(self, captured: Captured, eager_ns: int, say: Callable[[str], None]) -> Trace:
        """Return the trace with each op's kernels, profiled, and the time of the sequential graph."""
        trace = captured.trace
        runner = UserRunner(captured, trace, self.device)
        state = state_of(captured)
        releases = program_order_releases(trace)
        issue_ns = host_times(runner, state, releases, iterations=1)
        say("profiling its kernels")
        profile = profile_ops(runner, state, releases, sum(issue_ns), PROFILED_RUNS)
        gpu = msgspec.structs.replace(gpu_facts(), sm_clock_mhz=0, mem_clock_mhz=0)
        ops = tuple(
            msgspec.structs.replace(op, host_ns=host, kernels=kernels)
            for op, host, kernels in zip(trace.ops, issue_ns, profile.kernels, strict=True)
        )
        trace = msgspec.structs.replace(trace, ops=ops, provenance=msgspec.structs.replace(trace.provenance, gpu=gpu))
        return self.anchored(captured, msgspec.structs.replace(trace, ground_truth=ground_truth(eager_ns, 0)))

    def anchored(self, captured: Captured, trace: Trace) -> Trace:
        """Record the sequential graph, and return the trace with its time."""
        assert trace.ground_truth is not None
        sequential = self.prepare(captured, trace, Schedule.in_recorded_order(len(trace.ops)))
        graph_ns = self.times_ns({"": sequential}, {})[""]
        return msgspec.structs.replace(trace, ground_truth=ground_truth(trace.ground_truth.eager.median_ns, graph_ns))

    def with_variants(self, captured: Captured, trace: Trace, left_s: float, say: Callable[[str], None]) -> Trace:
        """Return the trace with torch's alternatives for its calls, each measured. May change the user's tensors."""
        runner = UserRunner(captured, trace, self.device)
        state_of(captured).restore()
        runner.run_in_order()
        try:
            return without_kept_factors(with_variants_of(runner, say, self._known, min(TUNING_S, max(0.0, left_s))))
        finally:
            runner.drop_temporaries()

    def prepare(self, captured: Captured, trace: Trace, schedule: Schedule) -> Ready:
        """Record the schedule as a CUDA graph, after one run on its streams: libraries initialize on first use."""
        if self.poison:
            runner = arena_runner(captured, trace, schedule, self.device, poison=True)
            return _Graph.of(GraphRecorder(runner, dependencies(trace), own_workspaces=True), schedule)
        return _Graph.of(self._recorder(captured, trace), schedule)

    def prepare_call(self, captured: Captured, trace: Trace, schedule: Schedule, results: Sequence[int]) -> Ready:
        """Record the schedule with the copies of a call in the same graph."""
        with torch.cuda.device(self.device):
            copies = GraphCopies(captured.inputs, results, self.device)
            return _Graph.of(self._recorder(captured, trace), schedule, copies)

    def _recorder(self, captured: Captured, trace: Trace) -> GraphRecorder:
        """Return the recorder of a step, which has streams of its own."""
        for known, ops, recorder in self._recorders:
            if known is captured and ops is trace.ops:
                return recorder
        recorder = GraphRecorder(UserRunner(captured, trace, self.device), dependencies(trace), own_workspaces=True)
        others = [each for each in self._recorders if each[0] is not captured]
        self._recorders = [*others, (captured, trace.ops, recorder)][-RECORDERS:]
        return recorder

    def times_ns(self, ready: Mapping[str, Ready], predicted_ns: Mapping[str, int]) -> dict[str, int]:
        """Return medians of rounds in turns, in ns."""
        timed = time_interleaved({name: each.run for name, each in ready.items()}, TRIAL_ROUNDS, TRIAL_MS)
        return {name: timing.median_ns for name, timing in timed.items()}

    def timing_ns(self, one_ns: int) -> int:
        """Return how long `times_ns` takes for each recording, in ns."""
        return interleaved_ns(one_ns, TRIAL_ROUNDS, TRIAL_MS)

    def time_call_ns(self, call: Callable[[], object]) -> int:
        """Return the median of a few calls in a row, host time included, in ns."""
        call()
        times = []
        for _ in range(EAGER_CALLS):
            torch.cuda.synchronize()
            begin = perf_counter_ns()
            call()
            torch.cuda.synchronize()
            times.append(perf_counter_ns() - begin)
        return sorted(times)[len(times) // 2]

    def around_ns(self, call: Callable[[Callable[[], None]], object], streams: int) -> int:
        """GPU time of a call with an almost empty graph, less that of the graph alone."""
        replay = self._almost_empty(streams)
        return max(0, self.device_ns(lambda: call(replay)) - self.device_ns(replay))

    def copies_in_graph_ns(
        self,
        call: Callable[[CallCopies], object],
        inputs: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        streams: int,
    ) -> tuple[int, int]:
        """GPU time of a call, and of a replay, of an almost empty graph with its copies, less that of one without."""
        copies = GraphCopies(inputs, range(len(results)), self.device)
        without, replay = self._almost_empty(streams), self._almost_empty(streams, copies, results)
        without_ns = self.device_ns(without)
        replay_ns = self.device_ns(replay)  # before any call, the graph copies its memory onto itself
        return max(0, self.device_ns(lambda: call(copies)) - without_ns), max(0, replay_ns - without_ns)

    def _almost_empty(
        self, streams: int, copies: GraphCopies | None = None, results: Sequence[torch.Tensor] = ()
    ) -> Callable[[], None]:
        """Return a replay of a graph that forks and joins: one of a single kernel would be launched as that kernel,
        and faster.
        """
        ticks = torch.zeros(streams, 1, device=self.device).unbind()
        graph = torch.cuda.CUDAGraph() if copies is None else torch.cuda.CUDAGraph(keep_graph=True)
        lanes = [torch.cuda.Stream() for _ in ticks[1:]]
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            first = torch.cuda.current_stream()
            if copies is not None:
                copies.begin()
            ticks[0].add_(1)
            for lane, tick in zip(lanes, ticks[1:], strict=True):
                lane.wait_stream(first)
                with torch.cuda.stream(lane):
                    tick.add_(1)
            for lane in lanes:
                first.wait_stream(lane)
            ticks[0].add_(1)
            if copies is not None:
                copies.end(results)
        if copies is not None:
            graph.instantiate()
            copies.bind(graph)

        def replay() -> None:
            _ = ticks  # the graph writes to them
            graph.replay()

        return replay

    def device_ns(self, call: Callable[[], object]) -> int:
        """Return the median GPU time of one call in a row, in ns; all are queued while the GPU is held back."""
        with torch.no_grad():
            return round(statistics.median(queued_ns(call) for _ in range(AROUND_ROUNDS)))

    def brief_ns(self, call: Callable[[], object]) -> float:
        """Return the GPU time of one call of few, in ns, as `timing.brief_ns`."""
        return brief_ns(call)

    def host_ns(self, call: Callable[[], object]) -> int:
        """Return the median host time of one call in a row of them, in ns; the GPU is held back meanwhile."""
        with torch.no_grad():
            return round(statistics.median(host_ns_behind(call) for _ in range(AROUND_ROUNDS)))

    def synchronize(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize()

    def free_bytes(self) -> int:
        """Return the GPU's free memory, in bytes, once torch has given back what it holds for nobody."""
        torch.cuda.empty_cache()
        free_bytes: int = torch.cuda.mem_get_info(self.device)[0]
        return free_bytes

    def give_back(self) -> None:
        """Give back the memory of dropped recordings, which torch would keep, each graph's apart."""
        self._recorders.clear()
        torch.cuda.empty_cache()

    def make_launches_fast(self) -> bool:
        """Bring launches into the fast state, which the recordings of the trial have ended."""
        with torch.cuda.device(self.device):
            return launch_state.make_launches_fast()
