"""Content of a timeline drawing: lanes, their bars, and quantities over time, limited to what can be seen.

If a window has more kernels than bars may be drawn, bars stand for bins of time: one per lane, bin and phase, long as
the kernels of that phase ran in it. No time is dropped, and the width of a bin is known to the caller.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from gpusim.report.perfetto import Run, pack_lanes

#: Browsers stay responsive up to about this number, and a screen has no more columns.
MAX_BARS = 2_000
MAX_SAMPLES = 2_000
#: Fields that a measured kernel takes from its matching simulated one.
_MATCHED: Final = ("op", "layer", "phase", "target")

Window = tuple[int, int]
"""Start and end of a window, in ns."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A row of the drawing, with slices of one stream that do not overlap."""

    name: str
    slices: tuple[int, ...]
    """Indices of slices of the run, in start order."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of a lane: one slice, or the slices of one phase in one bin."""

    lane: int
    start_ns: float
    dur_ns: float
    phase: str
    slices: tuple[int, ...]
    bin_ns: tuple[float, float] | None = None
    """Bin of the bar; None for a single slice."""


@dataclass(frozen=True, slots=True)
class Bars:
    """The bars of a window."""

    bars: tuple[Bar, ...]
    kernels: int
    """Number of slices in the window."""
    bin_ns: float | None
    """Width of a bin; None if each bar is one slice."""


@dataclass(frozen=True, slots=True)
class Samples:
    """A step function, or its means over bins."""

    times_ns: tuple[float, ...]
    values: tuple[float, ...]
    bin_ns: float | None
    """Width of the bins of mean values; None if values are exact."""


def lanes(run: Run) -> tuple[Lane, ...]:
    """Return the lanes of a run: one per stream, and more if its slices overlap (in measured runs)."""
    tracks: dict[tuple[int, int], list[int]] = {}
    for index, piece in enumerate(run.slices):
        tracks.setdefault((piece.device, piece.stream), []).append(index)
    several_devices = len({device for device, _ in tracks}) > 1
    titled = []
    for (device, stream), members in sorted(tracks.items()):
        name = f"GPU {device} stream {stream}" if several_devices else f"stream {stream}"
        packed = pack_lanes([(run.slices[index].start_ns, run.slices[index].end_ns) for index in members])
        for number, lane in enumerate(packed, 1):
            title = name if number == 1 else f"{name} ({number})"
            titled.append(Lane(title, tuple(members[place] for place in lane)))
    return tuple(titled)


def folded(run: Run) -> tuple[Lane, ...]:
    """Return the fewest lanes for a run, ignoring streams: those of a CUDA graph's executor are not the schedule's."""
    packed = pack_lanes([(piece.start_ns, piece.end_ns) for piece in run.slices])
    return tuple(Lane(f"at once {number}", tuple(lane)) for number, lane in enumerate(packed, 1))


def with_phases(measured: Run, simulated: Run) -> Run:
    """Return a measured run with op, layer and phase taken from simulated kernels of the same name, in start order.

    A profiler does not know them. If the counts of a name differ between the runs, its kernels stay as they are.
    """
    places: dict[str, list[int]] = defaultdict(list)
    for index in sorted(range(len(simulated.slices)), key=lambda place: simulated.slices[place].start_ns):
        places[simulated.slices[index].name].append(index)
    indices_of: dict[str, list[int]] = defaultdict(list)
    for index in sorted(range(len(measured.slices)), key=lambda place: measured.slices[place].start_ns):
        indices_of[measured.slices[index].name].append(index)
    slices = list(measured.slices)
    for name, indices in indices_of.items():
        if len(indices) != len(places[name]):
            continue
        for index, other in zip(indices, places[name], strict=True):
            known = {key: value for key, value in simulated.slices[other].args.items() if key in _MATCHED}
            slices[index] = replace(slices[index], args={**slices[index].args, **known})
    return replace(measured, slices=tuple(slices))


def whole(run: Run) -> Window:
    """Return the window of a whole run."""
    return 0, max((piece.end_ns for piece in run.slices), default=0)


def bars(run: Run, rows: Sequence[Lane], window: Window, limit: int = MAX_BARS) -> Bars:
    """Return at most about `limit` bars for a window; slices are cut at its edges."""
    begin, end = window
    inside = [
        (number, index)
        for number, lane in enumerate(rows)
        for index in lane.slices
        if run.slices[index].start_ns < end and run.slices[index].end_ns > begin
    ]
    if len(inside) > limit:
        return _binned(run, rows, inside, window, limit)
    single = []
    for lane, index in inside:
        start, stop = max(begin, run.slices[index].start_ns), min(end, run.slices[index].end_ns)
        single.append(Bar(lane, start, stop - start, phase_of(run, index), (index,)))
    return Bars(tuple(single), len(inside), None)


def _binned(run: Run, rows: Sequence[Lane], inside: list[tuple[int, int]], window: Window, limit: int) -> Bars:
    """Return bars with as many bins as give at most `limit` bars."""
    count = max(1, limit // len(rows))
    while True:
        binned = _bins(run, inside, window, count)
        if len(binned) <= limit or count == 1:
            return Bars(tuple(binned), len(inside), (window[1] - window[0]) / count)
        count = max(1, count * limit // len(binned))


def _bins(run: Run, inside: list[tuple[int, int]], window: Window, count: int) -> list[Bar]:
    """Return one bar per lane, bin and phase; those of one bin are contiguous from its start."""
    begin, end = window
    bin_ns = (end - begin) / count
    phases = sorted({phase_of(run, index) for _, index in inside})
    busy: dict[tuple[int, int, int], float] = {}
    members: dict[tuple[int, int, int], list[int]] = {}
    for lane, index in inside:
        start, stop = max(begin, run.slices[index].start_ns), min(end, run.slices[index].end_ns)
        first, last = int((start - begin) / bin_ns), min(count - 1, int((stop - begin) / bin_ns))
        for place in range(first, last + 1):
            overlap = min(stop, begin + (place + 1) * bin_ns) - max(start, begin + place * bin_ns)
            key = lane, place, phases.index(phase_of(run, index))
            if overlap > 0:
                busy[key] = busy.get(key, 0.0) + overlap
                members.setdefault(key, []).append(index)
    drawn: list[Bar] = []
    filled: dict[tuple[int, int], float] = {}
    for key in sorted(busy):
        lane, place, phase = key
        edge, offset = begin + place * bin_ns, filled.get((lane, place), 0.0)
        filled[lane, place] = offset + busy[key]
        limits = (edge, edge + bin_ns)
        drawn.append(Bar(lane, edge + offset, busy[key], phases[phase], tuple(members[key]), limits))
    return drawn


def phase_of(run: Run, index: int) -> str:
    """Return the phase of a slice; empty if it has none (measured runs)."""
    return str(run.slices[index].args.get("phase", ""))


def samples(series: Sequence[tuple[int, float]], window: Window, limit: int = MAX_SAMPLES) -> Samples:
    """Return a step function in a window, exact or, with more than `limit` steps, as means over `limit` bins."""
    begin, end = window
    times = [time for time, _ in series]
    place = max(0, bisect_right(times, begin) - 1)
    inside = [(max(begin, time), value) for time, value in series[place:] if time < end]
    if len(inside) <= limit:
        closed = [*inside, (end, inside[-1][1])] if inside else []
        return Samples(tuple(float(time) for time, _ in closed), tuple(value for _, value in closed), None)
    bin_ns = (end - begin) / limit
    sums = [0.0] * limit
    for (start, value), (stop, _) in zip(inside, [*inside[1:], (end, 0.0)], strict=True):
        for number in range(int((start - begin) / bin_ns), min(limit - 1, int((stop - begin) / bin_ns)) + 1):
            low, high = begin + number * bin_ns, begin + (number + 1) * bin_ns
            sums[number] += value * max(0.0, min(stop, high) - max(start, low))
    edges = [begin + number * bin_ns for number in range(limit)]
    means = [total / bin_ns for total in sums]
    return Samples((*edges, float(end)), (*means, means[-1]), bin_ns)
