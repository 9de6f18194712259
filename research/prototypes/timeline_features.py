"""Features of a simulated timeline, for `neighbour_residuals.py`.

`matrix` kernels are products; a kernel is on DRAM from `BUSY_FRAC` of the bandwidth on. SMs are idle beyond the sum of
the running kernels' shares of blocks. A turn is a kernel's place in the launch order of its predecessor's successors.
"""

import statistics
from collections import Counter

from gpusim.engine.base import Timeline, concurrency
from gpusim.formats.hardware import HardwareModel

BUSY_FRAC, BURST_NS = 0.25, 2_000


def features(timeline: Timeline, hardware: HardwareModel) -> dict[str, float]:
    """Return counts, and times in ns, by name; pairs side by side count the time in which both run."""
    tasks, starts, ends, causes = timeline.plan.tasks, timeline.start_ns, timeline.end_ns, timeline.causes
    assert causes is not None
    before, cross, turn, previous, followers = [], [], [], dict[int, int](), Counter[int]()
    for number, task in enumerate(tasks):
        before.append({*task.deps, *([previous[task.queue]] if task.queue in previous else [])})
        cross.append(any(tasks[dep].queue != task.queue for dep in task.deps))
        turn.append(followers[causes.last[number]])
        followers.update(before[-1])
        previous[task.queue] = number
    found = Counter[str]()
    number = max(range(len(tasks)), key=ends.__getitem__)
    while number >= 0:
        found["kernels on the critical path"] += 1
        found["waits on the critical path"] += cross[number]
        found["turns at forks on the critical path"] += turn[number]
        number = causes.last[number]
    least_bytes_per_ns = BUSY_FRAC * hardware.memory.dram_bytes_per_ns
    busy = [task.dram_bytes >= least_bytes_per_ns * task.dur_ns > 0 for task in tasks]
    running: list[int] = []
    idle_ns = level = at_ns = 0.0
    for number in sorted(range(len(tasks)), key=starts.__getitem__):
        running = [other for other in running if ends[other] > starts[number]]
        found["launches beside others"] += bool(running)
        found["kernels running at launches"] += len(running)
        for other in running:
            one, two = tasks[number], tasks[other]
            both_ns = min(ends[number], ends[other]) - starts[number]
            found["pairs, any"] += both_ns
            found["pairs, both products"] += both_ns * (one.matrix and two.matrix)
            found["pairs, no product"] += both_ns * (not one.matrix and not two.matrix)
            found["pairs, both on DRAM"] += both_ns * (busy[number] and busy[other])
            found["pairs, one kernel type"] += both_ns * (one.name == two.name)
            found["pairs, common input"] += both_ns * bool({*one.deps} & {*two.deps})
            found["launches within 2 us of another"] += starts[number] - starts[other] <= BURST_NS
            found["starts against launch order"] += other > number
        running.append(number)
    shares = [task.demand.residency for task in tasks]
    changes = [*zip(starts, shares, strict=True), *zip(ends, (-share for share in shares), strict=True)]
    for ns, change in sorted(changes):
        idle_ns += (ns - at_ns) * max(0.0, 1 - level)
        level, at_ns = level + change, ns
    firsts = {task.queue: starts[number] for number, task in reversed(list(enumerate(tasks)))}
    return {
        **found,
        "idle SM time": idle_ns,
        "waits between streams": sum(cross),
        "forks: successors beyond the first": sum(count - 1 for count in followers.values()),
        "roots": sum(not deps for deps in before),
        "predicted contention": sum(loss.lost_ns for losses in causes.losses for loss in losses),
        "predicted start interference": sum(causes.interference_ns),
        "kernels held": sum(held != "" for held in causes.held),
        "mean kernels in flight": concurrency(timeline),
        "mean start of the streams' first kernels": statistics.fmean(firsts.values()),
        "from inputs to start": sum(
            starts[k] - max(ends[dep] for dep in deps) for k, deps in enumerate(before) if deps
        ),
        "predicted time": timeline.makespan_ns,
    }
