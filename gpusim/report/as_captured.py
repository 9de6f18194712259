"""Whether a replay's sequential graph takes the time that predictions are anchored to, in words."""

from __future__ import annotations

from gpusim.formats.measurement import Measurement
from gpusim.rules.anchor import is_as_captured


def not_as_captured(measurement: Measurement) -> str:
    """Return by how much the sequential graph differs from its prediction, which is its time at capture; empty where
    that holds.
    """
    if is_as_captured(measurement.predicted_sequential_ns, measurement.sequential.median_ns):
        return ""
    share = measurement.sequential.median_ns / measurement.predicted_sequential_ns - 1.0
    how = "less" if share < 0 else "more"
    return f"the sequential graph takes {abs(share):.1%} {how} than predicted from its capture; so may the schedule"
