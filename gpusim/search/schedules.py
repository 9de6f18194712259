"""Rows of an exploration as schedules."""

from __future__ import annotations

from gpusim.plan.schedule import Schedule, make_schedule
from gpusim.search.explore import Explored, Row
from gpusim.version import __version__


def row_schedule(explored: Explored, row: Row) -> Schedule:
    """The schedule document of any row; for the best one it is what `gpusim explore -o` writes."""
    return make_schedule(
        explored.trace,
        row.assignment.order,
        row.assignment.streams,
        policy=row.policy,
        made_by=f"gpusim {__version__}, {explored.hardware.label}, seed {explored.seed}",
        predicted_ns=row.makespan_ns,
        variants=row.assignment.variants,
        partitions=row.assignment.partitions,
    )
