"""A decoder's cache that is the step's state, not an argument, is never copied."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own habit)

from tests.support.optimizing import close, fast

LENGTH, WIDTH = 5, 6


class Attending(nn.Module):
    """Writes each token's key and value to its caches in place, and attends to all."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("keys", torch.zeros(1, LENGTH, WIDTH))
        self.register_buffer("values", torch.zeros(1, LENGTH, WIDTH))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """[1, 1, width] and the place of the token, [1], to [1, 1, width]."""
        query, key, value = self.project(x).chunk(3, dim=-1)
        self.keys.index_copy_(1, position, key)
        self.values.index_copy_(1, position, value)
        seen = torch.arange(LENGTH) <= position
        return F.scaled_dot_product_attention(query, self.keys, self.values, attn_mask=seen[None])


@pytest.mark.parametrize("as_function", [False, True])
def test_caches_in_buffers_are_written_in_place_and_not_copied(as_function: bool) -> None:
    torch.manual_seed(0)
    model = Attending().eval()
    other = copy.deepcopy(model)
    caches = model.keys.data_ptr(), model.values.data_ptr()

    def decode(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(x, position)

    step = fast(decode if as_function else model, (torch.randn(1, 1, WIDTH), torch.tensor([0])))
    assert torch.equal(model.keys, other.keys)
    (variant,) = step._variants.values()
    before = variant.calls
    with torch.no_grad():
        for place in (0, 1, 2, 4, 3):
            x, position = torch.randn(1, 1, WIDTH), torch.tensor([place])
            close(step(x, position), other(x, position))
            close(model.keys, other.keys)
        for each in (model, other):
            each.keys.zero_()  # the next sequence
        close(step(x, position), other(x, position))
    assert variant.calls == before + 6
    assert [tensor.shape for tensor in variant.captured.inputs] == [(1, 1, WIDTH), (1,)]
    assert (model.keys.data_ptr(), model.values.data_ptr()) == caches
