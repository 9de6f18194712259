"""Copies of a call's arguments into fixed memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpusim.gpu.optimize.copies import BLOCK_ELEMENTS, Copies, fresh


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


def test_few_large_tensors_are_copied_alone_and_others_in_a_list() -> None:
    large, small = torch.zeros(BLOCK_ELEMENTS + 1), torch.zeros(BLOCK_ELEMENTS)
    calls: list[str] = []

    class Listening(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func.name())
            return func(*args, **(kwargs or {}))

    def copied(*memory: torch.Tensor) -> list[str]:
        copies = Copies(memory)
        calls.clear()
        with Listening():
            copies([torch.ones_like(each) for each in memory])
        assert all(bool(each.eq(1).all()) for each in memory)
        return [name.split("::")[1] for name in calls if "copy" in name]

    assert copied(small) == ["copy_"]
    assert copied(small, small.clone()) == ["_foreach_copy_"]
    assert copied(small, large, small.clone()) == ["copy_", "_foreach_copy_"]
    assert copied(large, large.clone(), small) == ["copy_", "copy_", "_foreach_copy_"]
    assert copied(large, large.clone(), large.clone()) == ["_foreach_copy_"]


def test_results_are_copied_into_memory_of_their_own_laid_out_alike() -> None:
    images = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    for given in ([images], [images, torch.arange(3), images], []):
        made = fresh(given)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(made, given, strict=True))
        assert all(mine.stride() == theirs.stride() for mine, theirs in zip(made, given, strict=True))
        assert len({tensor.data_ptr() for tensor in (*made, *given)}) == len(made) + len({*map(id, given)})
