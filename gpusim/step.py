"""The step, a trace on a hardware model: the main argument of the public API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from gpusim.arguments import file_path
from gpusim.errors import HardwareError, LimitError, OptionError, PlanError, TraceError
from gpusim.formats.hardware import HardwareModel, bundled_hardware, default_hardware, load_hardware
from gpusim.formats.trace import Trace
from gpusim.notebook import html_table, short_name, short_repr
from gpusim.plan.graph import OpGraph
from gpusim.trace.store import bundled_traces, load_trace, write_trace
from gpusim.units import counted, format_bytes, format_ns

Files = Sequence[str | Path]
"""Files of one run."""


@dataclass(frozen=True, repr=False)
class Step:
    """A trace on a hardware model, made by `gpusim.load` or `gpusim.capture`."""

    trace: Trace
    hardware: HardwareModel
    source: str = ""
    """File or bundled name of the trace, for messages; if empty, the trace's own name."""
    hardware_file: str = ""
    """File of the hardware model, for messages; empty for a bundled model."""

    @cached_property
    def graph(self) -> OpGraph:
        """Op graph with dependencies, kernels and their times on this hardware; built on first use.

        Raises `TraceError` or `HardwareError` if a kernel breaks a limit of the GPU.
        """
        with self.naming():
            return OpGraph.build(self.trace, self.hardware)

    @property
    def name(self) -> str:
        """Name of the trace, such as `googlenet-train-b8`."""
        return self.trace.name

    @property
    def kernels(self) -> int:
        """Number of captured kernels."""
        return sum(len(op.kernels) for op in self.trace.ops)

    @property
    def file(self) -> str:
        """Name of the trace in messages."""
        return self.source or self.name

    def on(self, hw: str | Path | HardwareModel) -> Step:
        """Return the same trace on another GPU. Raises `HardwareError`, `UnknownNameError`."""
        model, file = _hardware(hw)
        return Step(self.trace, model, self.source, file)

    def save(self, path: str | Path) -> None:
        """Write the trace (`.json`, or `.json.gz` for a small file). Raises `OutputError`, `OptionError`."""
        write_trace(self.trace, file_path("path", path))

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Add the file's name to errors of an engine: the trace's, or the hardware model's if it is a file."""
        try:
            yield
        except LimitError as cause:
            if not self.hardware_file:
                raise TraceError(self.file, str(cause)) from cause
            raise HardwareError(self.hardware_file, f"has no room for a kernel of {self.file}: {cause}") from cause
        except PlanError as cause:
            raise TraceError(self.file, str(cause)) from cause

    def __repr__(self) -> str:
        size = f"{counted(len(self.trace.ops), 'op')}, {counted(self.kernels, 'kernel')}"
        source = self.trace.provenance.imported_from
        quality = f", dependencies: {source.dependency_quality}" if source is not None else ""
        quality += ", estimated" if self.trace.provenance.estimated else ""
        return short_repr("Step", f"{short_name(self.name)} on {short_name(self.hardware.label)}: {size}{quality}")

    def _repr_html_(self) -> str:
        trace, truth = self.trace, self.trace.ground_truth
        rows = [
            ("network", trace.model.network),
            ("mode", trace.settings or "unknown"),
            ("ops", f"{len(trace.ops):,}"),
            ("kernels", f"{self.kernels:,}"),
            ("memory of all tensors", format_bytes(sum(storage.bytes for storage in trace.storages))),
            ("estimated for" if trace.provenance.estimated else "captured on", trace.provenance.gpu.name),
        ]
        if trace.provenance.imported_from is not None:
            rows.append(("dependencies", trace.provenance.imported_from.dependency_quality))
        if truth is not None:
            rows.append(("eager step, measured", format_ns(truth.eager.median_ns)))
            rows.append(("one CUDA graph, measured", format_ns(truth.graph.median_ns)))
        rows.append(("hardware model", self.hardware.label))
        return html_table(f"Step {self.name}", ("", ""), rows)


def load(trace: str | Path | Trace | Files, hw: str | Path | HardwareModel | None = None) -> Step:
    """Load a step from a bundled name, a trace file (`.json`, `.json.gz`) or a `Trace`, on a hardware model.

    A file of another tool is imported (`gpusim import` lists the formats): torch.profiler, Nsight Systems and others.
    Several files of one run, in a list or tuple, are joined: a profile with its execution trace, ncu table or CUDA
    graph. The `repr` of such a step has the quality of its dependencies.
    `hw` is a bundled name, a file or a `HardwareModel`; by default the model of the GPU that the trace was captured
    on, or the H200's if there is none. `gpusim.list_traces()` and `gpusim.list_hardware()` list what is bundled.
    Raises `TraceError` and `HardwareError` for a bad file, `UnknownNameError` for an unknown name.
    """
    if isinstance(trace, Trace):
        loaded, source = trace, ""
    elif isinstance(trace, str | Path):
        loaded, source = _load(str(trace)), str(trace)
    elif isinstance(trace, list | tuple) and trace and all(isinstance(file, str | Path) for file in trace):
        files = [str(file) for file in trace]
        loaded, source = _load(files[0]) if len(files) == 1 else _joined(files), ", ".join(files)
    else:
        raise OptionError(
            f"load: {type(trace).__name__} is no trace; give a bundled name, a file, the files of one run or a Trace "
            "(gpusim.capture takes models)"
        )
    if hw is None:
        return Step(loaded, default_hardware(loaded.provenance.gpu.name), source)
    model, file = _hardware(hw)
    return Step(loaded, model, source, file)


def _load(file: str) -> Trace:
    """Load the trace of a bundled name or a file, of gpusim or a profile."""
    if file not in bundled_traces():
        from gpusim.importers.recognise import is_foreign

        if is_foreign(file):
            from gpusim.importers.build import import_files

            return import_files([file]).trace
    return load_trace(file)


def _joined(files: Sequence[str]) -> Trace:
    """Import several files of one run."""
    from gpusim.importers.build import import_files

    return import_files(files).trace


def as_step(step: Step | Trace | str | Path) -> Step:
    """Return a given step, or the step that `load` makes of a name, a file or a trace."""
    return step if isinstance(step, Step) else load(step)


def _hardware(hw: str | Path | HardwareModel) -> tuple[HardwareModel, str]:
    """Return the hardware model, and its file if it is not bundled."""
    if isinstance(hw, HardwareModel):
        return hw, ""
    if not isinstance(hw, str | Path):
        raise OptionError("a bundled name, a file or a HardwareModel", argument="hw", value=repr(hw))
    return load_hardware(str(hw)), "" if str(hw) in bundled_hardware() else str(hw)
