"""Where a schedule runs: in a CUDA graph on streams, or op by op on the CPU, where all but times can be tested."""

from __future__ import annotations

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

#: Times of a step without a GPU: nobody measures them, and only their ratios steer the search.
NOMINAL_NS, NOMINAL_BYTES_PER_NS = 2_000, 1_000
#: Blocks of a nominal kernel: a quarter of an H200's SMs.
NOMINAL_BLOCKS = 33


class Ready(Protocol):
    """A schedule that can be run again and again."""

    @property
    def tensors(self) -> Sequence[torch.Tensor | None]:
        """Where its results lie after each run, by tensor id."""

    @property
    def peak_bytes(self) -> int:
        """Most memory that the step needs at once."""

    def run(self) -> None:
        """Run the step once on the user's tensors."""


class Executor(Protocol):
    """What runs schedules of captured steps on a device."""

    device: torch.device
    recordings: int
    """Times that a schedule is made ready, of which the fastest counts."""

    def facts(self) -> dict[str, str]:
        """What a schedule was made for: the device, versions, settings of the libraries."""

    def hardware(self) -> tuple[HardwareModel, bool]:
        """The hardware model to search with, and whether it was measured on this kind of GPU."""

    def measured(self, captured: Captured, eager_ns: int, say: Callable[[str], None]) -> Trace:
        """The captured step's trace with kernels and times."""

    def with_variants(self, captured: Captured, trace: Trace, say: Callable[[str], None]) -> Trace:
        """The trace with other kernels of its calls. It may change the user's tensors."""

    def prepare(self, captured: Captured, trace: Trace, schedule: Schedule) -> Ready:
        """Make a schedule ready to run. It may change the user's tensors."""

    def times_ns(self, ready: Mapping[str, Ready], predicted_ns: Mapping[str, int]) -> dict[str, int]:
        """What one run of each takes, measured in turns; without a GPU, what was predicted."""

    def time_call_ns(self, call: Callable[[], object]) -> int:
        """What one call of the user's own code takes."""

    def around_ns(self, call: Callable[[Callable[[], None]], object]) -> int:
        """What the device does in `call` beside a graph, which it takes: measured around an empty one."""

    def host_ns(self, call: Callable[[], object]) -> int:
        """What one call takes of the host, which does not wait for the device."""

    def synchronize(self) -> None:
        """Wait for the device."""


def state_of(captured: Captured) -> InitialState:
    """The user's tensors, with what they held before anything ran."""
    return InitialState(captured.live, captured.pristine)


class restored:  # noqa: N801  (a context manager)
    """Within, the captured step's tensors may change; afterwards they hold what they held when it was recorded."""

    def __init__(self, captured: Captured) -> None:
        self._state = state_of(captured)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        with torch.no_grad():
            self._state.restore()


class UserRunner(Runner):
    """A runner of a step on the user's own tensors, where nothing made of them may be kept: they change."""

    def __init__(self, captured: Captured, trace: Trace, device: torch.device) -> None:
        super().__init__(trace, device, own=True, functions=captured.functions)
        self.bind(captured.live)
        self._kept = _KeepsNothing()


class _KeepsNothing(dict[Any, Any]):
    """In place of what variants keep from call to call."""

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """The default, forgotten afterwards."""
        return default


def arena_runner(
    captured: Captured, trace: Trace, schedule: Schedule, device: torch.device, poison: bool
) -> ArenaRunner:
    """A runner of a step with all that it makes in one arena, packed for a schedule."""
    covered = covered_by(trace, schedule.variants)
    order, streams = place_fused(schedule.order, schedule.streams, covered)
    sync = plan_sync(trace, dependencies(trace), order, streams, covered)
    arena = pack(trace, HappensBefore.of_plan(trace, order, streams, sync), covered, kept=True)
    return ArenaRunner(trace, device, captured.live, arena, poison, captured.functions)


@dataclass
class _InOrder:
    """A schedule run op by op in its launch order, in an arena: results lie in fixed memory, as those of a graph do."""

    runner: ArenaRunner
    variants: Sequence[int]
    order: Sequence[int]
    peak_bytes: int

    @property
    def tensors(self) -> Sequence[torch.Tensor | None]:
        return self.runner.tensors

    def run(self) -> None:
        self.runner.choose(self.variants)
        for op in self.order:
            self.runner.run(op)


class CpuExecutor:
    """Runs schedules on the CPU, in launch order: for tests of everything but times."""

    device = torch.device("cpu")
    recordings = 1

    def facts(self) -> dict[str, str]:
        """No GPU."""
        return {"gpu": "cpu", "torch": str(torch.__version__)}

    def hardware(self) -> tuple[HardwareModel, bool]:
        """The model of a GPU that is not here."""
        return default_hardware(""), False

    def measured(self, captured: Captured, eager_ns: int, say: Callable[[str], None]) -> Trace:
        """The trace with nominal kernels: as long as the bytes that an op touches."""
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

    def with_variants(self, captured: Captured, trace: Trace, say: Callable[[str], None]) -> Trace:
        """The trace as it is: nothing can be measured."""
        return trace

    def prepare(self, captured: Captured, trace: Trace, schedule: Schedule) -> Ready:
        """The schedule in its launch order."""
        order, _ = place_fused(schedule.order, schedule.streams, covered_by(trace, schedule.variants))
        runner = arena_runner(captured, trace, schedule, self.device, poison=True)
        ready = _InOrder(runner, schedule.variants, order, runner.initial_bytes + runner.arena.bytes)
        ready.run()
        return ready

    def times_ns(self, ready: Mapping[str, Ready], predicted_ns: Mapping[str, int]) -> dict[str, int]:
        """As predicted: on a CPU there is nothing to measure."""
        return {name: predicted_ns[name] for name in ready}

    def time_call_ns(self, call: Callable[[], object]) -> int:
        """Nothing is measured, but the call is made."""
        call()
        return 0

    def around_ns(self, call: Callable[[Callable[[], None]], object]) -> int:
        """Nothing is measured, but the call is made."""
        call(lambda: None)
        return 0

    def host_ns(self, call: Callable[[], object]) -> int:
        """Nothing is measured."""
        return 0

    def synchronize(self) -> None:
        """Nothing runs on."""


def ground_truth(eager_ns: int, graph_ns: int) -> GroundTruth:
    """The measured times of a step, as a trace has them."""

    def timing(ns: int) -> Timing:
        return Timing(median_ns=max(1, ns), lo_ns=max(1, ns), hi_ns=max(1, ns), rounds=1)

    return GroundTruth(eager=timing(eager_ns), graph=timing(graph_ns), attributed_frac=1.0)
