"""The report of `gpusim calibrate --rules`: what experiments say of each rule that the engines follow."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from gpusim.errors import MeasurementError
from gpusim.formats.hyper_q import HyperQ
from gpusim.formats.trace import Gpu
from gpusim.io.files import Document, read_document

SCHEMA: Final = "gpusim-rules/1"


class Rule(Document, frozen=True, kw_only=True):
    """One rule, and what an experiment found."""

    name: str
    rule: str
    """What the engines take to be so."""
    holds: bool | None
    """Whether the experiment agrees; null where it only measures numbers."""
    found: str
    """What was seen, in a sentence."""
    numbers: dict[str, float]
    """Measured numbers by name; times in ns, rates in bytes a ns, slow-downs as factors."""


class Rules(Document, frozen=True, kw_only=True):
    """All experiments of one run."""

    schema: Literal["gpusim-rules/1"]
    gpu: Gpu
    date: str
    command: str
    gpusim: str = ""
    """Version of gpusim that measured, with a hash of its code."""
    rules: tuple[Rule, ...]
    hyper_q: HyperQ | None = None


def read_rules(path: Path) -> Rules:
    """Read a report. Raises `MeasurementError`."""
    return read_document(path, Rules, SCHEMA, MeasurementError)
