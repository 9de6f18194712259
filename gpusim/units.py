"""Units: integer nanoseconds and bytes inside, readable text at the edge."""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Final

NS_PER_US = 1_000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

_SIZE: Final = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([KMGT]?)(i?)(B?)\s*", re.IGNORECASE)


def us_to_ns(time_us: float) -> int:
    """Convert microseconds (float, as in profiles) to whole nanoseconds, rounded to the nearest."""
    return round(time_us * NS_PER_US)


def ms_to_ns(time_ms: float) -> int:
    """Convert milliseconds (float, as from CUDA events) to whole nanoseconds, rounded to the nearest."""
    return round(time_ms * NS_PER_MS)


def format_ns(time_ns: float) -> str:
    """Format a time in ns, us, ms or s with four significant digits: `869.1 us`."""
    for limit, divisor, unit in ((1e3, 1, "ns"), (1e6, 1e3, "us"), (1e9, 1e6, "ms")):
        if abs(time_ns) < limit:
            return f"{time_ns / divisor:.4g} {unit}" if divisor > 1 else f"{time_ns:.0f} ns"
    return f"{time_ns / 1e9:.4g} s"


def format_times_ns(times_ns: Iterable[float], signed: bool = False) -> list[str]:
    """Format times for the cells of one table: in the unit of the longest, with fixed decimals.

    `signed` adds a plus sign to positive times.
    """
    times = list(times_ns)
    longest = max((abs(time_ns) for time_ns in times), default=0.0)
    divisor, unit, decimals = next(
        (row for row in ((NS_PER_S, "s", 3), (NS_PER_MS, "ms", 3), (NS_PER_US, "us", 1)) if longest >= row[0]),
        (1, "ns", 0),
    )
    sign = "+" if signed else ""
    return [f"{time_ns / divisor:{sign}.{decimals}f} {unit}" for time_ns in times]


def format_bytes(size_bytes: float) -> str:
    """Format a size in B, KiB, MiB or GiB: `26.3 MiB`."""
    for limit, divisor, unit in ((KIB, 1, "B"), (MIB, KIB, "KiB"), (GIB, MIB, "MiB")):
        if abs(size_bytes) < limit:
            return f"{_three_digits(size_bytes / divisor)} {unit}"
    return f"{_three_digits(size_bytes / GIB)} GiB"


def format_bytes_up(size_bytes: int) -> str:
    """Format a size in KiB or MiB so that, read again, it is no smaller: for budgets that work."""
    if size_bytes < MIB:
        return f"{-(-size_bytes // KIB)} KiB"
    tenths = -(-10 * size_bytes // MIB)
    whole, tenth = divmod(tenths, 10)
    return f"{whole}.{tenth} MiB" if tenth and whole < 100 else f"{-(-tenths // 10)} MiB"


def format_peak(size_bytes: int) -> str:
    """Format the peak memory of a step; 0 bytes are those of a profile without tensors: `unknown`."""
    return format_bytes(size_bytes) if size_bytes else "unknown"


def _three_digits(number: float) -> str:
    """Format with three significant digits, or all digits before the point if there are more."""
    return f"{number:.0f}" if abs(number) >= 999.5 else f"{number:.3g}"


def parse_bytes(text: str, bare: int = 1) -> int:
    """Parse `8GiB`, `512 MiB`, `40 GB` or a bare number of `bare` bytes to whole bytes, rounded down.

    Raises `ValueError` for anything else.
    """
    match = _SIZE.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        raise ValueError(text)
    number, prefix, binary, byte = match.groups()
    base = 1024 if binary else 1000
    factor = base ** (" KMGT".index(prefix.upper()) if prefix else 0)
    return int(Decimal(number) * (factor if prefix or byte else bare))


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: `1 stream`, `2 streams`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def clause(count: int, noun: str, one: str, several: str) -> str:
    """Return a count with its noun and verb: `1 layer has`, `2 layers have`."""
    return f"{counted(count, noun)} {one if count == 1 else several}"
