"""Times of collectives: measured curves, interpolated over the logarithm of size, and estimates without one.

A curve measured for another number of GPUs is read at the size with as many bytes on a GPU's link, plus the latency of
the further steps ("scaled"). Without a curve, a time is latency plus bytes over bandwidth ("links"); between nodes it
always is.

A ring moves 2 (g - 1) / g of the buffer over each GPU's link in an all-reduce, and (g - 1) / g in the others (NCCL's
own accounting, nccl-tests, doc/PERFORMANCE.md).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Literal

import numpy as np
import numpy.typing as npt

from gpusim.formats.topology import Collective, Curve, Link, Topology

Basis = Literal["measured", "scaled", "links"]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Members:
    """Participants of a collective: GPUs in total, most GPUs on one node, and nodes.

    `at_once` is the number of such collectives that share a node's network: one for each part of the channels.
    """

    gpus: int
    of_node: int
    nodes: int = 1
    at_once: int = 1


@lru_cache(maxsize=1024)
def members(gpus: range, gpus_per_node: int, at_once: int = 1) -> Members:
    """Return the `Members` of a collective among these GPUs; a node has no more than one GPU for each at once."""
    counts: dict[int, int] = {}
    for gpu in gpus:
        counts[gpu // gpus_per_node] = counts.get(gpu // gpus_per_node, 0) + 1
    return Members(len(gpus), max(counts.values()), len(counts), min(at_once, gpus_per_node))


def wire_share(collective: Collective, gpus: int) -> float:
    """Return the bytes on a GPU's link for each byte of its buffer."""
    return (2.0 if collective == "all_reduce" else 1.0) * (gpus - 1) / gpus


def time_ns(topology: Topology, collective: Collective, size_bytes: float, who: Members) -> float:
    """Time of one collective on an idle machine, in ns; 0 for no bytes or one GPU."""
    if size_bytes <= 0 or who.gpus < 2:
        return 0.0
    inside = _in_node_ns(topology, collective, size_bytes, who.of_node) if who.of_node > 1 else 0.0
    if who.nodes < 2:
        return inside
    link = topology.links.network
    assert link is not None  # `check_gpus`
    wire = wire_share(collective, who.nodes) * size_bytes * who.at_once
    steps = (2 if collective == "all_reduce" else 1) * math.ceil(math.log2(who.nodes))
    return inside + wire / link.bytes_per_ns + steps * link.latency_ns


def basis(topology: Topology, collective: Collective, who: Members) -> Basis:
    """Return the source of the time of a collective."""
    if who.nodes > 1:
        return "links"
    groups = [curve.gpus for curve in topology.curves if curve.collective == collective]
    return "links" if not groups else "measured" if who.gpus in groups else "scaled"


def all_to_all_ns(topology: Topology, sizes_bytes: Floats, gpus: int) -> Floats:
    """`time_ns` of all-to-alls of many sizes among GPUs of one node."""
    link, curve = topology.links.node, _nearest(topology, "all_to_all", gpus)
    assert link is not None  # `check_gpus`
    if curve is None:
        by_links: Floats = link.latency_ns + wire_share("all_to_all", gpus) * sizes_bytes / link.bytes_per_ns
        return by_links
    points = regular(curve.points)
    sizes = np.log([size for size, _ in points])
    wanted = np.log(sizes_bytes * wire_share("all_to_all", gpus) / wire_share("all_to_all", curve.gpus))
    times = np.exp(np.interp(wanted, sizes, np.log([time for _, time in points])))
    times[wanted > sizes[-1]] *= np.exp(wanted[wanted > sizes[-1]] - sizes[-1])
    return times


def sync_ns(topology: Topology, size_bytes: float, who: Members) -> float:
    """Time in ns to sum the gradients of weights held by several GPUs and distribute the result."""
    if topology.sync == "all_reduce":
        return time_ns(topology, "all_reduce", size_bytes, who)
    return _parameter_server_ns(topology, size_bytes, who)


def sync_bytes(topology: Topology, size_bytes: int, gpus: int) -> int:
    """Bytes over all links for that: 2 (g - 1) times the size for a ring, 2 g for a separate server."""
    if gpus < 2:
        return 0
    return 2 * size_bytes * (gpus if topology.sync == "parameter_server" else gpus - 1)


def _parameter_server_ns(topology: Topology, size_bytes: float, who: Members) -> float:
    """Time of a parameter server: a node's GPUs send gradients to one of them, the nodes in turn send to the server.

    Parameters return over the other direction at the same time, as in the server simulation that accompanied the paper
    (bytes x (replicas - 1) / bandwidth, in the node and across nodes).
    """
    time = 0.0
    of_node, network = (who.of_node, topology.links.node, 1), (who.nodes, topology.links.network, who.at_once)
    for count, link, at_once in (of_node, network):
        if count > 1:
            assert link is not None
            time += at_once * size_bytes * (count - 1) / link.bytes_per_ns + link.latency_ns
    return time


def _in_node_ns(topology: Topology, collective: Collective, size_bytes: float, gpus: int) -> float:
    curve = _nearest(topology, collective, gpus)
    link = topology.links.node
    assert link is not None
    if curve is None:
        return (
            _steps(collective, gpus) * link.latency_ns + wire_share(collective, gpus) * size_bytes / link.bytes_per_ns
        )
    if curve.gpus == gpus:
        return interpolate(curve, size_bytes)
    same_wire = size_bytes * wire_share(collective, gpus) / wire_share(collective, curve.gpus)
    more_steps = _steps(collective, gpus) - _steps(collective, curve.gpus)
    return max(interpolate(curve, same_wire) + more_steps * link.latency_ns, _least_ns(link, collective, gpus))


def _least_ns(link: Link, collective: Collective, gpus: int) -> float:
    return _steps(collective, gpus) * link.latency_ns


def _steps(collective: Collective, gpus: int) -> int:
    """Return the number of sequential steps: those of a ring; an all-to-all sends its messages at once."""
    return {"all_reduce": 2 * (gpus - 1), "all_to_all": 1}.get(collective, gpus - 1)


@lru_cache(maxsize=256)
def _nearest(topology: Topology, collective: Collective, gpus: int) -> Curve | None:
    """Return the curve for the nearest number of GPUs; of two equally near, the larger number."""
    curves = [curve for curve in topology.curves if curve.collective == collective]
    return min(curves, key=lambda curve: (abs(math.log(curve.gpus / gpus)), -curve.gpus), default=None)


def interpolate(curve: Curve, size_bytes: float) -> float:
    """Interpolate a time linearly in logarithms; beyond the largest size, continue at its bandwidth.

    Below the smallest size it is that size's time, its latency.
    """
    points = regular(curve.points)
    if size_bytes <= points[0][0]:
        return points[0][1]
    if size_bytes >= points[-1][0]:
        return points[-1][1] * size_bytes / points[-1][0]
    place = bisect_left(points, size_bytes, key=itemgetter(0))
    (low, low_ns), (high, high_ns) = points[place - 1], points[place]
    share = math.log(size_bytes / low) / math.log(high / low)
    return float(low_ns * (high_ns / low_ns) ** share)


@lru_cache(maxsize=256)
def regular(points: tuple[tuple[int, int], ...]) -> tuple[tuple[int, float], ...]:
    """Remove noise from measured points: a larger message is neither faster in total nor slower per byte.

    Source of the rule: Alpa's tables of collectives (Zheng et al., OSDI 2022) are made monotone in bandwidth likewise.
    """
    regular_points: list[tuple[int, float]] = []
    for size, time in points:
        if not regular_points:
            regular_points.append((size, float(time)))
            continue
        before, before_ns = regular_points[-1]
        regular_points.append((size, min(max(float(time), before_ns), before_ns * size / before)))
    return tuple(regular_points)
