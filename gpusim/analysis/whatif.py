"""What-if: the same step with other SMs, bandwidth, launch costs or queues, or with a faster op.

A changed op graph starts from the baseline's, anchored and scaled to its GPU, so an empty change gives exactly the
baseline. Kernel times scale by the rule for other GPUs (`gpusim.plan.kernels.Scaling`): the part explained by DRAM
traffic with the bandwidth, the rest with the number of waves. The result is a trend, not a calibrated prediction, and
the changed hardware model is marked as uncalibrated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec

from gpusim.analysis.simulation import Simulated
from gpusim.defaults import DEFAULT_ENGINE
from gpusim.engine.base import Engine, engine_by_name
from gpusim.errors import OptionError
from gpusim.formats.hardware import GraphCosts, HardwareModel, StreamCosts, measure_of
from gpusim.formats.trace import Op
from gpusim.io.file_limits import MAX_RATE, MIN_RATE
from gpusim.plan.cache_misses import lost_times_ns, slower_by_misses
from gpusim.plan.graph import OpGraph
from gpusim.plan.kernels import Scaling, fit_to
from gpusim.plan.schedule import Schedule, check_streams
from gpusim.plan.tasks import Plan, Task
from gpusim.plan.traffic import Arithmetic
from gpusim.policies.registry import policy_by_name
from gpusim.rules.occupancy import kernel_demand
from gpusim.trace.op_names import full_label
from gpusim.trace.op_names import op_label as op_label  # the dashboard's

SectionT = TypeVar("SectionT", GraphCosts, StreamCosts)

#: Range of a parameter in a tornado diagram: half and twice its value.
LOW, HIGH = 0.5, 2.0
#: Exponent without effect.
LEAST_EXPONENT = 1e-6
#: Number of the longest ops in a tornado diagram.
LONGEST_OPS = 3


@dataclass(frozen=True)
class Change:
    """Changes against the baseline; factors multiply the baseline's values."""

    sms: int | None = None
    """Number of SMs."""
    bandwidth: float = 1.0
    """Factor on DRAM bandwidth."""
    launch_cost: float = 1.0
    """Factor on launch costs: gaps, forks, joins, front end and, in stream mode, the host's costs."""
    contention: float = 1.0
    """Factor on the slowdown of concurrent kernels."""
    queues: int | None = None
    """Hardware queues (stream mode)."""
    op_speed: Mapping[int, float] = field(default_factory=dict)
    """Speed factor of ops, by index."""

    def __post_init__(self) -> None:
        for name, value in (
            ("bandwidth", self.bandwidth),
            *((f"speed of op {o}", s) for o, s in self.op_speed.items()),
        ):
            if not 0.0 < value < float("inf"):
                raise OptionError(f"what-if: {name} is {value}; it must be a factor above 0")
        for name, value in (("launch cost", self.launch_cost), ("contention", self.contention)):
            if not 0.0 <= value < float("inf"):
                raise OptionError(f"what-if: {name} is {value}; it must be a factor of 0 or more")
        for name, count in (("SMs", self.sms), ("hardware queues", self.queues)):
            if count is not None and count < 1:
                raise OptionError(f"what-if: {count} {name}; there must be at least 1")


def policy_schedule(graph: OpGraph, policy: str, streams: int) -> Schedule:
    """Return the schedule of a policy. Raises `UnknownNameError` or, for the number of streams, `OptionError`."""
    check_streams(streams)
    return policy_by_name(policy)(graph, streams)


def changed_graph(graph: OpGraph, change: Change) -> OpGraph:
    """Return the op graph with a change; the same object if nothing changes.

    Raises `OptionError` for more hardware queues than the GPU has or an op that does not exist.
    """
    for op in change.op_speed:
        if not 0 <= op < len(graph):
            raise OptionError(f"what-if: no op {op} among {len(graph)} ops")
    hardware = changed_hardware(graph.hardware, change)
    speeds = {op: speed for op, speed in change.op_speed.items() if speed != 1.0}
    scaled = hardware.limits.sms != graph.hardware.limits.sms or change.bandwidth != 1.0
    if hardware is graph.hardware and not speeds:
        return graph
    tasks = list(graph.tasks)
    if scaled:
        scaling = Scaling(graph.hardware, hardware, graph.trace.model.dtype)
        foreign = graph.trace.provenance.gpu.name != scaling.source.gpu
        tasks = [
            _scaled(op, of_op, work, scaling, foreign)
            for op, of_op, work in zip(graph.trace.ops, tasks, graph.work, strict=True)
        ]
    for op, speed in speeds.items():
        tasks[op] = tuple(msgspec.structs.replace(task, dur_ns=task.dur_ns / speed) for task in tasks[op])
    return replace(graph, hardware=hardware, tasks=tuple(tasks))


def changed_hardware(hardware: HardwareModel, change: Change) -> HardwareModel:
    """Return the hardware model with a change, marked uncalibrated; the same object if nothing changes."""
    new = msgspec.structs.replace
    words: list[str] = []
    changed = hardware
    if change.sms is not None and change.sms != hardware.limits.sms:
        share = change.sms / hardware.limits.sms
        rates = {name: getattr(hardware.rates, name) * share for name in hardware.rates.__struct_fields__}
        changed = new(changed, limits=new(changed.limits, sms=change.sms), rates=new(changed.rates, **rates))
        words.append(f"{change.sms} SMs")
    if change.bandwidth != 1.0:
        rate = hardware.memory.dram_bytes_per_ns * change.bandwidth
        if not MIN_RATE <= rate <= MAX_RATE:
            limits = f"from {MIN_RATE:g} to {MAX_RATE:g}"
            raise OptionError(f"what-if: {change.bandwidth:g}x bandwidth is {rate:g} bytes/ns; simulated are {limits}")
        changed = new(changed, memory=new(changed.memory, dram_bytes_per_ns=rate))
        words.append(f"{change.bandwidth:g}x bandwidth")
    if change.launch_cost != 1.0:
        changed = new(
            changed,
            graph=_scaled_times(changed.graph, change.launch_cost),
            stream=_scaled_times(changed.stream, change.launch_cost),
        )
        words.append(f"{change.launch_cost:g}x launch cost")
    if change.contention != 1.0:
        slowdown = hardware.contention.younger_slowdown * change.contention
        exponents = tuple(  # an exponent of 0 would be another rule, not no contention
            min(1.0, max(LEAST_EXPONENT, exponent * change.contention)) if exponent else 0.0
            for exponent in (hardware.contention.sharing_exponent, hardware.contention.matrix_exponent)
        )
        contention = new(
            changed.contention, younger_slowdown=slowdown, sharing_exponent=exponents[0], matrix_exponent=exponents[1]
        )
        changed = new(changed, contention=contention)
        words.append(f"{change.contention:g}x contention")
    if change.queues is not None and change.queues != hardware.stream.queues:
        if change.queues > hardware.stream.max_queues:
            raise OptionError(f"what-if: {change.queues} hardware queues, of at most {hardware.stream.max_queues}")
        # A driver setting (CUDA_DEVICE_MAX_CONNECTIONS), not another GPU: the model stays calibrated.
        changed = new(changed, stream=new(changed.stream, queues=change.queues))
    if words:
        changed = new(changed, name=f"{hardware.name} with {', '.join(words)}", calibrated=False)
    return changed


def sensitivities(
    base: Simulated, longest_ops: int = LONGEST_OPS, engine: Engine | None = None
) -> tuple[tuple[str, float, float, float], ...]:
    """Return the makespan of one schedule with each parameter at half and at twice its value.

    Rows are (name, makespan at the low end, at the high end, now), in ns, for `tornado_figure`. The schedule is kept,
    although a policy might find a better one for the changed GPU.
    """
    runs = engine or engine_by_name(DEFAULT_ENGINE)
    hardware = base.graph.hardware
    now = float(base.makespan_ns)

    def makespan(change: Change) -> float:
        graph = changed_graph(base.graph, change)
        if graph is base.graph:
            return now
        return float(runs.run(retimed(base.timeline.plan, graph, base.schedule), graph.hardware).makespan_ns)

    sms = hardware.limits.sms
    few, many = max(1, round(sms * LOW)), round(sms * HIGH)
    ranges = [
        (f"SMs, {few} to {many}", Change(sms=few), Change(sms=many)),
        ("DRAM bandwidth, 0.5x to 2x", Change(bandwidth=LOW), Change(bandwidth=HIGH)),
        ("launch cost, 0.5x to 2x", Change(launch_cost=LOW), Change(launch_cost=HIGH)),
        ("contention, 0.5x to 2x", Change(contention=LOW), Change(contention=HIGH)),
    ]
    if base.mode == "stream":
        most = hardware.stream.max_queues
        ranges.append((f"hardware queues, 1 to {most}", Change(queues=1), Change(queues=most)))
    for op in longest(base.graph, longest_ops):
        name = f"speed of {full_label(base.graph.trace.ops[op])}, 0.5x to 2x"
        ranges.append((name, Change(op_speed={op: LOW}), Change(op_speed={op: HIGH})))
    return tuple((name, makespan(low), makespan(high), now) for name, low, high in ranges)


def retimed(plan: Plan, graph: OpGraph, schedule: Schedule) -> Plan:
    """Return the plan of a schedule with times and demands of a changed graph, as lowering it again would."""
    lost_ns = lost_times_ns(graph, schedule)
    seen: Counter[int] = Counter()
    tasks = []
    for task in plan.tasks:
        new = graph.tasks[task.op][seen[task.op]]
        if task.op in lost_ns:
            new = slower_by_misses(new, lost_ns[task.op][seen[task.op]])
        seen[task.op] += 1
        changes = {"dur_ns": new.dur_ns, "missed_ns": new.missed_ns, "demand": new.demand}
        same = all(getattr(task, name) == value for name, value in changes.items())
        tasks.append(task if same else msgspec.structs.replace(task, **changes))
    return replace(plan, tasks=tuple(tasks))


def longest(graph: OpGraph, count: int) -> tuple[int, ...]:
    """Return the ops with the longest time alone, longest first."""
    times = {op: sum(task.dur_ns for task in tasks) for op, tasks in enumerate(graph.tasks) if tasks}
    return tuple(sorted(times, key=lambda op: (-times[op], op))[:count])


def _scaled(
    op: Op, tasks: Sequence[Task], work: Sequence[Arithmetic], scaling: Scaling, foreign: bool
) -> tuple[Task, ...]:
    """Return the tasks of an op with times and demands of the changed GPU; `foreign`: captured on another one."""
    scaled = []
    for task in tasks:
        kernel = op.kernels[task.kernel]
        if foreign:
            kernel = fit_to(kernel, scaling.source)
        whole = round(task.dur_ns)
        # Kernels have whole ns; the ratio preserves the scaling by the anchor.
        timed = msgspec.structs.replace(kernel, dur_ns=whole)
        ratio = scaling.dur_ns(timed, task.dram_bytes, work[task.kernel]) / whole if whole else 1.0
        demand = kernel_demand(scaling.target.limits, kernel)
        scaled.append(msgspec.structs.replace(task, dur_ns=task.dur_ns * ratio, demand=demand))
    return tuple(scaled)


def _scaled_times(section: SectionT, factor: float) -> SectionT:
    """Return a section with its times multiplied by a factor; counts stay."""
    times = [name for name, measure in measure_of(type(section)).items() if measure == "time"]
    return msgspec.structs.replace(section, **{name: getattr(section, name) * factor for name in times})
