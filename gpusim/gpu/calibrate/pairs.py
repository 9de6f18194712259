"""Random pairs and triples of a trace's kernels, run concurrently on the GPU and predicted by the model.

One CUDA graph holds all of them in shuffled order, each between two kernels that record the time: each op alone, and
each pair or triple forked, concurrent, and joined. Two such graphs are timed: before each measurement, one runs its ops
once by themselves, the other fills the L2 cache with other data. The graph whose ops take nearest to their times in the
step counts: kernels of training steps find less in the cache there than right after themselves, those of inference at
batch 1 more than nothing (research/2026-11-23-capture-and-replay.md).
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from gpusim.analysis import concurrent_chains
from gpusim.analysis.concurrent_chains import Chain
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.pairs import PairCase
from gpusim.formats.trace import Trace
from gpusim.gpu.calibrate.stamps import EMPTY_PIECES, measured_ns, run_each
from gpusim.gpu.device import explain_out_of_memory, require_gpu, set_precision
from gpusim.gpu.replay.allowlist import check_operators
from gpusim.gpu.replay.execute import Runner, make_initial
from gpusim.plan.kernels import kernel_tasks
from gpusim.plan.tasks import Task
from gpusim.trace.trust import check_trace_code

#: Range of kernel durations, in ns: shorter ones are lost in the clock's resolution, longer ones make the graph slow.
MIN_NS, MAX_NS = 2_500, 80_000
#: Largest ratio of durations in a pair or triple: next to a much longer kernel, a slow-down would not show.
MAX_RATIO = 2.5
#: Every n-th case is a triple.
TRIPLE_EVERY = 4
#: Data read to evict everything else from the L2 cache, in sizes of that cache.
EVICTING_SIZES = 6


@dataclass(frozen=True)
class _Stages:
    """The work between each two stamps, in order: concurrent ops, one op, or nothing."""

    stages: tuple[tuple[int, ...], ...]

    def times(self, samples_ns: torch.Tensor) -> dict[tuple[int, ...], float]:
        """Return the mean time of each distinct stage, in ns."""
        means = samples_ns.double().mean(0).tolist()
        times_of: dict[tuple[int, ...], list[float]] = {}
        for stage, time_ns in zip(self.stages, means, strict=True):
            times_of.setdefault(stage, []).append(time_ns)
        return {stage: statistics.fmean(times) for stage, times in times_of.items()}


def measure_pairs(trace: Trace, hardware: HardwareModel, count: int, seed: int) -> list[PairCase]:
    """Measure and predict `count` random pairs and triples. Raises as `measure_groups` does."""
    rng = random.Random(seed)
    return measure_groups(trace, hardware, draw(trace, count, rng), rng, seed)


@explain_out_of_memory
def measure_groups(
    trace: Trace,
    hardware: HardwareModel,
    chosen: Sequence[tuple[int, ...]],
    rng: random.Random,
    seed: int,
    *,
    trust_code: bool = False,
) -> list[PairCase]:
    """Measure and predict groups of ops of one kernel each, run concurrently.

    No op of a group may touch a storage that another one of it writes. Raises `GpuError` without a GPU, and
    `TrustError` for a trace with code unless `trust_code`.
    """
    check_trace_code(trace, trace.name, trust_code)
    check_operators(trace, trace.name)
    device = require_gpu()
    set_precision(trace.model.dtype)
    runner = Runner(trace, device, trust_code=trust_code)
    runner.bind(make_initial(trace, device, seed).tensors)
    solos = [(op,) for op in sorted({op for ops in chosen for op in ops})]
    stages = [*chosen, *solos, *[()] * EMPTY_PIECES]
    rng.shuffle(stages)
    states = {cold: _measure(runner, _Stages(tuple(stages)), cold) for cold in (False, True)}
    cold = min(states, key=lambda state: unlike_the_step(trace, states[state]))
    times = states[cold]
    tasks = kernel_tasks(trace, hardware)
    alone_ns = {op: times[(op,)] for (op,) in solos}
    return [
        PairCase(
            trace=trace.name,
            ops=tuple(trace.ops[op].name for op in ops),
            kernels=tuple(trace.ops[op].kernels[0].name for op in ops),
            alone_ns=tuple(round(alone_ns[op]) for op in ops),
            empty_ns=round(times[()]),
            cold=cold,
            together_ns=round(times[ops]),
            predicted_ns=round(
                predict([tasks[op][0] for op in ops], [alone_ns[op] for op in ops], times[()], hardware)
            ),
        )
        for ops in chosen
    ]


def draw(trace: Trace, count: int, rng: random.Random) -> list[tuple[int, ...]]:
    """Draw distinct pairs and triples of ops that have one kernel of suitable length and change no parameter or state.

    Order counts, since the older of two kernels is served first. No op reads a storage that another one writes.
    """
    lasting = {tensor.storage for tensor in trace.tensors if tensor.init is not None}
    usable = [op for op in range(len(trace.ops)) if _usable(trace, op, lasting)]
    drawn: dict[tuple[int, ...], None] = {}
    for _ in range(200 * count):
        size = 3 if len(drawn) % TRIPLE_EVERY == TRIPLE_EVERY - 1 else 2
        if len(drawn) == count or len(usable) < size:
            break
        ops = tuple(rng.sample(usable, size))
        durations = [trace.ops[op].kernels[0].dur_ns for op in ops]
        if max(durations) <= MAX_RATIO * min(durations) and apart(trace, ops):
            drawn[ops] = None
    return list(drawn)


def _usable(trace: Trace, op: int, lasting: Collection[int]) -> bool:
    """Whether an op can be measured; `lasting` are the storages that outlive the step, which views may write to."""
    kernels = trace.ops[op].kernels
    changes = any(trace.tensors[t].storage in lasting for t in trace.ops[op].writes)
    return len(kernels) == 1 and kernels[0].kind == "kernel" and MIN_NS <= kernels[0].dur_ns <= MAX_NS and not changes


def apart(trace: Trace, ops: Sequence[int]) -> bool:
    """Whether no op touches a storage that another one writes, which would be a race."""
    touched = [{trace.tensors[t].storage for t in (*trace.ops[op].reads, *trace.ops[op].writes)} for op in ops]
    written = [{trace.tensors[t].storage for t in trace.ops[op].writes} for op in ops]
    return all(not (mine & theirs) for i, mine in enumerate(written) for j, theirs in enumerate(touched) if i != j)


def predict(tasks: Sequence[Task], alone_ns: Sequence[float], empty_ns: float, hardware: HardwareModel) -> float:
    """Predict the time between two stamps with these kernels concurrent, from their times between stamps alone, in
    ns.

    `empty_ns` is the time between two stamps with nothing between them.
    """
    chains = [Chain((task,), time_ns - empty_ns) for task, time_ns in zip(tasks, alone_ns, strict=True)]
    return concurrent_chains.predict(chains, empty_ns, hardware)


def unlike_the_step(trace: Trace, times: Mapping[tuple[int, ...], float]) -> float:
    """Return the deviation of ops alone from their times in the step: root mean square of the ratio's logarithm.

    `times` has ns by stage.
    """
    squares = [
        math.log(max(1.0, time_ns - times[()]) / trace.ops[stage[0]].kernels[0].dur_ns) ** 2
        for stage, time_ns in times.items()
        if len(stage) == 1
    ]
    return math.sqrt(statistics.fmean(squares)) if squares else 0.0


def _measure(runner: Runner, stages: _Stages, cold: bool) -> dict[tuple[int, ...], float]:
    """Record all stages in one graph, replay it, and read the stamps. `cold` is the state of the L2 cache."""
    evict = _evictor(runner.device)
    evict()
    runner.run_in_order()
    work = [[partial(runner.run, op) for op in ops] for ops in stages.stages]

    def prepare(number: int) -> None:
        if cold:
            evict()
        else:
            run_each(runner, stages.stages[number])

    return stages.times(measured_ns(runner, work, prepare))


def _evictor(device: torch.device) -> Callable[[], object]:
    """Return a call that reads enough to evict the L2 cache. It only reads, since written data would need
    write-back.
    """
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    unused = torch.zeros(EVICTING_SIZES * cache_bytes // 4, dtype=torch.float32, device=device)
    largest = torch.zeros((), dtype=torch.float32, device=device)
    return partial(torch.amax, unused, dim=0, out=largest)
