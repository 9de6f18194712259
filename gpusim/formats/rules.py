"""The report of `gpusim calibrate --rules`: experiments on the rules that the engines follow."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from gpusim.errors import MeasurementError
from gpusim.formats.hyper_q import HyperQ
from gpusim.formats.trace import Gpu
from gpusim.io.files import Document, read_document

SCHEMA: Final = "gpusim-rules/1"


class Rule(Document, frozen=True, kw_only=True):
    """One engine rule and the result of its experiment."""

    name: str
    rule: str
    """The rule, as the engines assume it."""
    holds: bool | None
    """True if the experiment agrees; null if it only measures numbers."""
    found: str
    """The observation, in a sentence."""
    numbers: dict[str, float]
    """Measured numbers by name: times in ns, rates in bytes per ns, slowdowns as factors."""


class Rules(Document, frozen=True, kw_only=True):
    """A report on all rules."""

    schema: Literal["gpusim-rules/1"]
    gpu: Gpu
    date: str
    command: str
    gpusim: str = ""
    """Version of gpusim, with a hash of its code."""
    rules: tuple[Rule, ...]
    hyper_q: HyperQ | None = None


def read_rules(path: Path) -> Rules:
    """Read a report. Raises `MeasurementError`."""
    return read_document(path, Rules, SCHEMA, MeasurementError)
