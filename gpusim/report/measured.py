"""A measured run for comparison with a simulated one: output of `gpusim replay`, or a profiler's trace.

Three kinds of file are accepted: the measurement (`gpusim replay -o`), with the time of the whole step; the timeline
(`gpusim replay --perfetto`), which adds the profiled kernels; and any Chrome trace of PyTorch's profiler. A profiled
run is slower than the timed one, and its lanes are those of the CUDA graph's executor.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import msgspec

from gpusim.errors import GpusimError, MeasurementError
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.measurement import SCHEMA, Measurement
from gpusim.formats.trace import Trace
from gpusim.io.decoding import decode_json
from gpusim.io.decompression import decompress
from gpusim.io.file_limits import MAX_UPLOAD_BYTES, MAX_UPLOAD_DOCUMENT_BYTES, PARTS_AT_A_TIME
from gpusim.io.files import decode_document, encode_json, read_file
from gpusim.io.known_formats import known_format
from gpusim.io.resources import resource_dir
from gpusim.io.sandbox import read_apart
from gpusim.report.perfetto import MAX_EXACT_INT, MEASUREMENT, PRODUCER, Category, Run, run_from_kineto
from gpusim.trace.store import structure_hash
from gpusim.units import counted, format_bytes

FOLDER = "validate/timelines"
SUFFIX = ".perfetto.json.gz"
#: More than a step has, and the limit of a drawing.
MAX_SLICES, MAX_STREAMS = 200_000, 256
#: Profilers count us from the start of the machine or from 1970.
MAX_TIME_US = 1e16
#: Part of the titles of measured runs in files of `gpusim replay --perfetto`.
TITLE = "measured"
#: Arguments of a kernel shown as sizes and as launch shapes.
_SIZES, _SHAPES = ("bytes", "correlation", "registers per thread", "shared memory"), ("grid", "block")


@dataclass(frozen=True)
class Measured:
    """A measured step, with at least one of its two parts."""

    title: str
    measurement: Measurement | None
    """Time of the step, measured without a profiler."""
    run: Run | None
    """Profiled kernels."""

    @property
    def timed_ns(self) -> int | None:
        """Time of the step without a profiler; None if not measured."""
        return self.measurement.schedule.median_ns if self.measurement else None

    @property
    def profiled_ns(self) -> int | None:
        """Time from the first start to the last end of a kernel under the profiler; None without a profile."""
        return None if self.run is None else max((piece.end_ns for piece in self.run.slices), default=0)

    @property
    def makespan_ns(self) -> int:
        """Time of the step without a profiler if measured, else under the profiler."""
        if self.measurement is not None:
            return self.measurement.schedule.median_ns
        assert self.profiled_ns is not None
        return self.profiled_ns


class _Event(msgspec.Struct):
    """Fields read from an event of a Chrome trace; some kinds of event have other types in these fields."""

    ph: str = ""
    cat: Any = ""
    name: Any = ""
    ts: Any = 0
    dur: Any = 0
    pid: Any = 0
    args: Any = None


class _File(msgspec.Struct):
    traceEvents: list[_Event] | None = None  # noqa: N815  (as the format calls it)
    otherData: dict[str, Any] = {}  # noqa: N815
    schema: Any = ""


def parse_measured(data: bytes, name: str, trace: Trace) -> Measured:
    """Parse a measured run of `trace` from a file's bytes; `name` is for messages.

    Raises `MeasurementError` for a broken file, one beyond the limits on size, or one of another step.
    """
    _check_size(data, name)
    text = decompress(data, name, MeasurementError, MAX_UPLOAD_DOCUMENT_BYTES)
    return _from_file(_decoded(text, name), text, name, trace)


def parse_measured_upload(data: bytes, name: str, trace: Trace) -> Measured:
    """`parse_measured` for an uploaded file, whose relevant parts are extracted in a separate process."""
    _check_size(data, name)
    function = f"{__name__}:{essence.__name__}"
    pieces = read_apart(function, data, name, MeasurementError, max_bytes=MAX_UPLOAD_DOCUMENT_BYTES)
    first, *others = pieces
    file = _decoded(first, name)
    for piece in others:
        assert file.traceEvents is not None
        file.traceEvents += decode_json(piece, list[_Event])
    return _from_file(file, first, name, trace)


def essence(data: bytes, name: str, *, max_bytes: int) -> Iterator[bytes]:
    """Yield the parts of a file that `parse_measured` needs, in pieces, without ignored events.

    Runs in the separate process of an upload.
    """
    text = decompress(data, name, MeasurementError, max_bytes)
    file = _decoded(text, name)
    if file.traceEvents is None:
        yield encode_json(_measurement(file, text, name))
        return
    kernels = sum(event.ph == "X" and event.cat in get_args(Category) for event in file.traceEvents)
    if kernels > MAX_SLICES:
        raise _too_many(kernels, name)
    events = [
        event
        for event in file.traceEvents
        if event.cat in get_args(Category) or (event.ph == "M" and event.name == "process_name")
    ]
    file.traceEvents = []
    yield encode_json(file)
    for begin in range(0, len(events), PARTS_AT_A_TIME):
        yield encode_json(events[begin : begin + PARTS_AT_A_TIME])


def _check_size(data: bytes, name: str) -> None:
    if len(data) > MAX_UPLOAD_BYTES:
        raise MeasurementError(name, f"is {format_bytes(len(data))}; the limit is {format_bytes(MAX_UPLOAD_BYTES)}")


def _decoded(text: bytes, name: str) -> _File:
    try:
        file: _File = decode_json(text, _File)
        return file
    except msgspec.ValidationError:
        return _File()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        raise MeasurementError(name, known_format(text, name, SCHEMA) or f"is not valid JSON: {cause}") from cause


def _measurement(file: _File, text: bytes, name: str) -> Measurement:
    if str(file.schema).partition("/")[0] != SCHEMA.partition("/")[0]:
        neither = "is neither a measurement (gpusim replay -o) nor a timeline (gpusim replay --perfetto)"
        raise MeasurementError(name, known_format(text, name, SCHEMA) or neither)
    return decode_document(text, Measurement, SCHEMA, name, MeasurementError)


def _too_many(kernels: int, name: str) -> MeasurementError:
    return MeasurementError(name, f"has {kernels:,} kernels; the limit is {MAX_SLICES:,}")


def _from_file(file: _File, text: bytes, name: str, trace: Trace) -> Measured:
    if file.traceEvents is not None:
        return _from_events(file, name, trace)
    measurement = _measurement(file, text, name)
    _check_step(measurement, name, trace)
    return Measured(_title(measurement), measurement, None)


def read_measured(path: Path, trace: Trace) -> Measured:
    """Read a measured run of `trace`. Raises `MeasurementError`."""
    return parse_measured(read_file(path, MeasurementError), str(path), trace)


def load_measured(name_or_file: str, trace: Trace) -> Measured:
    """Load a measured run of `trace` by bundled name (`bundled_measured`) or file. Raises `MeasurementError`."""
    bundled = bundled_measured(trace)
    if name_or_file in bundled:
        return read_measured(bundled[name_or_file], trace)
    if Path(name_or_file).suffix or os.path.exists(name_or_file):
        return read_measured(Path(name_or_file), trace)
    known = f"those of {trace.name}: {', '.join(bundled)}" if bundled else f"none of {trace.name} ships with gpusim"
    raise MeasurementError(name_or_file, f"is no file and no measured run ({known})")


def bundled_measured(trace: Trace) -> dict[str, Path]:
    """Return the bundled measured timelines of a step, by name."""
    try:
        folder = resource_dir(FOLDER)
    except GpusimError:
        return {}
    # No glob with the name, which is untrusted text.
    begin = f"{trace.name}."
    paths = sorted(path for path in folder.glob(f"*{SUFFIX}") if path.name.startswith(begin))
    return {path.name.removesuffix(SUFFIX).removeprefix(begin): path for path in paths}


def _from_events(file: _File, name: str, trace: Trace) -> Measured:
    events = file.traceEvents or []
    own = file.otherData.get("producer") == PRODUCER
    title, measurement = f"{TITLE}: {Path(name).name}", None
    if own:
        step = file.otherData.get("trace")
        if step != trace.name:
            raise MeasurementError(name, f"is a timeline of '{step}', not of '{trace.name}'")
        names = {
            event.pid: str(event.args.get("name", ""))
            for event in events
            if event.ph == "M" and event.name == "process_name" and isinstance(event.args, dict)
        }
        chosen = next((pid for pid, words in names.items() if words.startswith(TITLE)), None)
        if chosen is None:
            raise MeasurementError(name, "has only simulated runs; gpusim replay --perfetto writes a measured one")
        title = names[chosen]
        events = [event for event in events if event.pid == chosen]
        words = file.otherData.get(MEASUREMENT)
        if words is not None:
            measurement = decode_document(str(words).encode(), Measurement, SCHEMA, name, MeasurementError)
            _check_step(measurement, name, trace)
    work = [_checked(event, name) for event in events if event.ph == "X" and event.cat in get_args(Category)]
    if own:
        work = _of_graph(work)
    if not work:
        raise MeasurementError(name, "has no GPU kernel")
    if len(work) > MAX_SLICES:
        raise _too_many(len(work), name)
    if not own:
        check_kernels([event["name"] for event in work], name, trace)
    run = run_from_kineto(work, title)
    streams = len({(piece.device, piece.stream) for piece in run.slices})
    if streams > MAX_STREAMS:
        raise MeasurementError(name, f"has {streams:,} streams; the limit is {MAX_STREAMS}")
    return Measured(title, measurement, run)


def check_kernels(names: Sequence[str], file: str, trace: Trace) -> None:
    """Refuse a profile of another step, by kernel names. Raises `MeasurementError`.

    More than half of the step's kernels must be in the file, and more than half of the file's in the step. Kernels of
    variants count as well, since a replay may run them. Names count as often as they occur.
    """
    captured = Counter(kernel.name for op in trace.ops for kernel in op.kernels)
    others = Counter(kernel.name for op in trace.ops for variant in op.variants for kernel in variant.kernels)
    matching = (Counter(names) & (captured + others)).total()
    wanted = captured.total()
    if 2 * min(matching, wanted) > max(wanted, len(names)):
        return
    raise MeasurementError(
        file,
        f"is a profile of another step than '{trace.name}': {min(matching, wanted):,} of that step's {wanted:,} "
        f"kernels are among the file's {len(names):,} (one run of that step has most of them, and little else)",
    )


def not_comparable(measured: Measured, hardware: HardwareModel, mode: str, policy: str, streams: int) -> str:
    """Return why a predicted time cannot be compared with a measured one; empty if it can.

    Both must be of one GPU, one way to launch and one schedule. A replay runs in a CUDA graph (mode "graph").
    `policy` and `streams` belong to the predicted schedule; `streams` is the number in use.
    """
    replayed = measured.measurement
    if replayed is None:
        return "a profile does not say which schedule ran, and a profiler slows a step"
    if replayed.gpu.name != hardware.gpu:
        return f"measured on {replayed.gpu.name}, predicted for {hardware.gpu}"
    if mode != "graph":
        return "measured in one CUDA graph, predicted as launched from the host"
    if (replayed.policy, replayed.streams) != (policy, streams):
        ran, asked = (
            f"{name} on {counted(count, 'stream')}"
            for name, count in ((replayed.policy, replayed.streams), (policy, streams))
        )
        return f"measured {ran}, predicted {asked}"
    return ""


def _of_graph(work: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the kernels of the CUDA graph, if most belong to one launch.

    torch sets the random generator's seed and offset in two separate kernels, a while before it launches the graph.
    """
    launches = Counter(event["args"].get("correlation") for event in work if event["args"].get("correlation"))
    launch, kernels = launches.most_common(1)[0] if launches else (None, 0)
    if 2 * kernels <= len(work):
        return work
    return [event for event in work if event["args"].get("correlation") == launch]


def _checked(event: _Event, name: str) -> Mapping[str, Any]:
    """Return a kernel's event with fields of the right types. Raises `MeasurementError`."""
    args = event.args if isinstance(event.args, dict) else {}
    kernel = str(event.name)[:60]
    for field, value, least in (("ts", event.ts, -MAX_TIME_US), ("dur", event.dur, 0.0)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= MAX_TIME_US:
            raise MeasurementError(name, f"kernel '{kernel}' has {field} {str(value)[:30]!r}, which is no time in us")
    for field in ("stream", "device"):
        value = args.get(field, 0)
        if isinstance(value, bool) or not isinstance(value, int):
            raise MeasurementError(name, f"kernel '{kernel}' has {field} {str(value)[:30]!r}, which is no number")
    kept = {"stream": 0, **{key: value for key, value in args.items() if _is_plain(key, value)}}
    return {"ph": "X", "cat": event.cat, "name": str(event.name), "ts": event.ts, "dur": event.dur, "args": kept}


def _is_plain(key: str, value: object) -> bool:
    """Return True if an argument of a kernel is a valid value of the profiler; others are left out."""
    if key in _SIZES:
        return isinstance(value, int) and abs(value) <= MAX_EXACT_INT
    if key in _SHAPES:
        return isinstance(value, list) and all(isinstance(size, int) for size in value)
    return isinstance(value, str | int | float)


def _check_step(measurement: Measurement, name: str, trace: Trace) -> None:
    if measurement.trace_hash != structure_hash(trace):
        raise MeasurementError(name, f"measures another step ('{measurement.trace}') than '{trace.name}'")


def _title(measurement: Measurement) -> str:
    return f"{TITLE}: {measurement.policy}, {counted(measurement.streams, 'stream')}"
