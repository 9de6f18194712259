"""Kineto: the JSON of torch.profiler, from 2020 to today, for NVIDIA and AMD GPUs.

A kernel is matched with an operator through the call that launched it: the call has the kernel's `correlation`, and the
operator is the innermost one that runs on the call's thread when it begins. Without the call, `External id` matches
them.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from decimal import Decimal
from typing import Any, Final, Literal

import msgspec

from gpusim.formats.trace import GroundTruth, TaskKind
from gpusim.importers.kineto_findings import Counts, find
from gpusim.importers.kineto_links import Call, Host, Names, link
from gpusim.importers.model import (
    MAX_NAME,
    Activity,
    GpuFacts,
    ImportFileError,
    Profile,
    Range,
    Wait,
    dim3,
    lane_number,
    whole,
)
from gpusim.importers.stream_json import EventFile
from gpusim.io.decoding import convert
from gpusim.io.file_limits import MAX_PARTS, MAX_STEP_NS
from gpusim.units import NS_PER_US

KINDS: Final[dict[str, TaskKind]] = {
    "kernel": "kernel",
    "gpu_memcpy": "memcpy",
    "gpu_memset": "memset",
    "memcpy": "memcpy",
    "memset": "memset",
    "concurrent_kernel": "kernel",
}
CALLS: Final = (
    "cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver", "xpu_runtime", "xpu_driver", "runtime", "driver",
)  # fmt: skip
OPERATORS: Final = ("cpu_op", "operator")
#: Prefixes of the categories of other accelerators, whose records are not read.
OTHER_ACCELERATORS: Final = ("mtia", "hpu", "privateuse1", "glow")
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
#: Keys in files written by gpusim: time of a kernel alone on the GPU, in us, and the step's ground truth.
ALONE, GROUND_TRUTH = "alone (us)", "ground_truth"
#: Latest time that a file may hold: the year 2100.
MAX_TIME_NS: Final = 4_102_444_800_000_000_000
#: Most digits of a time, and most categories of events in a file.
MAX_NUMBER_CHARS, MAX_CATEGORIES = 64, 1000
#: Prefix of module spans in traces with `with_stack`.
MODULE: Final = "nn.Module: "
_DIGITS: Final = re.compile(r"\d{1,18}", re.ASCII)


class _Args(msgspec.Struct, gc=False):
    """The fields read from an event's `args`; decimal numbers stay text."""

    device: Any = None
    stream: Any = None
    correlation: Any = None
    external: Any = msgspec.field(default=None, name="External id")
    external_old: Any = msgspec.field(default=None, name="external id")
    record_function: Any = msgspec.field(default=None, name="Record function id")
    grid: Any = None
    block: Any = None
    cluster: Any = None
    registers: Any = msgspec.field(default=None, name="registers per thread")
    smem: Any = msgspec.field(default=None, name="shared memory")
    bytes: Any = None
    graph_node: Any = msgspec.field(default=None, name="graph node id")
    alone: Any = msgspec.field(default=None, name=ALONE)
    sync: Any = msgspec.field(default=None, name="cuda_sync_kind")
    waited_record: Any = msgspec.field(default=None, name="wait_on_cuda_event_record_corr_id")
    waited_stream: Any = msgspec.field(default=None, name="wait_on_stream")


class _Event(msgspec.Struct, gc=False):
    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    args: _Args | list[Any] | str | int | float | bool | None = None


_NO_ARGS: Final = _Args()
_Role = Literal["call", "operator", "range", "python", "sync", "other", ""]


def read_kineto(pieces: Iterator[bytes], name: str) -> Profile:
    """Read the profile in a Kineto file. Raises `ImportFileError`."""
    source = EventFile(pieces, name, "traceEvents", _Event, WANTED, exact=True)
    profile = Profile(file=name, format="kineto", writer="torch.profiler (Kineto)")
    host, threads = Host(), Names()
    operators, modules, names = host.operators, host.modules, host.names
    others: set[str] = set()
    fraction = False
    seen_events = out_of_range = negative = 0
    roles: dict[str, _Role | TaskKind] = {}
    """Role of each category."""
    for events in source.events():
        seen_events += len(events)
        for event in events:
            category = event.cat
            if event.ph != "X" or not isinstance(category, str):
                continue
            role = roles.get(category)
            if role is None:
                role = _role(category)
                if len(roles) < MAX_CATEGORIES:
                    roles[category] = role
            text = event.name[:MAX_NAME] if isinstance(event.name, str) else ""
            if not role or (role == "python" and not text.startswith(MODULE)):
                continue
            if role == "other":
                others.add(category.lower().partition("_")[0])
                continue
            start_ns, dur_ns = time_ns(event.ts), time_ns(event.dur) if event.dur is not None else 0
            if start_ns is None or dur_ns is None or abs(start_ns) >= MAX_TIME_NS or dur_ns > MAX_STEP_NS:
                out_of_range += 1
                continue
            if dur_ns < 0:
                negative += 1
                dur_ns = 0
            args = event.args if isinstance(event.args, _Args) else _NO_ARGS
            if role in ("kernel", "memcpy", "memset"):
                if event.dur is None:  # missing, or `nan`: as 0 ns it would be believed
                    out_of_range += 1
                    continue
                if len(profile.activities) >= MAX_PARTS:
                    raise ImportFileError(name, f"has more than {MAX_PARTS} GPU records")
                fraction = fraction or bool(start_ns % NS_PER_US or dur_ns % NS_PER_US)
                text = names.texts[names.number(text)]
                profile.activities.append(_activity(event, args, role, text, start_ns, dur_ns))
                continue
            if role == "sync":
                profile.has_waits = True
                wait = _wait(args)
                if wait is not None:
                    profile.waits.append(wait)
                continue
            thread = threads.number(_key(event.pid, event.tid))
            if role == "operator":
                if text.startswith("ProfilerStep"):
                    profile.ranges.append(Range(text, start_ns, start_ns + dur_ns, thread))
                numbers = names.number(text), _external(args), whole(args.record_function)
                operators.add(thread, start_ns, start_ns + dur_ns, *numbers)
            elif role == "call":
                correlation = whole(args.correlation)
                call = Call(thread, start_ns, start_ns + dur_ns)
                launches = bool(LAUNCHES.match(text))
                host.launches += launches
                if correlation >= 0:
                    host.calls.setdefault(correlation, call)
                elif launches:
                    host.uncorrelated.setdefault(_external(args), deque()).append(call)
            elif role == "range":
                profile.ranges.append(Range(text, start_ns, start_ns + dur_ns, thread))
            else:
                modules.add(thread, start_ns, start_ns + dur_ns, names.number(text[len(MODULE) :]))
    profile.resolution_ns = 1 if fraction or not profile.activities else NS_PER_US
    profile.nodes = len(operators.start)
    _facts(profile, source.rest)
    if any(wait.recorded >= 0 and wait.by_event for wait in profile.waits):
        # The profiler knows its own records: the others were made before the profile began, and order nothing in it.
        profile.waits = [wait for wait in profile.waits if wait.recorded >= 0]
    profile.activities.sort(key=lambda activity: (activity.start_ns, activity.lane))
    link(profile, host)
    find(profile, Counts(host.launches, out_of_range, negative, tuple(sorted(others)), source.mended))
    if not seen_events and "deviceProperties" not in source.rest and "schemaVersion" not in source.rest:
        raise ImportFileError(
            name, "has no events of torch.profiler: 'traceEvents' is missing or empty; profile the step again"
        )
    return profile


def _role(category: str) -> _Role | TaskKind:
    """Return the role of events of a category; empty for those that are not read."""
    category = category.lower()
    if category in KINDS:
        return KINDS[category]
    if category.startswith(OTHER_ACCELERATORS):
        return "other"
    roles: tuple[tuple[tuple[str, ...], _Role], ...] = (
        (CALLS, "call"),
        (OPERATORS, "operator"),
        (("user_annotation",), "range"),
        (("python_function",), "python"),
        (("cuda_sync",), "sync"),
    )
    return next((role for some, role in roles if category in some), "")


def _activity(event: _Event, args: _Args, kind: TaskKind, text: str, start_ns: int, dur_ns: int) -> Activity:
    return Activity(
        kind=kind,
        name=text,
        device=lane_number(args.device, _number_in(event.pid)),
        stream=lane_number(args.stream, _number_in(event.tid)),
        start_ns=start_ns,
        dur_ns=dur_ns,
        correlation=whole(args.correlation),
        external=_external(args),
        grid=dim3(args.grid),
        block=dim3(args.block),
        cluster=dim3(args.cluster),
        regs_per_thread=None if args.registers is None else whole(args.registers),
        smem_dynamic_bytes=max(0, whole(args.smem, 0)),
        bytes=max(0, whole(args.bytes, 0)),
        graph_node=max(0, whole(args.graph_node, 0)),
        alone_ns=_alone_ns(args.alone),
    )


def time_ns(time_us: object) -> int | None:
    """Convert a time in us to ns, rounded; None for an invalid time.

    Decimal text is converted digit by digit, since times since 1970 in ns exceed a double's precision.
    """
    if type(time_us) is int:
        return time_us * NS_PER_US
    if not isinstance(time_us, str) or len(time_us) > MAX_NUMBER_CHARS:
        return None
    before, _, after = time_us.partition(".")
    if len(after) == 3 and after.isdecimal() and before.isdecimal() and time_us.isascii():
        return int(before + after)
    try:
        nanoseconds = Decimal(time_us) * NS_PER_US
        return round(nanoseconds) if abs(nanoseconds) < MAX_TIME_NS * NS_PER_US else None
    except (ArithmeticError, ValueError):
        return None


def _number_in(value: object) -> int:
    """Return the number of a process or thread, also in `stream 7`; 0 without one."""
    digits = _DIGITS.search(value) if isinstance(value, str) else None
    return lane_number(digits[0] if digits else value)


def _alone_ns(value: object) -> int | None:
    alone_ns = time_ns(value)
    return alone_ns if alone_ns is not None and 0 <= alone_ns <= MAX_STEP_NS else None


def _wait(args: _Args) -> Wait | None:
    kind = args.sync
    correlation = whole(args.correlation)
    if correlation < 0:
        return None
    if kind in ("Stream Wait Event", "Event Sync"):
        recorded = whole(args.waited_record)
        source = whole(args.waited_stream)
        waiting = whole(args.stream) if kind == "Stream Wait Event" else None
        if recorded < 0 or source < 0:
            return Wait(correlation, -1, None, waiting, by_event=True)
        return Wait(correlation, recorded, source, waiting, by_event=True)
    if kind == "Stream Sync":
        return Wait(correlation, correlation, whole(args.stream), None)
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
        profile.read_origin(other)
        with suppress(msgspec.ValidationError):
            profile.ground_truth = convert(other.get(GROUND_TRUTH), GroundTruth | None)
    else:
        for activity in profile.activities:
            activity.alone_ns = None
    versions = []
    for key, runtime in (("cuda_runtime_version", "CUDA"), ("hip_runtime_version", "HIP")):
        number = whole(rest.get(key), 0)
        if number > 0:
            text = (
                f"{number // 1000}.{number % 1000 // 10}"
                if runtime == "CUDA"
                else f"{number // 10_000_000}.{number // 100_000 % 100}"
            )
            versions.append(f"{runtime} {text}")
            profile.cuda = profile.cuda or text
    if versions and profile.writer != "gpusim":
        profile.writer += f", {', '.join(versions)}"


def _external(args: _Args) -> int:
    return whole(args.external if args.external is not None else args.external_old)


def _key(pid: object, tid: object) -> tuple[str, str]:
    return str(pid)[:40], str(tid)[:40]
