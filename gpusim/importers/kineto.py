"""Kineto: the JSON that torch.profiler writes, from 2020 to today, of NVIDIA and AMD GPUs.

A kernel is tied to an operator by the call that launched it: the call has the kernel's `correlation`, and the operator
is the innermost one that runs on the call's thread when it begins. Without the call, `External id` ties them.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from gpusim.file_limits import MAX_PARTS, MAX_STEP_NS
from gpusim.importers.model import Activity, Finding, GpuFacts, ImportFileError, Profile, Range, Wait, dim3, whole
from gpusim.importers.stream_json import EventFile
from gpusim.trace.schema import Phase, TaskKind
from gpusim.units import NS_PER_US

KINDS: Final[dict[str, TaskKind]] = {
    "kernel": "kernel",
    "gpu_memcpy": "memcpy",
    "gpu_memset": "memset",
    "memcpy": "memcpy",
    "memset": "memset",
    "concurrent_kernel": "kernel",
}
CALLS: Final = ("cuda_runtime", "cuda_driver", "runtime", "driver")
OPERATORS: Final = ("cpu_op", "operator")
#: Calls that start a kernel, in CUDA and HIP.
LAUNCHES: Final = re.compile(
    r"^(?:cuda|hip|cu)(?:Launch(?:Cooperative|Device)?Kernel|ModuleLaunchKernel|ExtLaunch|ExtModuleLaunch)", re.I
)
WANTED: Final = (
    "deviceProperties",
    "distributedInfo",
    "schemaVersion",
    "baseTimeNanoseconds",
    "cupti_version",
    "cuda_runtime_version",
    "cuda_driver_version",
    "hip_runtime_version",
    "roctracer_version",
    "otherData",
    "displayTimeUnit",
    "metadata",
)
#: A clock of the GPU ticks about every 32 ns; kernels of so few ticks have a tenth of error.
SHORT_NS: Final = 1000
#: Latest time that a file may hold, in us: the year 2100.
MAX_TIME_US: Final = 4_102_444_800_000_000


class _Event(msgspec.Struct):
    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    args: msgspec.Raw = msgspec.Raw(b"")


class _Columns:
    """Spans on the host, as columns: a million operators take 50 MB."""

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


class _Names:
    """Texts by number, each kept once."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[object, int] = {}

    def number(self, text: object) -> int:
        found = self._numbers.get(text)
        if found is None:
            found = self._numbers[text] = len(self.texts)
            self.texts.append(text if isinstance(text, str) else repr(text))
        return found


def read_kineto(pieces: Iterator[bytes], name: str) -> Profile:
    """The profile in a Kineto file. Raises `ImportFileError`."""
    source = EventFile(pieces, name, "traceEvents", _Event, WANTED)
    profile = Profile(file=name, format="kineto", writer="torch.profiler (Kineto)")
    operators, modules = _Columns(), _Columns()
    names, threads = _Names(), _Names()
    calls: dict[int, tuple[int, int, int, int, int]] = {}
    """By correlation: thread, begin, end, name, external id."""
    launches = 0
    fraction = False
    seen_events = out_of_range = negative = 0
    waits_seen = False
    for events in source.events():
        seen_events += len(events)
        for event in events:
            category = event.cat
            if not isinstance(category, str):
                continue
            category = category.lower()
            if event.ph != "X":
                continue
            start_us, dur_us = event.ts, event.dur if event.dur is not None else 0
            start_us, dur_us = _number(start_us), _number(dur_us)
            if start_us is None or dur_us is None or not -MAX_TIME_US < start_us < MAX_TIME_US:
                out_of_range += 1
                continue
            if not dur_us <= MAX_STEP_NS / NS_PER_US:
                out_of_range += 1
                continue
            if dur_us < 0:
                negative += 1
                dur_us = 0
            start_ns, dur_ns = round(start_us * NS_PER_US), round(dur_us * NS_PER_US)
            if category in KINDS:
                if len(profile.activities) >= MAX_PARTS:
                    raise ImportFileError(name, f"has more than {MAX_PARTS} GPU records")
                if not fraction and (isinstance(event.ts, float) or isinstance(event.dur, float)):
                    fraction = not (float(start_us).is_integer() and float(dur_us).is_integer())
                activity = _activity(event, KINDS[category], start_ns, dur_ns, _args(event, name))
                activity.name = names.texts[names.number(activity.name)]
                profile.activities.append(activity)
            elif category in CALLS:
                args = _args(event, name)
                correlation = whole(args.get("correlation"))
                thread = threads.number(_key(event.pid, event.tid))
                calls.setdefault(
                    correlation,
                    (thread, start_ns, start_ns + dur_ns, names.number(_text(event.name)), _external(args)),
                )
                launches += bool(LAUNCHES.match(_text(event.name)))
            elif category in OPERATORS:
                args = _args(event, name)
                thread = threads.number(_key(event.pid, event.tid))
                text = _text(event.name)
                if text.startswith("ProfilerStep"):
                    profile.ranges.append(Range(text, start_ns, start_ns + dur_ns, thread))
                operators.add(
                    thread,
                    start_ns,
                    start_ns + dur_ns,
                    names.number(text),
                    _external(args),
                    whole(args.get("Record function id")),
                )
            elif category == "user_annotation":
                thread = threads.number(_key(event.pid, event.tid))
                profile.ranges.append(Range(_text(event.name), start_ns, start_ns + dur_ns, thread))
            elif category == "python_function":
                text = _text(event.name)
                if text.startswith("nn.Module: "):
                    thread = threads.number(_key(event.pid, event.tid))
                    modules.add(thread, start_ns, start_ns + dur_ns, names.number(text[11:]))
            elif category == "cuda_sync":
                waits_seen = True
                wait = _wait(_args(event, name))
                if wait is not None:
                    profile.waits.append(wait)
    profile.has_waits = waits_seen
    profile.resolution_ns = 1 if fraction or not profile.activities else NS_PER_US
    profile.nodes = len(operators.start)
    _facts(profile, source.rest)
    _link(profile, operators, modules, calls, names)
    _find(profile, launches, out_of_range, negative)
    if not seen_events and "deviceProperties" not in source.rest and "schemaVersion" not in source.rest:
        raise ImportFileError(name, "has no events of torch.profiler: 'traceEvents' is missing or empty")
    profile.activities.sort(key=lambda found: (found.start_ns, found.lane))
    return profile


def _activity(event: _Event, kind: TaskKind, start_ns: int, dur_ns: int, args: dict[str, Any]) -> Activity:
    memory = whole(args.get("shared memory"), 0)
    return Activity(
        kind=kind,
        name=_text(event.name),
        device=max(0, whole(args.get("device"), whole(event.pid, 0))),
        stream=max(0, whole(args.get("stream"), whole(event.tid, 0))),
        start_ns=start_ns,
        dur_ns=dur_ns,
        correlation=whole(args.get("correlation")),
        external=_external(args),
        grid=dim3(args.get("grid")),
        block=dim3(args.get("block")),
        cluster=dim3(args.get("cluster")),
        regs_per_thread=whole(args["registers per thread"]) if "registers per thread" in args else None,
        smem_dynamic_bytes=max(0, memory),
        bytes=max(0, whole(args.get("bytes"), 0)),
        graph_node=max(0, whole(args.get("graph node id"), 0)),
    )


def _wait(args: dict[str, Any]) -> Wait | None:
    kind = str(args.get("cuda_sync_kind"))
    correlation = whole(args.get("correlation"))
    if correlation < 0:
        return None
    if kind in ("Stream Wait Event", "Event Sync"):
        recorded = whole(args.get("wait_on_cuda_event_record_corr_id"))
        source = whole(args.get("wait_on_stream"))
        if recorded < 0 or source < 0:
            return None
        return Wait(correlation, recorded, source, whole(args.get("stream")) if kind == "Stream Wait Event" else None)
    if kind == "Stream Sync":
        return Wait(correlation, correlation, whole(args.get("stream")), None)
    if kind in ("Context Sync", "Device Sync"):
        return Wait(correlation, correlation, None, None)
    return None


def _facts(profile: Profile, rest: dict[str, Any]) -> None:
    devices = rest.get("deviceProperties")
    for device in devices if isinstance(devices, list) else []:
        if isinstance(device, dict):
            text = device.get("name")
            profile.gpus[whole(device.get("id"), 0)] = GpuFacts(
                text if isinstance(text, str) else "", max(0, whole(device.get("numSms"), 0))
            )
    distributed = rest.get("distributedInfo")
    if isinstance(distributed, dict) and isinstance(distributed.get("rank"), int):
        profile.rank = whole(distributed["rank"])
    other = rest.get("otherData")
    if isinstance(other, dict) and other.get("producer") == "gpusim":
        profile.writer = "gpusim"
    versions = []
    for key, what in (("cuda_runtime_version", "CUDA"), ("hip_runtime_version", "HIP")):
        number = whole(rest.get(key), 0)
        if number > 0:
            text = (
                f"{number // 1000}.{number % 1000 // 10}"
                if what == "CUDA"
                else f"{number // 10_000_000}.{number // 100_000 % 100}"
            )
            versions.append(f"{what} {text}")
            profile.cuda = profile.cuda or text
    if versions and profile.writer != "gpusim":
        profile.writer += f", {', '.join(versions)}"


def _link(
    profile: Profile,
    operators: _Columns,
    modules: _Columns,
    calls: dict[int, tuple[int, int, int, int, int]],
    names: _Names,
) -> None:
    """Give each record its launch, operator, module and phase."""
    launched = Counter(activity.correlation for activity in profile.activities)
    times: dict[int, list[tuple[int, int]]] = {}
    """By thread: when a call began, and its correlation."""
    for activity in profile.activities:
        call = calls.get(activity.correlation)
        if call is not None:
            activity.launch_ns, activity.launch_end_ns = call[1], call[2]
            activity.shared_launch = launched[activity.correlation] > 1
    for correlation in launched:
        call = calls.get(correlation)
        if call is not None:
            times.setdefault(call[0], []).append((call[1], correlation))
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
            activity.phase = _phase([names.texts[operators.name[i]] for i in chain])
        inside = layers.get(activity.correlation, ())
        if inside:
            activity.module = names.texts[modules.name[inside[-1]]]
    profile.calls = [names.texts[operators.name[index]] for index in order]
    kernels = [activity for activity in profile.activities if activity.kind == "kernel"]
    if kernels and profile.nodes:
        lost = sum(activity.dur_ns for activity in kernels if not activity.op)
        share = lost / max(1, sum(activity.dur_ns for activity in kernels))
        if share > 0.001:
            text = f"{share:.1%} of the kernels' time belongs to no operator"
            profile.findings.append(
                Finding("unattributed-time", text, "profile with activities=[CPU, CUDA] from before the step begins")
            )


def _phase(chain: list[str]) -> Phase:
    if any(text.startswith("Optimizer.step") for text in chain):
        return "optimizer"
    if any(text.startswith("autograd::engine::evaluate_function") or "Backward" in text for text in chain):
        return "backward"
    return "forward"


def _enclosing(spans: _Columns, times: dict[int, list[tuple[int, int]]]) -> dict[int, tuple[int, ...]]:
    """For each correlation, the spans of its thread that enclose its time, the outermost first."""
    by_thread: dict[int, list[int]] = {}
    for index, thread in enumerate(spans.thread):
        if thread in times:
            by_thread.setdefault(thread, []).append(index)
    found: dict[int, tuple[int, ...]] = {}
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
                found[correlation] = tuple(stack[-64:])
    return found


def _find(profile: Profile, launches: int, out_of_range: int, negative: int) -> None:
    add = profile.findings.append
    kernels = profile.kernels()
    if not profile.activities:
        return
    if profile.resolution_ns > 1:
        add(
            Finding(
                "integer-microseconds",
                "all times are whole microseconds: a kernel's time is right to ±1 µs",
                "profile with PyTorch 2.3 or later, which writes nanoseconds",
            )
        )
    graph = [activity for activity in kernels if activity.shared_launch]
    if graph:
        calls = len({activity.correlation for activity in graph})
        add(
            Finding(
                "shared-correlation",
                f"{len(graph)} kernels share {calls} launches: they ran from CUDA graphs, and have "
                "no operator and no launch of their own",
                "add a dump of the graph for its edges",
            )
        )
    if kernels and all(activity.regs_per_thread is None for activity in kernels):
        amd = any("AMD" in gpu.name or "MI" in gpu.name for gpu in profile.gpus.values()) or "HIP" in profile.writer
        text = (
            "AMD's profiler records no registers and no shared memory"
            if amd
            else "no kernel has its registers and shared memory"
        )
        add(
            Finding(
                "no-registers",
                f"{text}: how many blocks fit an SM is not known",
                "counts beside each other are upper bounds" if amd else "profile with a current PyTorch",
            )
        )
    missing = [device for device in profile.devices() if not profile.gpus.get(device, GpuFacts()).name]
    if missing:
        what = ", ".join(map(str, missing))
        add(Finding("no-gpu-properties", f"the file does not name the GPU (device {what})", "name it with --gpu"))
    if out_of_range or negative:
        add(
            Finding(
                "odd-times",
                f"{out_of_range} events have no sensible time and are left out, {negative} a negative duration",
                "profile again",
            )
        )
    unlaunched = sum(activity.launch_ns < 0 for activity in kernels)
    if unlaunched:
        add(
            Finding(
                "no-launches",
                f"{unlaunched} of {len(kernels)} kernels have no launch in the file",
                "profile the CPU, too (ProfilerActivity.CPU)",
            )
        )
    own = sum(not activity.shared_launch and activity.launch_ns >= 0 for activity in kernels)
    if launches > own + len({a.correlation for a in graph}) + 2:
        add(
            Finding(
                "dropped-events",
                f"{launches} launches in the file and kernels of {launches - (launches - own)} of them: records "
                "were dropped, or the profile ended before the kernels did",
                "synchronize before the profiler stops, and profile fewer steps",
            )
        )


def _args(event: _Event, name: str) -> dict[str, Any]:
    raw = bytes(event.args)
    if not raw:
        return {}
    try:
        found = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as cause:
        raise ImportFileError(name, f"is not valid JSON in the 'args' of an event: {cause}") from cause
    return found if isinstance(found, dict) else {}


def _external(args: dict[str, Any]) -> int:
    return whole(args.get("External id", args.get("external id")))


def _number(value: object) -> float | int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return value if value == value else None
    if isinstance(value, str) and len(value) < 32:
        try:
            return float(value)
        except ValueError:
            return None
    return None


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _key(pid: object, tid: object) -> tuple[str, str]:
    return str(pid)[:40], str(tid)[:40]
