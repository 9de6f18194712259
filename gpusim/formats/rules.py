"""The report of `gpusim calibrate --rules`: experiments on the rules that the engines follow."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from gpusim.errors import MeasurementError
from gpusim.formats.concurrent_chains import ConcurrentChains
from gpusim.formats.hyper_q import HyperQ
from gpusim.formats.trace import Gpu
from gpusim.io.files import Document, read_document
from gpusim.text import short_value

SCHEMA: Final = "gpusim-rules/1"
#: Experiments that are not of one rule of the dispatcher.
START_INTERFERENCE: Final = "start interference"
SMALL_PRODUCTS: Final = "small products"
CHANNELS_LAST: Final = "channels-last convolutions"
ROWS_BY_INDEX: Final = "rows by index"
SMALL_BLOCKS: Final = "many small blocks"
LAUNCHES: Final = "launches into streams"
#: Names of all experiments, in the order of the report; all but the last are names of rules.
EXPERIMENTS: Final = (
    "most room",
    "head of line",
    "room is taken at once",
    "priority",
    "block starts",
    "shared memory carve-out",
    "gap in a chain",
    "gap beside others",
    "bandwidth by SMs and warps",
    "sharing an SM",
    START_INTERFERENCE,
    SMALL_PRODUCTS,
    CHANNELS_LAST,
    ROWS_BY_INDEX,
    SMALL_BLOCKS,
    LAUNCHES,
)


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
    chains: tuple[ConcurrentChains, ...] = ()
    """What the rules on concurrent chains were judged by."""
    hyper_q: HyperQ | None = None


def read_rules(path: Path) -> Rules:
    """Read a report. Raises `MeasurementError`, also for chains that do not fit each other."""
    report = read_document(path, Rules, SCHEMA, MeasurementError)
    names: set[str] = set()
    for number, experiment in enumerate(report.chains):
        if experiment.name in names:
            second = f"is the second experiment '{short_value(experiment.name)}'"
            raise MeasurementError(str(path), second, place=f"$.chains[{number}].name")
        names.add(experiment.name)
        problem = experiment.problem()
        if problem is not None:
            raise MeasurementError(str(path), problem[1], place=f"$.chains[{number}].runs[{problem[0]}]")
    return report
