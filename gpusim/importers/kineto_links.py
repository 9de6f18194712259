"""Links from GPU records of a Kineto file to their launching call, operator and module.

The call has the record's `correlation`, and the operator is the innermost one that runs on the call's thread when it
begins. Without the call, `External id` links a record to its operator; without a correlation, to its call.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field

from gpusim.formats.trace import Phase
from gpusim.importers.model import Activity, Profile
from gpusim.io.file_limits import MAX_PARTS


class Columns:
    """Host spans, stored by column: a million operators take 50 MB."""

    def __init__(self) -> None:
        self.thread, self.start, self.end = array("q"), array("q"), array("q")
        self.name, self.external, self.record = array("q"), array("q"), array("q")

    def add(self, thread: int, start: int, end: int, name: int, external: int = -1, record: int = -1) -> None:
        if len(self.start) >= 8 * MAX_PARTS:
            return
        self.thread.append(thread)
        self.start.append(start)
        self.end.append(end)
        self.name.append(name)
        self.external.append(external)
        self.record.append(record)


class Names:
    """Texts by number, each stored once."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[object, int] = {}
        self._phases: dict[int, Phase] = {}

    def number(self, text: object) -> int:
        number = self._numbers.get(text)
        if number is None:
            number = self._numbers[text] = len(self.texts)
            self.texts.append(text if isinstance(text, str) else repr(text))
        return number

    def phase(self, number: int) -> Phase:
        """Return the phase of calls inside an operator of this name."""
        phase = self._phases.get(number)
        if phase is None:
            text = self.texts[number]
            if text.startswith("Optimizer.step"):
                phase = "optimizer"
            elif text.startswith("autograd::engine::evaluate_function") or "Backward" in text:
                phase = "backward"
            else:
                phase = "forward"
            self._phases[number] = phase
        return phase


@dataclass(slots=True)
class Call:
    """One call of the CUDA or HIP runtime or driver."""

    thread: int
    start_ns: int
    end_ns: int


@dataclass(slots=True)
class Host:
    """Host activity in a file."""

    operators: Columns = field(default_factory=Columns)
    modules: Columns = field(default_factory=Columns)
    names: Names = field(default_factory=Names)
    calls: dict[int, Call] = field(default_factory=dict)
    """Calls by correlation."""
    uncorrelated: dict[int, deque[Call]] = field(default_factory=dict)
    """Launches without a correlation, by external id and in order."""
    launches: int = 0


def link(profile: Profile, host: Host) -> None:
    """Give each record its launch, operator, module and phase. Records are in order of start."""
    operators, modules, names, calls = host.operators, host.modules, host.names, host.calls
    _correlate(profile.activities, host)
    launched = Counter((activity.correlation, activity.device) for activity in profile.activities)
    times: dict[int, list[tuple[int, int]]] = {}
    """Begin and correlation of each call, by thread."""
    for activity in profile.activities:
        call = calls.get(activity.correlation)
        if call is not None:
            activity.launch_ns, activity.launch_end_ns = call.start_ns, call.end_ns
            activity.shared_launch = launched[activity.correlation, activity.device] > 1
    for correlation in {activity.correlation for activity in profile.activities}:
        call = calls.get(correlation)
        if call is not None:
            times.setdefault(call.thread, []).append((call.start_ns, correlation))
    innermost = _enclosing(operators, times)
    layers = _enclosing(modules, times)
    order = sorted(range(len(operators.start)), key=lambda i: (operators.start[i], -operators.end[i]))
    call_number = array("q", bytes(8 * len(order)))
    for number, index in enumerate(order):
        call_number[index] = number
    by_external = {
        operators.external[i]: i for i in reversed(range(len(operators.start))) if operators.external[i] >= 0
    }
    for activity in profile.activities:
        chain = innermost.get(activity.correlation, ())
        if not chain and activity.external >= 0 and activity.external in by_external:
            chain = (by_external[activity.external],)
        if chain:
            inner = next(
                (i for i in reversed(chain) if not names.texts[operators.name[i]].startswith("ProfilerStep")), -1
            )
            if inner >= 0:
                activity.op = names.texts[operators.name[inner]]
                activity.op_call = call_number[inner]
                activity.record_function = operators.record[inner]
            activity.phase = _phase({names.phase(operators.name[i]) for i in chain})
        inside = layers.get(activity.correlation, ())
        if inside:
            activity.module = names.texts[modules.name[inside[-1]]]
    profile.calls = [names.texts[operators.name[index]] for index in order]


def _correlate(activities: list[Activity], host: Host) -> None:
    """Number records and launches that have an external id but no correlation: the nth record of an id with the nth
    launch.
    """
    if not host.uncorrelated:
        return
    number = max(0, *host.calls, *(activity.correlation for activity in activities))
    for activity in activities:
        waiting = host.uncorrelated.get(activity.external) if activity.correlation < 0 else None
        if waiting:
            number += 1
            activity.correlation, host.calls[number] = number, waiting.popleft()


def _phase(phases: Collection[Phase]) -> Phase:
    return "optimizer" if "optimizer" in phases else "backward" if "backward" in phases else "forward"


def _enclosing(spans: Columns, times: dict[int, list[tuple[int, int]]]) -> dict[int, tuple[int, ...]]:
    """Return, for each correlation, the spans of its thread that enclose its time, outermost first."""
    by_thread: dict[int, list[int]] = {}
    for index, thread in enumerate(spans.thread):
        if thread in times:
            by_thread.setdefault(thread, []).append(index)
    enclosing: dict[int, tuple[int, ...]] = {}
    for thread, indices in by_thread.items():
        indices.sort(key=lambda i: (spans.start[i], -spans.end[i]))
        stack: list[int] = []
        place = 0
        for time_ns, correlation in sorted(times[thread]):
            while place < len(indices) and spans.start[indices[place]] <= time_ns:
                begin = spans.start[indices[place]]
                while stack and spans.end[stack[-1]] < begin:
                    stack.pop()
                stack.append(indices[place])
                place += 1
            while stack and spans.end[stack[-1]] < time_ns:
                stack.pop()
            if stack:
                enclosing[correlation] = tuple(stack[-64:])
    return enclosing
