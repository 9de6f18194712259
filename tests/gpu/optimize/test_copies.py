"""Copies of a call's arguments into fixed memory."""

from __future__ import annotations

import torch

from gpusim.gpu.optimize.copies import Copies, fresh


def test_tensors_of_several_types_and_layouts_are_copied_to_their_own_places() -> None:
    given = [
        torch.arange(6, dtype=torch.int64),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.tensor(3.0),
        torch.arange(4, dtype=torch.int64).flip(0),
        torch.randn(3, 2).t(),
        torch.ones(3, dtype=torch.bool),
    ]
    memory = [torch.zeros_like(tensor) for tensor in given]
    kept = [tensor.data_ptr() for tensor in memory]
    Copies(memory)(given)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(memory, given, strict=True))
    assert [tensor.data_ptr() for tensor in memory] == kept


def test_results_are_copied_into_memory_of_their_own_laid_out_alike() -> None:
    images = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    for given in ([images], [images, torch.arange(3), images], []):
        made = fresh(given)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(made, given, strict=True))
        assert all(mine.stride() == theirs.stride() for mine, theirs in zip(made, given, strict=True))
        assert len({tensor.data_ptr() for tensor in (*made, *given)}) == len(made) + len({*map(id, given)})
