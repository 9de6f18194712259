"""Contention on an SM: how much slower blocks run the fuller their SM is, and how long a block takes.

A block of a kernel of which an SM could hold r adds 1 / r to the load of its SM. Blocks take load^p times as long as at
load 1, below 1, too. GEMM-like kernels (matrix products, convolutions, attention) have a p of their own. Each of the
two classes counts in the load of the other by the factor `cross_load`. Alone, a kernel takes its time wave by wave, the
last wave of n blocks (n / r)^p of a full one.

    load = own load + cross_load x load of the other class;  rate = 1 / load^p

Source: fitted to schedules of three networks on an H200, checked on others (research/2026-11-23-calibration.md).
Constants: `Contention.sharing_exponent`, `matrix_exponent`, `cross_load`.
"""

from __future__ import annotations

from gpusim.formats.hardware import Contention


def exponent(contention: Contention, gemm: int) -> float:
    """p of GEMM-like kernels (`gemm` 1) or of all others (0); a `matrix_exponent` of 0 stands for the others' p."""
    if gemm == 1 and contention.matrix_exponent > 0.0:
        return contention.matrix_exponent
    return contention.sharing_exponent


def exponents(contention: Contention) -> tuple[float, float]:
    """p of all other kernels, and of GEMM-like ones."""
    return exponent(contention, 0), exponent(contention, 1)


def alone_rate(contention: Contention, blocks: int, blocks_per_sm: int, sms: int, gemm: int) -> float:
    """Rate of so many blocks of one kernel spread over SMs that hold nothing else."""
    on_an_sm = (blocks + sms - 1) // sms
    return rate(contention, on_an_sm * block_load(blocks_per_sm), gemm)


def block_load(blocks_per_sm: int) -> float:
    """What a block adds to the load of its SM, which could hold so many of them."""
    return 1.0 / blocks_per_sm


def load(contention: Contention, own_load: float, other_load: float) -> float:
    """The load that blocks of one class feel, from the loads of their own class and of the other."""
    return own_load + contention.cross_load * other_load


def rate(contention: Contention, load: float, gemm: int) -> float:
    """How fast blocks of a class go on that feel this load, which is above 0; 1 is the rate at load 1."""
    return float(1.0 / load ** exponent(contention, gemm))


def waves(contention: Contention, blocks: int, blocks_per_sm: int, sms: int, gemm: int) -> float:
    """Time of a kernel alone over that of a block at load 1: a last wave that is not full takes less.

    `blocks` are those that are placed (`gpusim.rules.dispatch.placed_blocks`).
    """
    at_once = sms * blocks_per_sm
    on_an_sm = (blocks % at_once + sms - 1) // sms
    return float(blocks // at_once + (on_an_sm / blocks_per_sm) ** exponent(contention, gemm))
