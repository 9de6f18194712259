"""Maximum progress of an SM shared by kernels of two kinds, which slow their own kind most.

The setting is that of `gpusim.bounds.energetic` with placement SM by SM. GEMM-like kernels (m) and others (o) have
exponents p_m and p_o; p is the smaller one. With loads a_o and a_m of the kinds on an SM, the blocks of kind k run at
rate (a_k + w a_j)^-p_k, where w is the cross load and j the other kind. For each kind let F_k be the sum of f and L_k
the sum of l': F_k <= L_k <= c F_k, L_k <= a_k, F_o + F_m <= 1. Its blocks do (u L_k + (1 - u) F_k) x rate per ns. Let
s = L_o + L_m, t_k = L_k / s and e_k = t_k + w t_j; rates are at most (s e_k)^-p_k. Then for any weights v_k

    sum of v_k (u L_k + (1 - u) F_k) x rate <= C = max over t of (sum of t_k (v_k e_k^-p_k)^(1/p))^p.

For s > 1: u L_k + (1 - u) F_k <= F_k (L_k / F_k)^p, since u x + (1 - u) <= x^p from 1 to c, and s^-p_k <= s^-p. So the
left side is at most s^-p times the sum of F_k^(1 - p) (L_k (v_k e_k^-p_k)^(1/p))^p, and by Hoelder's inequality at most
s^-p (F_o + F_m)^(1 - p) (s x sum of t_k (v_k e_k^-p_k)^(1/p))^p <= C. For s <= 1, it is at most the sum of
v_k L_k (s e_k)^-p_k and so at most the sum of t_k (v_k e_k^-p_k). This is a mean of two numbers, which is at most the
p-th power of the mean of their (1/p)-th powers.

In addition, the left side is at most v_o + v_m, since its own load alone limits a kind to 1. It is also at most the
larger of v_k w^-p_k, since a_k + w a_j is at least w (a_o + a_m), and with that load both kinds together do at most 1.
Weights (1, 0) and (0, 1) have C = 1: a kind by itself. With w = 1 all e_k are 1, and weights (1, 1) have C = 1: other
weights give no larger bound.
"""

from __future__ import annotations

import functools

import numpy as np

Weights = tuple[float, float]
"""Weights of the work of other kernels and of GEMM-like kernels."""

#: Both kinds count in full.
IN_FULL: tuple[Weights, ...] = ((1.0, 1.0),)
#: Weights of one kind if the other has weight 1, before division by C; small weights suit small amounts of a kind.
_PARTS = (0.25, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
#: Intervals of t in the maximisation of C; each has an upper bound, and together they are at most 0.1 % too large.
_CELLS = 4096
#: Margin above any rounding error.
_MARGIN = 1e-9


@functools.lru_cache(maxsize=64)
def weights(exponents: tuple[float, float], cross_load: float) -> tuple[Weights, ...]:
    """Return weights with which all blocks of an SM together do at most 1 per ns.

    Each pair of weights gives a bound; `IN_FULL` if `cross_load` is 1. `exponents` are those of `Contention`, above 0.
    """
    if cross_load == 1.0:
        return IN_FULL
    pairs = [(1.0, 1.0), *((1.0, part) for part in _PARTS), *((part, 1.0) for part in _PARTS)]
    most = [most_done(exponents, cross_load, pair) for pair in pairs]
    divided = [(others / done, matrix / done) for (others, matrix), done in zip(pairs, most, strict=True)]
    return ((1.0, 0.0), (0.0, 1.0), *divided)


def most_done(exponents: tuple[float, float], cross_load: float, counted: Weights) -> float:
    """Return C for weights above 0, rounded up."""
    least = min(exponents)
    ends = np.linspace(0.0, 1.0, _CELLS + 1)
    # In a cell, each part of the load is at most its larger end, and each kind's load at least its smaller end.
    sides = ((ends[1:], ends[:-1]), (1.0 - ends[:-1], 1.0 - ends[1:]))
    with np.errstate(divide="ignore"):  # zero load if the other kind does not count: no bound, 0^-p
        others, matrix = (
            np.log(largest) + (np.log(weight) - exponent * np.log(smallest + cross_load * (1.0 - smallest))) / least
            for (largest, smallest), weight, exponent in zip(sides, counted, exponents, strict=True)
        )
        # Logarithms, since 1/p may reach 1e12.
        upper = np.exp(least * np.max(np.logaddexp(others, matrix)))
    bounds = [float(upper), sum(counted)]
    if cross_load > 0.0:
        bounds.append(max(weight * cross_load**-exponent for weight, exponent in zip(counted, exponents, strict=True)))
    return min(bounds) * (1.0 + _MARGIN)
