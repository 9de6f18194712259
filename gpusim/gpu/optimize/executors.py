"""Executors of schedules: CUDA graphs on streams, or op by op on the CPU, for tests of everything except times."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import torch

from gpusim.formats.hardware import HardwareModel, default_hardware
from gpusim.formats.trace import GroundTruth, Kernel, Timing, Trace
from gpusim.gpu.optimize.arena_runner import ArenaRunner
from gpusim.gpu.optimize.captured import Captured
from gpusim.gpu.replay.execute import InitialState, Runner
from gpusim.plan.arena import pack
from gpusim.plan.happens_before import HappensBefore
from gpusim.plan.schedule import Schedule
from gpusim.plan.sync import plan_sync
from gpusim.trace.dependencies import dependencies
from gpusim.trace.fusion import covered_by, place_fused

#: Nominal times of a step without a GPU; only their ratios steer the search.
NOMINAL_NS, NOMINAL_BYTES_PER_NS = 2_000, 1_000
#: Blocks of a nominal kernel: a quarter of an H200's SMs.
NOMINAL_BLOCKS = 33


class CallCopies(Protocol):
    """Copies of a call's inputs and results that a schedule makes itself."""

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the schedule on these inputs; return the results in memory of their own. Call it without gradients."""


class Ready(Protocol):
    """A schedule that can be run repeatedly."""

    @property
    def tensors(self) -> Sequence[torch.Tensor | None]:
        """Results after each run, by tensor id."""

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the step, in bytes."""

    @property
    def copies(self) -> CallCopies | None:
        """The copies that it makes itself, if any."""

    def run(self) -> None:
        """Run the step once on the user's tensors."""


class Executor(Protocol):
    """Runner of captured steps' schedules on a device."""

    device: torch.device
    recordings: int
    """Number of recordings per schedule; the fastest counts."""

    def facts(self) -> dict[str, str]:
        """Return the context of a schedule: the device, versions, settings of the libraries."""

    def hardware(self) -> tuple[HardwareModel, bool]:
        """Return the hardware model for the search, and whether it was measured on this kind of GPU."""

    def measured(self, captured: Captured, eager_ns: int, say: Callable[[str], None]) -> Trace:
        """Return the captured step's trace with kernels and times."""

    def anchored(self, captured: Captured, trace: Trace) -> Trace:
        """Return a trace with kernels and the measured time of its sequential graph. May change the user's tensors."""

    def with_variants(self, captured: Captured, trace: Trace, left_s: float, say: Callable[[str], None]) -> Trace:
        """Return the trace with other kernels of its calls, autotuned for `left_s` at most. May change the user's
        tensors.
        """

    def prepare(self, captured: Captured, trace: Trace, schedule: Schedule) -> Ready:
        """Prepare a schedule for runs. May change the user's tensors."""

    def prepare_call(
        self, captured: Captured, trace: Trace, schedule: Schedule, results: Sequence[int]
    ) -> Ready | None:
        """Prepare a schedule that copies a call's inputs and these results, by id, itself; None where this device has
        no such schedules. May change the user's tensors.
        """

    def times_ns(self, ready: Mapping[str, Ready], predicted_ns: Mapping[str, int]) -> dict[str, int]:
        """Return the time of one run of each in ns, measured in turns; without a GPU, the predicted one."""

    def timing_ns(self, one_ns: int) -> int:
        """Return how long `times_ns` takes for each recording of a schedule that takes `one_ns`, in ns."""

    def time_call_ns(self, call: Callable[[], object]) -> int:
        """Return the time of one call of the user's own code, in ns."""

    def around_ns(self, call: Callable[[Callable[[], None]], object], streams: int) -> int:
        """Return the device time of `call` outside the graph that it takes, in ns: measured around an empty one of as
        many streams.
        """

    def copies_in_graph_ns(
        self,
        call: Callable[[CallCopies], object],
        inputs: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        streams: int,
    ) -> tuple[int, int]:
        """Return the device time that copies add to a call, and to a run, of a schedule that makes them itself, in ns.

        `call` goes through an empty schedule of as many streams, which copies these inputs and results.
        """

    def device_ns(self, call: Callable[[], object]) -> int:
        """Return the device time of one call in a row that the host has queued, in ns."""

    def brief_ns(self, call: Callable[[], object]) -> float:
        """Return the device time of one call of few, in ns: for a comparison of many different calls."""

    def host_ns(self, call: Callable[[], object]) -> int:
        """Return the host time of one call, in ns, without waiting for the device."""

    def synchronize(self) -> None:
        """Wait for the device."""

    def free_bytes(self) -> int:
        """Return the memory that further recordings could take, in bytes."""

    def give_back(self) -> None:
        """Give back what trials took: the memory of recordings that nobody holds any more."""

    def make_launches_fast(self) -> bool:
        """Make launches as fast as they can be, once nothing is recorded any more; return whether that is possible."""


def state_of(captured: Captured) -> InitialState:
    """Return the user's tensors, with their initial contents."""
    return InitialState(captured.live, captured.pristine)


class restored:  # noqa: N801  (a context manager)
    """Within this context, the captured step's tensors may change; afterwards their recorded contents are restored."""

    def __init__(self, captured: Captured) -> None:
        self._state = state_of(captured)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        with torch.no_grad():
            self._state.restore()


class UserRunner(Runner):
    """Runner of a step on the user's own tensors, without cached values derived from them, since they change."""

    def __init__(self, captured: Captured, trace: Trace, device: torch.device) -> None:
        super().__init__(trace, device, own=True, functions=captured.functions)
        self.bind(captured.live)
        self._kept = _KeepsNothing()


class _KeepsNothing(dict[Any, Any]):
    """Cache of variants that stores nothing."""

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return the default without storing it."""
        return default


def arena_runner(
    captured: Captured, trace: Trace, schedule: Schedule, device: torch.device, poison: bool
) -> ArenaRunner:
    """Return a runner of a step with all results in one arena, packed for a schedule."""
    covered = covered_by(trace, schedule.variants)
    order, streams = place_fused(schedule.order, schedule.streams, covered)
    sync = plan_sync(trace, dependencies(trace), order, streams, covered)
    arena = pack(trace, HappensBefore.of_plan(trace, order, streams, sync), covered, kept=True)
    return ArenaRunner(trace, device, captured.live, arena, poison, captured.functions)


@dataclass
class _InOrder:
    """A schedule run op by op in launch order, in an arena: results have fixed memory, as in a graph."""

    runner: ArenaRunner
    variants: Sequence[int]
    order: Sequence[int]
    peak_bytes: int
    copies: CallCopies | None = None

    @property
    def tensors(self) -> Sequence[torch.Tensor | None]:
        return self.runner.tensors

    def run(self) -> None:
        self.runner.choose(self.variants)
        with torch.autocast("cpu", enabled=False):  # recorded calls are below it
            for op in self.order:
                self.runner.run(op)


class CpuExecutor:
    """Executor on the CPU, in launch order: for tests of everything except times."""

    device = torch.device("cpu")
    recordings = 1

    def facts(self) -> dict[str, str]:
        """Name the CPU as device."""
        return {"gpu": "cpu", "torch": str(torch.__version__)}

    def hardware(self) -> tuple[HardwareModel, bool]:
        """Return the model of an absent GPU."""
        return default_hardware(""), False

    def measured(self, captured: Captured, eager_ns: int, say: Callable[[str], None]) -> Trace:
        """Return the trace with nominal kernels, in proportion to the bytes that an op touches."""
        trace = captured.trace
        ops = []
        for op in trace.ops:
            size = sum(trace.storages[trace.tensors[t].storage].bytes for t in {*op.reads, *op.writes})
            nominal = Kernel(
                name=op.target, dur_ns=NOMINAL_NS + size // NOMINAL_BYTES_PER_NS, grid=(NOMINAL_BLOCKS, 1, 1)
            )
            ops.append(msgspec.structs.replace(op, kernels=(nominal,) if op.writes else ()))
        total_ns = sum(kernel.dur_ns for op in ops for kernel in op.kernels)
        return msgspec.structs.replace(trace, ops=tuple(ops), ground_truth=ground_truth(eager_ns, total_ns))

    def anchored(self, captured: Captured, trace: Trace) -> Trace:
        """Return the trace unchanged: nothing can be measured."""
        return trace

    def with_variants(self, captured: Captured, trace: Trace, left_s: float, say: Callable[[str], None]) -> Trace:
        """Return the trace unchanged: nothing can be measured."""
        return trace

    def prepare(self, captured: Captured, trace: Trace, schedule: Schedule) -> Ready:
        """Prepare the schedule in its launch order."""
        order, _ = place_fused(schedule.order, schedule.streams, covered_by(trace, schedule.variants))
        runner = arena_runner(captured, trace, schedule, self.device, poison=True)
        ready = _InOrder(runner, schedule.variants, order, runner.initial_bytes + runner.arena.bytes)
        ready.run()
        return ready

    def prepare_call(
        self, captured: Captured, trace: Trace, schedule: Schedule, results: Sequence[int]
    ) -> Ready | None:
        """Return None: torch makes the copies."""
        return None

    def times_ns(self, ready: Mapping[str, Ready], predicted_ns: Mapping[str, int]) -> dict[str, int]:
        """Return the predictions: on a CPU there is nothing to measure. Each runs once, and changes the state as timing
        does.
        """
        for each in ready.values():
            each.run()
        return {name: predicted_ns[name] for name in ready}

    def timing_ns(self, one_ns: int) -> int:
        """Nothing is measured."""
        return 0

    def time_call_ns(self, call: Callable[[], object]) -> int:
        """Call without measuring."""
        call()
        return 0

    def around_ns(self, call: Callable[[Callable[[], None]], object], streams: int) -> int:
        """Nothing is measured, but the call is made."""
        call(lambda: None)
        return 0

    def copies_in_graph_ns(
        self,
        call: Callable[[CallCopies], object],
        inputs: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        streams: int,
    ) -> tuple[int, int]:
        """Nothing is measured: no schedule has copies."""
        return 0, 0

    def device_ns(self, call: Callable[[], object]) -> int:
        """Nothing is measured, but the call is made."""
        call()
        return 0

    def brief_ns(self, call: Callable[[], object]) -> float:
        """Nothing is measured, but the call is made."""
        call()
        return 0.0

    def host_ns(self, call: Callable[[], object]) -> int:
        """Nothing is measured, but the call is made."""
        call()
        return 0

    def synchronize(self) -> None:
        """Do nothing."""

    def free_bytes(self) -> int:
        """Return more than any schedule takes: nothing is measured."""
        return sys.maxsize

    def give_back(self) -> None:
        """Do nothing: memory that nobody holds is free."""

    def make_launches_fast(self) -> bool:
        """Do nothing: there are none."""
        return True


def ground_truth(eager_ns: int, graph_ns: int) -> GroundTruth:
    """Return the measured times of a step in a trace's form."""

    def timing(ns: int) -> Timing:
        return Timing(median_ns=max(1, ns), lo_ns=max(1, ns), hi_ns=max(1, ns), rounds=1)

    return GroundTruth(eager=timing(eager_ns), graph=timing(graph_ns), attributed_frac=1.0)
