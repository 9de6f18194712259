"""Parallel work on ranges of a batch, one thread each; the work must release the GIL."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_ranges(count: int, threads: int | None, work: Callable[[int, int], None]) -> None:
    """Call `work(first, last)` on ranges that cover 0 to `count`, one per thread (default: one per core)."""
    parts = max(1, min(threads or cores(), count))
    edges = [count * part // parts for part in range(parts + 1)]
    if parts == 1:
        work(0, count)
        return
    with ThreadPoolExecutor(parts) as pool:
        list(pool.map(work, edges[:-1], edges[1:]))
