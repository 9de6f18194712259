"""The document with the results of a validation recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from gpusim.errors import MeasurementError
from gpusim.formats.measurement import outputs_in_words
from gpusim.formats.trace import Dtype, Frontend, MemoryFormat, Mode
from gpusim.io.files import (
    Count,
    Document,
    Nanoseconds,
    Positive,
    PositiveNanoseconds,
    document_schema,
    read_document,
)

SCHEMA: Final = "gpusim-results/1"
Kernels = Literal["captured", "chosen", "inductor"]
#: What an optimized step is held against.
Baseline = Literal[
    "eager",
    "torch_compile_reduce_overhead",
    "torch_compile_own_graph",
    "torch_compile_max_autotune",
    "torch_compile_combo_kernels",
]


class ResultCase(Document, frozen=True, kw_only=True, omit_defaults=False):
    """One replayed schedule: predicted, measured, and what it is compared with."""

    trace: str
    network: str
    mode: Mode
    batch: Positive
    dtype: Dtype
    memory_format: MemoryFormat
    frontend: Frontend
    policy: str
    streams: Positive
    predicted_ns: PositiveNanoseconds
    predicted_interval_ns: tuple[Nanoseconds, Nanoseconds] = (0, 0)
    """The interval that the prediction came with: 90 % of measurements are to lie in it."""
    measured_ns: PositiveNanoseconds
    interval_ns: tuple[Nanoseconds, Nanoseconds]
    sequential_ns: PositiveNanoseconds
    sequential_interval_ns: tuple[Nanoseconds, Nanoseconds]
    predicted_sequential_ns: Nanoseconds
    fastest_ns: Nanoseconds = 0
    slowest_ns: Nanoseconds = 0
    sequential_fastest_ns: Nanoseconds = 0
    sequential_slowest_ns: Nanoseconds = 0
    """Fastest and slowest recordings of the two, beside those of median time; 0 where they were not kept."""
    eager_ns: Nanoseconds
    outputs_equal: bool
    bit_equal: bool
    outputs_sensitive: bool = True
    """As in a measurement. Runs that did not look have True; GoogLeNet's inference was not sensitive in them."""
    worst_error: float
    sequential_error: float
    """Difference between two sequential runs."""
    fitted: bool
    worth_it: bool
    """Whether any schedule of this step was predicted to win beyond the model's uncertainty."""
    bounds_ns: dict[str, Nanoseconds]
    predicted_peak_bytes: Count
    measured_peak_bytes: Count
    sequential_peak_bytes: Count
    events: Count
    sm_clock_mhz: Count
    memory_budget_bytes: Count = 0
    """Of a memory plan that was made for a budget; 0 for all others."""
    baselines: dict[str, Nanoseconds] = {}
    commit: str = ""
    """Version and hash of the code that predicted, where the prediction was kept before the measurement."""
    date: str = ""
    """When the case was measured, where a file joins several days."""
    versions: dict[str, str] = {}
    """As of `Results`, for this case."""
    kernels: Kernels = "captured"
    """Whose kernels ran: those that were captured, some `chosen` among others, or a compiler's."""
    baseline_peak_bytes: dict[str, Count] = {}
    """Most memory that making and running each of `baselines` took, where that was looked at."""
    deviations: dict[str, float] = {}
    """How far outputs or gradients are from the same step in FP64, over their norm, by baseline and for `optimize`;
    empty where nobody looked, and where dropout makes every step another one."""
    optimize_s: float = 0.0
    """What `gpusim.optimize` took, for rows of policy `optimize`."""
    compiled_before: bool = False
    """Whether Triton's cache held kernels when `gpusim.optimize` began: it then took less than a first start does."""

    @property
    def outputs(self) -> str:
        """How the outputs compare with the sequential run's, in a word or two."""
        return outputs_in_words(self.outputs_equal, self.bit_equal, self.outputs_sensitive)

    @property
    def speedup(self) -> float:
        """Sequential graph over schedule, measured."""
        return self.sequential_ns / self.measured_ns

    @property
    def predicted_speedup(self) -> float:
        """The same, predicted."""
        return self.predicted_sequential_ns / self.predicted_ns

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted_ns / self.measured_ns - 1.0

    @property
    def sequential_prediction_error(self) -> float:
        """The same for the sequential graph, which is anchored to its time at capture: how well that repeats."""
        return self.predicted_sequential_ns / self.sequential_ns - 1.0


class Results(Document, frozen=True, kw_only=True, omit_defaults=False):
    """Everything one run of a recipe measured."""

    schema: str
    recipe: str
    gpu: str
    date: str
    command: str
    hardware: str
    versions: dict[str, str]
    gpusim: str = ""
    """As in a measurement."""
    cases: tuple[ResultCase, ...]


def read_results(path: Path) -> Results:
    """Read a results file. Raises `MeasurementError`."""
    return read_document(path, Results, SCHEMA, MeasurementError)


def read_all_results(folder: Path, pattern: str = "*.json") -> dict[str, Results]:
    """Name -> results of every results file in a folder, or those named so; other JSON documents are left alone.

    Raises `MeasurementError` for a broken file.
    """
    results = {}
    for path in sorted(folder.glob(pattern)):
        if document_schema(path, MeasurementError) == SCHEMA:
            results[path.stem] = read_results(path)
    return results


def first_of_each_step(runs: Sequence[Results]) -> list[Results]:
    """The runs without the cases of steps that an earlier one of them has."""
    firsts, seen = [], set[str]()
    for run in runs:
        firsts.append(msgspec.structs.replace(run, cases=tuple(case for case in run.cases if case.trace not in seen)))
        seen |= {case.trace for case in run.cases}
    return firsts


def results_name(results: Results) -> str:
    """`<recipe>_<gpu>_<yyyymmdd>`, the GPU as one short word."""
    gpu = results.gpu.replace("NVIDIA", "").strip().replace(" ", "-").lower()
    return f"{results.recipe}_{gpu}_{results.date.replace('-', '')}"
