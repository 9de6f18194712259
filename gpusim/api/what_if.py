"""`gpusim.whatif`: prediction of a step on a changed GPU, or with faster ops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpusim.api.predict import simulate
from gpusim.api.resolve import AnyStep, count, is_policy, launch_mode
from gpusim.arguments import real, text
from gpusim.defaults import DEFAULT_LAUNCH, DEFAULT_POLICY, DEFAULT_STREAMS, RECOMMENDED
from gpusim.errors import OptionError
from gpusim.notebook import html_table, short_name, short_repr
from gpusim.step import as_step
from gpusim.units import format_ns

if TYPE_CHECKING:
    from gpusim.analysis.simulation import Simulated
    from gpusim.plan.schedule import Schedule


@dataclass(frozen=True, repr=False)
class WhatIf:
    """A schedule on the original GPU and on a changed one."""

    baseline: Simulated
    changed: Simulated

    @property
    def speedup(self) -> float:
        """Baseline over changed makespan; above 1 if the change helps."""
        return self.baseline.makespan_ns / self.changed.makespan_ns if self.changed.makespan_ns else 1.0

    def sensitivities(self) -> tuple[tuple[str, float, float, float], ...]:
        """Return the changed makespan with each parameter at half and twice its value: name, low, high, now.

        Times are in ns; the schedule is kept.
        """
        from gpusim.analysis.whatif import sensitivities

        return sensitivities(self.changed)

    def __repr__(self) -> str:
        before, after = format_ns(self.baseline.makespan_ns), format_ns(self.changed.makespan_ns)
        where = short_name(self.changed.graph.hardware.label)
        return short_repr("WhatIf", f"{short_name(self.changed.graph.trace.name)}: {before} -> {after} on {where}")

    def _repr_html_(self) -> str:
        rows = [
            (name, run.graph.hardware.label, format_ns(run.makespan_ns), f"{run.speedup:.2f}x")
            for name, run in (("baseline", self.baseline), ("changed", self.changed))
        ]
        title = f"What if: {self.changed.graph.trace.name}, {self.changed.policy}"
        return html_table(title, ("", "hardware", "time", "over sequential"), rows)


def whatif(
    step: AnyStep,
    schedule: str | Path | Schedule = DEFAULT_POLICY,
    *,
    streams: int = DEFAULT_STREAMS,
    launch: str = DEFAULT_LAUNCH,
    sms: int | None = None,
    bandwidth: float = 1.0,
    launch_cost: float = 1.0,
    contention: float = 1.0,
    queues: int | None = None,
    ops: Mapping[str, float] | Iterable[tuple[str, float]] = (),
) -> WhatIf:
    """Predict a step with other SMs, bandwidth, launch costs or hardware queues, or with faster ops.

    `bandwidth`, `launch_cost` and `contention` are factors on the current value. `ops` has speed factors by op name,
    layer or `"LAYER OPERATOR"`. `launch` is that of the changed step; the baseline is one CUDA graph. `queues` needs
    the launch `"stream"`. A policy's schedule is made again for the changed GPU. Raises `OptionError`,
    `UnknownNameError`.
    """
    from gpusim.analysis.simulation import simulate as run
    from gpusim.analysis.whatif import Change, changed_graph, policy_schedule
    from gpusim.trace.op_names import find_ops

    step = as_step(step)
    mode = launch_mode(launch)
    if queues is not None and mode != "stream":
        raise OptionError(
            "hardware queues count only where the host launches: add launch 'stream'", argument="queues", value=queues
        )
    speeds = {op: speed for name, speed in _speeds(ops) for op in find_ops(step.trace, name)}
    change = Change(
        sms=count("sms", sms),
        bandwidth=real("bandwidth", bandwidth, "a factor above 0"),
        launch_cost=real("launch_cost", launch_cost, "a factor of 0 or more"),
        contention=real("contention", contention, "a factor of 0 or more"),
        queues=count("queues", queues),
        op_speed=speeds,
    )
    baseline = simulate(step, schedule, streams=streams)
    with step.naming():
        changed = changed_graph(baseline.ran, change)
        again = replace(baseline.schedule, variants=())
        if is_policy(schedule) and schedule != RECOMMENDED:
            again = policy_schedule(changed, str(schedule), streams)
        return WhatIf(baseline, run(changed, again, mode))


def _speeds(ops: object) -> list[tuple[str, float]]:
    """Return names of ops with their factors. Raises `OptionError` for anything else."""
    problem = "names of ops, each with a factor above 0"
    pairs = ops.items() if isinstance(ops, Mapping) else ops
    if isinstance(pairs, str) or not isinstance(pairs, Iterable):
        raise OptionError(problem, argument="ops", value=ops)
    speeds: list[tuple[str, float]] = []
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise OptionError(problem, argument="ops", value=pair)
        speeds.append((text("ops", pair[0], problem), real("ops", pair[1], problem)))
    return speeds
