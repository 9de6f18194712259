"""One step optimized and timed against its peers, for `gpusim validate`: in a process of its own, in turns."""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter, perf_counter_ns
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from gpusim.errors import CaptureError, GpuError
from gpusim.formats.results import Ablation, Baseline
from gpusim.formats.trace import Dtype, Frontend, Gpu, MemoryFormat, Mode, Timing
from gpusim.gpu.capture.models import ModelStep, load_step
from gpusim.gpu.device import gpu_facts, gpu_id, require_gpu, set_precision
from gpusim.gpu.inductor.kernels import stop_compiling
from gpusim.gpu.isolate import stopwatch
from gpusim.gpu.launch_state import make_launches_fast, make_launches_slow
from gpusim.gpu.optimize.callable import Gain, OptimizedStep
from gpusim.gpu.optimize.front import optimize
from gpusim.gpu.optimize.garbage import no_collection
from gpusim.gpu.optimize.peers import Call, Contender, Exact, make, tensors_of, user_step
from gpusim.gpu.optimize.sensitive import make_sensitive
from gpusim.gpu.replay.timing import median_interval
from gpusim.text import first_line

#: Rounds in which contenders take turns, and the length of each contender's part of a round, in ms: long enough that
#: the GPU's wait for the host's first call hardly counts (`research/2026-11-26-call-parts.md`).
ROUNDS, ROUND_MS = 15, 150.0
#: Number of peers in a case's first row, and rounds of a row that lacks peers.
FIRST_PEERS, FIRST_ROUNDS = 2, 5
BATCHES: Final = 2
#: Time limit for making one of the `further` peers in a case's first run, in s: autotuning takes some 12 s for a
#: convolution on an H200.
FURTHER_S: Final = 90.0


@dataclass(frozen=True)
class Asked:
    """A step to optimize, with its baselines."""

    spec: str
    mode: Mode
    batch: int
    dtype: Dtype
    memory_format: MemoryFormat
    peers: tuple[Baseline, ...]
    further: tuple[Baseline, ...]
    """Peers that take longest to make: everything is measured and stored before, and again with each of them."""
    streams: int
    budget_s: float | None
    seed: int
    further_s: float = FURTHER_S
    """Time limit for making one of `further`, in s."""
    within_s: float | None = None
    """Time after which the process ends, wherever it is."""
    ablations: tuple[Ablation, ...] = ()
    """Freedoms to take away one at a time, for `gpusim.gpu.optimize.ablations`."""


@dataclass(frozen=True)
class Measured:
    """Measurements of a step; times are of one call as a user makes it."""

    gpu: Gpu
    gpu_id: str
    optimized: Timing
    peers: dict[str, Timing]
    peer_bytes: dict[str, int]
    deviations: dict[str, float]
    """Deviation from the step in FP64, by contender; empty where dropout makes every step different."""
    optimize_s: float
    stages_s: dict[str, float]
    compiled_before: bool
    """Whether Triton's cache had kernels at the start: `optimize_s` is then shorter than at a first start."""
    sequential_ns: int
    predicted_ns: int
    predicted_interval_ns: tuple[int, int]
    predicted_sequential_ns: int
    streams: int
    policy: str
    kernels_chosen: bool
    peak_bytes: int
    worst_error: float
    bit_equal: bool
    sensitive: bool
    """Whether the results depend on the inputs, so that a wrong one shows."""
    frontend: Frontend
    ablation: Ablation | None = None
    """Freedom that was taken away."""
    fast_launches_ns: dict[str, int] = field(default_factory=dict)
    """Time of a call with launches in their fast state, by contender; empty if not measured."""


Keep = Callable[[Measured], None]


def measure(asked: Asked, keep: Keep) -> None:
    """Optimize a step, make its peers, and time all in turns. Call it in a process of its own.

    `keep` gets the measurements after each stage: with the first peers, with all of them, with the deviations from
    FP64, and both with each of the `further` peers. Raises `CaptureError` where the step cannot be optimized,
    `GpuError` for an error of the GPU.
    """
    say = stopwatch()
    with errors_of_the_gpu(), ended_after(asked.within_s, say):
        _measure(asked, keep, say)


def _measure(asked: Asked, keep: Keep, say: Callable[[str], None]) -> None:
    step, sensitive = loaded(asked, say)
    exact = Exact(step)
    ours = timed_optimize(step, asked, say)
    fast = ours.fast
    contenders = {"optimize": Contender(fast, ours.model)}
    batches = batches_of(step)
    say(f"a call alone takes {alone_ns(fast, batches) / 1e3:.1f} us; {said(ours.gain)}")
    gpu = gpu_facts(lambda: fast(*tensors_of(step)))
    deviations: dict[str, float] = {}
    for stage in stages(asked):
        for peer in stage.peers:
            say(f"making {peer}")
            try:
                with time_limit(asked.further_s) if stage.further else nullcontext():
                    contenders[peer] = make(peer, step)
            except TimeIsUp:
                stop_compiling()
                say(f"left out {peer}: not ready after {asked.further_s:g} s")
            except Exception as cause:  # torch.compile raises errors of many kinds
                say(f"left out {peer}: {first_line(cause)}")
        if stage.further and not contenders.keys() & set(stage.peers):
            continue
        say("timing all in turns")
        calls = {name: each.call for name, each in contenders.items()}
        times = times_in_turns(calls, batches, ROUNDS if stage.complete else FIRST_ROUNDS)
        measured = replace(
            ours.measured(gpu, times.pop("optimize"), times, sensitive),
            fast_launches_ns=fast_times(calls, batches) if stage.complete else {},
            peer_bytes={name: each.peak_bytes for name, each in contenders.items() if name != "optimize"},
            deviations=dict(deviations),
        )
        keep(measured)
        if stage.complete:
            say(f"a call alone takes {alone_ns(fast, batches) / 1e3:.1f} us while the others hold their memory")
            _compare(contenders, exact, deviations, say)
            keep(replace(measured, deviations=dict(deviations)))
    say("measured")


def fast_times(calls: Mapping[str, Call], batches: Sequence[tuple[Any, ...]]) -> dict[str, int]:
    """Return the time of a call with launches in their fast state, in ns; nothing where that cannot be made."""
    if not make_launches_fast():
        return {}
    times = times_in_turns(calls, batches, FIRST_ROUNDS, launches=lambda: None)
    return {name: time.median_ns for name, time in times.items()}


def loaded(asked: Asked, say: Callable[[str], None]) -> tuple[ModelStep, bool]:
    """Return the step on the GPU, in its precision, and whether its results depend on the inputs."""
    device = require_gpu()
    set_precision(asked.dtype)
    say("loading the model")
    step = load_step(
        asked.spec,
        mode=asked.mode,
        batch=asked.batch,
        dtype=asked.dtype,
        memory_format=asked.memory_format,
        device=device,
        seed=asked.seed,
    )
    return step, make_sensitive(step, asked.dtype, asked.seed)


@dataclass(frozen=True)
class Optimized:
    """A step as optimized, on a model of its own."""

    fast: OptimizedStep
    model: torch.nn.Module
    gain: Gain
    optimize_s: float
    compiled_before: bool

    def measured(self, gpu: Gpu, time: Timing, peers: dict[str, Timing], sensitive: bool) -> Measured:
        """Return its measurements, without memory and deviations of peers."""
        gain = self.gain
        return Measured(
            gpu=gpu,
            gpu_id=gpu_id(),
            optimized=time,
            peers=peers,
            peer_bytes={},
            deviations={},
            optimize_s=self.optimize_s,
            stages_s={stage: round(taken_s, 3) for stage, taken_s in gain.stages_s.items()},
            compiled_before=self.compiled_before,
            sequential_ns=gain.sequential_ns,
            predicted_ns=gain.predicted_call_ns,
            predicted_interval_ns=gain.predicted_call_interval_ns,
            predicted_sequential_ns=gain.predicted_sequential_ns,
            streams=gain.streams,
            policy=gain.policy,
            kernels_chosen=gain.kernels_chosen,
            peak_bytes=gain.peak_bytes,
            worst_error=gain.worst_error,
            bit_equal=gain.bit_equal,
            sensitive=sensitive,
            frontend=gain.frontend,
        )


def timed_optimize(
    step: ModelStep,
    asked: Asked,
    say: Callable[[str], None],
    ablation: Ablation | None = None,
    limit_s: float | None = None,
) -> Optimized:
    """Optimize a copy of the step's model, and return it with the time that takes. Raises as `optimized`."""
    compiled_before = holds_kernels()
    model = copy.deepcopy(step.module)
    begin = perf_counter()
    fast = optimized(step, model, asked, say, ablation, limit_s)
    optimize_s = perf_counter() - begin
    assert fast.gain is not None
    return Optimized(fast, model, fast.gain, optimize_s, compiled_before)


@dataclass(frozen=True)
class Stage:
    """Peers that are made together, before all are timed and stored."""

    peers: tuple[Baseline, ...]
    complete: bool
    """Whether all peers of the recipe are there: times are final, and deviations are computed."""
    further: bool
    """Whether it may be left out: its peers have a time limit."""


def stages(asked: Asked) -> list[Stage]:
    """Return the stages: a row is kept after each, and an error of a later one leaves it."""
    ends = sorted({min(FIRST_PEERS, len(asked.peers)), *range(FIRST_PEERS, len(asked.peers) + 1)})
    begins = [0, *ends[:-1]]
    made = [asked.peers[begin:end] for begin, end in zip(begins, ends, strict=True)]
    return [
        *(Stage(peers, end == len(asked.peers), False) for peers, end in zip(made, ends, strict=True) if peers),
        *(Stage((peer,), True, True) for peer in asked.further),
    ]


def _compare(
    contenders: Mapping[str, Contender], exact: Exact, deviations: dict[str, float], say: Callable[[str], None]
) -> None:
    """Add missing deviations from FP64. An error of the GPU is raised, another one is said."""
    for name, each in contenders.items():
        if name in deviations:
            continue
        say(f"comparing {name} with FP64")
        try:
            deviation = exact.deviation(each)
        except torch.AcceleratorError:
            raise
        except Exception as cause:  # FP64 may lack an operator, or memory
            say(f"not compared with FP64: {first_line(cause)}")
            continue
        if deviation is not None:
            deviations[name] = deviation


class TimeIsUp(BaseException):
    """A peer took too long to make. Not an `Exception`: autotuning ignores the errors of its choices."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeIsUp` after some seconds, in the main thread, and again each second while something ignores it."""

    def stop(*_: object) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def ended_after(seconds: float | None, say: Callable[[str], None]) -> Iterator[None]:
    """End the process after some seconds: a compiler in a library cannot be interrupted otherwise."""

    def end() -> None:
        say("no time is left")
        os._exit(1)

    timer = threading.Timer(0.0 if seconds is None else seconds, end)
    timer.daemon = True
    if seconds is not None:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def errors_of_the_gpu() -> Iterator[None]:
    """Raise `GpuError` for an error of the GPU: after a failed kernel a process cannot use it any more."""
    try:
        yield
    except torch.AcceleratorError as cause:
        raise GpuError(f"{first_line(cause)}; this process cannot use the GPU any more") from cause


def alone_ns(call: Call, batches: Sequence[tuple[Any, ...]]) -> int:
    """Return the wall time of one call, timed without others in turns."""
    return times_in_turns({"": call}, batches, rounds=3)[""].median_ns


def said(gain: Gain) -> str:
    """Return a one-line breakdown of a call's time."""
    return (
        f"the graph {gain.optimized_ns / 1e3:.1f} us (predicted {gain.predicted_ns / 1e3:.1f}, on the GPU alone "
        f"{gain.device_ns / 1e3:.1f}, its launch on the host {gain.launch_ns / 1e3:.1f}), copies "
        f"{gain.around_ns / 1e3:.1f} ({gain.around_sequential_ns / 1e3:.1f} around the sequential graph), the host "
        f"{gain.host_ns / 1e3:.1f}, the whole call on the GPU alone {gain.call_device_ns / 1e3:.1f}"
    )


def holds_kernels() -> bool:
    """Whether Triton's cache on disk has any kernel of the current GPU."""
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    folder = Path(triton_cache_dir(torch.cuda.current_device() if torch.cuda.is_available() else 0))
    return folder.is_dir() and any(folder.iterdir())


def optimized(
    step: ModelStep,
    model: torch.nn.Module,
    asked: Asked,
    say: Callable[[str], None] = lambda _: None,
    ablation: Ablation | None = None,
    limit_s: float | None = None,
) -> OptimizedStep:
    """Return the step as optimized by `gpusim.optimize`, with its `ablation` and `limit_s`.

    Raises `CaptureError` where it comes back unoptimized.
    """
    target: Call = model if step.loss is None else user_step(step, model, model)
    problems: list[str] = []
    fast = optimize(
        target,
        tensors_of(step),
        streams=asked.streams,
        budget_s=asked.budget_s,
        seed=asked.seed,
        ablation=ablation,
        limit_s=limit_s,
        say=say,
        warn=problems.append,
    )
    if not isinstance(fast, OptimizedStep):
        raise CaptureError(f"{asked.spec} is not optimized: {'; '.join(problems)}")
    return fast


def batches_of(step: ModelStep) -> list[tuple[Any, ...]]:
    """Return copies of the step's batch at several addresses, as from a loader."""
    return [pytree.tree_map_only(torch.Tensor, torch.clone, tensors_of(step)) for _ in range(BATCHES)]


def times_in_turns(
    calls: Mapping[str, Call],
    batches: Sequence[tuple[Any, ...]],
    rounds: int = ROUNDS,
    clock: Callable[[], int] = perf_counter_ns,
    round_ms: float | None = None,
    launches: Callable[[], object] | None = None,
) -> dict[str, Timing]:
    """Wall time per call, of many calls in a row between synchronizations; medians over rounds in turns.

    A contender's part of a round takes `round_ms`, by default `ROUND_MS`. Launches are made slow before it, as
    torch.compile leaves them (`research/2026-11-29-launch-states.md`); `launches` is called instead, if given.
    Python's garbage collection is off meanwhile: objects left by compilers would slow down the next to allocate.
    """
    repeats: dict[str, int] = {}
    for name, call in calls.items():
        for batch in batches:
            call(*batch)
        one_ns = max(1, _round(call, batches, 3, clock))
        repeats[name] = max(3, round((round_ms or ROUND_MS) * 1e6 / one_ns))
    samples: dict[str, list[int]] = {name: [] for name in calls}
    with no_collection():
        for turn in range(rounds):
            names = list(calls)
            for name in names if turn % 2 == 0 else names[::-1]:
                (launches or make_launches_slow)()
                samples[name].append(_round(calls[name], batches, repeats[name], clock))
    return {name: median_interval(times) for name, times in samples.items()}


def _round(call: Call, batches: Sequence[tuple[Any, ...]], repeats: int, clock: Callable[[], int]) -> int:
    _wait()
    begin = clock()
    for number in range(repeats):
        call(*batches[number % len(batches)])
    _wait()
    return (clock() - begin) // repeats


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
