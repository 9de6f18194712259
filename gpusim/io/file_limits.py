"""Limits on what a file may hold, each with its reason: sizes, memory, numbers of parts, and numbers themselves.

A step of 1,000,000 kernels passes: `benchmarks` makes such traces. What is refused is larger than any GPU or any step,
and would overflow a sum, fill the memory or never end.
"""

from __future__ import annotations

from typing import Final

from gpusim.units import GIB, KIB, MIB, NS_PER_S

# --- Sizes ---

#: Largest document, after decompression. A trace of a million kernels has about 800 MB.
MAX_DOCUMENT_BYTES: Final = 2 * GIB
#: Gzip makes at most 1,030 bytes of one; the bundled traces have 12 to 15, made traces of 100,000 equal ops 34.
MAX_EXPANSION: Final = 128
#: ... but a document up to this size is never refused for that.
FREE_EXPANSION_BYTES: Final = 32 * MIB
#: What comes out of a pipe or a device has no size to look at first.
MAX_STREAM_BYTES: Final = 256 * MIB
#: Sweep files and recipes are written by hand.
MAX_TOML_BYTES: Final = MIB

# --- Memory for the values of a document, counted in its text before they are made ---

#: A trace of a million kernels is counted as 3 GB, and takes 2.2.
MAX_VALUES_BYTES: Final = 6 * GIB
#: ... for each byte of the file. The same trace, compressed, has 22 MB: 136 for each byte.
MAX_VALUES_PER_BYTE: Final = 256
#: ... but this much is free.
FREE_VALUES_BYTES: Final = 512 * MIB
#: Bytes in memory: an object or a dict, a list, a text, and a number with its place in a list (CPython 3.11).
OBJECT_BYTES, LIST_BYTES, TEXT_BYTES, NUMBER_BYTES = 192, 64, 64, 40

# --- Files that somebody else sent ---

#: Upload, and its text: a trace of 100,000 kernels has 78 MB, compressed 2 to 8. A file of one's own may be larger.
MAX_UPLOAD_BYTES: Final = 64 * MIB
MAX_UPLOAD_DOCUMENT_BYTES: Final = 256 * MIB
#: Address space and seconds of the process that reads it: that trace takes 0.35 GB, and 5 s on a busy machine.
MAX_APART_BYTES: Final = GIB
MAX_APART_S: Final = 20
#: Ops, tensors or storages that come back at a time: decoding so many holds up other threads for 20 ms.
PARTS_AT_A_TIME: Final = 2000

# --- Numbers of parts ---

#: Ops, tensors and storages of a trace, and kernels of all its ops and variants: twice a million.
MAX_PARTS: Final = 2_000_000
#: Values in the arguments of all ops of a trace: five for each op.
MAX_ARGUMENTS: Final = 10_000_000
#: Code of one kernel. The largest seen, an update of 64 parameters at once, has 60,000 characters.
MAX_SOURCE_CHARS: Final = 4_000_000
#: Dependencies between ops, with what ops without kernels hand on: the project's traces have up to 4 for each op.
MAX_DEPENDENCIES_PER_OP: Final = 16
#: ... but so many are free. 3,000 kernels, a view of all, and 3,000 that need it have 9 million, in a file of 100 kB.
FREE_DEPENDENCIES: Final = 2_000_000
#: torch's own limit on the dimensions of a tensor.
MAX_DIMENSIONS: Final = 64

# --- Numbers ---

#: Any other count or size: doubles, which JSON readers and the engines use, hold whole numbers to here.
MAX_INTEGER: Final = 2**53
#: One kernel, one call on the host, and all of a step together: a day. Sums stay exact, in ns and as doubles.
MAX_STEP_NS: Final = 24 * 3600 * NS_PER_S
#: One cost of a hardware model: a second, which no launch takes. A million of them stay exact.
MAX_COST_NS: Final = NS_PER_S
#: One storage, or one copy: 1 TiB, more than a GPU has. The sum of `MAX_PARTS` of them stays in 64 bits.
MAX_STORAGE_BYTES: Final = 1024 * GIB
#: Elements of a tensor, and sizes, strides and offsets in elements.
MAX_ELEMENTS: Final = 2**40
#: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": a grid's x, and its y and z.
MAX_GRID_X, MAX_GRID_YZ = 2**31 - 1, 2**16 - 1
#: Blocks of one launch in all: as many as a grid of one dimension has.
MAX_GRID_BLOCKS: Final = MAX_GRID_X
#: ... threads of a block, in one dimension and in all.
MAX_BLOCK_THREADS: Final = 1024
#: ... blocks of a cluster in one dimension: 16 in all today, and room for more.
MAX_CLUSTER: Final = 64
#: ... registers of a thread: 255 today. What a GPU allows is in its hardware model; this only bounds the arithmetic.
MAX_THREAD_REGS: Final = 64 * KIB
#: Shared memory of a block or an SM: 228 KiB today.
MAX_SMEM_BYTES: Final = GIB

# --- Numbers of a hardware model: generous, since models of future GPUs are welcome ---

MAX_SMS: Final = 4096
MAX_WARP_THREADS: Final = 1024
MAX_SM_THREADS: Final = 64 * KIB
MAX_SM_BLOCKS: Final = 1024
MAX_SM_REGS: Final = 16 * MIB
MAX_SUB_PARTITIONS: Final = 64
MAX_SMEM_SPLITS: Final = 64
MAX_RESIDENT_GRIDS: Final = 4096
MAX_QUEUES: Final = 4096
MAX_DEVICE_BYTES: Final = 1024 * 1024 * GIB
#: Bytes, or floating-point operations, in a ns.
MIN_RATE, MAX_RATE = 1e-6, 1e9
#: Slow-downs and other factors.
MAX_FACTOR: Final = 1e6
#: Shares that predictions are divided by one minus.
MAX_UNCERTAINTY: Final = 0.99

# --- Several GPUs ---

#: GPUs of a plan: tables of costs have room for so many.
MAX_PLAN_GPUS: Final = 1024
#: Nodes of a topology and GPUs of one: more than a plan may have.
MAX_NODES: Final = 65_536
MAX_NODE_GPUS: Final = 1024
#: Sizes at which a collective was measured: one for each power of two up to 1 TiB, and room.
MAX_CURVE_POINTS: Final = 256
