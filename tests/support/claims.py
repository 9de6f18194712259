"""Pages in lower case and measured cases, for tests of claims."""

from __future__ import annotations

import math
import re
from pathlib import Path

from gpusim.formats.results import ResultCase, newest_results, read_results

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "validate" / "results"
#: Recipes with other kinds of networks than mostly convolutional ones.
OTHER_KINDS = (
    "kinds",
    "blind_kinds",
    "blind_intervals",
    "blind_last",
    "blind_next",
    "blind_products",
    "blind_turnover",
    "blind_recommended",
)


def prose(name: str) -> str:
    """Return a page in lower case, with single spaces."""
    return re.sub(r"\s+", " ", (ROOT / name).read_text(encoding="utf-8")).lower()


def rounded_up(error: float) -> float:
    """Return an error in percent, rounded up to a tenth."""
    return math.ceil(error * 1000) / 10


def cases(recipe: str) -> tuple[ResultCase, ...]:
    return read_results(newest_results(RESULTS, recipe)).cases
