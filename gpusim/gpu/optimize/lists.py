"""Calls on lists of tensors, split so that an early gradient's update does not wait for late ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

from gpusim.gpu.capture.calls import Call, JointGraph, Value

#: Most tensors of a part, by the number of its lists: as many as a launch of torch's multi-tensor kernels takes with
#: CUDA 12 (`depth_to_max_tensors` in ATen/native/cuda/MultiTensorApply.cuh); smaller parts would add launches.
MOST_TENSORS: Final = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
#: Elements of a tensor that one block of these kernels works on (`kChunkSize`, same file).
CHUNK_ELEMENTS: Final = 1 << 16
#: Blocks that are enough for a part: one for each SM of an H200. Larger parts wait for more gradients.
ENOUGH_BLOCKS: Final = 132
_IN_PLACE: Final = ("_foreach_", "_fused_")


def with_split_lists(graph: JointGraph) -> JointGraph:
    """Split each in-place call on long lists of the graph into parts that fill a GPU or a launch."""
    sizes = {name: state.tensor.numel() for name, state in graph.inputs.items()}
    return replace(graph, calls=tuple(part for call in graph.calls for part in split_list_call(call, sizes)))


def split_list_call(call: Call, sizes: Mapping[str, int]) -> Iterator[Call]:
    """Split one call on lists into several on parts of them; yields any other call unchanged.

    `sizes` are elements of the step's inputs. Only calls that change their first list in place and return nothing: they
    work element by element, so parts have the same effect.
    """
    name = call.function._schema.name.partition("::")[2]
    lists = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, list | tuple) and value]
    in_place = name.startswith(_IN_PLACE) and name.endswith("_") and not call.function._schema.returns
    changed = call.args[0] if in_place and isinstance(call.args[0], list | tuple) else ()
    ends = list(_ends(changed, sizes, MOST_TENSORS[min(max(MOST_TENSORS), max(1, len(lists)))]))
    if len(ends) < 2 or any(len(each) != len(changed) for each in lists):
        yield call
        return
    for number, (begin, end) in enumerate(pairwise([0, *ends])):

        def part(value: Any, begin: int = begin, end: int = end) -> Any:
            return value[begin:end] if isinstance(value, list | tuple) and value else value

        yield replace(
            call,
            name=call.name if not number else f"{call.name}_part{number}",
            args=tuple(part(value) for value in call.args),
            kwargs={key: part(value) for key, value in call.kwargs.items()},
        )


def _ends(changed: Sequence[Any], sizes: Mapping[str, int], most_tensors: int) -> Iterator[int]:
    """Yield the place behind the last tensor of each part."""
    begin, blocks = 0, 0
    for place, tensor in enumerate(changed):
        blocks += -(-sizes.get(tensor.node, 0) // CHUNK_ELEMENTS) if isinstance(tensor, Value) else 0
        if place + 1 - begin == most_tensors or blocks >= ENOUGH_BLOCKS or place + 1 == len(changed):
            yield place + 1
            begin, blocks = place + 1, 0
