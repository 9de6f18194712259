"""Measured lower bounds of a dense mixture of experts: python research/prototypes/experts_bound.py OUT.json.

`experts_large` at batch 2, TF32. Each piece is one CUDA graph: reading all weights once, the products of all experts
(one batched call a layer, or one call each on 1 to 8 streams), and the whole step with experts as batched products.
Weights are those of all layers, so they come from DRAM as in the step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from gpusim.gpu.calibrate.microbench import event_ns
from gpusim.gpu.device import provenance, require_gpu

WIDTH, HIDDEN, EXPERTS, LAYERS, HEADS, BATCH, TOKENS = 640, 1792, 12, 4, 10, 2, 160
ROWS = BATCH * TOKENS
#: Floating-point operations and bytes of the experts' products and weights.
FLOPS = 2 * ROWS * (EXPERTS * 2 * WIDTH * HIDDEN + 4 * WIDTH * WIDTH) * LAYERS
WEIGHT_BYTES = 4 * (EXPERTS * 2 * WIDTH * HIDDEN + 4 * WIDTH * WIDTH) * LAYERS


class Weights:
    """Weights of the network, experts of a layer side by side."""

    def __init__(self) -> None:
        def made(*shape: int) -> list[torch.Tensor]:
            return [torch.randn(*shape, device="cuda") / shape[-1] ** 0.5 for _ in range(LAYERS)]

        self.up, self.down = made(EXPERTS, HIDDEN, WIDTH), made(EXPERTS, WIDTH, HIDDEN)
        self.up_bias, self.down_bias = made(EXPERTS, 1, HIDDEN), made(EXPERTS, 1, WIDTH)
        self.qkv, self.out, self.router = made(3 * WIDTH, WIDTH), made(WIDTH, WIDTH), made(EXPERTS, WIDTH)
        self.x = torch.randn(BATCH, TOKENS, WIDTH, device="cuda")
        self.flat = torch.randn(ROWS, WIDTH, device="cuda")

    def read(self) -> None:
        """Read all large weights once."""
        for layer in range(LAYERS):
            self.up[layer].sum()
            self.down[layer].sum()

    def batched_products(self) -> None:
        for layer in range(LAYERS):
            self.experts(self.flat, layer, act=False)

    def experts(self, x: torch.Tensor, layer: int, act: bool = True) -> torch.Tensor:
        """All experts of a layer: [rows, width] to [experts, rows, width]."""
        each = x.expand(EXPERTS, *x.shape)
        hidden = torch.baddbmm(self.up_bias[layer], each, self.up[layer].transpose(1, 2))
        if act:
            hidden = functional.silu(hidden)
        return torch.baddbmm(self.down_bias[layer], hidden, self.down[layer].transpose(1, 2))

    def attention(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        normed = functional.layer_norm(x, [WIDTH])
        parts = functional.linear(normed, self.qkv[layer]).view(BATCH, TOKENS, 3, HEADS, WIDTH // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(query, key, value)
        return x + functional.linear(attended.transpose(1, 2).reshape(BATCH, TOKENS, WIDTH), self.out[layer])

    def step(self, experts: bool = True) -> None:
        """The whole step, or without the experts."""
        x = self.x
        for layer in range(LAYERS):
            x = self.attention(x, layer)
            if experts:
                normed = functional.layer_norm(x, [WIDTH]).view(ROWS, WIDTH)
                shares = torch.softmax(functional.linear(normed, self.router[layer]), -1)
                outputs = self.experts(normed, layer)
                x = x + torch.einsum("re,erw->rw", shares, outputs).view(BATCH, TOKENS, WIDTH)

    def separate(self, lanes: list[torch.cuda.Stream], act: bool) -> None:
        """Each expert by itself, in turns on some streams; nothing depends on anything else."""
        for number in range(LAYERS * EXPERTS):
            layer, expert = divmod(number, EXPERTS)
            with torch.cuda.stream(lanes[number % len(lanes)]):
                hidden = torch.addmm(self.up_bias[layer][expert, 0], self.flat, self.up[layer][expert].t())
                if act:
                    hidden = functional.silu(hidden)
                torch.addmm(self.down_bias[layer][expert, 0], hidden, self.down[layer][expert].t())


def graph_ns(run: Callable[[], object], lanes: list[torch.cuda.Stream]) -> float:
    """Return the time of one replay; `run` may use `lanes`, forked from the first."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=lanes[0], capture_error_mode="thread_local"):
        for lane in lanes[1:]:
            lane.wait_stream(lanes[0])
        run()
        for lane in lanes[1:]:
            lanes[0].wait_stream(lane)
    return event_ns(graph.replay, calls=20)


def main() -> None:
    """Write all times in ns."""
    require_gpu()
    torch.backends.cuda.matmul.allow_tf32 = True
    result: dict[str, Any] = provenance(
        "python research/prototypes/experts_bound.py", partial(torch.cuda._sleep, 2_000_000)
    )
    result |= {"flops": FLOPS, "weight_bytes": WEIGHT_BYTES, "ns": {}}
    lanes = [torch.cuda.Stream() for _ in range(8)]
    with torch.no_grad():
        weights = Weights()
        result["ns"] = {
            "read weights": graph_ns(weights.read, lanes[:1]),
            "batched products": graph_ns(weights.batched_products, lanes[:1]),
            "step without experts": graph_ns(partial(weights.step, False), lanes[:1]),
            "step, batched": graph_ns(weights.step, lanes[:1]),
        }
        for streams in (1, 2, 4, 8):
            for act in (False, True):
                run = partial(weights.separate, lanes[:streams], act)
                result["ns"][f"separate, {streams} streams{', silu' if act else ''}"] = graph_ns(run, lanes[:streams])
    print(json.dumps(result, indent=1))
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
