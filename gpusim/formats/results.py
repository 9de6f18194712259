"""The results document of a validation recipe."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from gpusim.errors import MeasurementError
from gpusim.formats.measurement import outputs_in_words
from gpusim.formats.trace import Dtype, Frontend, HostLink, MemoryFormat, Mode
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
#: Recipe and date are parts of file names: none leads to another folder.
RecipeName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$(?!\n)")]
Day = Annotated[str, Meta(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$(?!\n)")]
#: Most processes of one schedule.
MAX_PROCESSES: Final = 100
#: Baselines of an optimized step.
Baseline = Literal[
    "eager",
    "torch_compile_reduce_overhead",
    "torch_compile_own_graph",
    "torch_compile_max_autotune",
    "torch_compile_combo_kernels",
]

#: Freedoms that an optimized step may lack: all kernels but ATen's, all but Inductor's, all streams but one, other
#: algorithms of its calls, kernels by region.
Ablation = Literal["aten", "inductor", "one_stream", "no_variants", "no_regions"]


class ProcessTimes(Document, frozen=True, kw_only=True, omit_defaults=False):
    """What one process measured of a schedule."""

    measured_ns: PositiveNanoseconds
    """Median time, in ns."""
    sequential_ns: PositiveNanoseconds
    """Median time of the sequential graph in the same process, in ns."""
    date: Day
    gpu_id: str = ""
    """Identifier of this GPU; empty if unknown."""
    gpusim: str = ""
    """As in a measurement."""


class ResultCase(Document, frozen=True, kw_only=True, omit_defaults=False):
    """One replayed schedule: prediction, measurement and baselines."""

    trace: str
    network: str
    mode: Mode
    batch: Positive
    dtype: Dtype
    memory_format: MemoryFormat
    frontend: Frontend
    policy: str
    ablation: Ablation | None = None
    """Freedom that the step was optimized without, for policy `optimize`; `baselines` then has the step in full as
    `optimize`."""
    streams: Positive
    predicted_ns: PositiveNanoseconds
    predicted_interval_ns: tuple[Nanoseconds, Nanoseconds] = (0, 0)
    """Prediction interval, expected to hold 90 % of measurements, in ns."""
    measured_ns: PositiveNanoseconds
    interval_ns: tuple[Nanoseconds, Nanoseconds]
    sequential_ns: PositiveNanoseconds
    sequential_interval_ns: tuple[Nanoseconds, Nanoseconds]
    predicted_sequential_ns: Nanoseconds
    fastest_ns: Nanoseconds = 0
    slowest_ns: Nanoseconds = 0
    sequential_fastest_ns: Nanoseconds = 0
    sequential_slowest_ns: Nanoseconds = 0
    """Times of the fastest and slowest recordings of both graphs, in ns; 0 if not kept."""
    eager_ns: Nanoseconds
    outputs_equal: bool
    bit_equal: bool
    outputs_sensitive: bool = True
    """As in a measurement. True in runs without the check, where GoogLeNet's inference was in fact not sensitive."""
    worst_error: float
    sequential_error: float
    """Difference between two sequential runs."""
    fitted: bool
    worth_it: bool
    """True if any schedule of this step was predicted to win beyond the model's uncertainty."""
    bounds_ns: dict[str, Nanoseconds]
    predicted_peak_bytes: Count
    measured_peak_bytes: Count
    sequential_peak_bytes: Count
    events: Count
    sm_clock_mhz: Count
    memory_budget_bytes: Count = 0
    """Memory budget of a memory plan; 0 if none."""
    link: HostLink | None = None
    """Link to the host in the measuring process, for a memory plan."""
    baselines: dict[str, Nanoseconds] = {}
    commit: str = ""
    """Version and hash of the predicting code, if the prediction was stored before the measurement."""
    date: str = ""
    """Date of the measurement, if a file joins several days."""
    versions: dict[str, str] = {}
    """Software versions of this case, as in `Results`."""
    kernels: Kernels = "captured"
    """Kernels that ran: `captured` ones, some `chosen` variants, or a compiler's."""
    tried_ns: tuple[Nanoseconds, ...] = ()
    """Times of the policy's schedules in a trial on the GPU; the fastest was replayed. Empty without trials."""
    beside_ns: dict[str, Nanoseconds] = {}
    """Time of the same step in turns with a baseline that a later run added, by baseline."""
    baseline_peak_bytes: dict[str, Count] = {}
    """Peak memory of building and running each of `baselines`, if measured."""
    deviations: dict[str, float] = {}
    """Relative error of outputs or gradients against the same step in FP64, by baseline and for `optimize`; empty if
    not measured, or if dropout makes every step differ."""
    optimize_s: float = 0.0
    """Duration of `gpusim.optimize`, in s, for rows of policy `optimize`."""
    optimize_stages_s: dict[str, float] = {}
    """Time of each stage of `optimize_s`, in s."""
    compiled_before: bool = False
    """True if Triton's cache held kernels when `gpusim.optimize` began, which then took less than a first start."""
    processes: Annotated[tuple[ProcessTimes, ...], Meta(max_length=MAX_PROCESSES)] = ()
    """Each process that measured the schedule. Of several, `measured_ns` is the median and `interval_ns` the range.
    Empty in files up to 2026-11-29."""
    fast_launches_ns: dict[str, Nanoseconds] = {}
    """Time of `optimize` and of each baseline with launches in their fast state; empty if not measured. Since
    2026-11-29 all other times are in the slow state, before in either."""

    @property
    def sequential_times_ns(self) -> tuple[int, ...]:
        """Time of the sequential graph in each process, in ns: it has two states, which a median of processes hides."""
        return tuple(process.sequential_ns for process in self.processes) or (self.sequential_ns,)

    @property
    def way(self) -> str:
        """Policy, with the ablation if any."""
        return self.policy if self.ablation is None else f"{self.policy}: {self.ablation}"

    @property
    def outputs(self) -> str:
        """Result of the output check in a few words."""
        return outputs_in_words(self.outputs_equal, self.bit_equal, self.outputs_sensitive)

    @property
    def speedup(self) -> float:
        """Measured speed-up over the sequential graph."""
        return self.sequential_ns / self.measured_ns

    def over(self, baseline: str) -> float:
        """Measured speed-up over a baseline, from times in turns."""
        return self.baselines[baseline] / self.beside_ns.get(baseline, self.measured_ns)

    @property
    def fastest_compiled(self) -> str:
        """Name of the fastest measured mode of torch.compile."""
        return min((name for name in self.baselines if name.startswith("torch_compile")), key=self.over)

    def alongside_ns(self, baseline: str) -> int:
        """Time of a baseline in the run of `measured_ns`; of a later run's, its ratio to the same step counts."""
        return round(self.measured_ns * self.over(baseline))

    @property
    def predicted_speedup(self) -> float:
        """Predicted speed-up over the sequential graph."""
        return self.predicted_sequential_ns / self.predicted_ns

    @property
    def error(self) -> float:
        """Prediction error, (predicted - measured) / measured."""
        return self.predicted_ns / self.measured_ns - 1.0

    @property
    def sequential_prediction_error(self) -> float:
        """Prediction error of the sequential graph; anchored at capture, so it shows how well that time repeats."""
        return self.predicted_sequential_ns / self.sequential_ns - 1.0


class Results(Document, frozen=True, kw_only=True, omit_defaults=False):
    """All cases measured in one run of a recipe."""

    schema: str
    recipe: RecipeName
    gpu: str
    date: Day
    command: str
    hardware: str
    versions: dict[str, str]
    gpusim: str = ""
    """As in a measurement."""
    cases: tuple[ResultCase, ...]


def read_results(path: Path) -> Results:
    """Read a results file. Raises `MeasurementError`, also where a time is not the median of its processes."""
    results = read_document(path, Results, SCHEMA, MeasurementError)
    for number, case in enumerate(results.cases):
        measured_ns = [process.measured_ns for process in case.processes]
        if measured_ns and case.measured_ns != round(statistics.median(measured_ns)):
            problem = f"the median of these processes is not measured_ns, {case.measured_ns}"
            raise MeasurementError(str(path), problem, place=f"$.cases[{number}].processes")
    return results


def read_all_results(folder: Path, pattern: str = "*.json") -> dict[str, Results]:
    """Return the results files in a folder that match a pattern, by name; other JSON documents are skipped.

    Raises `MeasurementError` for a broken file.
    """
    results = {}
    for path in sorted(folder.glob(pattern)):
        if document_schema(path, MeasurementError) == SCHEMA:
            results[path.stem] = read_results(path)
    return results


def first_of_each_step(runs: Sequence[Results]) -> list[Results]:
    """Return the runs, each without the cases of steps that an earlier run has."""
    firsts, seen = [], set[str]()
    for run in runs:
        firsts.append(msgspec.structs.replace(run, cases=tuple(case for case in run.cases if case.trace not in seen)))
        seen |= {case.trace for case in run.cases}
    return firsts


def results_name(results: Results) -> str:
    """Return `<recipe>_<gpu>_<yyyymmdd>`, the GPU as one short word of letters, digits, `_`, `.` and `-`."""
    gpu = re.sub(r"[^a-z0-9_.-]", "-", results.gpu.replace("NVIDIA", "").strip().lower())
    return f"{results.recipe}_{gpu}_{results.date.replace('-', '')}"


def newest_results(folder: Path, recipe: str, gpu: str = "h200") -> Path:
    """Return the newest results file of a recipe on a GPU, named as by `results_name`.

    Raises `MeasurementError` where there is none.
    """
    name = f"{recipe}_{gpu}_"
    paths = folder.glob(f"{name}{8 * '[0-9]'}.json")
    newest = max(paths, key=lambda path: path.name, default=None)
    if newest is None:
        raise MeasurementError(str(folder), f"has no results of the recipe '{recipe}' ({name}<yyyymmdd>.json)")
    return newest
