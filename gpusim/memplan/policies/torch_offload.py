"""torch's activation offloading: all saved activations move, on a stream of their own.

Source: PyTorch's `torch/_functorch/_activation_offloading` (`enable_activation_offloading`,
`activation_offload_sink_wait`, `activation_reload_prefetch`). The rules:

1. Marked activations are copied out after their last use in the forward pass, on a second stream.
2. The waits for these copies are moved down to the end of the forward pass.
3. A copy back is launched as many ops ahead as it takes at a constant bandwidth (50 GB/s).

Filled in: torch leaves the marks to the user; here every saved activation is marked. Memory is let go when the wait is
over: by rule 2, at the start of the backward pass.
"""

from __future__ import annotations

from dataclasses import replace

from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.policies.base import Setting, layer_ends
from gpusim.memplan.times import Link, first_needs, place_copies

#: torch's default, `activation_offload_cpu_gpu_bw`.
CONSTANT_BYTES_PER_NS = 50.0


def torch_offload(setting: Setting) -> MemoryPlan:
    """Move every saved activation, and wait for the copies at the end of the forward pass."""
    storages, times = setting.storages, setting.times
    turn = min(storages.first_backward, len(storages.trace.ops) - 1)
    needs = first_needs(storages, times, storages.saved)
    moved = [s for s in storages.saved if needs[s] > turn]
    offloads = place_copies(storages, times, Link(CONSTANT_BYTES_PER_NS, CONSTANT_BYTES_PER_NS, 0.0), moved, needs)
    return MemoryPlan(
        offloads=tuple(replace(each, free=turn, back=max(turn, each.back)) for each in offloads),
        barriers=layer_ends(setting) if setting.synchronous else (),
    )
