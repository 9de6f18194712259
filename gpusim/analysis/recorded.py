"""Causes of a timeline, as recorded by its engine or by another run of the same plan."""

from __future__ import annotations

from gpusim.engine.base import Timeline, engine_by_name
from gpusim.engine.causes import Causes
from gpusim.formats.hardware import HardwareModel
from gpusim.plan.graph import COMPILED_FROM_OPS


def causes_of(timeline: Timeline, hardware: HardwareModel) -> Causes:
    """Return the causes of a timeline simulated with `hardware`.

    Engines give equal times. For a small plan, the fast engine is not worth its compilation.
    """
    if timeline.causes is None:
        name = "fast" if len(timeline.plan) >= COMPILED_FROM_OPS else "reference"
        timeline = engine_by_name(name).run(timeline.plan, hardware, record=True)
    assert timeline.causes is not None
    return timeline.causes
