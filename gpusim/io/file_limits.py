"""Limits on the content of a file, each with its reason: sizes, memory, numbers of parts, and values.

A step of 1,000,000 kernels passes: `benchmarks` makes such traces. Refused values are beyond any GPU or step and would
overflow a sum, fill the memory or never end.
"""

from __future__ import annotations

from typing import Final

from gpusim.units import GIB, KIB, MIB, NS_PER_S

# --- Sizes ---

#: Largest document, after decompression. A trace of a million kernels has about 800 MB.
MAX_DOCUMENT_BYTES: Final = 2 * GIB
#: Gzip expands at most 1,030 times; the bundled traces expand 12 to 15 times, generated traces of 100,000 equal ops 34.
MAX_EXPANSION: Final = 128
#: Documents up to this size are never refused for their expansion.
FREE_EXPANSION_BYTES: Final = 32 * MIB
#: Pipes and devices have no size to check in advance.
MAX_STREAM_BYTES: Final = 256 * MIB
#: Sweep files and recipes are written by hand.
MAX_TOML_BYTES: Final = MIB
#: JSON files up to this size may be written by hand, so their keys are checked for repetitions.
BY_HAND_BYTES: Final = MIB

# --- Memory for the values of a document, counted in its text before decoding ---

#: A trace of a million kernels is counted as 3 GB and takes 2.2 GB.
MAX_VALUES_BYTES: Final = 6 * GIB
#: Limit per byte of the file. The same trace, compressed to 22 MB, has 136 per byte.
MAX_VALUES_PER_BYTE: Final = 256
#: Values up to this size are always allowed.
FREE_VALUES_BYTES: Final = 512 * MIB
#: Bytes in memory of an object or dict, a list, a text, and a number with its slot in a list (CPython 3.11).
OBJECT_BYTES, LIST_BYTES, TEXT_BYTES, NUMBER_BYTES = 192, 64, 64, 40

# --- Uploaded files ---

#: An upload and its text: a trace of 100,000 kernels has 78 MB, compressed 2 to 8 MB. Local files may be larger.
MAX_UPLOAD_BYTES: Final = 64 * MIB
MAX_UPLOAD_DOCUMENT_BYTES: Final = 256 * MIB
#: Address space and time of the process that reads it: that trace takes 0.35 GB, and 5 s on a busy machine.
MAX_APART_BYTES: Final = GIB
MAX_APART_S: Final = 20
#: Ops, tensors or storages returned at a time: decoding that many blocks other threads for 20 ms.
PARTS_AT_A_TIME: Final = 2000

# --- Numbers of parts ---

#: Ops, tensors or storages of a trace, or kernels of all its ops and variants: twice a million.
MAX_PARTS: Final = 2_000_000
#: Values in the arguments of all ops of a trace: five per op.
MAX_ARGUMENTS: Final = 10_000_000
#: Code of one kernel. The largest one seen, an update of 64 parameters at once, has 60,000 characters.
MAX_SOURCE_CHARS: Final = 4_000_000
#: Dependencies between ops, including those passed on by views: the project's traces have up to 4 per op.
MAX_DEPENDENCIES_PER_OP: Final = 16
#: Always allowed. 3,000 kernels, a view of all, and 3,000 dependents of it have 9 million, in a file of 100 kB.
FREE_DEPENDENCIES: Final = 2_000_000
#: torch's own limit on the dimensions of a tensor.
MAX_DIMENSIONS: Final = 64

# --- Numbers ---

#: Any other count or size: doubles, used by JSON readers and engines, represent whole numbers up to here.
MAX_INTEGER: Final = 2**53
#: A kernel, a host call, or a whole step: a day. Sums stay exact, in ns and as doubles.
MAX_STEP_NS: Final = 24 * 3600 * NS_PER_S
#: A cost in a hardware model: a second, longer than any launch. Sums of a million stay exact.
MAX_COST_NS: Final = NS_PER_S
#: A storage or a copy: 1 TiB, more than a GPU has. The sum of `MAX_PARTS` of them fits 64 bits.
MAX_STORAGE_BYTES: Final = 1024 * GIB
#: Elements of a tensor, and sizes, strides and offsets in elements.
MAX_ELEMENTS: Final = 2**40
#: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": x of a grid, and y and z.
MAX_GRID_X, MAX_GRID_YZ = 2**31 - 1, 2**16 - 1
#: Blocks of one launch: as many as a grid of one dimension.
MAX_GRID_BLOCKS: Final = MAX_GRID_X
#: Threads of a block, per dimension and in total (same table).
MAX_BLOCK_THREADS: Final = 1024
#: Blocks of a cluster per dimension: 16 in total today, with a margin.
MAX_CLUSTER: Final = 64
#: Streams of a schedule: a GPU of compute capability 7.5 or later runs at most 128 kernels at once
#: (CUDA C++ Programming Guide, "Maximum number of resident grids per device").
MAX_STREAMS: Final = 128
#: Registers of a thread: 255 today. The limit of a GPU is in its hardware model; this only bounds the arithmetic.
MAX_THREAD_REGS: Final = 64 * KIB
#: Shared memory of a block or an SM: 228 KiB today.
MAX_SMEM_BYTES: Final = GIB
#: Schedules, pairs and repetitions that a recipe asks for per case: ten times the most that the project's recipes do.
MAX_RECIPE_REPEATS: Final = 1000

# --- Numbers of a hardware model, with a margin for future GPUs ---

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
#: Bytes or floating-point operations per ns.
MIN_RATE, MAX_RATE = 1e-6, 1e9
#: Slowdowns and other factors.
MAX_FACTOR: Final = 1e6
#: Shares u; predictions are divided by 1 - u.
MAX_UNCERTAINTY: Final = 0.99

# --- Several GPUs ---

#: GPUs of a plan: limit of the cost tables.
MAX_PLAN_GPUS: Final = 1024
#: Nodes of a topology and GPUs per node: more than a plan may have.
MAX_NODES: Final = 65_536
MAX_NODE_GPUS: Final = 1024
#: Measured sizes of a collective: one per power of two up to 1 TiB, with a margin.
MAX_CURVE_POINTS: Final = 256
