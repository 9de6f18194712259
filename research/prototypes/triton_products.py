# ruff: noqa: N803  (Triton's own names)
"""Would other kernels bring the products of a mixture of experts to its aim? Needs a GPU and Triton.

    python research/prototypes/triton_products.py OUT.json [small|large]

The products of all experts of `validate/networks/experts.py` in TF32 (no attention, nothing depends on anything but an
expert's second product on its first), each size as one CUDA graph on 1 to 8 streams: by cuBLAS, with SiLU as a kernel
of its own, and by Triton's plain product with SiLU in its epilogue, for several shapes of tiles. *Grouped* is one
launch for all experts of a layer. *Rounded* has weights rounded to TF32 in the kernel and rows where they are written,
or both in the kernel; else the tensor cores cut them off. Prints and writes us, TFLOP/s and the deviation from FP64.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from experts_bound import graph_ns as ns_of_graph
from torch.nn import functional

from gpusim.gpu.device import provenance, require_gpu

#: Rows, width, hidden width, experts, layers.
SIZES = {"small": (192, 384, 1024, 8, 3), "large": (320, 640, 1792, 12, 4)}
#: Rows and columns of a tile, depth of a step, warps, stages.
TILES = [
    (64, 64, 32, 4, 4),
    (64, 64, 64, 4, 3),
    (64, 128, 32, 4, 4),
    (64, 128, 32, 8, 4),
    (128, 64, 32, 8, 4),
    (128, 128, 32, 8, 4),
]
#: Ways of rounding: none, weights in the kernel and rows where they are written, both in the kernel.
ROUNDED = {"cut off": (0, 0, 0), "rows before": (1, 0, 1), "in the kernel": (1, 1, 0)}


@triton.jit
def product(x_at, w_at, b_at, y_at, M, N: tl.constexpr, K: tl.constexpr, X_STEP, W_STEP, B_STEP, Y_STEP,
            BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ACT: tl.constexpr,
            ROUND_W: tl.constexpr, ROUND_X: tl.constexpr, ROUND_Y: tl.constexpr):  # fmt: skip
    """y = act(x @ w.T + b) of the expert that the second index of the block names."""
    tile, expert = tl.program_id(0), tl.program_id(1)
    rows = tile // (N // BN) * BM + tl.arange(0, BM)
    columns = tile % (N // BN) * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    x = x_at + expert * X_STEP + rows[:, None] * K + depth[None, :]
    w = w_at + expert * W_STEP + columns[None, :] * K + depth[:, None]
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    for _ in range(0, K, BK):
        part, weights = tl.load(x, mask=rows[:, None] < M, other=0.0), tl.load(w)
        if ROUND_X:  # the tensor cores cut the lower 13 bits off
            part = (part.to(tl.int32, bitcast=True) + 0x1000).to(tl.float32, bitcast=True)
        if ROUND_W:
            weights = (weights.to(tl.int32, bitcast=True) + 0x1000).to(tl.float32, bitcast=True)
        sums = tl.dot(part, weights, sums, input_precision="tf32")
        x += BK
        w += BK
    sums += tl.load(b_at + expert * B_STEP + columns)[None, :]
    if ACT:
        sums = sums * tl.sigmoid(sums)
    if ROUND_Y:
        sums = (sums.to(tl.int32, bitcast=True) + 0x1000).to(tl.float32, bitcast=True)
    tl.store(y_at + expert * Y_STEP + rows[:, None] * N + columns[None, :], sums, mask=rows[:, None] < M)


class Products:
    """Weights and results of all experts of one size."""

    def __init__(self, size: str) -> None:
        self.rows, self.width, self.hidden, self.experts, self.layers = SIZES[size]

        def made(*shape: int) -> torch.Tensor:
            return torch.randn(self.layers, self.experts, *shape, device="cuda") / shape[-1] ** 0.5

        self.up, self.up_bias = made(self.hidden, self.width), made(self.hidden)
        self.down, self.down_bias = made(self.width, self.hidden), made(self.width)
        self.x = torch.randn(self.rows, self.width, device="cuda")
        self.middle = torch.empty(self.layers, self.experts, self.rows, self.hidden, device="cuda")
        self.y = torch.empty(self.layers, self.experts, self.rows, self.width, device="cuda")
        self.flops = 4 * self.rows * self.width * self.hidden * self.experts * self.layers

    def cublas(self, lanes: list[torch.cuda.Stream]) -> None:
        for number in range(self.layers * self.experts):
            at = divmod(number, self.experts)
            with torch.cuda.stream(lanes[number % len(lanes)]):
                middle = functional.silu(torch.addmm(self.up_bias[at], self.x, self.up[at].t()))
                torch.addmm(self.down_bias[at], middle, self.down[at].t(), out=self.y[at])

    def triton(self, lanes: list[torch.cuda.Stream], tiles: Any, rounded: str) -> None:
        for number in range(self.layers * self.experts):
            layer, expert = divmod(number, self.experts)
            with torch.cuda.stream(lanes[number % len(lanes)]):
                self._both(layer, slice(expert, expert + 1), tiles, rounded)

    def grouped(self, lanes: list[torch.cuda.Stream], tiles: Any, rounded: str) -> None:
        del lanes
        for layer in range(self.layers):
            self._both(layer, slice(None), tiles, rounded)

    def _both(self, layer: int, which: slice, tiles: Any, rounded: str) -> None:
        middle, rows = self.middle[layer, which], self.rows
        w, x, y = ROUNDED[rounded]
        steps = (0, self.hidden * self.width, self.hidden, rows * self.hidden)
        up = (self.x, self.up[layer, which], self.up_bias[layer, which], middle)
        self._launch(*up, self.hidden, self.width, steps, tiles[0], (True, w, x, y))
        steps = (rows * self.hidden, self.hidden * self.width, self.width, rows * self.width)
        down = (middle, self.down[layer, which], self.down_bias[layer, which], self.y[layer, which])
        self._launch(*down, self.width, self.hidden, steps, tiles[1], (False, w, x, 0))

    def _launch(self, x: Any, w: Any, b: Any, y: Any, n: int, k: int, steps: Any, tile: Any, flags: Any) -> None:
        bm, bn, bk, warps, stages = tile
        act, round_w, round_x, round_y = flags
        grid = (-(-self.rows // bm) * (n // bn), w.shape[0])
        product[grid](
            x, w, b, y, self.rows, n, k, *steps, BM=bm, BN=bn, BK=bk, ACT=act, num_warps=warps, num_stages=stages,
            ROUND_W=round_w, ROUND_X=round_x, ROUND_Y=round_y,
        )  # fmt: skip

    def exact(self) -> torch.Tensor:
        """Return the results in FP64."""
        x = self.x.double()
        middle = functional.silu(x @ self.up.double().mT + self.up_bias.double()[:, :, None])
        return middle @ self.down.double().mT + self.down_bias.double()[:, :, None]


def graph_ns(run: Callable[[list[torch.cuda.Stream]], object], lanes: list[torch.cuda.Stream]) -> float:
    return ns_of_graph(partial(run, lanes), lanes)


def main() -> None:
    """Write all times in us."""
    require_gpu()
    torch.backends.cuda.matmul.allow_tf32 = True
    file, sizes = Path(sys.argv[1]), sys.argv[2:] or list(SIZES)
    result: dict[str, Any] = provenance(
        "python research/prototypes/triton_products.py", partial(torch.cuda._sleep, 2_000_000)
    )
    lanes = [torch.cuda.Stream() for _ in range(8)]

    def note(name: str, ns: float, flops: int) -> None:
        result[name] = {"us": round(ns / 1e3, 1), "tflops": round(flops / ns / 1e3, 1)}
        print(f"{name:60} {ns / 1e3:8.1f} us {flops / ns / 1e3:6.1f} TFLOP/s", flush=True)
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    for size in sizes:
        products = Products(size)
        with torch.no_grad():
            right = products.exact()

            def off(right: torch.Tensor = right, products: Products = products) -> str:
                return f"off {float((products.y - right).norm() / right.norm()):.1e}"

            for streams in (1, 2, 4, 8):
                ns = graph_ns(products.cublas, lanes[:streams])
                note(f"{size}: cublas, {streams} streams, {off()}", ns, products.flops)
            for rounded in ROUNDED:
                best: dict[str, tuple[float, Any]] = {}
                for tile in TILES:
                    if products.hidden % tile[1] or products.width % tile[1]:
                        continue
                    for form in ("grouped", "triton"):
                        run = partial(getattr(products, form), tiles=(tile, tile), rounded=rounded)
                        products.y.zero_()
                        ns = graph_ns(run, lanes[: 1 if form == "grouped" else 8])
                        note(f"{size}: {form}, {rounded}, {tile}, {off()}", ns, products.flops)
                        best[form] = min(best.get(form, (float("inf"), tile)), (ns, tile))
                for streams in (1, 2, 4, 8):
                    run = partial(products.triton, tiles=(best["triton"][1],) * 2, rounded=rounded)
                    name = f"{size}: triton, {rounded}, {best['triton'][1]}, {streams} streams"
                    note(name, graph_ns(run, lanes[:streams]), products.flops)


if __name__ == "__main__":
    main()
