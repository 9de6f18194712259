"""The hardware model document: limits, calibrated constants and links of one GPU, each number with its source."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Annotated, Final, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta

from gpusim.defaults import DEFAULT_HARDWARE
from gpusim.errors import HardwareError, UnknownNameError
from gpusim.formats.trace import Dtype
from gpusim.io import file_limits
from gpusim.io.files import Document, read_document
from gpusim.io.resources import resource_dir
from gpusim.notebook import html_table, short_name, short_repr
from gpusim.units import format_bytes

SCHEMA: Final = "gpusim-hardware/1"

Factor = Annotated[float, Meta(ge=0, le=file_limits.MAX_FACTOR)]
Rate = Annotated[float, Meta(ge=file_limits.MIN_RATE, le=file_limits.MAX_RATE)]
DeviceBytes = Annotated[int, Meta(ge=1, le=file_limits.MAX_DEVICE_BYTES)]
SmRegs = Annotated[int, Meta(ge=1, le=file_limits.MAX_SM_REGS)]
SmemBytes = Annotated[int, Meta(ge=1, le=file_limits.MAX_SMEM_BYTES)]
SmemSplits = Annotated[
    tuple[Annotated[int, Meta(ge=0, le=file_limits.MAX_SMEM_BYTES)], ...], Meta(max_length=file_limits.MAX_SMEM_SPLITS)
]
SmThreads = Annotated[int, Meta(ge=1, le=file_limits.MAX_SM_THREADS)]
Fraction = Annotated[float, Meta(ge=0, le=file_limits.MAX_UNCERTAINTY)]

#: What a number of `GraphCosts`, `StreamCosts` or `Contention` measures: only a time may be scaled as a cost.
Measure = Literal["time", "count", "exponent", "ratio"]
TimeNs = Annotated[float, Meta(ge=0, le=file_limits.MAX_COST_NS, extra={"measure": "time"})]
Starts = Annotated[float, Meta(ge=0, le=file_limits.MAX_FACTOR, extra={"measure": "count"})]
Queues = Annotated[int, Meta(ge=1, le=file_limits.MAX_QUEUES, extra={"measure": "count"})]
Exponent = Annotated[float, Meta(ge=0, le=1, extra={"measure": "exponent"})]
Ratio = Annotated[float, Meta(ge=0, le=file_limits.MAX_FACTOR, extra={"measure": "ratio"})]
Weight = Annotated[float, Meta(ge=0, le=1, extra={"measure": "ratio"})]


class Limits(Document, frozen=True, kw_only=True):
    """What one SM and one block may hold, and in which steps it is handed out."""

    compute_capability: str
    """Such as `9.0`."""
    sms: Annotated[int, Meta(ge=1, le=file_limits.MAX_SMS)]
    """SMs of the GPU."""
    warp_threads: Annotated[int, Meta(ge=1, le=file_limits.MAX_WARP_THREADS)]
    """Threads of a warp; a block takes whole warps."""
    threads_per_sm: SmThreads
    """Threads resident at once."""
    blocks_per_sm: Annotated[int, Meta(ge=1, le=file_limits.MAX_SM_BLOCKS)]
    """Blocks resident at once (block slots)."""
    threads_per_block: SmThreads
    """Most threads of a block."""
    regs_per_sm: SmRegs
    """32-bit registers of an SM."""
    regs_per_block: SmRegs
    """Most registers of a block."""
    regs_per_thread: SmRegs
    """Most registers of a thread."""
    reg_granularity: SmRegs
    """Registers are handed out to a warp in multiples of this."""
    sub_partitions: Annotated[int, Meta(ge=1, le=file_limits.MAX_SUB_PARTITIONS)]
    """Warp schedulers of an SM, each with its own part of the register file."""
    smem_per_sm_bytes: SmemBytes
    """Shared memory of an SM with the largest carve-out."""
    smem_per_block_bytes: SmemBytes
    """Most shared memory of one block, opt-in included."""
    smem_granularity_bytes: SmemBytes
    """A block gets a multiple of this."""
    smem_reserved_bytes: Annotated[int, Meta(ge=0, le=file_limits.MAX_SMEM_BYTES)]
    """Shared memory that the driver takes of every block."""
    smem_splits_bytes: SmemSplits = ()
    """What an SM's shared memory can be set to, ascending; the rest is L1 cache. Empty where it cannot be set."""
    resident_grids: Annotated[int, Meta(ge=1, le=file_limits.MAX_RESIDENT_GRIDS)]
    """Kernels that may run on the GPU at once."""


class Memory(Document, frozen=True, kw_only=True):
    """Device memory, its cache, and what they deliver."""

    dram_bytes: DeviceBytes
    """Device memory."""
    dram_bytes_per_ns: Rate
    """Bandwidth of device memory: reached, if calibrated, else the data sheet's peak."""
    l2_bytes: DeviceBytes
    """L2 cache."""


class Rates(Document, frozen=True, kw_only=True):
    """Dense arithmetic peaks in FLOP per ns (= GFLOP/s); where a format has no unit of its own, the rate it runs at."""

    fp32: Rate
    """FP32 without tensor cores."""
    tf32: Rate
    """TF32 on tensor cores."""
    bf16: Rate
    """BF16 on tensor cores, FP32 accumulation."""

    def of(self, dtype: Dtype) -> float:
        """The peak of a trace's dtype."""
        return {"fp32": self.fp32, "tf32": self.tf32, "bf16": self.bf16}[dtype]


class Copies(Document, frozen=True, kw_only=True):
    """Copies between host and device: one engine for each direction."""

    h2d_bytes_per_ns: Rate
    """Host to device."""
    d2h_bytes_per_ns: Rate
    """Device to host."""
    both_bytes_per_ns: Rate
    """Both directions at once, in total."""
    latency_ns: TimeNs
    """Fixed part of one copy."""
    switch_ns: TimeNs = 0.0
    """Extra delay in a CUDA graph from a kernel to a copy that waits for it, and from a copy to a kernel."""
    kernel_slowdown: Ratio = 0.0
    """How much longer kernels take beside copies of one direction, as a share of their time; twice that beside both."""


class GraphCosts(Document, frozen=True, kw_only=True):
    """Costs of a CUDA graph's replay."""

    chain_ns: TimeNs
    """End of a kernel to the start of its only successor."""
    fork_ns: TimeNs
    """From one of three or more successors of a kernel to the next; the last two are ready together."""
    join_ns: TimeNs
    """Extra delay of a kernel for each predecessor beyond the first."""
    busy_ns: TimeNs = 0.0
    """What a kernel loses to starts of others while it runs, where there are many; what waits for it starts later."""
    busy_starts: Starts = 0.0
    """Starts of others to which half of that is lost; 0: the first takes all of it."""
    branch_ns: TimeNs = 0.0
    """Extra delay of everything that waits, in a graph that is no straight line: one of several streams."""
    front_end_ns: TimeNs
    """Least time between two kernel starts."""
    memory_node_ns: TimeNs
    """Extra delay around a memset or memcpy node."""


class StreamCosts(Document, frozen=True, kw_only=True):
    """Costs of launches from the host into streams."""

    launch_ns: TimeNs
    """Host time of one kernel launch."""
    start_ns: TimeNs
    """Launch call to the kernel's start on an idle GPU."""
    chain_ns: TimeNs
    """End of a kernel to the start of the next one in its stream, already launched."""
    event_ns: TimeNs
    """End of a kernel to the start of a kernel of another stream that waits for its event."""
    event_host_ns: TimeNs
    """Host time of recording an event and of waiting for it, together."""
    queues: Queues
    """Hardware queues in use (CUDA_DEVICE_MAX_CONNECTIONS)."""
    max_queues: Queues
    """Most there can be."""


class Contention(Document, frozen=True, kw_only=True):
    """Slowdown of kernels that run together (docs/hardware-rules.md)."""

    younger_slowdown: Ratio
    """a: every kernel but the oldest runs at 1 / (1 + a) of the rate of its share of the SMs."""
    sharing_exponent: Exponent = 0.0
    """p: blocks take load^p times as long as on an SM that is full of them, load being the sum of the blocks' shares.

    At most 1: an SM that holds more gets no less done.

    0 where it is not used: SMs are then shared out as one pool (`gpusim.engine.pool`), else one by one
    (`gpusim.engine.placement`).
    """
    matrix_exponent: Exponent = 0.0
    """p of kernels that multiply matrices, which keep an SM busier than others do; 0: as for all others."""
    cross_load: Weight = 1.0
    """How much the blocks of kernels that multiply matrices count in the load of the others on an SM, and the other way
    round: the two kinds wait for different things; 1: as much as those of their own kind."""


class Uncertainty(Document, frozen=True, kw_only=True):
    """How far predictions have been from measurements, as a share of the time (90 % of cases lie within)."""

    sequential_frac: Fraction
    """For sequential schedules."""
    schedule_frac: Fraction
    """For all others."""
    cache_frac: Fraction = 0.0
    """How much longer still a schedule on several streams may take where its step may lose the L2 cache
    (`gpusim.plan.l2_cache`)."""
    variants_frac: Fraction = 0.0
    """How much longer still a schedule may take that runs variants: they are timed apart from the step, and those that
    came out fast are chosen."""

    def late_frac(self, streams: int, may_lose_cache: bool, other_kernels: bool = False) -> float:
        """What a schedule may take more than predicted, over and above the error of any prediction."""
        cache = self.cache_frac if may_lose_cache and streams > 1 else 0.0
        return (1 + cache) * (1 + (self.variants_frac if other_kernels else 0.0)) - 1


class HardwareModel(Document, frozen=True, kw_only=True):
    """One GPU. `sources` has an entry for every number, keyed by section or `section.field`."""

    schema: Literal["gpusim-hardware/1"]
    """`gpusim-hardware/1`."""
    name: str
    """The name for `--hw`; equals the file's name without `.json`."""
    gpu: str
    """Name as the driver reports it: `NVIDIA H200`."""
    calibrated: bool
    """Whether the costs and contention were measured on this GPU, by `gpusim calibrate`."""
    limits: Limits
    """Capacity of an SM, a block and the GPU."""
    memory: Memory
    """Device memory and L2 cache."""
    rates: Rates
    """Arithmetic peaks."""
    copies: Copies
    """Copies between host and device."""
    graph: GraphCosts
    """Launch costs inside a CUDA graph."""
    stream: StreamCosts
    """Launch costs from the host."""
    contention: Contention
    """Slowdown of kernels that run together."""
    uncertainty: Uncertainty
    """Intervals of predictions."""
    sources: dict[str, str]
    """Text for each number, by section (`"graph"`) or by field (`"graph.chain_ns"`); the field's own text goes
    first."""

    def interval_ns(
        self, predicted_ns: int, streams: int, may_lose_cache: bool, other_kernels: bool = False
    ) -> tuple[int, int]:
        """The interval around a prediction that 90 % of measurements of past schedules lay in."""
        spread = self.uncertainty.schedule_frac if streams > 1 else self.uncertainty.sequential_frac
        late = 1 + self.uncertainty.late_frac(streams, may_lose_cache, other_kernels)
        return round(predicted_ns / (1 + spread)), round(predicted_ns / (1 - spread) * late)

    @property
    def label(self) -> str:
        """The name as outputs show it: an uncalibrated model always says so."""
        return self.name if self.calibrated else f"{self.name} (uncalibrated)"

    def __repr__(self) -> str:
        return short_repr("HardwareModel", f"{short_name(self.label)}: {short_name(self.gpu)}, {self.limits.sms} SMs")

    def _repr_html_(self) -> str:
        rows = [
            ("GPU", self.gpu),
            ("calibrated", "yes" if self.calibrated else "no"),
            ("SMs", f"{self.limits.sms:,}"),
            ("memory", format_bytes(self.memory.dram_bytes)),
            ("DRAM bandwidth", f"{self.memory.dram_bytes_per_ns:,.0f} GB/s"),
            ("L2 cache", format_bytes(self.memory.l2_bytes)),
        ]
        return html_table(f"Hardware model {self.label}", ("", ""), rows)


def measure_of(section: type[GraphCosts | StreamCosts | Contention]) -> dict[str, Measure]:
    """Field -> what it measures. Raises `TypeError` for a field that does not say."""
    measures: dict[str, Measure] = {}
    for name, annotation in get_type_hints(section, include_extras=True).items():
        tags = [meta.extra["measure"] for meta in get_args(annotation) if isinstance(meta, Meta) and meta.extra]
        if len(tags) != 1:
            raise TypeError(f"{section.__name__}.{name} does not say what it measures")
        measures[name] = tags[0]
    return measures


def read_hardware(path: Path) -> HardwareModel:
    """Read and check a hardware model. Raises `HardwareError`, also for a number without a source."""
    model = read_document(path, HardwareModel, SCHEMA, HardwareError)
    for section in ("limits", "memory", "rates", "copies", "graph", "stream", "contention", "uncertainty"):
        numbers = getattr(model, section)
        for field in msgspec.structs.fields(numbers):
            source = model.sources.get(f"{section}.{field.name}", model.sources.get(section, ""))
            # What a file may leave out, and does, is no number of its own.
            if not source.strip() and getattr(numbers, field.name) != field.default:
                raise HardwareError(str(path), "has no source", place=f"$.{section}.{field.name}")
    if model.stream.queues > model.stream.max_queues:
        problem = f"{model.stream.queues} queues, of at most {model.stream.max_queues}"
        raise HardwareError(str(path), problem, place="$.stream.queues")
    return model


def bundled_hardware() -> dict[str, Path]:
    """Name -> file of every hardware model that ships with gpusim, sorted by name."""
    return {path.stem: path for path in sorted(resource_dir("hwmodels").glob("*.json"))}


def load_hardware(name_or_file: str) -> HardwareModel:
    """A hardware model by file name (`.json`) or bundled name. Raises `HardwareError`, `UnknownNameError`."""
    if name_or_file.endswith(".json") or os.path.isfile(name_or_file):
        return read_hardware(Path(name_or_file))
    bundled = bundled_hardware()
    if name_or_file not in bundled:
        raise UnknownNameError("hardware", name_or_file, bundled)
    return read_hardware(bundled[name_or_file])


def default_hardware(gpu: str) -> HardwareModel:
    """The model to begin with for a trace captured on this GPU: its own, or `DEFAULT_HARDWARE` where there is none."""
    return hardware_for_gpu(gpu) or load_hardware(DEFAULT_HARDWARE)


def hardware_for_gpu(gpu: str) -> HardwareModel | None:
    """The bundled model of the GPU that a trace was captured on, or None where there is none."""
    for path in bundled_hardware().values():
        stat = path.stat()
        model = _read_once(path, stat.st_mtime_ns, stat.st_size)
        if model.gpu == gpu:
            return model
    return None


@functools.lru_cache(maxsize=32)
def _read_once(path: Path, mtime_ns: int, size_bytes: int) -> HardwareModel:
    """A bundled model; a file that has changed is another key, so it is read again."""
    return read_hardware(path)
