"""Schedules by policy name, or by the name of the recommended schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpusim.defaults import DEFAULT_STREAMS, RECOMMENDED
from gpusim.errors import UnknownNameError
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule, check_streams
from gpusim.policies.registry import POLICIES, policy_by_name

if TYPE_CHECKING:
    from gpusim.search.budget import Report


def check_policy(name: str) -> None:
    """Raise `UnknownNameError` unless `name` is a policy or `RECOMMENDED`."""
    if name != RECOMMENDED and name not in POLICIES:
        raise UnknownNameError("policy", name, (*POLICIES, RECOMMENDED))


def schedule_of(
    graph: OpGraph,
    policy: str,
    streams: int = DEFAULT_STREAMS,
    report: Report = lambda stage, share, best_ns: None,
) -> Schedule:
    """Return the schedule of a policy on up to `streams` streams.

    `RECOMMENDED` explores the step with the defaults of `explore` and returns the recommended schedule with its name.
    Raises `UnknownNameError` for the policy and `OptionError` for the number of streams.
    """
    check_streams(streams)
    if policy != RECOMMENDED:
        return policy_by_name(policy)(graph, streams)
    from gpusim.search.explore import explore  # slow to import, and needed only for a search

    return explore(graph, streams=streams, report=report).best.schedule
