"""Dependencies between ops, from data alone.

An op depends on (1) the ops that made the tensors in its arguments, (2) the last writers of every storage it reads,
(3) the last readers and writers of every storage it changes in place, (4) for a random op, the random op before it,
since both draw from one generator and another order would draw other numbers, and (5) the ops in its `after`, which
imported traces have in place of tensors. Program order adds nothing else.
The unit is the storage: aliasing tensors are the same memory. Inductor's kernels write parts of one buffer
concurrently; in their traces, two tensors alias unless they certainly share no element (`gpusim.trace.overlap`).
"""

from __future__ import annotations

from gpusim.formats.arguments import TENSOR, tensor_refs
from gpusim.formats.trace import Op, Trace
from gpusim.trace.overlap import memory_units


def dependencies(trace: Trace) -> tuple[tuple[int, ...], ...]:
    """Return the sorted indices of the ops that must have ended before each op starts.

    Every index is smaller than the op's own, since the recorded order is legal (checked on reading a trace).
    """
    units_of, n_units = memory_units(trace)
    nobody = -1
    maker = [nobody] * len(trace.tensors)
    writer = [nobody] * n_units
    readers: list[list[int] | None] = [None] * n_units  # since the last write; None if there are none
    last_random = nobody
    result: list[tuple[int, ...]] = []
    for index, op in enumerate(trace.ops):
        needed = set(map(maker.__getitem__, handles(op)))
        if op.after:
            needed.update(edge.op for edge in op.after)
        for tensor in op.reads:
            for unit in units_of[tensor]:
                needed.add(writer[unit])
                if known := readers[unit]:
                    known.append(index)
                else:
                    readers[unit] = [index]
        for tensor in op.writes:
            for unit in units_of[tensor]:
                needed.add(writer[unit])
                if known := readers[unit]:
                    needed.update(known)
                    readers[unit] = None
                writer[unit] = index
        if op.random:
            needed.add(last_random)
            last_random = index
        for made in op.outputs:
            if made is not None and maker[made] == nobody:
                maker[made] = index
        needed.discard(nobody)
        needed.discard(index)
        result.append(tuple(sorted(needed)))
    return tuple(result)


def handles(op: Op) -> set[int]:
    """Return the tensors in an op's arguments."""
    tensors: set[int] = set()
    for values in (op.args, op.kwargs.values()) if op.kwargs else (op.args,):
        for value in values:
            if type(value) is dict and len(value) == 1 and type(tensor := value.get(TENSOR)) is int:
                tensors.add(tensor)  # the usual case, without a generator
            elif isinstance(value, dict | list | tuple):
                tensors.update(tensor_refs(value))
    return tensors


def reads_writes_storages(trace: Trace) -> list[tuple[frozenset[int], frozenset[int]]]:
    """Return the storages with elements that each op reads, and those that it writes."""
    storage_of = [tensor.storage for tensor in trace.tensors]
    return [
        (frozenset(storage_of[t] for t in op.reads), frozenset(storage_of[t] for t in op.writes)) for op in trace.ops
    ]
