"""Report of a long run of `scripts/fuzz` or `scripts/kill_test`, as a page to commit."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

from gpusim.io.files import write_bytes
from gpusim.version import code_version


def write_report(path: Path, title: str, command: str, table: str, problems: list[str]) -> None:
    """Write a Markdown page: the command, the date, the code and the machine, then the table and the problems."""
    said = (
        f"`{command}`, {datetime.date.today().isoformat()}, gpusim {code_version()}, "
        f"Python {platform.python_version()}, {os.cpu_count()} cores."
    )
    failed = "\n".join(f"- `{problem}`" for problem in problems)
    parts = (f"# {title}", said, table, failed)
    write_bytes(path, "\n\n".join(part for part in parts if part).encode() + b"\n")
