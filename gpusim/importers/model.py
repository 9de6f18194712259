"""What every importer makes of a file: GPU records with their launches, ranges, waits, operators and edges.

Times are integer nanoseconds on the file's own clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Literal

from gpusim.errors import TraceError
from gpusim.formats.trace import Counters, EdgeKind, GroundTruth, Phase, Quality, TaskKind
from gpusim.io.file_limits import MAX_INTEGER

Format = Literal[
    "kineto", "nsys-sqlite", "ncu-csv", "execution-trace", "chakra-et", "chakra-json", "cuda-graph", "gpusim-trace"
]

#: Formats as a sentence names them.
FORMAT_NAMES: dict[Format, str] = {
    "kineto": "a trace of torch.profiler (Kineto)",
    "nsys-sqlite": "an SQLite export of Nsight Systems",
    "ncu-csv": "a CSV table of Nsight Compute",
    "execution-trace": "an execution trace of PyTorch",
    "chakra-et": "a Chakra execution trace",
    "chakra-json": "a Chakra execution trace as JSON",
    "cuda-graph": "a dump of a CUDA graph",
    "gpusim-trace": "a trace of gpusim",
}


class ImportFileError(TraceError):
    """A profile that cannot be read or holds no step."""


#: Longest name of an operator or kernel that is looked at: those of CUTLASS have 3,000 characters.
MAX_NAME: Final = 8192
#: Steps of loops within loops over one file: a real one of a million records takes a tenth, all of them some 15 s.
MAX_WORK: Final = 50_000_000


@dataclass(slots=True)
class Work:
    """Counts such steps, and ends what would take minutes or gigabytes."""

    file: str
    left: int = field(default_factory=lambda: MAX_WORK)

    def spend(self, steps: int) -> None:
        """Raise `ImportFileError` where these are too many."""
        self.left -= steps
        if self.left < 0:
            raise ImportFileError(self.file, "its records, streams and waits combine in too many ways to be followed")


@dataclass(slots=True)
class Activity:
    """One record of GPU work."""

    kind: TaskKind
    name: str
    device: int
    stream: int
    start_ns: int
    dur_ns: int
    correlation: int = -1
    """Number of the call that launched it; -1 where the file has none."""
    external: int = -1
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    cluster: tuple[int, int, int] | None = None
    regs_per_thread: int | None = None
    smem_static_bytes: int = 0
    smem_dynamic_bytes: int = 0
    bytes: int = 0
    graph_node: int = 0
    """CUPTI's number of the node of a CUDA graph; 0 outside of graphs."""
    process: int = 0
    launch_ns: int | None = None
    """When the call that launched it began; None where the file does not say. Below 0 before the file's origin."""
    launch_end_ns: int | None = None
    """When that call returned."""
    shared_launch: bool = False
    """Other records have the same launch: a CUDA graph, or one call with several kernels."""
    op: str = ""
    """Operator that launched it, such as `aten::mm`."""
    op_call: int = -1
    """Number of that operator's call in the file, in order of begin; -1 without one."""
    record_function: int = -1
    """`Record function id` of that call; -1 where the file has none."""
    module: str = ""
    phase: Phase = "forward"
    counters: Counters | None = None
    alone_ns: int | None = None
    """What it takes alone on the GPU, where the file says so."""

    @property
    def end_ns(self) -> int:
        """When it ended."""
        return self.start_ns + self.dur_ns

    @property
    def lane(self) -> tuple[int, int, int]:
        """Process, device and stream."""
        return self.process, self.device, self.stream


@dataclass(frozen=True, slots=True)
class Range:
    """A named span of host time: a `ProfilerStep#7`, an NVTX range."""

    name: str
    start_ns: int
    end_ns: int
    thread: int = 0


@dataclass(frozen=True, slots=True)
class Wait:
    """Work launched after call `correlation` waits for what was launched before call `recorded` on `source`."""

    correlation: int
    recorded: int
    """-1 where the file does not say which record is waited for."""
    source: int | None
    """Stream waited for; None for all."""
    stream: int | None
    """Stream that waits; None for all, after a wait of the host."""
    process: int = 0
    by_event: bool = False
    """Whether the record of an event is waited for, and not all that a stream or the device has."""


@dataclass(frozen=True, slots=True)
class Edge:
    """Activity `before` must have ended before activity `after` starts; both are indices."""

    before: int
    after: int
    kind: EdgeKind


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong or missing in a file: a stable code, the reason, and what to do."""

    code: str
    text: str
    action: str = ""


#: Findings that say why a file has no kernels of a GPU.
WITHOUT_KERNELS: Final = ("no-kernels", "no-times", "graphs-as-a-whole", "other-accelerator")


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What a file says of a GPU."""

    name: str = ""
    sms: int = 0
    max_clock_mhz: int = 0
    """Of its SMs, which is not what they ran at."""


@dataclass(slots=True)
class Profile:
    """One file, or one rank of it."""

    file: str
    format: Format
    writer: str
    activities: list[Activity] = field(default_factory=list)
    ranges: list[Range] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    gpus: dict[int, GpuFacts] = field(default_factory=dict)
    edges: list[Edge] | None = None
    """Edges that the file itself states; None where it states none."""
    quality: Quality = "none"
    """What the edges rest on; set with them."""
    findings: list[Finding] = field(default_factory=list)
    resolution_ns: int = 1
    has_times: bool = True
    rank: int | None = None
    torch: str = ""
    cuda: str = ""
    has_waits: bool = False
    """The file records waits for events, so that their absence says something."""
    nodes: int = 0
    """Operators or nodes, with kernels or without."""
    calls: list[str] = field(default_factory=list)
    """Names of all operators in order of begin; `Activity.op_call` counts in it."""
    ground_truth: GroundTruth | None = None
    """What the step took without a profiler, where the file says so."""

    def note(self, code: str, text: str, action: str = "") -> None:
        """Add a finding."""
        self.findings.append(Finding(code, text, action))

    def kernels(self) -> list[Activity]:
        """Its kernels, without copies and memsets."""
        return [activity for activity in self.activities if activity.kind == "kernel"]

    def devices(self) -> list[int]:
        """Devices with work, sorted."""
        return sorted({activity.device for activity in self.activities})


def busy(activities: Iterable[Activity]) -> tuple[int, int]:
    """Time in which at least one of the activities runs, and at least two, in ns; each device by itself."""
    marks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for activity in activities:
        device_marks = marks.setdefault((activity.process if activity.device < 0 else 0, activity.device), [])
        device_marks.append((activity.start_ns, 1))
        device_marks.append((activity.end_ns, -1))
    any_ns = two_ns = 0
    for device_marks in marks.values():
        device_marks.sort()
        running, last_ns = 0, 0
        for time_ns, change in device_marks:
            if running >= 1:
                any_ns += time_ns - last_ns
            if running >= 2:
                two_ns += time_ns - last_ns
            running += change
            last_ns = time_ns
    return any_ns, two_ns


def whole(value: object, default: int = -1, limit: int = 2**63 - 1) -> int:
    """A number of a file as an integer, or `default` where it is none or too large."""
    if value is None or isinstance(value, bool):
        return default
    if isinstance(value, int):
        return value if -limit <= value <= limit else default
    if isinstance(value, float):
        return int(value) if -limit <= value <= limit else default
    if isinstance(value, str) and len(value) < 24:
        try:
            return whole(int(value), default, limit)
        except ValueError:
            with suppress(ValueError):
                return whole(float(value), default, limit)
    return default


def lane_number(value: object, default: int = 0) -> int:
    """The number of a device or stream, `default` where it is none or larger than a trace can hold."""
    return max(0, whole(value, default, MAX_INTEGER))


def dim3(value: object) -> tuple[int, int, int] | None:
    """A launch size of a file, as a list or as text such as `[8, 1, 1]`; None where it is none."""
    if isinstance(value, str) and len(value) < 80:
        value = value.strip("[]() ").replace(",", " ").split()
    if isinstance(value, list | tuple) and 1 <= len(value) <= 3:
        parts = [whole(part) for part in value] + [1] * (3 - len(value))
        if min(parts) >= 1:
            return parts[0], parts[1], parts[2]
    return None
