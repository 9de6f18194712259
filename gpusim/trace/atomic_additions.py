"""Results that depend on the order in which a kernel of Inductor's adds atomically.

Blocks that add to one element add in the order in which they run, and floating-point sums round differently in each
order. Two runs of such a kernel alone often agree bit for bit, by luck: beside other kernels its blocks run in another
order. So a result behind such an addition may differ between two right schedules, and no other result may.
"""

from __future__ import annotations

import re
from typing import Final

from gpusim.formats.trace import Trace
from gpusim.trace.dependencies import reads_writes_storages

#: Inductor's calls that add atomically: `tl.atomic_add(` in Triton; in C++ `atomic_add(`, `atomic_add_vec<...>(`, and a
#: transposed store whose last template argument says so. Triton's metadata say 'atomic_add_found' of every kernel.
_ADDS: Final = re.compile(r"\batomic_add(_vec)?\s*[(<]|\btranspose_mxn<[^>]*\btrue>")


def adds_atomically(trace: Trace) -> list[bool]:
    """Return, for each op, whether its code in the trace adds atomically."""
    adding = {source.sha256 for source in trace.sources if _ADDS.search(source.text)}
    return [op.source in adding for op in trace.ops]


def behind_atomic_additions(trace: Trace) -> frozenset[int]:
    """Return the tensors whose contents, at the end of the step, depend on an op that adds atomically.

    Data flow is followed through storages, views and changes in place included. What has once depended stays in, even
    if it is overwritten: no buffer of Inductor's is used twice.
    """
    behind: set[int] = set()
    for adding, (read, written) in zip(adds_atomically(trace), reads_writes_storages(trace), strict=True):
        if adding or not behind.isdisjoint(read):
            behind |= written
    return frozenset(index for index, tensor in enumerate(trace.tensors) if tensor.storage in behind)
