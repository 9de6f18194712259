"""What in its company costs a kernel time: starts, bytes from the L2 cache, or shared memory that an SM sets aside.

    python research/prototypes/what_company_costs.py OUT.json SECONDS

Chains of some kinds of `one_beside.py` run beside company of one property each, on other SMs: one long kernel that
only spins, with and without shared memory; one long kernel that reads from the L2 cache, by more and more blocks; and
chains of short ones. The subject's chain is timed by two stamps; a long kernel goes on for longer.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import concurrent_chains
import one_beside
import torch
from concurrent_chains import CHAIN, LONGER, Call, Chains, repeated

from gpusim.gpu.device import provenance, require_gpu

SUBJECTS = (
    "spin",
    "add 12000",
    "norm 48 x 384",
    "tf32 64 x 1024 x 256",
    "tf32 192 x 384 x 1024",
    "convolution 160 to 320",
    "convolution 96 to 128",
)
KIB = 1024
SMEM_BYTES = (0, 96 * KIB, 226 * KIB)
#: Blocks and threads a block of the kernels that read.
READERS = ((8, 256), (8, 1024), (16, 1024), (32, 1024), (48, 1024))
#: Elements of 16 bytes that they read: 8 MiB, which the cache holds.
READ = 8 * KIB * KIB // 16
SHORT_NS = 3_700
CLOCKS_PER_NS = 1.98
SOURCE = """
extern "C" __global__ void spin(int clocks) {
    extern __shared__ char unused[];
    long long end = clock64() + clocks;
    while (clock64() < end) { }
}
extern "C" __global__ void reads(const float4* data, int count, int clocks, float* out) {
    long long end = clock64() + clocks;
    int at = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    float sum = 0;
    while (clock64() < end) {
        #pragma unroll 8
        for (int i = 0; i < 8; i++) {
            sum += __ldcg(data + at).x;
            at += step;
            if (at >= count) at -= count;
        }
    }
    if (sum == 12345.0f) out[0] = sum;
}
"""


def companies(longest_ns: float) -> dict[str, tuple[Call, float]]:
    """Return a call for each company, and its time in ns. A long one lasts `longest_ns`."""
    data, out = torch.ones(READ * 4, device="cuda"), torch.zeros(1, device="cuda")
    reads = torch.cuda._compile_kernel(SOURCE, "reads")
    made: dict[str, tuple[Call, float]] = {}
    for length, duration_ns in (("long", longest_ns), ("short", float(SHORT_NS))):
        clocks = round(duration_ns * CLOCKS_PER_NS)
        for smem_bytes in SMEM_BYTES:
            spin = torch.cuda._compile_kernel(SOURCE, "spin")  # its shared memory is a property of the kernel
            spin.set_shared_memory_config(smem_bytes)
            for blocks in (1, 24):
                call = partial(spin, (blocks, 1, 1), (128, 1, 1), [clocks], smem_bytes)
                made[f"{length} spin, {blocks} blocks, {smem_bytes // KIB} KiB"] = call, duration_ns
        for blocks, threads in READERS:
            call = partial(reads, (blocks, 1, 1), (threads, 1, 1), [data, READ, clocks, out])
            made[f"{length} reader, {blocks} blocks, {threads} threads"] = call, duration_ns
    return made


def main() -> None:
    """Write what was found, with the GPU's name."""
    out, seconds = sys.argv[1:]
    end = monotonic() + float(seconds)
    require_gpu()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    concurrent_chains.kinds = one_beside.kinds
    command = "python research/prototypes/what_company_costs.py OUT.json SECONDS"
    result: dict[str, Any] = provenance(command, partial(torch.cuda._sleep, 2_000_000))
    result |= {"chain": CHAIN, "ns": {}}

    def write() -> None:
        Path(out).write_text(json.dumps(result, indent=1), encoding="utf-8")

    with torch.no_grad():
        chains = Chains()
        alone = {name: chains.ns(chains.graph(chains.calls[name][0], []))[0] for name in SUBJECTS}
        result["alone_ns"] = alone
        for other, (call, duration_ns) in companies(LONGER * max(alone.values())).items():
            for name in SUBJECTS:
                length = max(1, round(LONGER * alone[name] / duration_ns))
                graph = chains.graph(chains.calls[name][0], [repeated([call], length)])
                mine_ns, _ = chains.ns(graph)
                result["ns"][f"{name} | {other}"] = mine_ns
            write()
            if monotonic() > end:
                break
    write()
    print(f"{len(result['ns'])} graphs, {end - monotonic():.0f} s left", flush=True)


if __name__ == "__main__":
    main()
