"""Generated parts of pages in research/."""

from __future__ import annotations

from pathlib import Path


def fill(page: Path, part: str, text: str) -> None:
    """Replace the text between the marks of a part, `<!-- part:begin -->` and `<!-- part:end -->`. Exits without
    marks.
    """
    begin, end = f"<!-- {part}:begin -->", f"<!-- {part}:end -->"
    before, opened, rest = page.read_text("utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not (opened and closed):
        raise SystemExit(f"{page}: no part between {begin} and {end}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", "utf-8")
