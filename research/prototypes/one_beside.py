"""What a kernel of a chain loses beside one other chain, on SMs of its own: by its own kind, and by its company's.

    python research/prototypes/one_beside.py OUT.json SECONDS

All kinds have fewer blocks than half of an H200's SMs, on operands that stay in the L2 cache. The subject's chain is
timed by two stamps; the company goes on for longer. Then the graphs are profiled, which tells kernels from gaps.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import concurrent_chains
import torch
from concurrent_chains import CHAIN, LONGER, Call, Chains, durations, launched, repeated
from torch.nn import functional

from gpusim.gpu.device import provenance, require_gpu

#: m, n, k of products in TF32 and in BF16; channels in and out, filter and side of convolutions in BF16.
PRODUCTS = ((64, 1024, 256), (192, 1024, 384), (192, 384, 1024), (384, 512, 512))
HALF_PRODUCTS = ((128, 512, 1024), (64, 768, 3072))
CONVOLUTIONS = ((160, 320, 3, 14), (96, 128, 3, 28))
ELEMENTS = (12_000,)


def kinds() -> dict[str, Callable[[], Call]]:
    """Return a function for each kind of kernel that makes a call of it with operands of its own."""

    def product(m: int, n: int, k: int, dtype: torch.dtype) -> Call:
        a, weight, bias = (torch.randn(*shape, device="cuda", dtype=dtype) for shape in ((m, k), (n, k), (n,)))
        return partial(torch.addmm, bias, a, weight.t(), out=torch.empty(m, n, device="cuda", dtype=dtype))

    def convolution(inputs: int, outputs: int, kernel: int, side: int) -> Call:
        x = torch.randn(1, inputs, side, side, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(outputs, inputs, kernel, kernel, device="cuda", dtype=torch.bfloat16)
        x, weight = (each.contiguous(memory_format=torch.channels_last) for each in (x, weight))
        return partial(functional.conv2d, x, weight, padding=kernel // 2)

    def add(count: int) -> Call:
        x, y = torch.randn(count, device="cuda"), torch.randn(count, device="cuda")
        return partial(torch.add, x, y, out=torch.empty_like(x))

    def norm(rows: int, columns: int) -> Call:
        x, weight, bias = (torch.randn(*shape, device="cuda") for shape in ((rows, columns), (columns,), (columns,)))
        return partial(torch.native_layer_norm, x, [columns], weight, bias, 1e-5)

    made: dict[str, Callable[[], Call]] = {}
    for m, n, k in PRODUCTS:
        made[f"tf32 {m} x {n} x {k}"] = partial(product, m, n, k, torch.float32)
    for m, n, k in HALF_PRODUCTS:
        made[f"bf16 {m} x {n} x {k}"] = partial(product, m, n, k, torch.bfloat16)
    for shape in CONVOLUTIONS:
        made[f"convolution {shape[0]} to {shape[1]}"] = partial(convolution, *shape)
    for count in ELEMENTS:
        made[f"add {count}"] = partial(add, count)
    made["norm 48 x 384"] = partial(norm, 48, 384)
    return made


def main() -> None:
    """Write what was found, with the GPU's name."""
    out, seconds = sys.argv[1:]
    end = monotonic() + float(seconds)
    require_gpu()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    concurrent_chains.kinds = kinds
    command = "python research/prototypes/one_beside.py OUT.json SECONDS"
    result: dict[str, Any] = provenance(command, partial(torch.cuda._sleep, 2_000_000))
    result |= {"chain": CHAIN, "spin_cycles": concurrent_chains.SPIN_CYCLES, "losses": {}, "profiles": {}}

    def write() -> None:
        Path(out).write_text(json.dumps(result, indent=1), encoding="utf-8")

    with torch.no_grad():
        chains = Chains()
        result["kernels"] = launched(chains.calls)
        alone = {name: chains.graph(calls[0], []) for name, calls in chains.calls.items()}
        result["alone_ns"] = {name: chains.ns(graph)[0] for name, graph in alone.items()}
        graphs = {}
        for name, calls in chains.calls.items():
            for other in chains.calls:
                length = min(400, max(2, round(LONGER * CHAIN * result["alone_ns"][name] / result["alone_ns"][other])))
                graph = chains.graph(calls[0], [repeated(chains.calls[other][1], length)])
                mine_ns, theirs_ns = chains.ns(graph)
                key = f"{name} | {other}"
                result["losses"][key] = {"ns": mine_ns, "beside_ns": theirs_ns, "length": length}
                if name == other or name.startswith("tf32 192 x 384"):
                    graphs[key] = graph
            write()
        print(f"{len(result['losses'])} graphs, {end - monotonic():.0f} s left", flush=True)
        for key, graph in {**alone, **graphs}.items():
            if monotonic() > end:
                break
            result["profiles"][key] = durations(graph)
    write()
    print(f"{len(result['profiles'])} profiles, {end - monotonic():.0f} s left", flush=True)


if __name__ == "__main__":
    main()
