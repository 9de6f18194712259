"""The best plan within a memory limit for each GPU.

Memory gets a price, and the exact search finds the best plan at each price (Lagrangian relaxation; Everett,
"Generalized Lagrange multiplier method", 1963). If the best plan overall fits, it is exact. Else the result is the
fastest fitting plan seen, known ones among them, with a lower bound on the time of every fitting plan from the
relaxation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from gpusim.errors import OptionError
from gpusim.layerwise.communication import Floats
from gpusim.layerwise.eliminate import Pair, Solution, cost_of, solve
from gpusim.units import format_bytes

#: Number of prices tried: each halves the interval.
_PRICES: Final = 40


def solve_within(
    nodes: Sequence[Floats],
    edges: Mapping[Pair, Floats],
    memory: Sequence[Floats],
    limit_bytes: int,
    known: Sequence[tuple[int, ...]] = (),
) -> Solution:
    """Return the best choice within `limit_bytes` in total, no worse than those `known` that fit.

    Raises `OptionError` if none fits.
    """
    best = solve(nodes, edges, known=known)
    if _bytes(memory, best.choice) <= limit_bytes:
        return best
    least = sum(float(each.min()) for each in memory)
    if least > limit_bytes:
        problem = f"no plan fits: each needs {format_bytes(least)} on one GPU at least"
        raise OptionError(problem, argument="memory_limit", value=format_bytes(limit_bytes))
    fitting = [(cost_of(nodes, edges, choice), choice) for choice in known if _bytes(memory, choice) <= limit_bytes]
    cheapest, bound = min(fitting, default=None), best.bound_ns
    low, high = 0.0, best.cost_ns / max(1.0, float(limit_bytes)) + 1e-9
    for _ in range(_PRICES):
        solution = _priced(nodes, edges, memory, high)
        if _bytes(memory, solution.choice) <= limit_bytes:
            break
        high *= 4
    for _ in range(_PRICES):
        price = (low + high) / 2
        solution = _priced(nodes, edges, memory, price)
        used = _bytes(memory, solution.choice)
        bound = max(bound, solution.bound_ns - price * limit_bytes)
        if used <= limit_bytes:
            high = price
            cost = cost_of(nodes, edges, solution.choice)
            if cheapest is None or cost < cheapest[0]:
                cheapest = cost, solution.choice
        else:
            low = price
    if cheapest is None:  # every price tried bought too much: the smallest plan of all fits
        choice = tuple(int(each.argmin()) for each in memory)
        cheapest = cost_of(nodes, edges, choice), choice
    return Solution(cheapest[1], cheapest[0], min(bound, cheapest[0]), best.kernel)


def _priced(nodes: Sequence[Floats], edges: Mapping[Pair, Floats], memory: Sequence[Floats], price: float) -> Solution:
    return solve([costs + price * used for costs, used in zip(nodes, memory, strict=True)], edges)


def _bytes(memory: Sequence[Floats], choice: Sequence[int]) -> float:
    return float(np.sum([used[choice[index]] for index, used in enumerate(memory)]))
