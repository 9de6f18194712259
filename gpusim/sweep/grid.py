"""The points of a sweep, identified by a hash of everything that determines the result."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from gpusim import HardwareModel, Trace
from gpusim.api.sweeps import Sweep, check_engine, default_hardware, parse_trace, read_hardware, registered_policies
from gpusim.errors import TraceError
from gpusim.io.files import encode_json, read_file
from gpusim.sweep.spec import hardware_files, policy_names, trace_files
from gpusim.version import version_of

#: Parts of the package that determine a result, besides trace and hardware model.
_SIMULATION = (
    *("formats/arguments.py", "formats/hardware.py", "formats/schedule.py", "formats/trace.py"),
    *("trace", "rules", "plan", "engine", "policies", "bounds", "step.py", "units.py"),
    *("api/sweeps.py", "sweep/point.py"),
)


Group = tuple[str, str]
"""Hashes of a trace and a hardware model. Points of a group share a step, which costs as much as a few points."""


@dataclass(frozen=True)
class TraceContent:
    """A trace for workers: the bytes of its file, and its columns in every row."""

    hash: str
    data: bytes
    name: str
    network: str
    mode: str
    batch: int
    dtype: str
    memory_format: str
    frontend: str


@dataclass(frozen=True)
class HardwareContent:
    """A hardware model for workers: JSON bytes, and its columns in every row."""

    hash: str
    data: bytes
    name: str
    calibrated: bool


@dataclass(frozen=True, slots=True)
class Point:
    """One simulation of a sweep; `key` identifies it in the store."""

    key: str
    trace_hash: str
    hardware_hash: str
    policy: str
    streams: int
    engine: str
    seed: int

    @property
    def group(self) -> Group:
        """Hashes of its trace and hardware model."""
        return self.trace_hash, self.hardware_hash


@dataclass(frozen=True)
class Grid:
    """All points of a sweep, ordered by group, with the contents they refer to by hash."""

    points: tuple[Point, ...]
    traces: dict[str, TraceContent]
    hardware: dict[str, HardwareContent]
    version: str

    @property
    def contents(self) -> dict[str, bytes]:
        """All contents for workers, by hash."""
        return {item.hash: item.data for kind in (self.traces, self.hardware) for item in kind.values()}


def build_grid(sweep: Sweep) -> Grid:
    """Read all files of a sweep and return the product as a grid.

    Raises `UnknownNameError`, `TraceError` and `HardwareError` before anything is simulated.
    """
    check_engine(sweep.engine)
    policies = policy_names(sweep.policies)
    version = code_version()
    given = {content.hash: content for content in map(read_content, hardware_files(sweep.hardware))}
    traces: dict[str, TraceContent] = {}
    hardware = dict(given)
    points: dict[str, Point] = {}
    for path in trace_files(sweep.traces):
        trace, gpu = _read_trace(path)
        traces[trace.hash] = trace
        models = given
        if not models:
            own = _content(default_hardware(gpu))
            models = {own.hash: own}
            hardware |= models
        for model in models:
            for policy in policies:
                for streams in registered_policies()[policy].stream_counts(sweep.streams):
                    point = make_point(trace.hash, model, policy, streams, sweep.engine, sweep.seed, version)
                    points[point.key] = point
    return Grid(tuple(points.values()), traces, hardware, version)


def make_point(
    trace_hash: str, hardware_hash: str, policy: str, streams: int, engine: str, seed: int, version: str
) -> Point:
    """Return a point with its key."""
    key = _hash([trace_hash, hardware_hash, policy, streams, engine, seed, version])
    return Point(key, trace_hash, hardware_hash, policy, streams, engine, seed)


def trace_hash(trace: Trace) -> str:
    """Return a hash of all that a simulation reads of a trace: structure, kernels, times and the GPU's name.

    Unlike `gpusim.trace.store.structure_hash`, it differs between captures of the same step.
    """
    fields = asdict(trace) | {"provenance": trace.provenance.gpu.name}
    return _hash(fields)


def hardware_hash(model: HardwareModel) -> str:
    """Return a hash of a hardware model's numbers, without the texts on their sources."""
    return _hash(asdict(model) | {"sources": None})


def read_content(path: Path) -> HardwareContent:
    """Read a hardware model. Raises `HardwareError`."""
    return _content(read_hardware(path))


@functools.cache
def code_version() -> str:
    """Return the version of gpusim with a hash of the simulating code; other changes keep results valid."""
    return version_of(_SIMULATION)


def _read_trace(path: Path) -> tuple[TraceContent, str]:
    """Return the content of a trace and the GPU of its capture."""
    data = read_file(path, TraceError)
    trace = parse_trace(data, str(path))
    model = trace.model
    content = TraceContent(
        hash=trace_hash(trace),
        data=data,
        name=trace.name,
        network=model.network,
        mode=model.mode,
        batch=model.batch,
        dtype=model.dtype,
        memory_format=model.memory_format,
        frontend=model.frontend,
    )
    return content, trace.provenance.gpu.name


def _content(model: HardwareModel) -> HardwareContent:
    return HardwareContent(hardware_hash(model), encode_json(model), model.name, model.calibrated)


def _hash(value: Any) -> str:
    return hashlib.sha256(encode_json(value)).hexdigest()[:32]
