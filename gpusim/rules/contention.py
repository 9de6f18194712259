"""Contention on an SM: the rate of blocks as a function of the load of their SM, and the time of a block.

A block adds 1 / r to the load of its SM, where r is the number of the kernel's blocks that an SM could hold. Blocks
take load^p times as long as at load 1, also below 1. GEMM-like kernels (matrix products, convolutions, attention) have
a p of their own. Each of the two classes counts in the load of the other with the factor `cross_load`. Alone, a kernel
runs wave by wave; a last wave of n blocks takes (n / r)^p of a full one.

    load = own load + cross_load x load of the other class;  rate = 1 / load^p

Source: fitted to schedules of three networks on an H200, checked on others (research/2026-11-23-calibration.md).
Constants: `Contention.sharing_exponent`, `matrix_exponent`, `cross_load`.
"""

from __future__ import annotations

from gpusim.formats.hardware import Contention


def exponent(contention: Contention, gemm: int) -> float:
    """Return p of GEMM-like kernels (`gemm` 1) or of all others (0); a `matrix_exponent` of 0 means the others' p."""
    if gemm == 1 and contention.matrix_exponent > 0.0:
        return contention.matrix_exponent
    return contention.sharing_exponent


def exponents(contention: Contention) -> tuple[float, float]:
    """Return p of other kernels, and of GEMM-like ones."""
    return exponent(contention, 0), exponent(contention, 1)


def alone_rate(contention: Contention, blocks: int, blocks_per_sm: int, sms: int, gemm: int) -> float:
    """Return the rate of `blocks` blocks of one kernel spread over SMs without other kernels."""
    on_an_sm = (blocks + sms - 1) // sms
    return rate(contention, on_an_sm * block_load(blocks_per_sm), gemm)


def block_load(blocks_per_sm: int) -> float:
    """Return the load that a block adds to its SM, which could hold `blocks_per_sm` of them."""
    return 1.0 / blocks_per_sm


def load(contention: Contention, own_load: float, other_load: float) -> float:
    """Return the load for blocks of one class, from the loads of their own class and of the other."""
    return own_load + contention.cross_load * other_load


def rate(contention: Contention, load: float, gemm: int) -> float:
    """Return the rate of blocks of a class at a load above 0; the rate at load 1 is 1."""
    return float(1.0 / load ** exponent(contention, gemm))


def waves(contention: Contention, blocks: int, blocks_per_sm: int, sms: int, gemm: int) -> float:
    """Return the time of a kernel alone over that of a block at load 1; a partial last wave takes less.

    `blocks` is the number of placed blocks (`gpusim.rules.dispatch.placed_blocks`).
    """
    at_once = sms * blocks_per_sm
    on_an_sm = (blocks % at_once + sms - 1) // sms
    return float(blocks // at_once + (on_an_sm / blocks_per_sm) ** exponent(contention, gemm))
