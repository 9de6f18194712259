"""The one rule for quantiles: what a table, a figure or an uncertainty says that a share of values lies within."""

from __future__ import annotations

from collections.abc import Sequence


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest of the ordered values that at least `share` of them do not exceed, in whole thousandths."""
    return ordered[min(len(ordered) - 1, -(-round(share * 1000) * len(ordered) // 1000) - 1)]
