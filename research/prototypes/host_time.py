"""Host time of a call of an optimized step, part by part, on a CPU: the schedule itself does nothing.

    python research/prototypes/host_time.py

The model has GoogLeNet's form: nine blocks of four branches, 269 modules, 167 parameters, each with few channels.
"""

from __future__ import annotations

import sys
import timeit
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from gpusim.gpu.optimize.executors import CpuExecutor
from tests.support.optimizing import fast

BLOCKS, CHANNELS, CALLS, REPEATS = 9, 8, 200, 15


def conv(channels: int, to: int, kernel: int) -> nn.Sequential:
    """A convolution with batch norm."""
    layer = nn.Conv2d(channels, to, kernel, padding=kernel // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(to), nn.ReLU(inplace=True))


class Block(nn.Module):
    """Four branches, joined."""

    def __init__(self) -> None:
        super().__init__()
        self.one = conv(CHANNELS, 2, 1)
        self.three = nn.Sequential(conv(CHANNELS, 2, 1), conv(2, 2, 3))
        self.five = nn.Sequential(conv(CHANNELS, 2, 1), conv(2, 2, 3))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(CHANNELS, 2, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1)


def main() -> None:
    """Print the least time of each part in us."""
    layers = [conv(3, CHANNELS, 3), *(Block() for _ in range(BLOCKS)), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(CHANNELS, 10)).eval()
    x = torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        step = fast(model, x, executor=CpuExecutor(), budget_s=0.2)
        variant = next(iter(step._variants.values()))
        object.__setattr__(variant.ready, "run", lambda: None)
        parts: dict[str, Callable[[], object]] = {
            "key": lambda: step._key((x,), {}),
            "hooks": variant.captured.hooks.hold,
            "parameters and modules": variant.captured.places.hold,
            "of these, tensors": variant.captured.places._layouts.hold,
            "gradients": variant.captured.presence.holds,
            "Python values": variant.captured.reads.changed,
            "copies": lambda: variant.run([x]),
            "call": lambda: step(x),
        }
        for name, part in parts.items():
            least_s = min(timeit.repeat(part, number=CALLS, repeat=REPEATS)) / CALLS
            print(f"{name:24} {least_s * 1e6:6.1f} us")


if __name__ == "__main__":
    main()
