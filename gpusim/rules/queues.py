"""Launch from the host: one thread launches in order into hardware queues; a queue's head blocks what is behind it.

    start = max(launched + start_ns, end of stream's previous kernel + chain_ns, end of any other dependency + event_ns)

Source: 44 measured cases, and how streams are dealt over queues (research/2026-11-23-stream-mode.md). Constants:
`StreamCosts.launch_ns`, `event_host_ns`, `start_ns`, `chain_ns`, `event_ns`, `queues`.
"""

from __future__ import annotations

from gpusim.formats.hardware import StreamCosts


def host_launch_ns(stream: StreamCosts, host_ns: float, events: int) -> float:
    """Host time of a launch and of the events it waits for; `host_ns` is the launch's traced time, 0 where unknown."""
    return (host_ns if host_ns > 0.0 else stream.launch_ns) + stream.event_host_ns * events


def launched_start_ns(stream: StreamCosts, launched_ns: float) -> float:
    """When a kernel may start for its launch."""
    return launched_ns + stream.start_ns


def stream_start_ns(stream: StreamCosts, ended_ns: float) -> float:
    """When a kernel may start for the one before it in its stream."""
    return ended_ns + stream.chain_ns


def event_start_ns(stream: StreamCosts, ended_ns: float) -> float:
    """When a kernel may start for one of another stream, whose event it waits for."""
    return ended_ns + stream.event_ns


def hardware_queue(stream: StreamCosts, number: int) -> int:
    """The hardware queue of the `number`-th stream of a device, in the order of first launches: dealt in turn."""
    return number % int(stream.queues)


def least_gap_ns(stream: StreamCosts) -> float:
    """The least time from the end of any predecessor to a start."""
    return min(stream.chain_ns, stream.event_ns)
