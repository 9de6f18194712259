"""The hardware model document: limits, calibrated constants and links of one GPU, each number with its source."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Final, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta

from gpusim.defaults import DEFAULT_HARDWARE
from gpusim.errors import HardwareError
from gpusim.formats.trace import Dtype
from gpusim.io import file_limits
from gpusim.io.files import Document, read_document
from gpusim.io.opening import bundled_or_file
from gpusim.io.resources import resource_dir
from gpusim.notebook import html_table, short_name, short_repr
from gpusim.units import format_bytes

SCHEMA: Final = "gpusim-hardware/1"

Factor = Annotated[float, Meta(ge=0, le=file_limits.MAX_FACTOR)]
Rate = Annotated[float, Meta(ge=file_limits.MIN_RATE, le=file_limits.MAX_RATE)]
Bandwidth = Annotated[float, Meta(ge=0, le=file_limits.MAX_RATE)]
DeviceBytes = Annotated[int, Meta(ge=1, le=file_limits.MAX_DEVICE_BYTES)]
SmRegs = Annotated[int, Meta(ge=1, le=file_limits.MAX_SM_REGS)]
SmemBytes = Annotated[int, Meta(ge=1, le=file_limits.MAX_SMEM_BYTES)]
SmemSplits = Annotated[
    tuple[Annotated[int, Meta(ge=0, le=file_limits.MAX_SMEM_BYTES)], ...], Meta(max_length=file_limits.MAX_SMEM_SPLITS)
]
SmThreads = Annotated[int, Meta(ge=1, le=file_limits.MAX_SM_THREADS)]
Fraction = Annotated[float, Meta(ge=0, le=file_limits.MAX_UNCERTAINTY)]

#: Quantity of a number in `GraphCosts`, `StreamCosts` or `Contention`; only times may be scaled as costs.
Measure = Literal["time", "count", "exponent", "ratio"]
TimeNs = Annotated[float, Meta(ge=0, le=file_limits.MAX_COST_NS, extra={"measure": "time"})]
Starts = Annotated[float, Meta(ge=0, le=file_limits.MAX_FACTOR, extra={"measure": "count"})]
Queues = Annotated[int, Meta(ge=1, le=file_limits.MAX_QUEUES, extra={"measure": "count"})]
Exponent = Annotated[float, Meta(ge=0, le=1, extra={"measure": "exponent"})]
Ratio = Annotated[float, Meta(ge=0, le=file_limits.MAX_FACTOR, extra={"measure": "ratio"})]
Weight = Annotated[float, Meta(ge=0, le=1, extra={"measure": "ratio"})]


class Limits(Document, frozen=True, kw_only=True):
    """Capacity of an SM and limits of a block, with allocation granularities."""

    compute_capability: str
    """For example `9.0`."""
    sms: Annotated[int, Meta(ge=1, le=file_limits.MAX_SMS)]
    """Number of SMs."""
    warp_threads: Annotated[int, Meta(ge=1, le=file_limits.MAX_WARP_THREADS)]
    """Threads per warp; a block takes whole warps."""
    threads_per_sm: SmThreads
    """Resident threads per SM."""
    blocks_per_sm: Annotated[int, Meta(ge=1, le=file_limits.MAX_SM_BLOCKS)]
    """Resident blocks per SM (block slots)."""
    threads_per_block: SmThreads
    """Maximum threads per block."""
    regs_per_sm: SmRegs
    """32-bit registers per SM."""
    regs_per_block: SmRegs
    """Maximum registers per block."""
    regs_per_thread: SmRegs
    """Maximum registers per thread."""
    reg_granularity: SmRegs
    """Registers are allocated to a warp in multiples of this."""
    sub_partitions: Annotated[int, Meta(ge=1, le=file_limits.MAX_SUB_PARTITIONS)]
    """Warp schedulers per SM, each with its own part of the register file."""
    smem_per_sm_bytes: SmemBytes
    """Shared memory per SM at the largest carve-out."""
    smem_per_block_bytes: SmemBytes
    """Maximum shared memory per block, opt-in included."""
    smem_granularity_bytes: SmemBytes
    """Shared memory is allocated to a block in multiples of this."""
    smem_reserved_bytes: Annotated[int, Meta(ge=0, le=file_limits.MAX_SMEM_BYTES)]
    """Shared memory that the driver reserves in every block."""
    smem_splits_bytes: SmemSplits = ()
    """Carve-outs of an SM, ascending; the rest is L1 cache. Empty if the carve-out is fixed."""
    resident_grids: Annotated[int, Meta(ge=1, le=file_limits.MAX_RESIDENT_GRIDS)]
    """Maximum number of concurrent kernels."""


class Memory(Document, frozen=True, kw_only=True):
    """Size and bandwidth of device memory, and L2 cache."""

    dram_bytes: DeviceBytes
    """Size of device memory."""
    dram_bytes_per_ns: Rate
    """Bandwidth of device memory: measured if calibrated, else the data sheet's peak."""
    l2_bytes: DeviceBytes
    """Size of the L2 cache."""
    l2_bytes_per_ns: Bandwidth = 0.0
    """Bandwidth of the L2 cache; 0 if not measured, and losses to cache misses are then not predicted."""
    warp_l2_bytes_per_ns: Bandwidth = 0.0
    """Bandwidth of the L2 cache for a single warp."""
    warp_dram_bytes_per_ns: Bandwidth = 0.0
    """Bandwidth of device memory for a single warp."""
    miss_ns: TimeNs = 0.0
    """Delay of a kernel that reads from device memory instead of the L2 cache, beyond the bandwidth."""
    launch_miss_ns: TimeNs = 0.0
    """Delay of a launch that misses it."""


class Rates(Document, frozen=True, kw_only=True):
    """Dense arithmetic peaks in FLOP per ns (= GFLOP/s). A format without its own unit has the rate it runs at."""

    fp32: Rate
    """FP32 without tensor cores."""
    tf32: Rate
    """TF32 on tensor cores."""
    bf16: Rate
    """BF16 on tensor cores, FP32 accumulation."""

    def of(self, dtype: Dtype) -> float:
        """Return the peak rate for a trace's dtype, in FLOP per ns."""
        return {"fp32": self.fp32, "tf32": self.tf32, "bf16": self.bf16}[dtype]


class Copies(Document, frozen=True, kw_only=True):
    """Copies between host and device, with one copy engine per direction."""

    h2d_bytes_per_ns: Rate
    """Bandwidth from host to device."""
    d2h_bytes_per_ns: Rate
    """Bandwidth from device to host."""
    both_bytes_per_ns: Rate
    """Total bandwidth with both directions busy."""
    latency_ns: TimeNs
    """Fixed time of a copy."""
    switch_ns: TimeNs = 0.0
    """Extra delay in a CUDA graph of a copy after a kernel, and of a kernel that waits for a copy."""
    copy_slowdown: Ratio = 0.0
    """Slowdown of a copy to the host or beside kernels, as a share of its time."""
    kernel_slowdown: Ratio = 0.0
    """Slowdown of kernels during copies in one direction, as a share of their time; twice that during both."""
    memset_d2h_ns: TimeNs = 0.0
    """Extra time of a small memset during copies to the host."""
    memset_h2d_ns: TimeNs = 0.0
    """The same during copies to the device."""


class GraphCosts(Document, frozen=True, kw_only=True):
    """Launch costs in a replayed CUDA graph."""

    chain_ns: TimeNs
    """Gap from the end of a kernel to the start of its only successor."""
    fork_ns: TimeNs
    """Delay between successive ones of three or more successors of a kernel; the last two are ready together."""
    join_ns: TimeNs
    """Extra delay of a kernel with several predecessors, however many."""
    busy_ns: TimeNs = 0.0
    """Most time a kernel loses to start interference; its successors start later by it."""
    busy_starts: Starts = 0.0
    """Starts of other kernels at which half of `busy_ns` is lost; 0: the first start costs all of it."""
    product_frac: Ratio = 0.0
    """Share of its time alone that a matrix product loses if others run beside it throughout."""
    branch_ns: TimeNs = 0.0
    """Extra delay of every dependent node in a graph with branches, that is, of several streams."""
    front_end_ns: TimeNs
    """Minimum interval between kernel starts."""
    turnover_ns: TimeNs = 0.0
    """Time that each block of a kernel of more than one wave holds up the next kernel start."""
    memory_node_ns: TimeNs
    """Extra delay at a memset or memcpy node."""


class StreamCosts(Document, frozen=True, kw_only=True):
    """Costs of launching kernels into streams from the host."""

    launch_ns: TimeNs
    """Host time of a kernel launch."""
    start_ns: TimeNs
    """Time from the launch call to the kernel's start on an idle GPU."""
    chain_ns: TimeNs
    """Gap between kernels of one stream, the second already launched."""
    event_ns: TimeNs
    """Gap from a kernel to one of another stream that waits for its event."""
    event_host_ns: TimeNs
    """Host time to record an event and to wait for it, together."""
    queues: Queues
    """Hardware queues in use (CUDA_DEVICE_MAX_CONNECTIONS)."""
    max_queues: Queues
    """Maximum number of hardware queues."""


class Contention(Document, frozen=True, kw_only=True):
    """Slowdown of concurrent kernels (docs/hardware-rules.md)."""

    younger_slowdown: Ratio
    """a: each kernel except the oldest runs at 1 / (1 + a) of the rate of its share of the SMs."""
    sharing_exponent: Exponent = 0.0
    """p: blocks take load^p times as long as on an SM full of their kernel; load is the sum of the blocks' shares.

    At most 1: a fuller SM does no less work.

    0: contention follows the pool of SMs (`gpusim.engine.pool`), not each SM (`gpusim.engine.placement`).
    """
    matrix_exponent: Exponent = 0.0
    """p of GEMM-like kernels, which keep an SM busier; 0: `sharing_exponent` holds for them too."""
    cross_load: Weight = 1.0
    """Weight of GEMM-like kernels in the load of other kernels on an SM, and vice versa: the two use different
    resources; 1: full weight."""


def saved_frac(predicted_ns: float, sequential_ns: float) -> float:
    """Return the predicted saving over the sequential graph as a share of the predicted time, from 0 to 1."""
    return min(1.0, max(0.0, sequential_ns / max(1.0, predicted_ns) - 1))


class Uncertainty(Document, frozen=True, kw_only=True):
    """Prediction error that held for 90 % of measured cases, as a share of the predicted time."""

    sequential_frac: Fraction
    """Error of sequential schedules."""
    schedule_frac: Fraction
    """Error of all other schedules."""
    less_known_frac: Fraction = 0.0
    """The same for steps not mostly convolutional, if larger."""
    saving_frac: Fraction = 0.0
    """Their further error, as a share of the predicted saving."""
    variants_frac: Fraction = 0.0
    """Further slowdown of a schedule with variants: they are timed outside the step, and choosing the fastest favours
    lucky timings."""
    searched_frac: Fraction = 0.014
    """Further slowdown of a searched schedule, without variants: a search also finds errors of the model."""
    cache_frac: Fraction = 0.0
    """Unused; of earlier files."""
    products_frac: Fraction = 0.0
    """Unused; of earlier files."""

    def margins(
        self,
        predicted_ns: float,
        sequential_ns: float,
        streams: int,
        *,
        other_kernels: bool = False,
        searched: bool = False,
        less_known: bool = False,
        least_frac: float = 0.0,
    ) -> tuple[float, float]:
        """Return by which shares of its predicted time a schedule may take less and more, next to the sequential graph.

        `less_known` is True if the step is not mostly convolutional; of its saving, at most `predicted_ns` counts.
        `least_frac` is a lower limit of `schedule_frac`.
        """
        more = 1 + self.further_frac(other_kernels=other_kernels, searched=searched)
        if streams < 2:
            return 0.0, more - 1
        error = max(self.schedule_frac, least_frac, self.less_known_frac if less_known else 0.0)
        doubt = self.saving_frac * saved_frac(predicted_ns, sequential_ns) if less_known else 0.0
        return 1 - (1 - error) * (1 - doubt), (1 + error) * (1 + doubt) * more - 1

    def further_frac(self, *, other_kernels: bool, searched: bool) -> float:
        """Return the further slowdown of a schedule with variants, or of a searched one: the larger of the two."""
        return max(self.variants_frac if other_kernels else 0.0, self.searched_frac if searched else 0.0)


class HardwareModel(Document, frozen=True, kw_only=True):
    """One GPU. `sources` has an entry for every number, keyed by section or `section.field`."""

    schema: Literal["gpusim-hardware/1"]
    """`gpusim-hardware/1`."""
    name: str
    """Name for `--hw`; equals the file name without `.json`."""
    gpu: str
    """Name reported by the driver, for example `NVIDIA H200`."""
    calibrated: bool
    """True if costs and contention were measured on this GPU by `gpusim calibrate`."""
    limits: Limits
    """Limits of the GPU, an SM and a block."""
    memory: Memory
    """Device memory and L2 cache."""
    rates: Rates
    """Arithmetic peaks."""
    copies: Copies
    """Copies between host and device."""
    graph: GraphCosts
    """Launch costs in a CUDA graph."""
    stream: StreamCosts
    """Launch costs from the host."""
    contention: Contention
    """Slowdown of concurrent kernels."""
    uncertainty: Uncertainty
    """Prediction intervals."""
    sources: dict[str, str]
    """Source of each number, by section (`"graph"`) or field (`"graph.chain_ns"`); the field's entry takes
    precedence."""

    def interval_ns(
        self,
        predicted_ns: int,
        sequential_ns: float,
        streams: int,
        *,
        other_kernels: bool = False,
        searched: bool = False,
        less_known: bool = False,
    ) -> tuple[int, int]:
        """Return the prediction interval in ns, which held 90 % of past measurements; as `Uncertainty.margins`."""
        less, more = self.uncertainty.margins(
            predicted_ns,
            sequential_ns,
            streams,
            other_kernels=other_kernels,
            searched=searched,
            less_known=less_known,
        )
        error = self.uncertainty.sequential_frac if streams < 2 else 0.0
        return round(predicted_ns * (1 - less) * (1 - error)), round(predicted_ns * (1 + more) * (1 + error))

    @property
    def label(self) -> str:
        """Name for display, marked `(uncalibrated)` if the model is."""
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
    """Return the quantity that each field measures. Raises `TypeError` for a field without one."""
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
            # A field left at its default holds no number of the file, so it needs no source.
            if not source.strip() and getattr(numbers, field.name) != field.default:
                raise HardwareError(str(path), "has no source", place=f"$.{section}.{field.name}")
    if model.stream.queues > model.stream.max_queues:
        problem = f"{model.stream.queues} queues, of at most {model.stream.max_queues}"
        raise HardwareError(str(path), problem, place="$.stream.queues")
    if model.memory.l2_bytes_per_ns > 0.0:
        for name in ("warp_l2_bytes_per_ns", "warp_dram_bytes_per_ns"):
            if getattr(model.memory, name) == 0.0:
                problem = "is 0, and losses to cache misses need it where l2_bytes_per_ns is not 0"
                raise HardwareError(str(path), problem, place=f"$.memory.{name}")
    return model


def bundled_hardware() -> dict[str, Path]:
    """Return the file of each bundled hardware model, by name, sorted."""
    return {path.stem: path for path in sorted(resource_dir("hwmodels").glob("*.json"))}


def load_hardware(name_or_file: str) -> HardwareModel:
    """Load a hardware model by bundled name or file name (`.json`). Raises `HardwareError`, `UnknownNameError`."""
    return read_hardware(bundled_or_file("hardware", name_or_file, bundled_hardware(), ".json"))


def default_hardware(gpu: str) -> HardwareModel:
    """Return the hardware model of the GPU that a trace was captured on, or `DEFAULT_HARDWARE` if none is bundled."""
    return hardware_for_gpu(gpu) or load_hardware(DEFAULT_HARDWARE)


def hardware_for_gpu(gpu: str) -> HardwareModel | None:
    """Return the bundled model of the GPU that a trace was captured on, or None."""
    for path in bundled_hardware().values():
        stat = path.stat()
        model = _read_once(path, stat.st_mtime_ns, stat.st_size)
        if model.gpu == gpu:
            return model
    return None


@functools.lru_cache(maxsize=32)
def _read_once(path: Path, mtime_ns: int, size_bytes: int) -> HardwareModel:
    """Read a bundled model; time and size are in the cache key, so a changed file is read again."""
    return read_hardware(path)
