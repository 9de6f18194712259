"""Sections of pages between two markers, kept up to date by scripts."""

from __future__ import annotations

from gpusim.errors import OutputError


def with_section(page: str, name: str, begin: str, end: str, text: str) -> str:
    """Return the page with `text` between the markers. Raises `OutputError`, naming the page, if they are missing."""
    before, opened, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not (opened and closed):
        raise OutputError(name, f"no section between {begin} and {end}")
    return f"{before}{begin}\n{text}\n{end}{after}"
