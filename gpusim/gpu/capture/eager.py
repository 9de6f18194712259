"""Wall time of the model's own eager step, and the host's issue time for each of its phases."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import torch

from gpusim.formats.trace import Phase, Timing, Trace
from gpusim.gpu.capture.joint_graph import LEARNING_RATE, MOMENTUM
from gpusim.gpu.capture.models import ModelStep
from gpusim.gpu.capture.user_step import Phases, UserStep
from gpusim.gpu.replay.timing import median_interval
from gpusim.plan.eager import STEPS_IN_A_ROW

#: Timing rounds; each measures the step's wall time and the host's pace, in turns.
EAGER_ROUNDS = 25
WARMUP_STEPS = 5


@dataclass(frozen=True)
class EagerTimes:
    """Wall time of the model's own eager step, and the host's issue time per phase."""

    wall: Timing
    """Time per step of `STEPS_IN_A_ROW` steps in a row, between synchronizations, as in a user's loop."""
    pace: Mapping[Phase | None, int]
    """Median issue time of each phase, in ns."""


def time_eager(step: ModelStep | UserStep, rounds: int = EAGER_ROUNDS) -> EagerTimes:
    """Time the model's own eager step and the host's pace in its phases, in turns.

    Measured one after the other, the pace of host-bound steps was 13 % below to 27 % above the wall time
    (`validate/traces`), since the host's speed drifts. In turns, both see the same drift.
    """
    phases = step.phases if isinstance(step, UserStep) else _eager_phases(step, copy.deepcopy(step.module))
    for _ in range(WARMUP_STEPS):
        _run(phases)
    walls: list[int] = []
    paces: dict[Phase | None, list[int]] = {phase: [] for phase, _ in phases}
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = perf_counter_ns()
        for _ in range(STEPS_IN_A_ROW):
            _run(phases)
        torch.cuda.synchronize()
        walls.append((perf_counter_ns() - begin) // STEPS_IN_A_ROW)
        for phase, issue_ns in _issue_times(phases).items():
            paces[phase].append(issue_ns)
    torch.cuda.synchronize()
    pace = {phase: round(statistics.median(times)) for phase, times in paces.items()}
    return EagerTimes(median_interval(walls), pace)


def _run(phases: Phases) -> None:
    """Run one step."""
    value: Any = None
    for _, run in phases:
        value = run(value)


def _issue_times(phases: Phases) -> dict[Phase | None, int]:
    """Return the host time to issue each phase of one step, in ns; the GPU is idle at the start of every phase.

    The ops of a trace are called one by one from Python; autograd and the optimizer issue theirs at another pace. The
    launch queue holds about a thousand kernels: behind a busy GPU, a long phase would wait for the GPU and appear slow.
    """
    times: dict[Phase | None, int] = {}
    value: Any = None
    for phase, run in phases:
        torch.cuda.synchronize()
        begin = perf_counter_ns()
        value = run(value)
        times[phase] = perf_counter_ns() - begin
    return times


def paced(trace: Trace, host_ns: Sequence[int], pace: Mapping[Phase | None, int]) -> list[int]:
    """Return the ops' host times, scaled so that each phase takes as long as in the model's own eager step, in ns.

    A step that was not split into phases has one pace, under None.
    """
    if None in pace:
        everything = sum(host_ns)
        return [round(host * pace[None] / everything) if everything else host for host in host_ns]
    total: dict[Phase, int] = {}
    for op, host in zip(trace.ops, host_ns, strict=True):
        total[op.phase] = total.get(op.phase, 0) + host
    return [
        round(host * pace[op.phase] / total[op.phase]) if pace.get(op.phase) and total[op.phase] else host
        for op, host in zip(trace.ops, host_ns, strict=True)
    ]


def _eager_phases(step: ModelStep, module: torch.nn.Module) -> Phases:
    """Return the phases of the eager step in order; each receives the result of the one before."""
    if step.loss is None:

        def infer(_: Any) -> Any:
            with torch.no_grad():
                return module(*step.inputs)

        return [("forward", infer)]

    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    loss_function = step.loss

    def forward(_: Any) -> Any:
        optimizer.zero_grad(set_to_none=True)
        return loss_function(module(*step.inputs), step.target)

    def backward(loss: Any) -> Any:
        loss.backward()

    def update(_: Any) -> Any:
        optimizer.step()

    return [("forward", forward), ("backward", backward), ("optimizer", update)]
