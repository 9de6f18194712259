"""How much an SM gets done at most where kernels of two kinds run on it, each disturbing its own kind most.

The setting is that of `gpusim.bounds.energetic`, where blocks go to SMs one by one. Kernels that multiply matrices (m)
and others (o) have exponents p_o and p_m, the smaller of which is p. With loads a_o and a_m of the kinds on an SM, a
kind's blocks go on at (a_k + w a_j)^-p_k, w being the cross load and j the other kind. Of each kind let F_k be the sum
of f and L_k that of l': F_k <= L_k <= c F_k, L_k <= a_k, F_o + F_m <= 1. Its blocks do (u L_k + (1 - u) F_k) x rate a
ns. Let s = L_o + L_m, t_k = L_k / s and e_k = t_k + w t_j; rates are at most (s e_k)^-p_k. Then for any weights v_k

    sum of v_k (u L_k + (1 - u) F_k) x rate <= C = max over t of (sum of t_k (v_k e_k^-p_k)^(1/p))^p.

Where s is above 1: u L_k + (1 - u) F_k <= F_k (L_k / F_k)^p, since u x + (1 - u) <= x^p from 1 to c, and
s^-p_k <= s^-p. So the left side is at most s^-p times the sum of F_k^(1 - p) (L_k (v_k e_k^-p_k)^(1/p))^p, and that, by
Hoelder's inequality, at most s^-p (F_o + F_m)^(1 - p) (s x sum of t_k (v_k e_k^-p_k)^(1/p))^p <= C. Where s is below 1,
it is at most the sum of v_k L_k (s e_k)^-p_k, and so at most that of t_k (v_k e_k^-p_k): a mean of two numbers, which
is at most the p-th power of the mean of their (1/p)-th powers.

Besides, the left side is never above v_o + v_m, since a kind's own load alone lets it do 1 at most, nor above the
larger of v_k w^-p_k, since a_k + w a_j is at least w (a_o + a_m), and with that load both do 1 at most. Weights (1, 0)
and (0, 1) have C = 1: a kind by itself. With w = 1 all e_k are 1, and weights (1, 1) have C = 1: no others say more.
"""

from __future__ import annotations

import functools

import numpy as np

Weights = tuple[float, float]
"""What the work of kernels that do not multiply matrices counts, and of those that do."""

#: Each work counts in full.
IN_FULL: tuple[Weights, ...] = ((1.0, 1.0),)
#: What one kind counts where the other counts 1, before both are divided by C: little where there is little of it.
_PARTS = (0.25, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
#: Parts of the loads' split that C is looked for in; each has an upper bound, together 0.1 % too large at most.
_CELLS = 4096
#: Above any rounding.
_MARGIN = 1e-9


@functools.lru_cache(maxsize=64)
def weights(exponents: tuple[float, float], cross_load: float) -> tuple[Weights, ...]:
    """Weights by which all blocks of an SM together do at most 1 a ns.

    Any of them gives a bound; `IN_FULL` where `cross_load` is 1. `exponents` are those of `Contention`, and above 0.
    """
    if cross_load == 1.0:
        return IN_FULL
    pairs = [(1.0, 1.0), *((1.0, part) for part in _PARTS), *((part, 1.0) for part in _PARTS)]
    most = [most_done(exponents, cross_load, pair) for pair in pairs]
    divided = [(others / done, matrix / done) for (others, matrix), done in zip(pairs, most, strict=True)]
    return ((1.0, 0.0), (0.0, 1.0), *divided)


def most_done(exponents: tuple[float, float], cross_load: float, counted: Weights) -> float:
    """C for weights above 0, or a little more."""
    least = min(exponents)
    ends = np.linspace(0.0, 1.0, _CELLS + 1)
    # In a cell neither part of the load is above its larger end, and no kind's load below its smaller one.
    sides = ((ends[1:], ends[:-1]), (1.0 - ends[:-1], 1.0 - ends[1:]))
    with np.errstate(divide="ignore"):  # no load at all, where the other kind does not count: no bound, 0^-p
        others, matrix = (
            np.log(largest) + (np.log(weight) - exponent * np.log(smallest + cross_load * (1.0 - smallest))) / least
            for (largest, smallest), weight, exponent in zip(sides, counted, exponents, strict=True)
        )
        # Logarithms, since 1/p may be as large as 1e12.
        upper = np.exp(least * np.max(np.logaddexp(others, matrix)))
    bounds = [float(upper), sum(counted)]
    if cross_load > 0.0:
        bounds.append(max(weight * cross_load**-exponent for weight, exponent in zip(counted, exponents, strict=True)))
    return min(bounds) * (1.0 + _MARGIN)
