"""Whether a replay's sequential graph takes the time of its capture, to which predictions are anchored, in words."""

from __future__ import annotations

from gpusim.formats.measurement import Measurement
from gpusim.formats.trace import Trace
from gpusim.rules.anchor import is_as_captured


def not_as_captured(measurement: Measurement, trace: Trace) -> str:
    """Return by how much a replay's sequential graph differs from that of the capture.

    Empty where they are alike, or cannot be compared: a trace without a timed graph, or of another GPU.
    """
    truth, measured_ns = trace.ground_truth, measurement.sequential.median_ns
    if truth is None or trace.provenance.gpu.name != measurement.gpu.name:
        return ""
    if is_as_captured(truth.graph.median_ns, measured_ns):
        return ""
    share = measured_ns / truth.graph.median_ns - 1.0
    how = "less" if share < 0 else "more"
    return f"the sequential graph takes {abs(share):.1%} {how} than at capture; so may the schedule"
