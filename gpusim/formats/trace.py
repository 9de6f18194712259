"""The trace document: one captured step as frozen values.

Times are integers in ns, sizes are in bytes. Tensors, storages and ops are referred to by index.
The JSON Schema and docs/formats.md are generated from these classes.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from gpusim.formats.ground_truth import GroundTruth as GroundTruth
from gpusim.formats.ground_truth import HostLink as HostLink
from gpusim.formats.ground_truth import Timing as Timing
from gpusim.io import file_limits
from gpusim.io.files import Count, Document, Positive, StorageBytes
from gpusim.notebook import html_table, short_name, short_repr
from gpusim.units import counted

SCHEMA: Final = "gpusim-trace/2"
#: Older versions that are still read. Version 1 has captured eager steps only, none imported or compiled.
OLDER_SCHEMAS: Final = ("gpusim-trace/1",)

Dim3 = tuple[Positive, Positive, Positive]
StepNs = Annotated[int, Meta(ge=0, le=file_limits.MAX_STEP_NS)]
Elements = Annotated[int, Meta(ge=0, le=file_limits.MAX_ELEMENTS)]
Dimensions = Annotated[tuple[Elements, ...], Meta(max_length=file_limits.MAX_DIMENSIONS)]
_GridX = Annotated[int, Meta(ge=1, le=file_limits.MAX_GRID_X)]
_GridYZ = Annotated[int, Meta(ge=1, le=file_limits.MAX_GRID_YZ)]
_BlockSize = Annotated[int, Meta(ge=1, le=file_limits.MAX_BLOCK_THREADS)]
_ClusterSize = Annotated[int, Meta(ge=1, le=file_limits.MAX_CLUSTER)]
_Date = Annotated[str, Meta(pattern=r"^([0-9]{4}-[0-9]{2}-[0-9]{2})?$(?!\n)")]
Grid = tuple[_GridX, _GridYZ, _GridYZ]
Block = tuple[_BlockSize, _BlockSize, _BlockSize]
Cluster = tuple[_ClusterSize, _ClusterSize, _ClusterSize]
SmemBytes = Annotated[int, Meta(ge=0, le=file_limits.MAX_SMEM_BYTES)]

Role = Literal[
    "input", "target", "parameter", "buffer", "constant", "activation", "gradient", "optimizer_state", "output"
]
Phase = Literal["forward", "backward", "optimizer"]
Mode = Literal["infer", "train"]
Dtype = Literal["fp32", "tf32", "bf16"]
MemoryFormat = Literal["contiguous", "channels_last"]
Frontend = Literal["aten", "inductor"]
TaskKind = Literal["kernel", "memset", "memcpy"]
Blas = Literal["cublas", "cublaslt"]
EdgeKind = Literal["stream", "event", "data", "graph", "assumed"]
Quality = Literal["data", "graph", "event", "stream", "assumed", "none"]
#: Target of an op that is an Inductor kernel; the trace has its code under `sources`.
KERNEL: Final = "inductor.kernel"
Composition = Literal["native", "by_sample", "forward_pool", "by_index", "fused", "joined", "merged"]


class Gpu(Document, frozen=True, kw_only=True):
    """GPU and software of a capture or measurement."""

    name: str
    """Name reported by the driver, for example `NVIDIA H200`; ties the trace to a hardware model."""
    driver: str
    """Driver version; empty if unknown."""
    cuda: str
    """CUDA version of the torch build."""
    torch: str
    """torch version."""
    cudnn: str
    """cuDNN version in torch's numbering."""
    sm_clock_mhz: Count
    """SM clock during this step; 0 if unknown."""
    mem_clock_mhz: Count
    """Memory clock during this step; 0 if unknown."""


class ImportedFrom(Document, frozen=True, kw_only=True):
    """The profile that a trace was imported from."""

    format: str
    """`kineto`, `nsys-sqlite`, `ncu-csv`, `chakra-et` or `chakra-json`."""
    writer: str
    """Program that wrote the profile."""
    files: tuple[str, ...]
    """File names without folders."""
    step: str
    """Part of the file: a `ProfilerStep#7`, an NVTX range, a repeating period, or the whole file."""
    device: Count
    """GPU number in the file."""
    dependency_quality: Quality
    """Origin of the edges in `ops[].after`: `data` and `graph` come from the program, `event` from streams and recorded
    waits, `stream` from stream order, `assumed` from observed order across streams. `none`: no order in the file."""
    observed_ns: StepNs
    """Time from the start of the first GPU record to the end of the last; 0 in a file without times."""
    busy_ns: StepNs
    """Part of it with at least one kernel, copy or memset running."""
    concurrent_ns: StepNs
    """Part of it with at least two running."""
    times_alone: bool = False
    """True if it has times of kernels alone."""
    simulated: bool = False
    """True if times are predicted."""
    slowed_frac: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Earlier doubt about kernels."""
    resimulated_ns: StepNs = 0
    """Time of the step simulated from launches, edges and durations alone; 0 in a file without times."""
    streams: Count = 1
    """Number of streams with work."""


class Provenance(Document, frozen=True, kw_only=True):
    """Origin of a trace."""

    gpu: Gpu
    """GPU and software."""
    date: _Date
    """Capture date, `yyyy-mm-dd`, or empty."""
    command: str
    """Command line that made the trace."""
    gpusim: str
    """Version of gpusim, with a hash of its code; no hash in traces up to 2026-11-23."""
    counters: str = ""
    """Profiler that counted traffic and instructions; if empty, traffic is estimated from sizes."""
    estimated: str = ""
    """Source of estimated launch shapes and kernel times, if no GPU has run the step; the trace then has the GPU's
    name and cannot be replayed."""
    imported_from: ImportedFrom | None = None
    """Set for a trace imported from a profile; it has no tensors and cannot be replayed."""


class Model(Document, frozen=True, kw_only=True):
    """The captured model and how the step runs it."""

    spec: str
    """Argument of `gpusim capture`: `torchvision:NAME`, `timm:NAME` or `file.py:function`; for a step captured in
    Python, its class or function."""
    network: str
    """`NAME` or `function` in the spec."""
    mode: Mode
    """`infer`: forward; `train`: forward, loss, backward and optimizer."""
    batch: Positive
    """Batch size."""
    dtype: Dtype
    """`tf32`: float32 tensors, TF32 allowed in matrix products and convolutions; `bf16`: parameters and inputs in
    bfloat16."""
    memory_format: MemoryFormat
    """Memory layout of 4-dimensional tensors."""
    frontend: Frontend
    """Tool that turned the model into ops: `aten` calls operators like eager PyTorch, `inductor` compiles fused
    kernels, with code in `sources`."""
    optimizer: str | None = None
    """`sgd_momentum` for a training step of a SPEC; for a user's own step its optimizers, for example `AdamW`."""
    fixed: tuple[str, ...] = ()
    """Values frozen at capture although the user's code changes them, for example a factor that follows from the
    number of the step."""


class TensorInit(Document, frozen=True, kw_only=True):
    """Values with which replay fills a tensor that exists before the step, in the model's range."""

    kind: Literal["normal", "uniform", "integers", "constant", "values"]
    """`normal`: a = mean, b = standard deviation; `uniform`, `integers`: a = smallest, b = largest; `constant`: a;
    `values`: the elements themselves, in `values`."""
    a: float = 0.0
    """First parameter."""
    b: float = 0.0
    """Second parameter."""
    values: tuple[float, ...] = ()
    """Elements, for `values`."""


class Storage(Document, frozen=True, kw_only=True):
    """A block of memory; aliasing tensors share one."""

    bytes: StorageBytes
    """Size."""


class Tensor(Document, frozen=True, kw_only=True):
    """A tensor: shape and strides over a storage."""

    shape: Dimensions
    """Size of each dimension."""
    stride: Dimensions
    """Stride of each dimension, in elements."""
    dtype: str
    """torch's name without prefix, for example `float32`."""
    storage: Count
    """Index into `storages`."""
    offset: Elements = 0
    """Offset of the first element in the storage, in elements."""
    role: Role
    """Role of the tensor in the step."""
    name: str = ""
    """Name of the parameter or buffer, if any."""
    init: TensorInit | None = None
    """Initial values; set for tensors that the step reads before writing."""


class Counters(Document, frozen=True, kw_only=True):
    """Hardware counters of one launch, gathered with Nsight Compute."""

    dram_bytes: Count
    """DRAM traffic, reads and writes; replaces the estimate from tensor sizes."""
    l2_bytes: Count
    """L2 traffic."""
    instructions: Count
    """Executed warp instructions."""
    tensor_instructions: Count
    """Warp instructions on tensor cores."""
    smem_config_bytes: SmemBytes | None = None
    """Shared memory carve-out that the driver chose for this launch."""


class Kernel(Document, frozen=True, kw_only=True):
    """One GPU launch (or memory operation) of an op."""

    name: str
    """Demangled name."""
    dur_ns: StepNs
    """Median duration over `samples` runs, alone on the GPU."""
    kind: TaskKind = "kernel"
    """Kind of launch."""
    grid: Grid = (1, 1, 1)
    """Blocks in x, y, z."""
    block: Block = (1, 1, 1)
    """Threads per block in x, y, z."""
    cluster: Cluster | None = None
    """Blocks per cluster; null if none or unknown. Capture records none, and no rule reads it."""
    regs_per_thread: Annotated[int, Meta(ge=0, le=file_limits.MAX_THREAD_REGS)] = 0
    """Registers per thread."""
    smem_bytes: SmemBytes = 0
    """Shared memory per block, static and dynamic."""
    smem_static_bytes: SmemBytes | None = None
    """Static part of it; null if unknown."""
    smem_dynamic_bytes: SmemBytes | None = None
    """Dynamic part of it; null if unknown."""
    lo_ns: StepNs = 0
    """10th percentile of the duration."""
    hi_ns: StepNs = 0
    """90th percentile of the duration."""
    samples: Count = 0
    """Number of measured runs."""
    bytes: StorageBytes = 0
    """Bytes copied or set, for `memcpy` and `memset`."""
    counters: Counters | None = None
    """Hardware counters, if gathered."""


class VariantSettings(Document, frozen=True, kw_only=True):
    """Settings that a variant's call changes; omitted ones are as captured."""

    cudnn: bool = True
    """false: the call avoids cuDNN (torch's own convolution)."""
    benchmark: bool = False
    """cuDNN times its algorithms at the first call and takes the fastest (`torch.backends.cudnn.benchmark`)."""
    deterministic: bool = False
    """Only deterministic algorithms (`torch.backends.cudnn.deterministic`)."""
    tf32: bool | None = None
    """Permits TF32; null: as the trace's dtype says."""
    memory_format: MemoryFormat | None = None
    """Layout to which 4-dimensional arguments are converted for the call; results are converted back."""
    blas: Blas | None = None
    """Library for matrix products (`torch.backends.cuda.preferred_blas_library`)."""
    composition: Composition | None = None
    """Alternative lowering of the operator. `native`, `by_sample`: batch norm by torch's own kernels, or sample by
    sample. `forward_pool`: backward of an average pool as a pool. `by_index`: backward of a max pool by its indices.
    `fused`: convolution and ReLU by cuDNN. `joined`: elementwise ops fused into one kernel. `merged`: convolutions of
    one input as one."""


class Variant(Document, frozen=True, kw_only=True):
    """Another way to run an op: the same operator under other library settings, with other kernels."""

    name: str
    """Unique in the op; schedules refer to it."""
    settings: VariantSettings
    """Settings of the call."""
    kernels: tuple[Kernel, ...]
    """Kernels launched, layout conversions included."""
    covers: tuple[Count, ...] = ()
    """Other ops fused into this one, which then launch nothing (`gpusim.trace.fusion`)."""
    workspace_bytes: StorageBytes | None = None
    """As the op's; null if unknown."""


class After(Document, frozen=True, kw_only=True):
    """A dependency on an earlier op, in an imported trace."""

    op: Count
    """Index of the earlier op."""
    kind: EdgeKind
    """`data`: producer and consumer; `graph`: an edge of a CUDA graph; `event`: a recorded wait; `stream`: order on one
    stream; `assumed`: observed order only."""


class Observed(Document, frozen=True, kw_only=True):
    """Stream and times of an imported op, from the start of the step's first GPU record."""

    stream: Count
    """Stream number in the profile."""
    start_ns: StepNs
    """Start time."""
    launch_ns: int | None = None
    """Start time of the launch call, negative before the first record; null if unknown."""


class Source(Document, frozen=True, kw_only=True):
    """Code of a kernel, as written by Inductor; replay compiles and runs it only if the trace is trusted."""

    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    """Hash of `text`; ops refer to it."""
    text: Annotated[str, Meta(max_length=file_limits.MAX_SOURCE_CHARS)]
    """A Python expression that compiles the kernel."""


class Op(Document, frozen=True, kw_only=True):
    """A node of the data-flow graph: one ATen call, or one call of a fused kernel."""

    name: str
    """Unique in the trace; schedules refer to it."""
    target: str
    """Operator and overload, `aten.convolution.default`, or `inductor.kernel`."""
    args: tuple[Any, ...] = ()
    """Positional arguments, encoded (docs/formats.md)."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments, encoded likewise."""
    outputs: tuple[int | None, ...] = ()
    """Returned tensors, flattened; null for a result that is no tensor."""
    reads: tuple[Count, ...] = ()
    """Tensors with elements that it reads."""
    writes: tuple[Count, ...] = ()
    """Tensors that it writes, new or in place."""
    cut: tuple[Count, ...] = ()
    """Tensors read without their gradient (`detach`, `no_grad`)."""
    other_gradient: tuple[Count, ...] = ()
    """Tensors read with a gradient of the user's own function, or with and without one."""
    random: bool = False
    """True if it draws random numbers; random ops share a generator and keep their order."""
    phase: Phase = "forward"
    """Part of the step."""
    layer: str = ""
    """Path of its module, for example `inception3a.branch1.conv`."""
    host_ns: StepNs = 0
    """Median host time of the eager call."""
    moved_bytes: StorageBytes = 0
    """Bytes read and written, in an imported trace with sizes but no tensors."""
    kernels: tuple[Kernel, ...] = ()
    """Kernels launched, in order."""
    workspace_bytes: StorageBytes = 0
    """Temporary GPU memory besides its tensors; 0 in traces up to 2026-11-23."""
    variants: tuple[Variant, ...] = ()
    """Kernel variants, captured with `gpusim capture --variants`."""
    after: tuple[After, ...] = ()
    """Dependencies beyond those through tensors; only in imported traces."""
    observed: Observed | None = None
    """Observed stream and times, in an imported trace."""
    source: str = ""
    """Hash of the kernel's code, for `inductor.kernel`; else empty."""


class Trace(Document, frozen=True, kw_only=True, omit_defaults=False):
    """One captured step."""

    schema: Literal["gpusim-trace/1", "gpusim-trace/2"]
    """`gpusim-trace/2`. Version 1 is read too."""
    provenance: Provenance
    """Origin of the trace."""
    model: Model
    """Captured model."""
    storages: Annotated[tuple[Storage, ...], Meta(max_length=file_limits.MAX_PARTS)]
    """Blocks of memory."""
    tensors: Annotated[tuple[Tensor, ...], Meta(max_length=file_limits.MAX_PARTS)]
    """Views of storages."""
    ops: Annotated[tuple[Op, ...], Meta(max_length=file_limits.MAX_PARTS)]
    """Operator calls, in an order that respects all dependencies."""
    ground_truth: GroundTruth | None = None
    """Measured times of the whole step."""
    sources: Annotated[tuple[Source, ...], Meta(max_length=file_limits.MAX_PARTS)] = ()
    """Code of the kernels, with front end `inductor`."""

    @property
    def name(self) -> str:
        """Name of the trace (see `named_trace`); an imported trace has the name of its file."""
        return self.model.network if self.provenance.imported_from is not None else trace_name(self.model)

    @property
    def settings(self) -> str:
        """Mode, batch and data type in words; of an imported step, whose file has none, `train` if it trains."""
        model = self.model
        if self.provenance.imported_from is None:
            return f"{model.mode}, batch {model.batch}, {model.dtype}"
        return model.mode if model.mode == "train" else ""

    def __repr__(self) -> str:
        return short_repr("Trace", f"{short_name(self.name)}: {counted(len(self.ops), 'op')}")

    def _repr_html_(self) -> str:
        rows = [(op.name, op.target, op.phase, op.layer) for op in self.ops]
        return html_table(f"Trace {self.name}", ("op", "target", "phase", "layer"), rows)


def trace_name(model: Model) -> str:
    """Return the name under which a capture of `model` is bundled."""
    return named_trace(model.network, model.mode, model.batch, model.dtype, model.frontend)


def named_trace(network: str, mode: Mode, batch: int, dtype: Dtype, frontend: Frontend) -> str:
    """Return `<network>-<train|infer>-b<batch>[-<dtype>][-<frontend>]`; TF32 and ATen are left out."""
    parts = [network, mode, f"b{batch}"]
    if dtype != "tf32":
        parts.append(dtype)
    if frontend != "aten":
        parts.append(frontend)
    return "-".join(parts)
