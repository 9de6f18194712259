"""Contention with one pool of SMs: the oldest kernel runs undisturbed, later ones slower than their share of the SMs.

    rate = share of its demand that a kernel gets / (1 + younger_slowdown x warps per SM, at most 1)

Kernels take shares of the GPU's threads, registers, shared memory and block slots in start order; after a kernel that
did not get all of its demand, no later one gets any. Later kernels wait for issue slots, caches and memory; a kernel of
a few warps is alone on its SMs and loses less. `gpusim.engine.pool` assigns the shares.

Source: pairs of kernels on an H200 (research/2026-11-22-fidelity-history.md). Constant: `Contention.younger_slowdown`.
"""

from __future__ import annotations

from gpusim.formats.hardware import Contention


def slowed_part(contention: Contention, warps_per_sm: float) -> float:
    """Return the slowdown of a kernel next to an older one, as a share of its time; `warps_per_sm` is at most 1."""
    return contention.younger_slowdown * warps_per_sm


def later_slowdown(contention: Contention, warps_per_sm: float) -> float:
    """Return the factor on the time of a kernel next to an older one."""
    return 1.0 + slowed_part(contention, warps_per_sm)
