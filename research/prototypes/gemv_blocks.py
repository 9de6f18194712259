# ruff: noqa: N803  (Triton's own names)
"""Which blocks read a matrix for one row fastest? Needs a GPU and Triton.

    python research/prototypes/gemv_blocks.py OUT.json

Sums of products in the form of Inductor's reductions, for the matrices of `validate/networks/decoder.py` (large, bf16)
and of VGG-16 (32 bits): us of a kernel in a CUDA graph that goes through several matrices, so that they come from DRAM,
for blocks of some rows, bytes of a row at once, and warps. The block of `gpusim.gpu.inductor.gemv` is marked.
"""

from __future__ import annotations

import itertools
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from gpusim.gpu.calibrate.microbench import event_ns
from gpusim.gpu.device import provenance, require_gpu
from gpusim.gpu.inductor.gemv import block_of

#: Rows, elements of a row, matrices read by one kernel, type of their elements.
SHAPES = [
    (2048, 5632, 1, torch.bfloat16),
    (5632, 2048, 2, torch.bfloat16),
    (2048, 2048, 1, torch.bfloat16),
    (1024, 2048, 2, torch.bfloat16),
    (4096, 25088, 1, torch.float32),
]
ROWS, ROW_BYTES, WARPS = (1, 2, 4, 8), (2048, 4096), (4, 8, 16)
#: Bytes of all matrices of a shape: more than the L2 cache has.
BYTES = 400 << 20


@triton.jit
def gemv(v_at, a_at, b_at, y_at, z_at, N, K, TWO: tl.constexpr, XBLOCK: tl.constexpr, R0_BLOCK: tl.constexpr):
    """y = a @ v, and with TWO also z = b @ v."""
    rows = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    base = tl.arange(0, R0_BLOCK)[None, :]
    sums = tl.full([XBLOCK, R0_BLOCK], 0, tl.float32)
    others = tl.full([XBLOCK, R0_BLOCK], 0, tl.float32)
    for first in tl.range(0, K, R0_BLOCK):
        columns = first + base
        known = (columns < K) & (rows < N)
        v = tl.load(v_at + columns, columns < K, eviction_policy="evict_last", other=0.0).to(tl.float32)
        a = tl.load(a_at + columns + K * rows, known, eviction_policy="evict_first", other=0.0).to(tl.float32)
        sums = tl.where(known, sums + a * v, sums)
        if TWO:
            b = tl.load(b_at + columns + K * rows, known, eviction_policy="evict_first", other=0.0).to(tl.float32)
            others = tl.where(known, others + b * v, others)
    tl.store(y_at + rows, tl.sum(sums, 1)[:, None], rows < N)
    if TWO:
        tl.store(z_at + rows, tl.sum(others, 1)[:, None], rows < N)


def times_of(rows: int, columns: int, count: int, dtype: torch.dtype) -> dict[str, float]:
    """Return us of a kernel by block, fastest first."""
    matrices = torch.randn(
        max(2, BYTES // (rows * columns * dtype.itemsize * count)), count, rows, columns, device="cuda"
    )
    matrices, vector = matrices.to(dtype), torch.randn(columns, device="cuda").to(dtype)
    y, z = torch.empty(2, rows, device="cuda")
    chosen = block_of(rows, columns, dtype.itemsize)

    def run(block: dict[str, int]) -> None:
        for each in matrices:
            grid = (-(-rows // block["XBLOCK"]),)
            gemv[grid](vector, each[0], each[-1], y, z, rows, columns, TWO=count > 1, **block)

    times: dict[str, float] = {}
    for block_rows, row_bytes, warps in itertools.product(ROWS, ROW_BYTES, WARPS):
        elements = row_bytes // dtype.itemsize
        block = {"XBLOCK": block_rows, "R0_BLOCK": elements, "num_warps": warps, "num_stages": 1}
        run(block)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run(block)
        name = f"{block_rows} rows, {row_bytes} bytes, {warps} warps" + (", chosen" if block == chosen else "")
        times[name] = round(event_ns(graph.replay, calls=3, rounds=5) / len(matrices) / 1e3, 2)
    return dict(sorted(times.items(), key=lambda each: each[1]))


def main() -> None:
    """Print and write the times of each shape."""
    require_gpu()
    file = Path(sys.argv[1])
    result: dict[str, Any] = provenance(
        "python research/prototypes/gemv_blocks.py", partial(torch.cuda._sleep, 2_000_000)
    )
    for rows, columns, count, dtype in SHAPES:
        times = times_of(rows, columns, count, dtype)
        result[f"{count} x {rows} x {columns} {dtype}"] = times
        bytes_read = rows * columns * dtype.itemsize * count
        print(rows, columns, count, dtype, f"{bytes_read / min(times.values()) / 1e6:.2f} TB/s", flush=True)
        print(
            "   ", *[each for number, each in enumerate(times.items()) if number < 6 or "chosen" in each[0]], flush=True
        )
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
