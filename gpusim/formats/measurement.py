"""The measurement document: what a replayed schedule took on a GPU, beside what was predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from msgspec import Meta

from gpusim.errors import MeasurementError
from gpusim.formats.trace import Gpu, Timing
from gpusim.io.files import Count, Document, Nanoseconds, Positive, read_document, write_document
from gpusim.notebook import html_table, short_name, short_repr
from gpusim.units import format_ns

SCHEMA: Final = "gpusim-measurement/1"


class OutputCheck(Document, frozen=True, kw_only=True):
    """Outputs, gradients and changed states of the schedule, compared with the sequential run on the same data."""

    equal: bool
    """Within the tolerance."""
    bit_equal: bool
    """Every compared tensor agrees bit for bit."""
    sequential_repeats: bool
    """Whether two sequential runs agree bit for bit: where they do not, no schedule can be held to it."""
    worst_error: Annotated[float, Meta(ge=0)]
    """Largest ||schedule - sequential|| / ||sequential|| over all compared tensors."""
    sequential_error: Annotated[float, Meta(ge=0)]
    """The same between two sequential runs."""
    tolerance: float
    """The limit applied: the dtype's, or 3 x `sequential_error` where that is larger."""
    compared: Count
    """Number of tensors compared."""
    sensitive: bool = True
    """Whether the outputs change with the input by more than a tolerance; equal ones show nothing where they do not."""
    fp32_error: Annotated[float, Meta(ge=0)] | None = None
    """Of a TF32 step's schedule with variants: how far it is from a run in FP32, the role that is worst. It is held to
    `tolerance`, which is twice what follows at least."""
    sequential_fp32_error: Annotated[float, Meta(ge=0)] | None = None
    """How far the captured kernels are from that run, in the same role."""


def outputs_in_words(equal: bool, bit_equal: bool, sensitive: bool) -> str:
    """How outputs compare with the sequential run's, in a word or two."""
    if not equal:
        return "DIFFERENT"
    if not sensitive:
        return "equal for any input"
    return "bit-equal" if bit_equal else "equal"


class Measurement(Document, frozen=True, kw_only=True, omit_defaults=False):
    """One replay: schedule and sequential graph, timed in turns."""

    schema: Literal["gpusim-measurement/1"]
    """`gpusim-measurement/1`."""
    trace: str
    """Name of the trace."""
    trace_hash: str
    """Its structure hash."""
    policy: str
    """Who made the schedule."""
    streams: Positive
    """Its number of streams."""
    schedule: Timing
    """The schedule's CUDA graph, measured."""
    sequential: Timing
    """The same ops on one stream in recorded order, in a CUDA graph, measured in turns with it."""
    predicted_ns: Nanoseconds
    """What the engine predicts for the schedule."""
    predicted_interval_ns: tuple[Nanoseconds, Nanoseconds] = (0, 0)
    """What 90 % of measurements of past schedules lay in, around such a prediction."""
    predicted_sequential_ns: Nanoseconds
    """What the engine predicts for the sequential graph."""
    hardware: str
    """Hardware model of the prediction; ends in `(uncalibrated)` where it is."""
    outputs: OutputCheck
    """Comparison of the results."""
    peak_bytes: Count
    """Most memory allocated while the schedule was recorded; the sequential graph's is below."""
    sequential_peak_bytes: Count
    """The same for the sequential graph."""
    events: Count
    """Events that the schedule needs."""
    gpu: Gpu
    """GPU, software and clocks."""
    date: str
    """Day, `yyyy-mm-dd`."""
    command: str
    """Command line."""
    gpusim: str = ""
    """Version of gpusim that measured and predicted, with a hash of its code; files until 2026-11-23 have none."""

    @property
    def speedup(self) -> float:
        """Sequential graph over schedule, measured."""
        return self.sequential.median_ns / self.schedule.median_ns

    @property
    def prediction_error(self) -> float:
        """(predicted - measured) / measured, of the schedule."""
        return self.predicted_ns / self.schedule.median_ns - 1.0

    @property
    def sequential_error(self) -> float:
        """(predicted - measured) / measured, of the sequential graph."""
        return self.predicted_sequential_ns / self.sequential.median_ns - 1.0

    @property
    def outputs_text(self) -> str:
        """How the outputs compare with the sequential run's, in a word or two."""
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
    """Write a measurement as JSON; all or nothing. Raises `OutputError`."""
    write_document(path, measurement, indent=1)
