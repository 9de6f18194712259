"""Readable sizes."""

from __future__ import annotations

import pytest

from gpusim.units import GIB, KIB, MIB, format_bytes


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1000, "1000 B"),
        (1023 * MIB, "1023 MiB"),
        (1000 * KIB, "1000 KiB"),
        (26.34 * MIB, "26.3 MiB"),
        (139.8 * GIB, "140 GiB"),
        (123_456 * GIB, "123456 GiB"),
        (-1000 * MIB, "-1000 MiB"),
    ],
)
def test_sizes_have_three_digits_and_no_exponent(size_bytes: float, text: str) -> None:
    assert format_bytes(size_bytes) == text
