"""Write the constants of hwmodels/h200.json into docs/hardware-rules.md: python scripts/make_rule_values.py.

With --check nothing is written, and the exit status is 1 where the page is out of date.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from gpusim.formats.hardware import load_hardware
from gpusim.formats.schemas import field_docs
from gpusim.io.files import write_bytes
from gpusim.report.pages import with_section

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "hardware-rules.md"
#: Sections of the hardware model with one number per rule.
SECTIONS = ("graph", "stream", "contention", "memory", "copies")
FITTED = ("contention.sharing_exponent", "contention.matrix_exponent", "contention.younger_slowdown", "graph.busy_ns")
CHOSEN = ("contention.cross_load", "graph.join_ns", "graph.product_frac", "memory.miss_ns")
#: Size of the device memory, which no rule of time uses, and the origin of the size of the cache.
LEFT_OUT, DRIVER = ("memory.dram_bytes",), ("memory.l2_bytes",)


def values() -> str:
    """Return the table of constants."""
    hardware = load_hardware("h200")
    lines = ["", "|constant|value|origin|", "|---|--:|---|"]
    for section in SECTIONS:
        part = getattr(hardware, section)
        for name in field_docs(type(part)):
            field = f"{section}.{name}"
            if field in LEFT_OUT:
                continue
            origin = "fitted" if field in FITTED else "chosen" if field in CHOSEN else "measured"
            if field in DRIVER:
                origin = "of the driver"
            value = getattr(part, name)
            lines.append(f"|`{field}`|{value if isinstance(value, int) else f'{value:.4g}'}|{origin}|")
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    options = parser.parse_args(arguments)
    old = PAGE.read_text(encoding="utf-8")
    new = with_section(old, PAGE.name, "<!-- values:begin -->", "<!-- values:end -->", values())
    if options.check:
        if new != old:
            print("docs/hardware-rules.md is out of date: run python scripts/make_rule_values.py")
        return int(new != old)
    write_bytes(PAGE, new.encode())
    print(PAGE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
