"""Detection of a profile's steps: `ProfilerStep` ranges, repeated NVTX ranges, or a period of kernels.

A record belongs to the range of its launch, since kernels run later than the host's ranges.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from gpusim.errors import OptionError, UnknownNameError
from gpusim.importers.model import Activity, Profile, Range
from gpusim.importers.observed import makespan_ns
from gpusim.units import counted

_STEP_WORDS: Final = re.compile(
    r"(?:^|[^a-z])(?:step|iter|iteration|batch|train_step|forward_backward)(?:[^a-z]|$)", re.I
)
_DIGITS: Final = re.compile(r"\d+")
#: Least share of the kernels' time in the ranges of one name, for these to be steps.
MIN_COVER: Final = 0.5
#: Fewest kernels of a period, and fewest repetitions.
MIN_PERIOD, MIN_REPEATS = 3, 2
WHOLE = "the whole file"


@dataclass(frozen=True, slots=True)
class Step:
    """A part of a profile: name and indices of its records."""

    name: str
    indices: tuple[int, ...]
    is_whole: bool = False


def find_steps(profile: Profile, indices: Sequence[int]) -> list[Step]:
    """Return the steps among these records, in order; empty where none are found."""
    activities = profile.activities
    if not any(activities[index].kind == "kernel" for index in indices):
        return []
    named = [span for span in profile.ranges if span.name.startswith("ProfilerStep")]
    for ranges in ([named] if named else []) + _repeated_ranges(profile):
        steps = _by_ranges(activities, indices, ranges)
        if steps and (ranges is named or _cover(activities, indices, steps) >= MIN_COVER):
            return steps
    return _by_period(activities, indices)


def choose_step(profile: Profile, indices: Sequence[int], wanted: str | None) -> tuple[Step, list[Step]]:
    """Return the requested step, or the one of median time among those with the most frequent number of kernels.

    `wanted` is a name (`ProfilerStep#7`, a range), a number from 0, or `all`. Raises `OptionError`.
    """
    steps = find_steps(profile, indices)
    whole_file = Step(WHOLE, tuple(indices), is_whole=True)
    if wanted == "all":
        return whole_file, steps
    if wanted is not None:
        for step in steps:
            if step.name == wanted:
                return step, steps
        if wanted.isascii() and wanted.isdigit():
            number = wanted.lstrip("0") or "0"
            if len(number) <= len(str(len(steps))) and int(number) < len(steps):
                return steps[int(number)], steps
            known = f"{counted(len(steps), 'step')}, numbered from 0" if steps else "no marked or repeated step"
            problem = f"{profile.file} has {known}"
            raise OptionError(problem, argument="step", value=wanted[:20])
        ranges = [span for span in profile.ranges if span.name == wanted]
        chosen = _by_ranges(profile.activities, indices, ranges[:1])
        if not chosen:
            names = {step.name for step in steps} | {span.name for span in profile.ranges}
            raise UnknownNameError("step", wanted, [*sorted(names)[:2000], "all"])
        return chosen[0], steps
    if not steps:
        return whole_file, steps
    counts = Counter(_kernels(profile.activities, step) for step in steps)
    usual = max(counts, key=lambda count: (counts[count], count))
    alike = [step for step in steps if _kernels(profile.activities, step) == usual]
    by_time = sorted(alike, key=lambda step: makespan_ns([profile.activities[i] for i in step.indices]))
    return by_time[(len(by_time) - 1) // 2], steps


def _kernels(activities: Sequence[Activity], step: Step) -> int:
    return sum(activities[index].kind == "kernel" for index in step.indices)


def _cover(activities: Sequence[Activity], indices: Sequence[int], steps: Sequence[Step]) -> float:
    in_all = sum(activities[index].dur_ns for index in indices)
    return sum(activities[index].dur_ns for step in steps for index in step.indices) / max(1, in_all)


def _repeated_ranges(profile: Profile) -> list[list[Range]]:
    """Return ranges that may be steps, likeliest first: several with the same name except for digits, not nested."""
    groups: dict[tuple[int, str], list[Range]] = {}
    for span in profile.ranges:
        groups.setdefault((span.thread, _DIGITS.sub("#", span.name)), []).append(span)
    repeated = []
    for (_, label), spans in groups.items():
        spans.sort(key=lambda span: span.start_ns)
        apart = all(a.end_ns <= b.start_ns for a, b in pairwise(spans))
        if len(spans) >= MIN_REPEATS and apart and _STEP_WORDS.search(label):
            repeated.append(spans)
    repeated.sort(key=lambda spans: -sum(span.end_ns - span.start_ns for span in spans))
    return repeated[:16]


def _by_ranges(activities: Sequence[Activity], indices: Sequence[int], ranges: Sequence[Range]) -> list[Step]:
    """Return steps of ranges, with each record in the range of its launch, or of its start without one."""
    spans = sorted({(span.start_ns, span.end_ns, span.name) for span in ranges})
    if not spans:
        return []
    inside: dict[int, list[int]] = {}
    begins = [begin for begin, _, _ in spans]
    for index in indices:
        activity = activities[index]
        time_ns = activity.start_ns if activity.launch_ns is None else activity.launch_ns
        place = bisect_left(begins, time_ns + 1) - 1
        if place >= 0 and time_ns < spans[place][1]:
            inside.setdefault(place, []).append(index)
    names = Counter(name for _, _, name in spans)
    steps: list[Step] = []
    for place, records in sorted(inside.items()):
        name = spans[place][2]
        if any(activities[index].kind == "kernel" for index in records):
            number = len(steps)
            steps.append(Step(name if names[name] == 1 else f"{name} [{number}]", tuple(records)))
    return steps


def _by_period(activities: Sequence[Activity], indices: Sequence[int]) -> list[Step]:
    """Return steps as the longest sequence of kernels that repeats through the whole file."""
    kernels = [index for index in indices if activities[index].kind == "kernel"]
    numbers: dict[object, int] = {}
    sequence = [
        numbers.setdefault((activities[i].name, activities[i].grid, activities[i].block), len(numbers)) for i in kernels
    ]
    counts = Counter(sequence)
    rare = sorted((count, number) for number, count in counts.items() if count >= MIN_REPEATS)[:8]
    for _, number in rare:
        places = [place for place, element in enumerate(sequence) if element == number]
        gaps = {b - a for a, b in pairwise(places)}
        if len(gaps) != 1 or (period := gaps.pop()) < MIN_PERIOD:
            continue
        begin = places[0]
        while begin > 0 and sequence[begin - 1] == sequence[begin - 1 + period]:
            begin -= 1
        end = places[-1]
        while end + 1 < len(sequence) and sequence[end + 1] == sequence[end + 1 - period]:
            end += 1
        repeats = (end + 1 - begin) // period
        inside = set(sequence[begin : end + 1])
        outside = set(sequence[:begin]) | set(sequence[end + 1 :])
        # A layer repeats, too; but kernels around layers do not occur in them, and steps leave no kernel out.
        if repeats < MIN_REPEATS or outside - inside or (end + 1 - begin) < 0.9 * len(sequence):
            continue
        steps = []
        for number_of in range(repeats):
            first = kernels[begin + number_of * period]
            last_at = begin + (number_of + 1) * period
            stop = kernels[last_at] if last_at < len(kernels) else indices[-1] + 1
            members = tuple(indices[bisect_left(indices, first) : bisect_left(indices, stop)])
            steps.append(Step(f"period {number_of} of {period} kernels", members))
        return steps
    return []
