"""Contention with one pool of SMs: the oldest kernel is undisturbed, later ones run slower than their share of the SMs.

    rate = share of its demand that a kernel gets / (1 + younger_slowdown x warps per SM, at most 1)

Kernels take shares of the GPU's threads, registers, shared memory and block slots in the order of their starts; behind
one that did not get all of its demand nobody gets any. A later kernel waits for issue slots, caches and memory behind
the oldest; one of a few warps is alone on its SMs and loses less. `gpusim.engine.pool` shares out.

Source: pairs of kernels on an H200 (research/2026-11-22-fidelity-history.md). Constant: `Contention.younger_slowdown`.
"""

from __future__ import annotations

from gpusim.formats.hardware import Contention


def slowed_part(contention: Contention, warps_per_sm: float) -> float:
    """What a kernel of so many warps an SM (at most 1) takes longer beside an older one, as a part of its time."""
    return contention.younger_slowdown * warps_per_sm


def later_slowdown(contention: Contention, warps_per_sm: float) -> float:
    """How many times as long it takes there."""
    return 1.0 + slowed_part(contention, warps_per_sm)
