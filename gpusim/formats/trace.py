"""The trace document: one captured step, as frozen values.

Times are integer nanoseconds, sizes bytes. Tensors, storages and ops are referred to by their index.
The JSON Schema and docs/formats.md are generated from these classes.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from gpusim.io import file_limits
from gpusim.io.files import Count, Document, Nanoseconds, Positive, StorageBytes
from gpusim.notebook import html_table, short_name, short_repr
from gpusim.units import counted

SCHEMA: Final = "gpusim-trace/2"
#: Versions that are read, too. Version 1 has captured steps of operators alone: nothing imported, nothing compiled.
OLDER_SCHEMAS: Final = ("gpusim-trace/1",)

Dim3 = tuple[Positive, Positive, Positive]
StepNs = Annotated[int, Meta(ge=0, le=file_limits.MAX_STEP_NS)]
Elements = Annotated[int, Meta(ge=0, le=file_limits.MAX_ELEMENTS)]
Dimensions = Annotated[tuple[Elements, ...], Meta(max_length=file_limits.MAX_DIMENSIONS)]
_GridX = Annotated[int, Meta(ge=1, le=file_limits.MAX_GRID_X)]
_GridYZ = Annotated[int, Meta(ge=1, le=file_limits.MAX_GRID_YZ)]
_BlockSize = Annotated[int, Meta(ge=1, le=file_limits.MAX_BLOCK_THREADS)]
_ClusterSize = Annotated[int, Meta(ge=1, le=file_limits.MAX_CLUSTER)]
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
#: Target of an op that is a kernel of Inductor's, whose code the trace has under `source`.
KERNEL: Final = "inductor.kernel"
Composition = Literal["native", "by_sample", "forward_pool", "by_index", "fused", "joined"]


class Gpu(Document, frozen=True, kw_only=True):
    """The GPU and software that a trace or measurement was taken with."""

    name: str
    """As the driver reports it: `NVIDIA H200`; ties the trace to a hardware model."""
    driver: str
    """Driver version, empty where it could not be read."""
    cuda: str
    """CUDA version of torch."""
    torch: str
    """torch version."""
    cudnn: str
    """cuDNN version, as torch numbers it."""
    sm_clock_mhz: Count
    """SM clock seen while the GPU was busy with this step; 0 where it could not be read."""
    mem_clock_mhz: Count
    """Memory clock, likewise."""


class ImportedFrom(Document, frozen=True, kw_only=True):
    """The profile that a trace was imported from, and what it shows of the step."""

    format: str
    """`kineto`, `nsys-sqlite`, `ncu-csv`, `chakra-et` or `chakra-json`."""
    writer: str
    """The program that wrote the profile."""
    files: tuple[str, ...]
    """Names of the files, without folders."""
    step: str
    """Which part of the file: a `ProfilerStep#7`, an NVTX range, a repeating period, or the whole file."""
    device: Count
    """Number of the GPU in the file."""
    dependency_quality: Quality
    """What the edges in `ops[].after` rest on. `data` and `graph` are those of the program. `event` is streams and
    recorded waits, `stream` the order on streams, `assumed` the observed order across streams, too. `none`: the file
    has no order."""
    observed_ns: StepNs
    """From the start of the first GPU record to the end of the last one, in the file; 0 in a file without times."""
    busy_ns: StepNs
    """Part of it in which at least one kernel, copy or memset ran."""
    concurrent_ns: StepNs
    """Part of it in which at least two ran."""
    resimulated_ns: StepNs = 0
    """The same step by its launches, edges and durations alone; 0 where the file has no times."""
    streams: Count = 1
    """Streams with work."""


class Provenance(Document, frozen=True, kw_only=True):
    """Where a trace comes from."""

    gpu: Gpu
    """GPU and software."""
    date: str
    """Day of the capture, `yyyy-mm-dd`."""
    command: str
    """Command line that made the trace."""
    gpusim: str
    """Version of gpusim that wrote it, with a hash of its code; without one in traces until 2026-11-23."""
    counters: str = ""
    """What counted the kernels' traffic and instructions; where nothing did, traffic is estimated from sizes."""
    estimated: str = ""
    """What launch shapes and times of the kernels rest on, where no GPU has run the step; such a trace has the GPU's
    name and cannot be replayed."""
    imported_from: ImportedFrom | None = None
    """Set where the trace is a profile of somebody else's run; such a trace has no tensors and cannot be replayed."""


class Model(Document, frozen=True, kw_only=True):
    """What was captured."""

    spec: str
    """As given to `gpusim capture`: `torchvision:NAME`, `timm:NAME` or `file.py:function`; of a step captured in Python
    the class or function."""
    network: str
    """`NAME` or `function` of the spec."""
    mode: Mode
    """Forward only, or forward, loss, backward and optimizer."""
    batch: Positive
    """Batch size."""
    dtype: Dtype
    """`tf32`: float32 tensors, TF32 allowed in matrix products and convolutions; `bf16`: parameters and inputs in
    bfloat16."""
    memory_format: MemoryFormat
    """Layout of 4-dimensional tensors."""
    frontend: Frontend
    """Who turned the model into ops: `aten` calls operators as eager PyTorch does, `inductor` compiles to fused
    kernels, whose code is in `sources`."""
    optimizer: str | None = None
    """`sgd_momentum` for a training step of a SPEC; for a step of the user's own its optimizers, such as `AdamW`."""
    fixed: tuple[str, ...] = ()
    """What stays as it was in the captured step although the user's code would change it, such as a factor that
    follows from the number of the step."""


class TensorInit(Document, frozen=True, kw_only=True):
    """How replay fills a tensor that exists before the step, so that values stay in the model's range."""

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
    """A piece of memory; tensors that alias share one."""

    bytes: StorageBytes
    """Size."""


class Tensor(Document, frozen=True, kw_only=True):
    """A tensor: a shape and strides over a storage."""

    shape: Dimensions
    """Size of each dimension."""
    stride: Dimensions
    """Distance of neighbours in each dimension, in elements."""
    dtype: str
    """torch's name without the prefix: `float32`, `int64` ..."""
    storage: Count
    """Index into `storages`."""
    offset: Elements = 0
    """First element, in elements from the storage's start."""
    role: Role
    """What the tensor is to the step."""
    name: str = ""
    """Parameter or buffer name where there is one."""
    init: TensorInit | None = None
    """Set for every tensor that the step reads without having written it."""


class Counters(Document, frozen=True, kw_only=True):
    """Hardware counters of one launch, gathered with Nsight Compute."""

    dram_bytes: Count
    """DRAM traffic, read and written; replaces the estimate from tensor sizes."""
    l2_bytes: Count
    """L2 traffic."""
    instructions: Count
    """Instructions executed, by warp."""
    tensor_instructions: Count
    """Of these, on tensor cores."""
    smem_config_bytes: SmemBytes | None = None
    """Part of an SM's L1 cache that the driver made shared memory for this launch."""


class Kernel(Document, frozen=True, kw_only=True):
    """One GPU launch (or memory operation) of an op."""

    name: str
    """Demangled."""
    dur_ns: StepNs
    """Median over `samples` runs, alone on the GPU."""
    kind: TaskKind = "kernel"
    """What it is."""
    grid: Grid = (1, 1, 1)
    """Blocks in x, y, z."""
    block: Block = (1, 1, 1)
    """Threads of a block in x, y, z."""
    cluster: Cluster | None = None
    """Blocks of a cluster; null where there is none or it is not known. Capture records none, and no rule reads it."""
    regs_per_thread: Annotated[int, Meta(ge=0, le=file_limits.MAX_THREAD_REGS)] = 0
    """Registers of a thread."""
    smem_bytes: SmemBytes = 0
    """Shared memory of a block, static and dynamic together."""
    smem_static_bytes: SmemBytes | None = None
    """Static part, where the profiler tells the two apart."""
    smem_dynamic_bytes: SmemBytes | None = None
    """The two parts where the profiler tells them apart."""
    lo_ns: StepNs = 0
    """10th percentile of the samples."""
    hi_ns: StepNs = 0
    """90th percentile of the samples."""
    samples: Count = 0
    """Runs measured."""
    bytes: StorageBytes = 0
    """Bytes moved or set, for `memcpy` and `memset`."""
    counters: Counters | None = None
    """Hardware counters, where they were gathered."""


class VariantSettings(Document, frozen=True, kw_only=True):
    """How a variant's call differs from the captured one; what is left out is as captured."""

    cudnn: bool = True
    """false: the call does not use cuDNN (torch's own convolution)."""
    benchmark: bool = False
    """cuDNN times its algorithms at the first call and takes the fastest (`torch.backends.cudnn.benchmark`)."""
    deterministic: bool = False
    """Only algorithms that give the same bits each time (`torch.backends.cudnn.deterministic`)."""
    tf32: bool | None = None
    """Whether TF32 may be used; null: as the trace's dtype says."""
    memory_format: MemoryFormat | None = None
    """4-dimensional arguments are converted to this layout before the call, and results back to the traced one."""
    blas: Blas | None = None
    """Library of matrix products (`torch.backends.cuda.preferred_blas_library`)."""
    composition: Composition | None = None
    """Other operators of torch in place of the op's own. `native`, `by_sample`: batch norm by torch's own kernels, or
    sample by sample. `forward_pool`: backward of an average pool as a pool. `by_index`: backward of a max pool by its
    indices. `fused`: convolution and ReLU by cuDNN. `joined`: elementwise ops as one kernel."""


class Variant(Document, frozen=True, kw_only=True):
    """Another way to run an op: the same operator under other settings of its library, with other kernels."""

    name: str
    """Unique in the op; schedules refer to it."""
    settings: VariantSettings
    """How the call differs."""
    kernels: tuple[Kernel, ...]
    """As an op's, conversions between layouts included."""
    covers: tuple[Count, ...] = ()
    """Ops before or after this one that it computes, too; they then run nothing (`gpusim.trace.fusion`)."""


class After(Document, frozen=True, kw_only=True):
    """An earlier op that must have ended, in an imported trace."""

    op: Count
    """Index of an earlier op."""
    kind: EdgeKind
    """`data`: one makes what the other uses; `graph`: an edge of a CUDA graph; `event`: a recorded wait; `stream`:
    same stream, in this order; `assumed`: nothing but the observed order."""


class Observed(Document, frozen=True, kw_only=True):
    """Where and when an imported op ran; times from the start of the step's first GPU record."""

    stream: Count
    """Number of the stream in the profile."""
    start_ns: StepNs
    """When it began."""
    launch_ns: int | None = None
    """When the call that launched it began, negative before the first record; null where the file does not say."""


class Source(Document, frozen=True, kw_only=True):
    """Code of a kernel, as Inductor wrote it; replay compiles and runs it only where the trace is trusted."""

    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    """Hash of `text`; ops refer to it."""
    text: Annotated[str, Meta(max_length=file_limits.MAX_SOURCE_CHARS)]
    """A Python expression that compiles the kernel."""


class Op(Document, frozen=True, kw_only=True):
    """A node of the data-flow graph: one ATen call, or one call of a fused kernel."""

    name: str
    """Unique in the trace; schedules refer to it."""
    target: str
    """Operator and overload: `aten.convolution.default`; `inductor.kernel` for code of the trace's."""
    args: tuple[Any, ...] = ()
    """Positional arguments, encoded (docs/formats.md)."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments, likewise."""
    outputs: tuple[int | None, ...] = ()
    """Tensors returned, flattened; null where the op returns no tensor in that place."""
    reads: tuple[Count, ...] = ()
    """Tensors whose elements it reads."""
    writes: tuple[Count, ...] = ()
    """Tensors whose elements it writes, new ones and those changed in place."""
    random: bool = False
    """It draws random numbers; such ops keep their order, since they share the generator."""
    phase: Phase = "forward"
    """Part of the step."""
    layer: str = ""
    """Path of the module it belongs to, such as `inception3a.branch1.conv`."""
    host_ns: StepNs = 0
    """Time of the call on the host, eager, median."""
    moved_bytes: StorageBytes = 0
    """Bytes of the tensors that it reads and writes, where an imported trace has sizes and no tensors."""
    kernels: tuple[Kernel, ...] = ()
    """What it launches, in order."""
    workspace_bytes: StorageBytes = 0
    """GPU memory that it takes for itself while it runs, beside its tensors; 0 in traces until 2026-11-23."""
    variants: tuple[Variant, ...] = ()
    """Other ways to run it, captured with `gpusim capture --variants`."""
    after: tuple[After, ...] = ()
    """Earlier ops that must have ended, beyond what tensors say; only imported traces have any."""
    observed: Observed | None = None
    """Where and when it ran, in an imported trace."""
    source: str = ""
    """Hash of the kernel's code, for `inductor.kernel`; empty for all others."""


class Timing(Document, frozen=True, kw_only=True):
    """A wall time measured without a profiler, over several rounds."""

    median_ns: Nanoseconds
    """Median over rounds; for a CUDA graph, of its recording of median time."""
    lo_ns: Nanoseconds
    """Lower end of the interval that holds the median in at least 95 % of cases."""
    hi_ns: Nanoseconds
    """Upper end."""
    rounds: Count
    """Rounds measured."""
    fastest_ns: Nanoseconds = 0
    """Time of the fastest recording, where the one of median time out of several of a CUDA graph was timed."""
    slowest_ns: Nanoseconds = 0
    """Time of the slowest of them."""


class GroundTruth(Document, frozen=True, kw_only=True):
    """What the captured step takes, unprofiled."""

    eager: Timing
    """The model's own eager step (with torch.optim's SGD in training), host time included."""
    graph: Timing
    """The ops of this trace, in order, on one stream, in a CUDA graph."""
    attributed_frac: Annotated[float, Meta(ge=0, le=1)]
    """Share of the profiled GPU time that was tied to an op."""
    unattributed: tuple[str, ...] = ()
    """Names of what was not tied to one."""


class Trace(Document, frozen=True, kw_only=True, omit_defaults=False):
    """One captured step."""

    schema: Literal["gpusim-trace/1", "gpusim-trace/2"]
    """`gpusim-trace/2`. Version 1 has captured steps only, and is read as this one."""
    provenance: Provenance
    """Where the trace comes from."""
    model: Model
    """What was captured."""
    storages: Annotated[tuple[Storage, ...], Meta(max_length=file_limits.MAX_PARTS)]
    """Pieces of memory."""
    tensors: Annotated[tuple[Tensor, ...], Meta(max_length=file_limits.MAX_PARTS)]
    """Views of storages."""
    ops: Annotated[tuple[Op, ...], Meta(max_length=file_limits.MAX_PARTS)]
    """Operator calls, in an order that respects all dependencies."""
    ground_truth: GroundTruth | None = None
    """Measured times of the whole step."""
    sources: Annotated[tuple[Source, ...], Meta(max_length=file_limits.MAX_PARTS)] = ()
    """Code of the kernels, in a trace of the front end `inductor`."""

    @property
    def name(self) -> str:
        """See `named_trace`; an imported trace has the name of its file."""
        return self.model.network if self.provenance.imported_from is not None else trace_name(self.model)

    def __repr__(self) -> str:
        return short_repr("Trace", f"{short_name(self.name)}: {counted(len(self.ops), 'op')}")

    def _repr_html_(self) -> str:
        rows = [(op.name, op.target, op.phase, op.layer) for op in self.ops]
        return html_table(f"Trace {self.name}", ("op", "target", "phase", "layer"), rows)


def trace_name(model: Model) -> str:
    """The name under which a capture of `model` is bundled."""
    return named_trace(model.network, model.mode, model.batch, model.dtype, model.frontend)


def named_trace(network: str, mode: Mode, batch: int, dtype: Dtype, frontend: Frontend) -> str:
    """`<network>-<train|infer>-b<batch>[-<dtype>][-<frontend>]`; TF32 and ATen are not spelled out."""
    parts = [network, mode, f"b{batch}"]
    if dtype != "tf32":
        parts.append(dtype)
    if frontend != "aten":
        parts.append(frontend)
    return "-".join(parts)
