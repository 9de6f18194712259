"""Calls on lists of tensors, split so that an early gradient's update does not wait for late ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from gpusim.gpu.capture.calls import Call, JointGraph

#: Tensors per launch of torch's multi-tensor kernels, by the number of their lists (`depth_to_max_tensors` in
#: ATen/native/cuda/MultiTensorApply.cuh): smaller parts would add launches.
MOST_TENSORS: Final = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
_IN_PLACE: Final = ("_foreach_", "_fused_")


def with_split_lists(graph: JointGraph) -> JointGraph:
    """Split each in-place call on long lists of the graph into parts of one launch."""
    return replace(graph, calls=tuple(part for call in graph.calls for part in split_list_call(call)))


def split_list_call(call: Call) -> Iterator[Call]:
    """Split one call on lists into several on parts of them; yields any other call unchanged.

    Only calls that change their first list in place and return nothing: they work element by element, so parts have the
    same effect.
    """
    name = call.function._schema.name.partition("::")[2]
    lists = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, list | tuple) and value]
    in_place = name.startswith(_IN_PLACE) and name.endswith("_") and not call.function._schema.returns
    length = len(call.args[0]) if in_place and isinstance(call.args[0], list | tuple) else 0
    most = MOST_TENSORS[min(max(MOST_TENSORS), max(1, len(lists)))]
    if length <= most or any(len(each) != length for each in lists):
        yield call
        return
    for first in range(0, length, most):

        def part(value: Any, begin: int = first) -> Any:
            return value[begin : begin + most] if isinstance(value, list | tuple) and value else value

        yield replace(
            call,
            name=call.name if not first else f"{call.name}_part{first // most}",
            args=tuple(part(value) for value in call.args),
            kwargs={key: part(value) for key, value in call.kwargs.items()},
        )
