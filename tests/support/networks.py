"""Small networks for the tests of capture and replay, each hard in its own way.

Each public function is a SPEC for `gpusim capture` (`tests/support/networks.py:branches`): it takes the batch and
returns a module and its inputs, some also a loss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own habit)

from gpusim.formats.trace import Dtype, MemoryFormat, Mode, Trace
from gpusim.gpu.capture.calls import JointGraph
from gpusim.gpu.capture.capture import build_step
from gpusim.gpu.capture.joint_graph import joint_graph
from gpusim.gpu.capture.models import ModelStep
from gpusim.gpu.capture.options import CaptureOptions
from gpusim.gpu.capture.rebuild import bare_trace
from gpusim.gpu.capture.record import Recorded, record
from gpusim.gpu.inductor.step import inductor_step
from gpusim.gpu.replay.execute import InitialState, Runner

Made = tuple[nn.Module, tuple[Any, ...]]
SIZE = 12
CLASSES = 7


def conv_bn(inner: int, outer: int, kernel: int = 1, **options: Any) -> nn.Sequential:
    """Make convolution, batch norm (whose statistics change in place) and ReLU in place."""
    return nn.Sequential(
        nn.Conv2d(inner, outer, kernel, padding=kernel // 2, bias=False, **options),
        nn.BatchNorm2d(outer),
        nn.ReLU(inplace=True),
    )


def image(batch: int, channels: int = 3) -> torch.Tensor:
    return torch.randn(batch, channels, SIZE, SIZE)


class Branches(nn.Module):
    """An Inception block: four branches of one stem, joined."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, 8, 3)
        self.one = conv_bn(8, 4)
        self.three = nn.Sequential(conv_bn(8, 4), conv_bn(4, 6, 3))
        self.five = nn.Sequential(conv_bn(8, 4), conv_bn(4, 4, 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), conv_bn(8, 4))
        self.head = nn.Linear(18, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        joined = torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1)
        return self.head(F.adaptive_avg_pool2d(joined, 1).flatten(1))


class Faint(nn.Module):
    """Convolutions with weights so small that only the last layer's bias remains of the signal."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(6)))
        for weight in self.body.parameters():
            nn.init.normal_(weight, std=1e-3)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


class Deaf(nn.Module):
    """The output does not depend on the input, whatever the weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.zeros_like(x))


class Mute(nn.Module):
    """The last layer's weights are zero, as those of torchvision's vision transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 8), nn.Linear(8, CLASSES)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).relu())


class Views(nn.Module):
    """Views of views, read and written: halves changed through slices, read through the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.second = nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).clone()
        y[:, :6].add_(y[:, 6:])  # seen through y
        y[:, 3:5].mul_(2.0)
        z = y.view(-1, 3, 4).transpose(1, 2).reshape(-1, 12)
        z = z + y.unfold(1, 4, 1).sum(-1).repeat(1, 2)[:, :12]
        return self.second(z.t().contiguous().t())


class InPlace(nn.Module):
    """Chains of changes in place, and an older reader of the changed memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.second = nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        before = x.mean()
        x.add_(1.0).mul_(0.5).relu_()
        y = self.second(x)
        y += x
        y.clamp_(-2.0, 2.0)
        return F.hardtanh(y, inplace=True).mean((2, 3)) + before


class Dropouts(nn.Module):
    """Random ops on independent branches: they share one generator."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(10, 8)
        self.right = nn.Linear(10, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left = F.dropout(self.left(x), 0.3, self.training)
        right = F.dropout(self.right(x), 0.6, self.training)
        return self.head(left * torch.rand_like(left) + right)


class Shared(nn.Module):
    """One layer called three times, and a weight tied to another layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(9, 9)
        self.tied = nn.Linear(9, 9, bias=False)
        self.tied.weight = self.body.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.body(self.body(self.body(x).relu()).relu()))


class Pooled(nn.Module):
    """BatchNorm and a mean over space: the expanded gradient of the mean meets a channels_last convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.b = nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.bn(self.a(x)).relu()).mean((2, 3))


class Grouped(nn.Module):
    """Grouped, depthwise, strided and dilated convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.group = nn.Conv2d(4, 8, 3, padding=1, groups=2)
        self.depth = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=8)
        self.point = nn.Conv2d(8, CLASSES, 1, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.point(self.depth(self.group(x)).relu()).flatten(2).amax(-1)


class UpAndDown(nn.Module):
    """Down, up by a transposed convolution and by interpolation, joined by a skip; no class scores."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.norm = nn.GroupNorm(2, 4)
        self.out = nn.Conv2d(10, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.down(x).relu()
        high = F.interpolate(low, scale_factor=2.0, mode="nearest")
        return self.out(torch.cat([F.gelu(self.norm(self.up(low))), high], 1))


class Attention(nn.Module):
    """Integer inputs, an embedding tied to the output, a mask that is a constant, one attention block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.register_buffer("positions", torch.randn(6, 8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.positions
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        mask = torch.ones(6, 6, device=x.device, dtype=x.dtype).tril().log()
        scores = (q @ k.transpose(-1, -2)) * 0.5 + mask
        x = x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + self.mlp(self.norm(x))
        return F.linear(x.mean(1), self.embed.weight)


class Table(nn.Module):
    """Rows of a table, many of them several times: on two threads Inductor adds to their gradient atomically."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(64, 32)
        self.layer = nn.Linear(32, CLASSES)

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        return self.layer(self.rows(places).relu().mean(1))


class BufferView(nn.Module):
    """A buffer that is a view of another, and a counter: both change in place during the step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, CLASSES)
        self.register_buffer("whole", torch.randn(2, 5))
        self.register_buffer("row", self.whole[1])
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.whole.sum(0)
        self.row.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.calls.add_(1)
        return self.layer(y * self.whole[1])


class Outputs(nn.Module):
    """Several outputs in a dictionary: scores twice (an auxiliary head), features, and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.main = nn.Linear(8, CLASSES)
        self.auxiliary = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor, scale: float) -> dict[str, Any]:
        features = self.body(x * scale).tanh()
        scores = self.main(features)
        return {"out": scores, "aux": [self.auxiliary(features)], "best": scores.argmax(1)}


class Frozen(nn.Module):
    """Untrained layers before trained ones: the backward pass ends early."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = conv_bn(3, 6, 3).requires_grad_(False)
        self.trained = nn.Conv2d(6, CLASSES, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(self.frozen(x)).sum((2, 3))


class Indexed(nn.Module):
    """Results that are indices: unpooling, gather, scatter and a top-k of fixed size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, where = F.max_pool2d(self.conv(x), 2, return_indices=True)
        y = F.max_unpool2d(y, where, 2)
        best, which = y.flatten(2).topk(3, dim=2)
        spread = torch.zeros_like(y.flatten(2)).scatter(2, which, best * 2.0)
        return self.head(spread.sum(2) + y.flatten(2).gather(2, which).sum(2))


class Recurrent(nn.Module):
    """A loop over time with one cell."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(x.shape[0], 6)
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state)


class ChangesInput(nn.Module):
    """The step changes its own input, which it also returns as an output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, CLASSES)

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.mul_(0.5)
        return self.layer(x + shift), shift


class ReadsAValue(nn.Module):
    """Not capturable: a number from a tensor steers the computation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * x.sum().item()


class Masked(ReadsAValue):
    """Not capturable: the number of selected elements depends on their values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y[y > 0].sum().reshape(1, 1)


class Heads(nn.Module):
    """A trunk with several heads. Convolutions have biases before batch norm: their gradients are zero in theory."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(self.block(3, 8), self.block(8, 8))
        self.heads = nn.ModuleList(
            nn.Sequential(self.block(8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))
            for _ in range(3)
        )

    def block(self, inner: int, outer: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU())

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = self.trunk(x)
        return [head(x) for head in self.heads]


class Layouts(nn.Module):
    """Operators that some layouts of images forbid or read otherwise; one image is among the results.

    Random ones draw in the order of memory, views need strides, norms and products want channels last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.depth = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.layer_norm, self.group_norm, self.norm = nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.BatchNorm2d(8)
        self.widen, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)
        self.squeeze, self.excite = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.down = nn.Conv2d(8, 6, 3, stride=2, padding=1)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = F.dropout(self.stem(x).relu(), 0.3, self.training)
        wide = F.gelu(self.widen(self.layer_norm(self.depth(x).permute(0, 2, 3, 1))))
        x = x + self.narrow(wide).permute(0, 3, 1, 2)
        x = self.norm(x) * self.excite(self.squeeze(x.mean((2, 3), keepdim=True)).relu()).sigmoid()
        x = self.group_norm(F.dropout2d(x, 0.3, self.training))
        x = x.view(len(x), 2, 4, SIZE, SIZE).transpose(1, 2).reshape(len(x), 8, SIZE, SIZE)  # channels shuffled
        x = x * torch.rand_like(x)
        x = F.avg_pool2d(torch.cat([x[:, :4], x[:, 4:] + x[:, :4]], 1), 3, 1, 1)
        features = self.down(x)
        return self.head(F.adaptive_avg_pool2d(features, 2).flatten(1)), features


class Residual(nn.Module):
    """Residual blocks behind a stem; no pooling."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.stem = conv_bn(3, 8, 3)
        self.blocks = nn.ModuleList(nn.Sequential(conv_bn(8, 8, 3), conv_bn(8, 8, 3)) for _ in range(blocks))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


class Untrainable(nn.Module):
    """Not capturable in training: it has no parameter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu()


def faint(batch: int) -> Made:
    return Faint(), (image(batch, 4),)


def deaf(batch: int) -> Made:
    return Deaf(), (torch.randn(batch, 5),)


def mute(batch: int) -> Made:
    return Mute(), (torch.randn(batch, 5),)


def branches(batch: int) -> Made:
    return Branches(), (image(batch),)


def views(batch: int) -> Made:
    return Views(), (torch.randn(batch, 12),)


def in_place(batch: int) -> Made:
    return InPlace(), (image(batch),)


def dropouts(batch: int) -> Made:
    return Dropouts(), (torch.randn(batch, 10),)


def shared(batch: int) -> Made:
    return Shared(), (torch.randn(batch, 9),)


def pooled(batch: int) -> Made:
    return Pooled(), (image(batch),)


def grouped(batch: int) -> Made:
    return Grouped(), (image(batch, 4),)


def up_and_down(batch: int) -> Made:
    return UpAndDown(), (image(batch),)


def attention(batch: int) -> Made:
    return Attention(), (torch.randint(0, 11, (batch, 6)),)


def table(batch: int) -> Made:
    return Table(), (torch.randint(0, 64, (batch, 256)),)


def buffer_view(batch: int) -> Made:
    return BufferView(), (torch.randn(batch, 5),)


def outputs(batch: int) -> Made:
    return Outputs(), (torch.randn(batch, 6), 0.5)


def frozen(batch: int) -> Made:
    return Frozen(), (image(batch),)


def indexed(batch: int) -> Made:
    return Indexed(), (image(batch),)


def recurrent(batch: int) -> Made:
    return Recurrent(), (torch.randn(batch, 3, 4),)


def changes_input(batch: int) -> Made:
    return ChangesInput(), (torch.randn(batch, 5), torch.randn(5))


def reads_a_value(batch: int) -> Made:
    return ReadsAValue(), (torch.randn(batch, 5),)


def masked(batch: int) -> Made:
    return Masked(), (torch.randn(batch, 5),)


def heads(batch: int) -> Made:
    return Heads(), (image(batch),)


def layouts(batch: int) -> tuple[nn.Module, tuple[torch.Tensor], Callable[[Any], torch.Tensor]]:
    """Return a network whose loss needs the image among its results, too."""
    return Layouts(), (image(batch),), lambda results: results[0].pow(2).sum() + results[1].sum()


def residual(batch: int) -> Made:
    return Residual(), (image(batch),)


def untrainable(batch: int) -> Made:
    return Untrainable(), (torch.randn(batch, 5),)


def wrong_return(batch: int) -> torch.Tensor:
    return torch.randn(batch, 5)


def own_loss(batch: int) -> tuple[nn.Module, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Return a network with a loss of its own, and a single input that is not in a tuple."""
    return nn.Linear(4, 3), torch.randn(batch, 4), lambda output: output.pow(2).sum()


#: Networks above that can be captured.
NETWORKS = (
    "branches",
    "views",
    "in_place",
    "dropouts",
    "shared",
    "pooled",
    "grouped",
    "up_and_down",
    "attention",
    "buffer_view",
    "outputs",
    "frozen",
    "indexed",
    "recurrent",
    "changes_input",
    "own_loss",
    "heads",
)


# --- Capture as far as it goes without a GPU: everything but the times and the kernels ---


@dataclass(frozen=True)
class OnCpu:
    """A step captured on the CPU with all intermediate results. Shared by tests: do not change."""

    options: CaptureOptions
    step: ModelStep
    graph: JointGraph
    recorded: Recorded
    trace: Trace

    def rerun(self, trace: Trace | None = None) -> Runner:
        """Return a runner of the trace (or of another with the same tensors), bound to a fresh copy of the initial
        state.
        """
        runner = Runner(trace or self.trace, CPU, trust_code=True)
        runner.bind(InitialState.copy_of(self.recorded.initial).tensors)
        torch.manual_seed(self.options.seed)
        return runner


CPU = torch.device("cpu")
FILE = Path(__file__)
BATCH = 2


def spec(name: str) -> str:
    """Return the SPEC of a network of this file."""
    return f"{FILE}:{name}"


@functools.cache
def on_cpu(name: str, mode: Mode = "train", memory_format: MemoryFormat = "contiguous", dtype: Dtype = "fp32") -> OnCpu:
    """Capture the network on the CPU."""
    options = CaptureOptions(spec=spec(name), mode=mode, batch=BATCH, dtype=dtype, memory_format=memory_format)
    step = build_step(options, CPU)
    graph = joint_graph(step)
    torch.manual_seed(options.seed)
    recorded = record(graph)
    return OnCpu(options, step, graph, recorded, bare_trace(options, step, recorded))


# --- The same steps as Inductor's kernels, which run on the CPU, too ---


@functools.cache
def fused_on_cpu(name: str, mode: Mode = "train") -> OnCpu:
    """Capture the network on the CPU with the front end `inductor`. Compiles C++: seconds each."""
    captured = on_cpu(name, mode)
    options = replace(captured.options, frontend="inductor")
    recorded = inductor_step(captured.graph, captured.recorded, mode == "train")
    return OnCpu(options, captured.step, captured.graph, recorded, bare_trace(options, captured.step, recorded))
