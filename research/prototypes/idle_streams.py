"""How late kernels start behind a change of stream, by the time that their stream has been idle.

    python research/prototypes/idle_streams.py research/data/concurrent_timelines*_h200_20261126.json.gz

Reads what `concurrent_timelines.py` wrote. In a serial graph each kernel waits for the one before, so nothing runs
beside it, and what a change of stream costs is the gap before it. Streams are those that the driver ran the kernels on.
What is more than the median gap behind changes to streams in recent use is printed by idle time: of each recording, and
of two halves of the networks, by the alphabet in turns. Below are schedules with company: medians of the time from the
end of its last predecessor to a kernel's start, by the number of that predecessor's successors, and the kernel's place.
"""

from __future__ import annotations

import gzip
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from kernel_by_kernel import Step, before, graph_of, linear, matched

Rows = list[tuple[float, float]]
"""Idle time of a kernel's stream, and the gap before the kernel, in ns."""

RECENT_NS, LONG_NS = 20_000.0, 40_000.0
#: A longer gap is none of launches: the first kernels of a profiled replay start early, and the rest late.
MOST_NS = 5_000.0


def switches(recording: dict[str, Any]) -> Rows:
    """Return idle times and gaps of a serial graph's kernels that run on another stream than the one before."""
    names, replays = recording["names"], [sorted(replay) for replay in recording["replays"]]
    count = statistics.mode(map(len, replays))
    replays = [replay for replay in replays if len(replay) == count]
    start = [statistics.median(replay[n][0] for replay in replays) for n in range(count)]
    end = [start[n] + statistics.median(replay[n][1] for replay in replays) for n in range(count)]
    streams = [event[2] for event in replays[0]]
    is_kernel = [not names[event[3]].startswith("Mem") for event in replays[0]]
    used: dict[int, float] = {streams[0]: end[0]}
    rows = []
    for n in range(1, count):
        if streams[n] != streams[n - 1] and is_kernel[n] and is_kernel[n - 1] and start[n] - end[n - 1] < MOST_NS:
            rows.append((end[n - 1] - used.get(streams[n], start[0]), start[n] - end[n - 1]))
        used[streams[n]] = end[n]
    return rows


def cells(rows: Rows) -> str:
    """Return what gaps are more by idle time: mean and number of kernels."""
    found = []
    for low_ns, high_ns in ((0.0, RECENT_NS), (RECENT_NS, LONG_NS), (LONG_NS, float("inf"))):
        more = [gap for idle, gap in rows if low_ns <= max(0.0, idle) < high_ns]
        found.append(f"{statistics.fmean(more):4.0f} ns ({len(more)})" if more else "")
    return " | ".join(found)


def forks(step: Step, streams: str) -> dict[tuple[int, int], list[float]]:
    """Return the delays of a schedule's kernels behind forks, by successors and place."""
    plan, recording = step.plan(streams), step.found["profiles"][f"real {streams}"]
    launches = linear(step.found["profiles"]["real 1"])[1]
    place = {name: number for number, name in enumerate(recording["names"])}
    numbers = [step.number[task.op] + task.kernel for task in plan.tasks]
    wanted = [(place.get(launches[n][0], -1), launches[n][1]) for n in numbers]
    preds = before(plan)
    succs: list[list[int]] = [[] for _ in preds]
    for number, earlier in enumerate(preds):
        for each in earlier:
            succs[each].append(number)
    delays: dict[tuple[int, int], list[float]] = defaultdict(list)
    for events in recording["replays"]:
        found = matched(plan, preds, events, wanted) if len(events) == len(preds) else []
        for number, earlier in enumerate(preds if found else []):
            if earlier and plan.tasks[number].kind == "kernel":
                last = max(earlier, key=lambda each: events[found[each]][0] + events[found[each]][1])
                delay = events[found[number]][0] - events[found[last]][0] - events[found[last]][1]
                delays[len(succs[last]), succs[last].index(number)].append(delay)
    return delays


def main() -> None:
    """Print a table."""
    every: dict[str, Rows] = defaultdict(list)
    print("| serial graph of | idle less than 20 us | 20 to 40 us | longer |\n|---|---|---|---|")
    for file in map(Path, sys.argv[1:]):
        for step in json.loads(gzip.decompress(file.read_bytes()))["steps"]:
            for name, recording in step.get("profiles", {}).items():
                if not name.startswith("serial"):
                    continue
                rows = switches(recording)
                usual_ns = statistics.median(gap for idle, gap in rows if idle < RECENT_NS)
                more = [(idle, gap - usual_ns) for idle, gap in rows]
                every[step["trace"]] += more
                print(f"| {step['trace']}, {name.partition(' ')[2]} streams | {cells(more)} |")
    for half, networks in (("first", sorted(every)[::2]), ("second", sorted(every)[1::2])):
        rows = [row for network in networks for row in every[network]]
        print(f"| {half} half: {', '.join(networks)} | {cells(rows)} |")
    for file in map(Path, sys.argv[1:]):
        for found in json.loads(gzip.decompress(file.read_bytes()))["steps"]:
            graph, number = graph_of(found["trace"]), [0]
            for op in graph.trace.ops:
                number.append(number[-1] + len(op.kernels))
            for streams in list(found["order"])[1:]:
                delays = forks(Step(found, graph, number), streams)
                text = []
                for count, place in sorted(delays):
                    if count in (1, 2, 4, 8, 9):
                        each = delays[count, place]
                        text.append(f"{place + 1} of {count}: {statistics.median(each):.0f} ({len(each)})")
                print(f"{found['trace']}, {streams} streams, ns: " + ", ".join(text))


if __name__ == "__main__":
    main()
