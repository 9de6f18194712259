"""Readable sizes."""

from __future__ import annotations

import pytest

from gpusim.units import GIB, KIB, MIB, format_bytes, format_peak


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


def test_a_peak_of_nothing_is_not_known() -> None:
    """A profile has kernels and no tensors: 0 B would be a wrong answer."""
    assert [format_peak(size_bytes) for size_bytes in (0, 1, 1000 * KIB)] == ["unknown", "1 B", "1000 KiB"]
