"""Keep all: what PyTorch does by itself.

Source: PyTorch's autograd and caching allocator. The rules:

1. What the forward pass makes and the backward pass needs stays on the GPU until its last use.
2. Everything else is let go after its last use.
"""

from __future__ import annotations

from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.policies.base import Setting


def keep_all(setting: Setting) -> MemoryPlan:
    """Move and recompute nothing."""
    return MemoryPlan()
