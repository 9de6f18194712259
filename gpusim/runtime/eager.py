"""The model's own eager step: its wall time, and the host's pace in each of its phases."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any

import torch

from gpusim.runtime.joint import LEARNING_RATE, MOMENTUM
from gpusim.runtime.models import Step
from gpusim.runtime.timing import median_interval
from gpusim.trace.schema import Phase, Timing, Trace

EAGER_ROUNDS = 25


def time_eager(step: Step, rounds: int = EAGER_ROUNDS) -> Timing:
    """Wall time of the model's own eager step, from a quiet GPU to a quiet GPU, as a user's loop would run it."""
    module = copy.deepcopy(step.module)
    run = _eager_step(step, module)
    samples = []
    for _ in range(5):
        run()
    torch.cuda.synchronize()
    for _ in range(rounds):
        begin = perf_counter_ns()
        repeats = 4
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
        samples.append((perf_counter_ns() - begin) // repeats)
    return median_interval(samples)


#: Iterations of the eager step whose phases are timed on the host.
PACE_ITERATIONS = 9


def host_pace(step: Step) -> dict[Phase, int]:
    """Host time that each phase of the model's own eager step takes to issue, in ns: medians, from a quiet GPU.

    The ops of a trace are called one by one from Python, autograd and the optimizer issue theirs in a pace of their
    own. A phase that waits for the GPU would be taken for a slow one: the launch queue holds about a thousand kernels.
    """
    module = copy.deepcopy(step.module)
    phases = _eager_phases(step, module)
    samples: dict[Phase, list[int]] = {phase: [] for phase, _ in phases}
    for iteration in range(PACE_ITERATIONS + 3):
        torch.cuda.synchronize()
        value: Any = None
        for phase, run in phases:
            begin = perf_counter_ns()
            value = run(value)
            if iteration >= 3:
                samples[phase].append(perf_counter_ns() - begin)
    torch.cuda.synchronize()
    return {phase: round(statistics.median(times)) for phase, times in samples.items()}


def paced(trace: Trace, host_ns: Sequence[int], pace: dict[Phase, int]) -> list[int]:
    """Host times of the ops, scaled so that each phase takes what it takes in the model's own eager step."""
    total: dict[Phase, int] = {}
    for op, host in zip(trace.ops, host_ns, strict=True):
        total[op.phase] = total.get(op.phase, 0) + host
    return [
        round(host * pace[op.phase] / total[op.phase]) if pace.get(op.phase) and total[op.phase] else host
        for op, host in zip(trace.ops, host_ns, strict=True)
    ]


def _eager_step(step: Step, module: torch.nn.Module) -> Callable[[], Any]:
    """One call is one step."""
    phases = _eager_phases(step, module)

    def run() -> Any:
        value: Any = None
        for _, phase in phases:
            value = phase(value)
        return value

    return run


def _eager_phases(step: Step, module: torch.nn.Module) -> list[tuple[Phase, Callable[[Any], Any]]]:
    """The phases of the eager step in order; each is given what the one before it returned."""
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
