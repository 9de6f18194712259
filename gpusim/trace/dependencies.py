"""Dependencies between ops, from data alone.

An op depends on (1) the ops that made the tensors in its arguments, (2) the last writers of every storage it reads,
(3) the last readers and writers of every storage it changes in place, (4) the random op before it, if it is one too:
both draw from one generator, and another order would draw other numbers, and (5) the ops in its `after`, which
imported traces have in place of tensors. Program order adds nothing else.
Storage is the unit: two tensors that alias are the same memory.
"""

from __future__ import annotations

from gpusim.trace.schema import Op, Trace
from gpusim.trace.values import TENSOR, tensor_refs


def dependencies(trace: Trace) -> tuple[tuple[int, ...], ...]:
    """For each op, the sorted indices of the ops that must have ended before it starts.

    Every index is smaller than the op's own: the recorded order is one legal order, which reading a trace checks.
    """
    storage_of = [tensor.storage for tensor in trace.tensors]
    maker: dict[int, int] = {}
    writers: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    last_random: int | None = None
    result: list[tuple[int, ...]] = []
    for index, op in enumerate(trace.ops):
        found: set[int] = set()
        found.update(edge.op for edge in op.after)
        for tensor in handles(op):
            if tensor in maker:
                found.add(maker[tensor])
        for storage in {storage_of[tensor] for tensor in op.reads}:
            if storage in writers:
                found.add(writers[storage])
            if storage in readers:
                readers[storage].append(index)
            else:
                readers[storage] = [index]
        for storage in {storage_of[tensor] for tensor in op.writes}:
            if storage in writers:
                found.add(writers[storage])
            if storage in readers:
                found.update(readers.pop(storage))
            writers[storage] = index
        if op.random:
            if last_random is not None:
                found.add(last_random)
            last_random = index
        for result_tensor in op.outputs:
            if result_tensor is not None:
                maker.setdefault(result_tensor, index)
        found.discard(index)
        result.append(tuple(sorted(found)))
    return tuple(result)


def handles(op: Op) -> set[int]:
    """Tensors that the op's arguments mention."""
    found: set[int] = set()
    for values in (op.args, op.kwargs.values()) if op.kwargs else (op.args,):
        for value in values:
            if type(value) is dict and len(value) == 1 and type(tensor := value.get(TENSOR)) is int:
                found.add(tensor)  # nearly all of them, without a generator each
            elif isinstance(value, dict | list | tuple):
                found.update(tensor_refs(value))
    return found


def reads_writes_storages(trace: Trace) -> list[tuple[frozenset[int], frozenset[int]]]:
    """For each op, the storages whose elements it reads and those it writes."""
    storage_of = [tensor.storage for tensor in trace.tensors]
    return [
        (frozenset(storage_of[t] for t in op.reads), frozenset(storage_of[t] for t in op.writes)) for op in trace.ops
    ]
