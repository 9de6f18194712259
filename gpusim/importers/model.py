"""Common result of all importers: GPU records with their launches, ranges, waits, operators and edges.

Times are integer nanoseconds on the file's own clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Literal

from gpusim.errors import TraceError
from gpusim.formats.trace import Counters, EdgeKind, GroundTruth, Phase, Quality, TaskKind
from gpusim.io.file_limits import MAX_INTEGER
from gpusim.text import shortened

Format = Literal[
    "kineto", "nsys-sqlite", "ncu-csv", "execution-trace", "chakra-et", "chakra-json", "cuda-graph", "gpusim-trace"
]

#: Name of each format in messages.
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


#: Keys in gpusim's own exports: whether the times are predicted, what the kernels are estimated from, and the share of
#: their time that is in doubt, as text.
SIMULATED, ESTIMATED, SLOWED = "simulated", "estimated", "slowed"


class ImportFileError(TraceError):
    """Error of a profile that cannot be read or has no step."""


#: Longest operator or kernel name that is processed: those of CUTLASS have 3,000 characters.
MAX_NAME: Final = 8192
#: Most steps of nested loops for one file: a real one of a million records takes a tenth, and the limit is reached
#: after about 15 s.
MAX_WORK: Final = 50_000_000


@dataclass(slots=True)
class WorkLimit:
    """Counter of work that stops an import before it takes minutes or gigabytes."""

    file: str
    left: int = field(default_factory=lambda: MAX_WORK)

    def spend(self, steps: int) -> None:
        """Count steps. Raises `ImportFileError` beyond the limit."""
        self.left -= steps
        if self.left < 0:
            raise ImportFileError(self.file, "its records, streams and waits combine in too many ways")


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
    """CUPTI's number of the CUDA graph node; 0 outside of graphs."""
    process: int = 0
    launch_ns: int | None = None
    """Begin of the launching call, in ns; None where unknown. Negative before the file's origin."""
    launch_end_ns: int | None = None
    """Return of the launching call, in ns."""
    shared_launch: bool = False
    """Whether other records share the launch: a CUDA graph, or one call with several kernels."""
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
    """Duration alone on the GPU, in ns, where the file has it."""

    @property
    def end_ns(self) -> int:
        """End of the record, in ns."""
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
    """A wait: work launched after call `correlation` waits for work launched before call `recorded` on `source`."""

    correlation: int
    recorded: int
    """Call number of the awaited record; -1 where the file does not have it."""
    source: int | None
    """Stream waited for; None for all."""
    stream: int | None
    """Waiting stream; None for all, after a wait of the host."""
    process: int = 0
    by_event: bool = False
    """Whether the wait is for an event, not for all work of a stream or the device."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A dependency: activity `before` ends before activity `after` starts; both are indices."""

    before: int
    after: int
    kind: EdgeKind


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem in a file: a stable code, the reason, and the remedy."""

    code: str
    text: str
    action: str = ""


#: Findings that explain why a file has no GPU kernels.
WITHOUT_KERNELS: Final = ("no-kernels", "no-times", "graphs-as-a-whole", "other-accelerator")


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """Facts of a file about a GPU."""

    name: str = ""
    sms: int = 0
    max_clock_mhz: int = 0
    """Largest SM clock, in MHz; not the clock of the run."""


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
    """Source of the edges; set together with them."""
    findings: list[Finding] = field(default_factory=list)
    resolution_ns: int = 1
    has_times: bool = True
    rank: int | None = None
    torch: str = ""
    cuda: str = ""
    has_waits: bool = False
    """Whether the file records event waits, so that their absence is meaningful."""
    nodes: int = 0
    """Number of operators or nodes, with or without kernels."""
    calls: list[str] = field(default_factory=list)
    """Names of all operators in order of begin, indexed by `Activity.op_call`."""
    ground_truth: GroundTruth | None = None
    """Times of the step without a profiler, where the file has them."""
    simulated: bool = False
    """Whether gpusim wrote the file from a simulation."""
    estimated: str = ""
    """What its kernels are estimated from, if no GPU has run them."""
    slowed_frac: float = 0.0
    """Share of the kernels' time that is in doubt, by the profile that was simulated."""

    def read_origin(self, values: Mapping[str, object]) -> None:
        """Take the origin of the times from the values of gpusim's own export."""
        self.simulated = values.get(SIMULATED) is True
        basis = values.get(ESTIMATED)
        self.estimated = shortened(basis, MAX_NAME) if isinstance(basis, str) else ""
        with suppress(TypeError, ValueError):
            self.slowed_frac = min(1.0, max(0.0, float(str(values.get(SLOWED, 0)))))

    def note(self, code: str, text: str, action: str = "") -> None:
        """Add a finding."""
        self.findings.append(Finding(code, text, action))

    def kernels(self) -> list[Activity]:
        """Return the kernel records, without copies and memsets."""
        return [activity for activity in self.activities if activity.kind == "kernel"]

    def devices(self) -> list[int]:
        """Return the devices with work, sorted."""
        return sorted({activity.device for activity in self.activities})


def busy(activities: Iterable[Activity]) -> tuple[int, int]:
    """Return the time with at least one and with at least two activities running on one device, in ns, summed over
    devices.
    """
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
    """Convert a file's number to an integer; `default` where it is invalid or too large."""
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
    """Return the number of a device or stream; `default` where it is invalid or larger than a trace can hold."""
    return max(0, whole(value, default, MAX_INTEGER))


def dim3(value: object) -> tuple[int, int, int] | None:
    """Parse a launch size, a list or text such as `[8, 1, 1]`; None where it is invalid."""
    if isinstance(value, str) and len(value) < 80:
        value = value.strip("[]() ").replace(",", " ").split()
    if isinstance(value, list | tuple) and 1 <= len(value) <= 3:
        parts = [whole(part) for part in value] + [1] * (3 - len(value))
        if min(parts) >= 1:
            return parts[0], parts[1], parts[2]
    return None
