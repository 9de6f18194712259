"""Networks with attention, to be captured: `tests/support/attention_models.py:NAME`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

WIDTH, HEADS, POSITIONS, INPUTS, CLASSES = 16, 4, 7, 6, 5
NETWORKS = [
    *("separate", "causal", "masked", "chunk", "unbind", "within", "module", "with_weights"),
    *("other_keys", "norm_first", "norm_last", "patches", "written", "words", "windows", "maps"),
]
Made = tuple[nn.Module, torch.Tensor]


class Attending(nn.Module):
    """Positions -> embedding -> residual attention -> mean over positions -> classes."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.embed = nn.Linear(INPUTS, WIDTH)
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a score for each class."""
        x = self.embed(x)
        scores: torch.Tensor = self.last(self.norm(x + self.attend(x)).mean(1))
        return scores

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is added to the embedding."""
        raise NotImplementedError("each kind attends in its own way")

    def mixed(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend with heads in their own dimension; returns them side by side again."""
        n, _, rows, width = query.shape
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return out.transpose(1, 2).reshape(n, rows, HEADS * width)


class Separate(Attending):
    """Three projections, one output; with a mask given as a tensor if `masked`, which makes the same of them."""

    def __init__(self, causal: bool = False, masked: bool = False) -> None:
        super().__init__(causal)
        self.masked = masked
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        n, rows, _ = x.shape
        q, k, v = (each(x).view(n, rows, HEADS, -1).transpose(1, 2) for each in (self.q, self.k, self.v))
        if not self.masked:
            return self.o(self.mixed(q, k, v))  # type: ignore[no-any-return]
        mask = torch.ones(rows, rows, dtype=torch.bool, device=x.device).tril()
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)
        return self.o(out.transpose(1, 2).reshape(n, rows, WIDTH))  # type: ignore[no-any-return]


class Fused(Attending):
    """One projection for queries, keys and values; by `within`, each head has all three."""

    def __init__(self, how: str) -> None:
        super().__init__(causal=True)
        self.how, self.qkv, self.o = how, nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        n, rows, _ = x.shape
        if self.how == "chunk":
            q, k, v = (each.view(n, rows, HEADS, -1).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=-1))
        elif self.how == "unbind":
            q, k, v = self.qkv(x).view(n, rows, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            q, k, v = self.qkv(x).view(n, rows, HEADS, 3, -1).permute(3, 0, 2, 1, 4).unbind(0)
        return self.o(self.mixed(q, k, v))  # type: ignore[no-any-return]


class Module(Attending):
    """torch's own module, by its fast path or with the weights of its attention; or of other keys than queries."""

    def __init__(self, weights: bool = False, other: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.weights = weights
        self.other = nn.Linear(WIDTH, WIDTH) if other else None
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, dropout=dropout, batch_first=True)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        keys = x if self.other is None else self.other(x)[:, 1:5]
        return self.attention(x, keys, keys, need_weights=self.weights)[0]  # type: ignore[no-any-return]


class Encoder(Attending):
    """torch's encoder, the norm first or last."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, dropout=0.0, batch_first=True, norm_first=first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)  # type: ignore[no-any-return]


class Patches(nn.Module):
    """As torchvision's ViT: patches of an image, a class token before them, a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, dropout=0.0, batch_first=True)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a score for each class."""
        rows = self.patch(x).flatten(2).permute(0, 2, 1)
        rows = torch.cat([self.token.expand(len(x), -1, -1), rows], dim=1) + self.positions
        scores: torch.Tensor = self.last(self.encoder(rows)[:, 0])
        return scores


class Written(Attending):
    """Attention written out as products, a mask and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        n, rows, _ = x.shape
        q, k, v = (each.view(n, rows, HEADS, -1).transpose(1, 2) for each in self.qkv(x).split(WIDTH, dim=2))
        seen = torch.ones(rows, rows, device=x.device).tril()
        weights = (q @ k.transpose(-2, -1) * 0.5).masked_fill(seen == 0, float("-inf")).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).reshape(n, rows, WIDTH))  # type: ignore[no-any-return]


class Words(nn.Module):
    """A language model: a table of words, a table of positions, causal attention, a class for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(11, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        self.norm, self.qkv, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48), nn.Linear(WIDTH, 11, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a score for each word at each position."""
        rows = self.words(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        n, length, _ = rows.shape
        heads = (each.view(n, length, HEADS, -1).transpose(1, 2) for each in self.qkv(self.norm(rows)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        scores: torch.Tensor = self.last(rows + mixed.transpose(1, 2).reshape(n, length, WIDTH))
        return scores


class Windows(nn.Module):
    """As torchvision's Swin: shifted windows with a table of biases, then every other row and column."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.table = nn.Conv2d(3, 8, 2, stride=2), nn.Parameter(torch.randn(9, 2))
        self.norm, self.qkv, self.o = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.merge, self.last = nn.Linear(32, 8, bias=False), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a score for each class."""
        x = self.patch(x).permute(0, 2, 3, 1)
        n, rows, columns, width = x.shape
        shifted = torch.roll(self.norm(x), (-1, -1), (1, 2)).view(n, rows // 2, 2, columns // 2, 2, width)
        inside = shifted.permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, width)
        q, k, v = self.qkv(inside).reshape(-1, 4, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        place = torch.arange(4, device=x.device)
        index = (place[:, None] // 2 - place // 2 + 1) * 3 + place[:, None] % 2 - place % 2 + 1
        bias = self.table[index.flatten()].view(4, 4, 2).permute(2, 0, 1)
        mixed = ((q @ k.transpose(-2, -1)) + bias[None]).softmax(-1) @ v
        mixed = self.o(mixed.transpose(1, 2).reshape(-1, 4, width))
        mixed = mixed.view(n, rows // 2, columns // 2, 2, 2, width).permute(0, 1, 3, 2, 4, 5)
        x = x + torch.roll(mixed.reshape(n, rows, columns, width), (1, 1), (1, 2))
        corners = [x[:, first::2, second::2] for first in (0, 1) for second in (0, 1)]
        scores: torch.Tensor = self.last(self.merge(torch.cat(corners, -1)).mean((1, 2)))
        return scores


class Maps(nn.Module):
    """Attention between the pixels of a map, positions first, beside the map itself; then a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.two, self.last = nn.Conv2d(8, 4, 3, stride=2, padding=1), nn.Linear(4 * 6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a score for each class."""
        x = self.one(x)
        pixels = x.flatten(2).permute(2, 0, 1)
        pixels = self.norm(pixels + self.attention(pixels, pixels, pixels, need_weights=False)[0])
        mixed = pixels.permute(1, 2, 0).reshape(x.shape)
        scores: torch.Tensor = self.last(self.two(torch.relu(mixed) + x).flatten(1))
        return scores


class Tied(Attending):
    """One projection for keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        n, rows, _ = x.shape
        q, k, v = (
            each(y).view(n, rows, HEADS, -1).transpose(1, 2)
            for each, y in zip((self.q, self.k, self.k), (x, x, 2 * x), strict=True)
        )
        return self.mixed(q, k, v)


def _positions(make: Callable[[], nn.Module]) -> Callable[[int], Made]:
    return lambda batch: (make(), torch.randn(batch, POSITIONS, INPUTS))


separate, causal = _positions(Separate), _positions(lambda: Separate(causal=True))
masked = _positions(lambda: Separate(masked=True))
chunk, unbind, within = (_positions(lambda how=how: Fused(how)) for how in ("chunk", "unbind", "within"))  # type: ignore[misc]
module, with_weights = _positions(Module), _positions(lambda: Module(weights=True))
other_keys, dropped = _positions(lambda: Module(other=True)), _positions(lambda: Module(dropout=0.1))
norm_first, norm_last = _positions(lambda: Encoder(True)), _positions(lambda: Encoder(False))


written, tied = _positions(Written), _positions(Tied)


def maps(batch: int) -> Made:
    """Return the network of maps with an image of 5 x 4."""
    return Maps(), torch.randn(batch, 3, 5, 4)


def words_loss(scores: torch.Tensor) -> torch.Tensor:
    """Return the loss of a class for each position, with targets of its own."""
    target = torch.zeros(scores.shape[0] * scores.shape[1], dtype=torch.int64, device=scores.device)
    return functional.cross_entropy(scores.reshape(len(target), -1), target)


def words(batch: int) -> tuple[nn.Module, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the language model with words."""
    return Words(), torch.randint(0, 11, (batch, POSITIONS)), words_loss


def windows(batch: int) -> Made:
    """Return the network of windows with an image of 8 x 8."""
    return Windows(), torch.randn(batch, 3, 8, 8)


def patches(batch: int) -> Made:
    """Return the network of patches with an image of 8 x 8."""
    return Patches(), torch.randn(batch, 3, 8, 8)
