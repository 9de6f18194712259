"""Kernels that record SM and time of each of their blocks, compiled with NVRTC, and the graphs that launch them.

`Hold` occupies its place for a set time without using issue slots, so that only placement shows. Work kernels (`WORK`)
do one kind of work for a set time and count the work done.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from gpusim.errors import GpuError
from gpusim.gpu.launch_state import make_launches_slow
from gpusim.units import KIB, MIB

#: Most blocks that one experiment can record.
ROWS = 40_000
#: Largest dynamic shared memory of the kernels, in bytes.
MAX_SMEM = 200 * KIB
#: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES and CU_FUNC_ATTRIBUTE_NUM_REGS of the driver API.
_MAX_DYNAMIC_SMEM, _NUM_REGS = 8, 4

HOLD_SOURCE = """
extern "C" __global__ void hold(long long* rec, int base, int hold_ns, int vary_ns) {
    if (threadIdx.x == 0) {
        long long now;
        unsigned sm, lot = (blockIdx.x * 2654435761u) >> 16;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        asm volatile("mov.u32 %0, %smid;" : "=r"(sm));
        long long* mine = rec + 3LL * (base + blockIdx.x);
        mine[0] = sm;
        mine[1] = now;
        long long until = now + hold_ns + (long long)lot * vary_ns / 65536;
        do {
            __nanosleep(100);
            asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        } while (now < until);
        mine[2] = now;
    }
    __syncthreads();
}
"""

_WORK_SOURCE = """
__device__ __forceinline__ long long meet(int* arrived, int total, volatile long long* met) {
    __syncthreads();
    if (threadIdx.x == 0) {
        atomicAdd(arrived, 1);
        long long begin = clock64();
        while (*(volatile int*)arrived < total && clock64() - begin < 20000000LL) __nanosleep(100);
        *met = clock64();
    }
    __syncthreads();
    return *met;  // not a clock read by each warp: that may move above the barrier
}

extern "C" __global__ void work(
    long long* rec, int base, int* arrived, int total, int cycles, int* data, int mask, int skew) {
    __shared__ unsigned long long done;
    __shared__ long long met;
    if (threadIdx.x == 0) done = 0;
    SETUP
    long long begin = meet(arrived, total, &met);
    unsigned count = 0;
    do {
        CHUNK
        count++;
    } while (clock64() - begin < cycles);
    if ((threadIdx.x & 31) == 0) atomicAdd(&done, (unsigned long long)count);
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned sm;
        asm volatile("mov.u32 %0, %smid;" : "=r"(sm));
        long long* mine = rec + 3LL * (base + blockIdx.x);
        mine[0] = sm;
        mine[1] = (long long)done;
        mine[2] = clock64() - begin;
    }
    if (SINK) rec[0] = -1;
}
"""

_MMA = (
    '"mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"'
    ' : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3]) : "r"(x), "r"(x + 1), "r"(x + 2), "r"(x + 3),'
    ' "r"(x + 1), "r"(x + 2)'
)
_MEMORY = (
    "float s = 0.f; int warps = blockDim.x >> 5; unsigned step = gridDim.x * warps * 256;"
    "unsigned at = (blockIdx.x * warps + (threadIdx.x >> 5)) * 256 + skew + (threadIdx.x & 31);",
    "float4 v[8];\n#pragma unroll\nfor (int i = 0; i < 8; i++)"
    " v[i] = __ldcg((const float4*)data + ((at + i * 32) & mask));\n"
    "#pragma unroll\nfor (int i = 0; i < 8; i++) s += v[i].x + v[i].y + v[i].z + v[i].w;\nat += step;",
    "s == 12345.678f",
)


@dataclass(frozen=True)
class ChunkCode:
    """One kind of work: the CUDA code of a warp's chunk, and the memory that it reads."""

    setup: str
    chunk: str
    sink: str
    mask: int = 0
    """Last index of the memory to read, in units of one read; a power of two, less 1."""
    chunk_bytes: int = 0
    """Bytes that a warp reads per chunk."""
    cached: bool = False
    """True if it must find its memory in the L2 cache."""

    @property
    def source(self) -> str:
        return _WORK_SOURCE.replace("SETUP", self.setup).replace("CHUNK", self.chunk).replace("SINK", self.sink)

    def mask_within(self, cache_bytes: int) -> int:
        """Return the mask on a GPU with this L2 cache: halved until the memory of cached work is well within it."""
        mask, read_bytes = self.mask, L2_BYTES
        while self.cached and LEAST_CACHES * read_bytes > cache_bytes:
            mask, read_bytes = mask >> 1, read_bytes >> 1
        return mask


#: Memory that work reads, in bytes: far more than the L2 cache holds, and well within it. A small cache gets less.
DRAM_BYTES, L2_BYTES = 4096 * MIB, 16 * MIB
#: Least size of the L2 cache, in sizes of what work reads of it.
LEAST_CACHES = 3

WORK: Final[Mapping[str, ChunkCode]] = {
    "fma": ChunkCode(
        "float a[8]; for (int i = 0; i < 8; i++) a[i] = threadIdx.x + i; float m = 0.999f + mask * 1e-12f;",
        "#pragma unroll\nfor (int j = 0; j < 32; j++) {\n#pragma unroll\n"
        "for (int i = 0; i < 8; i++) a[i] = a[i] * m + 0.5f; }",
        "a[0] + a[1] + a[2] + a[3] + a[4] + a[5] + a[6] + a[7] == 12345.678f",
    ),
    "tensor": ChunkCode(
        "float d[4][4]; for (int i = 0; i < 4; i++) for (int j = 0; j < 4; j++) d[i][j] = i + j;"
        " unsigned x = __float_as_uint(1e-3f * threadIdx.x);",
        "#pragma unroll\nfor (int j = 0; j < 8; j++) {\n#pragma unroll\n"
        f"for (int i = 0; i < 4; i++) asm volatile({_MMA}); }}",
        "d[0][0] + d[1][1] + d[2][2] + d[3][3] == 12345.678f",
    ),
    "l2": ChunkCode(*_MEMORY, mask=L2_BYTES // 16 - 1, chunk_bytes=4096, cached=True),
    "dram": ChunkCode(*_MEMORY, mask=DRAM_BYTES // 16 - 1, chunk_bytes=4096),
    "latency": ChunkCode(
        "unsigned at = (blockIdx.x * blockDim.x + threadIdx.x) & mask;",
        "#pragma unroll\nfor (int i = 0; i < 4; i++) at = (at + 262112 + __ldcg(data + at)) & mask;",
        "at == 0xffffffffu",
        mask=L2_BYTES // 4 - 1,
        chunk_bytes=512,
        cached=True,
    ),
}


@dataclass(frozen=True)
class Hold:
    """A kernel that only occupies its place; a larger `delay_us` starts it that much later."""

    blocks: int
    threads: int
    hold_us: float
    delay_us: float = 0.0
    vary_us: float = 0.0
    """Largest random extra time of a block, in us."""
    smem_bytes: int = 0
    priority: int = 0


@dataclass(frozen=True)
class Blocks:
    """SM, start and end of each block of one kernel; times in ns from the first start of the experiment."""

    sm: tuple[int, ...]
    start_ns: tuple[int, ...]
    end_ns: tuple[int, ...]


class BlockBench:
    """The compiled kernels and their record memory."""

    def __init__(self, sm_clock_mhz: int) -> None:
        """Prepare the kernels; `sm_clock_mhz` is the clock under load, which converts cycles of work kernels to
        time.
        """
        self.mhz = sm_clock_mhz
        self.rows = torch.zeros(ROWS * 3, dtype=torch.int64, device="cuda")
        self.hold = _compiled(HOLD_SOURCE, "hold")
        self.streams: dict[tuple[int, int], Any] = {}
        self.work: dict[str, Any] = {}
        self.data: torch.Tensor | None = None
        self.timer_sms: frozenset[int] = frozenset()
        """SMs that held the timers of the last `place`."""
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.sms: int = properties.multi_processor_count
        self.cache_bytes: int = properties.L2_cache_size
        self._launch(0, Hold(1, 32, 1))
        torch.cuda.synchronize()

    def place(self, holds: Sequence[Hold]) -> list[Blocks]:
        """Run kernels as parallel branches of one CUDA graph, started in order of their delays.

        The delaying timers are placed before anything else: behind a kernel with waiting blocks, they would wait, too.
        """
        if sum(hold.blocks for hold in holds) > ROWS - 100:
            raise GpuError(f"an experiment notes at most {ROWS - 100} blocks")
        root, lanes = self._stream(99, 0), [self._stream(i, hold.priority) for i, hold in enumerate(holds)]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=root, capture_error_mode="thread_local"):
            self._launch(ROWS - 1, Hold(1, 32, 1))
            for lane in lanes:
                lane.wait_stream(root)
            order = sorted(range(len(holds)), key=lambda i: -holds[i].delay_us)
            for i in order:
                with torch.cuda.stream(lanes[i]):
                    self._launch(ROWS - 2 - i, Hold(1, 32, 2 + holds[i].delay_us))
            base = 0
            for hold, lane in zip(holds, lanes, strict=True):
                with torch.cuda.stream(lane):
                    self._launch(base, hold)
                base += hold.blocks
            for lane in lanes:
                root.wait_stream(lane)
        blocks = self._replayed(graph, [hold.blocks for hold in holds])
        timers = self.rows.view(-1, 3)[ROWS - 1 - len(holds) :, 0]
        self.timer_sms = frozenset(timers.tolist())
        return blocks

    def chains(
        self, width: int, length: int, hold: Hold, neighbor: tuple[str, int, int] | None = None
    ) -> list[list[Blocks]]:
        """Run `width` independent chains of `length` kernels in one CUDA graph; returns kernels by chain.

        `neighbor` is a kernel (kind of work, blocks, warps per block) that runs all the time.
        """
        root, lanes = self._stream(99, 0), [self._stream(i, 0) for i in range(width)]
        arrived = torch.zeros(1, dtype=torch.int32, device="cuda")
        if neighbor is not None:
            self._prepare_work(neighbor[0])
            lanes.append(self._stream(98, 0))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=root, capture_error_mode="thread_local"):
            arrived.zero_()
            self._launch(ROWS - 1, Hold(1, 32, 1))
            for lane in lanes:
                lane.wait_stream(root)
            if neighbor is not None:
                cycles = round((length + 5) * (hold.hold_us + 2) * self.mhz)
                with torch.cuda.stream(lanes[width]):
                    self._launch_work(neighbor, width * length * hold.blocks, arrived, neighbor[1], cycles, 0)
            for step in range(length):
                for chain, lane in enumerate(lanes[:width]):
                    with torch.cuda.stream(lane):
                        self._launch((chain * length + step) * hold.blocks, hold)
            for lane in lanes:
                root.wait_stream(lane)
        blocks = self._replayed(graph, [hold.blocks] * (width * length))
        return [blocks[chain * length : (chain + 1) * length] for chain in range(width)]

    def fork(self, width: int, hold: Hold) -> list[Blocks]:
        """Run `width` kernels that wait for one, in one CUDA graph; returns them in recorded order."""
        root, lanes = self._stream(99, 0), [self._stream(i, 0) for i in range(width)]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=root, capture_error_mode="thread_local"):
            self._launch(ROWS - 1, Hold(1, 32, 10))
            for number, lane in enumerate(lanes):
                lane.wait_stream(root)
                with torch.cuda.stream(lane):
                    self._launch(number * hold.blocks, hold)
            for lane in lanes:
                root.wait_stream(lane)
        return self._replayed(graph, [hold.blocks] * width)

    def rates(self, parts: Sequence[tuple[str, int, int]], window_us: float = 60.0, rounds: int = 3) -> list[float]:
        """Return chunks per us of concurrent kernels (kind of work, blocks, warps per block), as medians.

        All blocks must be resident at once: they wait for each other, then work for the same time.
        """
        for kind, _, _ in parts:
            self._prepare_work(kind)
        arrived = torch.zeros(1, dtype=torch.int32, device="cuda")
        samples: list[list[float]] = []
        for number in range(rounds + 1):
            arrived.zero_()
            torch.cuda.synchronize()
            base = 0
            for place, part in enumerate(parts):
                total, cycles = sum(blocks for _, blocks, _ in parts), round(window_us * self.mhz)
                with torch.cuda.stream(self._stream(place, 0)):
                    self._launch_work(part, base, arrived, total, cycles, (2 * number + place) << 24)
                base += part[1]
            torch.cuda.synchronize()
            rows, base = self.rows.cpu()[: 3 * base].view(-1, 3).double(), 0
            samples.append([])
            for _, blocks, _ in parts:
                mine = rows[base : base + blocks]
                samples[-1].append(float((mine[:, 1] / mine[:, 2]).sum()) * self.mhz)
                base += blocks
        return [sorted(times)[len(times) // 2] for times in zip(*samples[1:], strict=True)]

    def _replayed(self, graph: Any, blocks: Sequence[int]) -> list[Blocks]:
        """Return the blocks of the second replay, with slow launches; the first may include initialization."""
        make_launches_slow()
        for _ in range(2):
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
        rows = self.rows.cpu().view(-1, 3)
        first = int(rows[: sum(blocks), 1].min())
        kernels, base = [], 0
        for count in blocks:
            mine = rows[base : base + count]
            base += count
            kernels.append(
                Blocks(
                    tuple(mine[:, 0].tolist()),
                    tuple((mine[:, 1] - first).tolist()),
                    tuple((mine[:, 2] - first).tolist()),
                )
            )
        return kernels

    def _launch(self, base: int, hold: Hold) -> None:
        self.hold(
            grid=(hold.blocks, 1, 1),
            block=(hold.threads, 1, 1),
            args=[self.rows, base, round(hold.hold_us * 1000), round(hold.vary_us * 1000)],
            shared_mem=hold.smem_bytes,
        )

    def _prepare_work(self, kind: str) -> None:
        """Compile the work kernel and allocate the memory that it reads."""
        if self.data is None:
            self.data = torch.zeros(DRAM_BYTES // 4, dtype=torch.int32, device="cuda")
        if kind not in self.work:
            self.work[kind] = _compiled(WORK[kind].source, "work")

    def _launch_work(
        self, part: tuple[str, int, int], base: int, arrived: torch.Tensor, total: int, cycles: int, skew: int
    ) -> None:
        """Launch a work kernel that starts once `total` blocks are resident; `skew` is its first place in memory."""
        kind, blocks, warps = part
        mask = WORK[kind].mask_within(self.cache_bytes)
        self.work[kind](
            grid=(blocks, 1, 1),
            block=(32 * warps, 1, 1),
            args=[self.rows, base, arrived, total, cycles, self.data, mask, skew & mask],
        )

    def _stream(self, number: int, priority: int) -> Any:
        key = (number, priority)
        if key not in self.streams:
            self.streams[key] = torch.cuda.Stream(priority=priority)
        return self.streams[key]


def _compiled(source: str, name: str) -> Any:
    """Compile a kernel that may use up to `MAX_SMEM` of shared memory."""
    kernel = torch.cuda._compile_kernel(source, name)
    code = ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(kernel.func, _MAX_DYNAMIC_SMEM, MAX_SMEM)
    if code:
        raise GpuError(f"the driver refuses {MAX_SMEM} bytes of shared memory for kernel '{name}' (error {code})")
    kernel._max_shared_mem_bytes = MAX_SMEM
    return kernel
