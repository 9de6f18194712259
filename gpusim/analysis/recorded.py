"""The causes of a timeline: those that its engine recorded, or of another run of the same plan."""

from __future__ import annotations

from gpusim.engine.base import Timeline, engine_by_name
from gpusim.engine.causes import Causes
from gpusim.formats.hardware import HardwareModel
from gpusim.plan.graph import COMPILED_FROM_OPS


def causes_of(timeline: Timeline, hardware: HardwareModel) -> Causes:
    """Why each task of a timeline that was simulated with `hardware` waited, and what it lost.

    Every engine gives the same times for a plan. A small one is not worth compiling the fast engine for.
    """
    if timeline.causes is None:
        name = "fast" if len(timeline.plan) >= COMPILED_FROM_OPS else "reference"
        timeline = engine_by_name(name).run(timeline.plan, hardware, record=True)
    assert timeline.causes is not None
    return timeline.causes
