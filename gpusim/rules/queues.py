"""Launch from the host: one thread launches in order into hardware queues; the head of a queue blocks later entries.

    start = max(launched + start_ns, end of stream's previous kernel + chain_ns, end of any other dependency + event_ns)

Source: 44 measured cases, and the assignment of streams to queues (research/2026-11-23-stream-mode.md). Constants:
`StreamCosts.launch_ns`, `event_host_ns`, `start_ns`, `chain_ns`, `event_ns`, `queues`.
"""

from __future__ import annotations

from gpusim.formats.hardware import StreamCosts


def host_launch_ns(stream: StreamCosts, host_ns: float, events: int) -> float:
    """Return the host time of a launch with its event waits, in ns; `host_ns` is its traced time, 0 if unknown."""
    return (host_ns if host_ns > 0.0 else stream.launch_ns) + stream.event_host_ns * events


def launched_start_ns(stream: StreamCosts, launched_ns: float) -> float:
    """Return the earliest start of a kernel after its launch."""
    return launched_ns + stream.start_ns


def stream_start_ns(stream: StreamCosts, ended_ns: float) -> float:
    """Return the earliest start of a kernel after the previous one of its stream."""
    return ended_ns + stream.chain_ns


def event_start_ns(stream: StreamCosts, ended_ns: float) -> float:
    """Return the earliest start of a kernel after one of another stream whose event it waits for."""
    return ended_ns + stream.event_ns


def hardware_queue(stream: StreamCosts, number: int) -> int:
    """Return the hardware queue of a device's `number`-th stream, in order of first launches: round-robin."""
    return number % int(stream.queues)


def least_gap_ns(stream: StreamCosts) -> float:
    """Return the minimum time from the end of any predecessor to a start, in ns."""
    return min(stream.chain_ns, stream.event_ns)
