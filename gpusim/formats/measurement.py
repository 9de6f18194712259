"""The measurement document: measured and predicted times of a replayed schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from msgspec import Meta

from gpusim.errors import MeasurementError
from gpusim.formats.trace import Gpu, HostLink, Timing
from gpusim.io.files import Count, Document, Nanoseconds, Positive, read_document, write_document
from gpusim.notebook import html_table, short_name, short_repr
from gpusim.units import format_ns

SCHEMA: Final = "gpusim-measurement/1"


class OutputCheck(Document, frozen=True, kw_only=True):
    """Comparison of a schedule's outputs, gradients and changed states with a sequential run on the same data."""

    equal: bool
    """True if all tensors agree within the tolerance."""
    bit_equal: bool
    """True if all tensors agree bit for bit."""
    sequential_repeats: bool
    """True if two sequential runs agree bit for bit; otherwise no schedule can be expected to."""
    worst_error: Annotated[float, Meta(ge=0)]
    """Largest ||schedule - sequential|| / ||sequential|| over all compared tensors."""
    sequential_error: Annotated[float, Meta(ge=0)]
    """The same between two sequential runs."""
    tolerance: float
    """The limit applied: the dtype's, or 3 x `sequential_error` where that is larger."""
    compared: Count
    """Number of tensors compared."""
    sensitive: bool = True
    """True if the outputs depend on the input by more than a tolerance; otherwise equal outputs prove nothing."""
    fp32_error: Annotated[float, Meta(ge=0)] | None = None
    """Error against a run in FP32, for a TF32 step's schedule with variants, in the worst role. Checked against
    `tolerance`, at least twice `sequential_fp32_error`."""
    sequential_fp32_error: Annotated[float, Meta(ge=0)] | None = None
    """Error of the captured kernels against that run, in the same role."""


def outputs_in_words(equal: bool, bit_equal: bool, sensitive: bool) -> str:
    """Return the result of an output check in a few words."""
    if not equal:
        return "DIFFERENT"
    if not sensitive:
        return "equal for any input"
    return "bit-equal" if bit_equal else "equal"


class Measurement(Document, frozen=True, kw_only=True, omit_defaults=False):
    """One replay of a schedule, timed in turns with the sequential graph."""

    schema: Literal["gpusim-measurement/1"]
    """`gpusim-measurement/1`."""
    trace: str
    """Name of the trace."""
    trace_hash: str
    """Structure hash of the trace."""
    policy: str
    """Policy or program that made the schedule."""
    streams: Positive
    """Number of streams."""
    schedule: Timing
    """Measured time of the schedule's CUDA graph."""
    sequential: Timing
    """Measured time of the sequential CUDA graph, taken in turns with the schedule's."""
    predicted_ns: Nanoseconds
    """Predicted time of the schedule."""
    predicted_interval_ns: tuple[Nanoseconds, Nanoseconds] = (0, 0)
    """Prediction interval, which held 90 % of past measurements."""
    predicted_sequential_ns: Nanoseconds
    """Predicted time of the sequential graph."""
    hardware: str
    """Hardware model of the prediction, marked `(uncalibrated)` if it is."""
    outputs: OutputCheck
    """Comparison of the outputs."""
    peak_bytes: Count
    """Peak memory while the schedule was recorded."""
    sequential_peak_bytes: Count
    """Peak memory while the sequential graph was recorded."""
    events: Count
    """Number of CUDA events in the schedule."""
    link: HostLink | None = None
    """Link to the host in the measuring process, for a memory plan."""
    gpu: Gpu
    """GPU, software versions and clocks."""
    gpu_id: str = ""
    """Identifier of this GPU; empty if unknown."""
    date: str
    """Date, `yyyy-mm-dd`."""
    command: str
    """Command line."""
    gpusim: str = ""
    """Version of gpusim, with a hash of its code; absent in files up to 2026-11-23."""

    @property
    def speedup(self) -> float:
        """Measured speed-up over the sequential graph."""
        return self.sequential.median_ns / self.schedule.median_ns

    @property
    def prediction_error(self) -> float:
        """Prediction error of the schedule, (predicted - measured) / measured."""
        return self.predicted_ns / self.schedule.median_ns - 1.0

    @property
    def sequential_error(self) -> float:
        """Prediction error of the sequential graph, (predicted - measured) / measured."""
        return self.predicted_sequential_ns / self.sequential.median_ns - 1.0

    @property
    def outputs_text(self) -> str:
        """Result of the output check in a few words."""
        return outputs_in_words(self.outputs.equal, self.outputs.bit_equal, self.outputs.sensitive)

    def __repr__(self) -> str:
        text = f"{short_name(self.trace)} on {short_name(self.gpu.name)}: {short_name(self.policy)} {self.speedup:.2f}x"
        return short_repr("Measurement", f"{text}, outputs {self.outputs_text}")

    def _repr_html_(self) -> str:
        rows = [
            ("sequential CUDA graph", format_ns(self.sequential.median_ns), format_ns(self.predicted_sequential_ns)),
            (
                f"{self.policy}, {self.streams} streams",
                format_ns(self.schedule.median_ns),
                format_ns(self.predicted_ns),
            ),
        ]
        title = f"{self.trace} on {self.gpu.name}: {self.speedup:.2f}x, outputs {self.outputs_text}"
        return html_table(title, ("schedule", "measured", "predicted"), rows)


def read_measurement(path: Path) -> Measurement:
    """Read a measurement file. Raises `MeasurementError`."""
    return read_document(path, Measurement, SCHEMA, MeasurementError)


def write_measurement(measurement: Measurement, path: Path) -> None:
    """Write a measurement as JSON, atomically. Raises `OutputError`."""
    write_document(path, measurement, indent=1)
