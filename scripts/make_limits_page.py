"""Draw docs/images/limits.png and bring the example in docs/limits.md up to date: python scripts/make_limits_page.py.

Needs plotly, and for the picture kaleido with a Chrome or Chromium (`pip install ".[app]"`); `--no-picture` omits it.
To be run again whenever a rule of the engine, a hardware model's numbers or the example's trace changes.
"""

from __future__ import annotations

import argparse
import io
from contextlib import redirect_stdout
from pathlib import Path

from gpusim.files import write_bytes
from gpusim.hardware.model import load_hardware
from gpusim.report.limits_table import print_limits
from gpusim.search.limits import Limits, limits
from gpusim.trace.store import load_trace

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "limits.md"
PICTURE = ROOT / "docs" / "images" / "limits.png"
EXAMPLE, HARDWARE = "googlenet-train-b8", "h200"
BEGIN, END = "<!-- example:begin -->\n", "<!-- example:end -->"


def printed(found: Limits) -> str:
    """What `gpusim limits` prints."""
    out = io.StringIO()
    with redirect_stdout(out):
        print_limits(found)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip()


def with_example(page: str, example: str) -> str:
    """The page with another example between its marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}```\n{example}\n```\n{END}{rest.split(END)[1]}"


def main() -> None:
    """Write both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-picture", action="store_true", help="only the numbers")
    options = parser.parse_args()
    found = limits(load_trace(EXAMPLE), load_hardware(HARDWARE))
    write_bytes(PAGE, with_example(PAGE.read_text("utf-8"), printed(found)).encode())
    print(PAGE)
    if not options.no_picture:
        from gpusim.report.figures.limits import limits_figure
        from gpusim.report.figures.output import write_png

        write_png(PICTURE, limits_figure(found))
        print(PICTURE)


if __name__ == "__main__":
    main()
