"""A small network for each kind of layer, with sizes that no degree divides."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

Made = tuple[nn.Module, torch.Tensor]
#: Network -> dimensions by which its layer is split.
SPLITS = {
    "group_norm": "nc",
    "group_norm_alone": "nc",
    "group_norm_of_sequence": "nc",
    "instance_norm": "nc",
    "instance_norm_with_weights": "nc",
    "rms_norm": "nch",
    "layer_norm_without_bias": "nh",
    "layer_norm_alone": "nh",
    "convolved": "nch",
    "convolved_with_gaps": "nch",
    "convolved_groups": "nch",
    "convolved_from_the_batch": "nch",
    "pooled_positions": "nch",
    "averaged_positions": "nch",
    "upsampled": "nchw",
    "upsampled_thrice": "nchw",
    "upsampled_to_a_size": "ncw",
    "upsampled_between_corners": "nc",
    "transposed": "nchw",
    "transposed_without_overlap": "nchw",
    "transposed_with_more_rows": "nchw",
    "transposed_odd": "nchw",
    "transposed_with_gaps": "ncw",
    "transposed_groups": "nhw",
    "log_softmax": "n",
    "pixels": "nchw",
    "bag_of_sums": "nc",
    "bag_of_means": "nc",
    "bag_of_maxima": "nc",
    "bag_with_padding": "nc",
    "rows": "nc",
    "columns": "nc",
    "cut": "nchw",
    "grouped": "nch",
    "windows_apart": "n",
    "volume": "n",
    "normed": "n",
    "prelu": "nchw",
    "prelu_of_one": "nchw",
    "larger_by_channels": "nchw",
    "smaller_by_channels": "nchw",
    "adaptive_maxima": "nc",
    "averaged_without_padding": "nchw",
    "shuffled": "n",
    "dense": "nchw",
}
#: Those that draw random numbers, by dimensions for which they do.
RANDOM = {"dropped_in_place": "nchw", "dropped_channels": "nc", "dropped_samples": "n"}
#: Networks with weights that several layers share.
TIED = ("tied_table", "called_thrice")


class _Between(nn.Module):
    """A layer between a convolution and a classifier."""

    def __init__(self, layer: nn.Module, channels: int) -> None:
        super().__init__()
        self.first, self.layer = nn.Conv2d(3, 8, 3, padding=1), layer
        self.next, self.last = nn.Conv2d(channels, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.next(self.layer(self.first(x))))
        return self.last(x.mean((2, 3)))


def _image(make: Callable[[], nn.Module], channels: int = 8, size: int = 9) -> Callable[[int], Made]:
    return lambda batch: (_Between(make(), channels), torch.randn(batch, 3, size, size - 1))


class _Sequence(nn.Module):
    """A layer on the features of each position."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer, self.next, self.last = nn.Linear(6, 8), layer, nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.next(self.layer(self.first(x))).mean(1))


def _sequence(make: Callable[[], nn.Module]) -> Callable[[int], Made]:
    return lambda batch: (_Sequence(make()), torch.randn(batch, 7, 6))


class _Channels(nn.Module):
    """A layer on channels by positions."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x.transpose(1, 2))
        return found.transpose(1, 2)


class _Positions(nn.Module):
    """A layer on channels by positions, which the network is given so."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.last = layer, nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layer(x).mean(2))


def _positions(make: Callable[[], nn.Module]) -> Callable[[int], Made]:
    return lambda batch: (_Positions(make()), torch.randn(batch, 4, 11))


group_norm = _image(lambda: nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU()))
group_norm_alone = _image(lambda: nn.GroupNorm(2, 8, affine=False))
group_norm_of_sequence = _sequence(lambda: _Channels(nn.GroupNorm(2, 8)))
instance_norm = _image(lambda: nn.InstanceNorm2d(8))
instance_norm_with_weights = _image(lambda: nn.InstanceNorm2d(8, affine=True))
rms_norm = _sequence(lambda: nn.RMSNorm(8, eps=1e-5))
layer_norm_without_bias = _sequence(lambda: nn.LayerNorm(8, bias=False))
layer_norm_alone = _sequence(lambda: nn.LayerNorm(8, elementwise_affine=False))

convolved = _sequence(lambda: _Channels(nn.Conv1d(8, 8, 3, padding=1)))
convolved_with_gaps = _sequence(lambda: _Channels(nn.Conv1d(8, 8, 2, stride=2, dilation=2, padding=1)))
convolved_groups = _sequence(lambda: _Channels(nn.Conv1d(8, 8, 3, padding=2, groups=4, bias=False)))
convolved_from_the_batch = _positions(lambda: nn.Conv1d(4, 8, 5, stride=2, padding=2))
pooled_positions = _sequence(lambda: _Channels(nn.MaxPool1d(3, stride=2, padding=1)))
averaged_positions = _sequence(lambda: _Channels(nn.AvgPool1d(2)))

upsampled = _image(lambda: nn.Upsample(scale_factor=2))
upsampled_thrice = _image(lambda: nn.Upsample(scale_factor=(3, 2), mode="bilinear"))
upsampled_to_a_size = _image(lambda: nn.Upsample(size=(13, 16)))
upsampled_between_corners = _image(lambda: nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True))
transposed = _image(lambda: nn.ConvTranspose2d(8, 6, 4, stride=2, padding=1), 6)
transposed_without_overlap = _image(lambda: nn.ConvTranspose2d(8, 8, 2, stride=2, bias=False))
transposed_with_more_rows = _image(lambda: nn.ConvTranspose2d(8, 8, 3, stride=2, padding=1, output_padding=1))
transposed_odd = _image(lambda: nn.ConvTranspose2d(8, 6, (5, 3), stride=(3, 1), padding=(2, 0)), 6)
transposed_with_gaps = _image(lambda: nn.ConvTranspose2d(8, 8, (2, 3), stride=3))
transposed_groups = _image(lambda: nn.ConvTranspose2d(8, 8, 2, stride=2, groups=2))


class _Rows(nn.Module):
    """Rows of a table, or of several."""

    def __init__(self, table: nn.Module, features: int = 8) -> None:
        super().__init__()
        self.table, self.last = table, nn.Linear(features, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(functional.relu(self.table(x)))


class _Columns(nn.Module):
    """A table for each column."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Embedding(10 + number, 8) for number in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([each(x[:, number]) for number, each in enumerate(self.each)], 1)


def _bag(mode: str, padding: int | None = None) -> Callable[[int], Made]:
    table = nn.EmbeddingBag(10, 8, mode=mode, padding_idx=padding)
    return lambda batch: (_Rows(table), torch.randint(0, 10, (batch, 4)))


bag_of_sums, bag_of_means, bag_of_maxima, bag_with_padding = _bag("sum"), _bag("mean"), _bag("max"), _bag("sum", 0)


def rows(batch: int) -> Made:
    return _Rows(nn.Embedding(10, 8, padding_idx=1)), torch.randint(0, 10, (batch,))


def columns(batch: int) -> Made:
    return _Rows(_Columns(), 24), torch.randint(0, 10, (batch, 3))


class _OtherBags(nn.Module):
    """Offsets that are a constant: nothing says how long bags are."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.table, self.last = nn.EmbeddingBag(10, 8, mode="sum"), nn.Linear(8, 5)
        self.register_buffer("offsets", torch.arange(0, 4 * batch, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.table(x.flatten(), self.offsets))


def bags_of_other_lengths(batch: int) -> Made:
    return _OtherBags(batch), torch.randint(0, 10, (batch, 4))


log_softmax = _image(lambda: nn.LogSoftmax(1))


class _Pixels(nn.Module):
    """Maps as the result: the loss is their mean square, added to a zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(functional.relu(self.layer(x)))


def pixels(batch: int) -> Made:
    return _Pixels(), torch.randn(batch, 3, 7, 6)


class _Tied(nn.Module):
    """A table of words whose rows are the classifier's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.between, self.last = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12, bias=False)
        self.last.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(functional.relu(self.between(self.table(x)))).mean(1)


class _Thrice(nn.Module):
    """Modules with weights and biases, called several times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.body = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.rows, self.last = nn.Linear(4, 4), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.first(x))
        for _ in range(3):
            x = functional.relu(self.body(x))
        x = x.mean((2, 3))
        return self.last(self.rows(functional.relu(self.rows(x))))


class _TwiceWithNorm(nn.Module):
    """A convolution with BatchNorm, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)), nn.Linear(3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(self.body(x)).mean((2, 3)))


def called_with_norm(batch: int) -> Made:
    return _TwiceWithNorm(), torch.randn(batch, 3, 6, 5)


def tied_table(batch: int) -> Made:
    return _Tied(), torch.randint(0, 12, (batch, 5))


def called_thrice(batch: int) -> Made:
    return _Thrice(), torch.randn(batch, 3, 6, 5)


class _Cut(nn.Module):
    """A convolution of a detached map, a mean that is made without gradients, and the map itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            mean = functional.relu(x).mean((2, 3), keepdim=True)
        return x * torch.sigmoid(self.gate(x.detach())) + mean


class _TakenTwice(nn.Module):
    """A map times itself, of which one has no gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.detach()


class _CutWeight(nn.Module):
    """A weight without its gradient, which is trained elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(8, 8, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.conv2d(functional.relu(self.one(x)), self.one.weight.detach())


class _Straight(torch.autograd.Function):
    """Rounding with the gradient of the identity."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _Rounded(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Straight.apply(x)


cut = _image(_Cut)
taken_twice, cut_weight, own_gradient = _image(_TakenTwice), _image(_CutWeight), _image(_Rounded)


class _Grouped(nn.Module):
    """Attention with fewer heads of keys and values than of queries, with rotary embeddings, as Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 8)
        self.o = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, rows, _ = x.shape
        q, k, v = (each(x).view(n, rows, -1, 4).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(
            self.turned(q), self.turned(k), v, is_causal=True, enable_gqa=True
        )
        return self.o(mixed.transpose(1, 2).reshape(n, rows, 16))

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        angles = torch.arange(x.shape[2], device=x.device)[:, None] * torch.arange(1, 3, device=x.device).repeat(2)
        return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


class _Windows(nn.Module):
    """Attention within windows of rows that are far apart, with a bias for each head; then back in order."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.bias = nn.Linear(8, 24), nn.Parameter(torch.zeros(1, 2, 6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        rows = x.permute(0, 2, 3, 1).view(n, 3, h // 3, 2, w // 2, c).permute(0, 2, 4, 1, 3, 5).reshape(-1, 6, c)
        q, k, v = self.qkv(rows).view(-1, 6, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=self.bias.expand(len(rows), -1, -1, -1))
        mixed = mixed.transpose(1, 2).reshape(n, h // 3, w // 2, 3, 2, c).permute(0, 3, 1, 4, 2, 5)
        return mixed.reshape(n, h, w, c).permute(0, 3, 1, 2)


class _Volume(nn.Module):
    """Convolutions, a norm and pools of volumes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Conv3d(3, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.MaxPool3d(2))
        self.next, self.last = nn.Conv3d(4, 4, (1, 2, 2), bias=False), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.next(functional.avg_pool3d(self.layer(x), (1, 1, 2)))
        return self.last(functional.adaptive_avg_pool3d(x, 1).flatten(1))


class _Normed(nn.Module):
    """Channels of length 1, scaled and shifted; then a ReLU6 and a sigmoid in place, of what backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(8, 1, 1)), nn.Parameter(torch.zeros(8, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.addcmul(self.shift, self.scale, functional.normalize(x, dim=1))
        return functional.hardswish(functional.relu6(x + 1, inplace=True), inplace=True)


def volume(batch: int) -> Made:
    return _Volume(), torch.randn(batch, 3, 5, 6, 8)


grouped = _sequence(_Grouped)
windows_apart = _image(_Windows, size=9)
normed = _image(_Normed)
prelu = _image(lambda: nn.Sequential(nn.Conv2d(8, 8, 1), nn.PReLU(8)))
prelu_of_one = _image(lambda: nn.Sequential(nn.Conv2d(8, 8, 1), nn.PReLU()))
larger_by_channels = _image(lambda: nn.PixelShuffle(2), 2)
adaptive_maxima = _image(lambda: nn.AdaptiveMaxPool2d((4, 3)))
averaged_without_padding = _image(lambda: nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False))


def smaller_by_channels(batch: int) -> Made:
    return _Between(nn.PixelUnshuffle(2), 32), torch.randn(batch, 3, 6, 10)


shuffled = _image(lambda: nn.ChannelShuffle(4))


class _Dense(nn.Module):
    """Concatenations that begin alike, each with a norm behind it, as DenseNet's."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.Sequential(nn.BatchNorm2d(size), nn.ReLU()) for size in (12, 16))
        self.one, self.two = nn.Conv2d(8, 4, 1), nn.Conv2d(12, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.one(x)
        two = self.two(self.norms[0](torch.cat([x, one], 1)))
        return self.norms[1](torch.cat([x, one, two], 1))


class _DroppedSamples(nn.Module):
    """A branch that is dropped for whole samples, as stochastic depth does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x.new_empty((len(x), 1, 1, 1)).bernoulli_(0.5).div_(0.5)
        return x + functional.relu(x) * kept


dense = _image(_Dense, 16)
dropped_in_place = _image(lambda: nn.Sequential(nn.Conv2d(8, 8, 1), nn.Dropout(0.5, inplace=True)))
dropped_channels, dropped_samples = _image(lambda: nn.Dropout2d(0.5)), _image(_DroppedSamples)


class _SomeSamples(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(x[:1])


some_samples = _image(_SomeSamples)
norm_of_positions = _sequence(lambda: nn.BatchNorm1d(7))
