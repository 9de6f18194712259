"""Output of `gpusim doctor` and `gpusim import`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from gpusim.importers.build import Imported
from gpusim.importers.doctor import Report
from gpusim.importers.model import Finding
from gpusim.text import shortened
from gpusim.units import counted, format_ns


def doctor_lines(report: Report, file: str) -> Iterator[str]:
    """Yield the lines of the report."""
    yield f"{file}: {report.what}, by {report.writer}"
    gpus = [name if count == 1 else f"{count} x {name}" for name, count in Counter(report.gpus).items()]
    yield f"  GPU           {shortened(', '.join(gpus)) or 'none'}"
    yield f"  kernels       {report.kernels} on {counted(report.streams, 'stream')}"
    yield f"  steps         {report.steps or 'none marked'}"
    yield f"  busy          {format_ns(report.busy_ns)}; two or more kernels ran in {report.concurrent_frac:.1%} of it"
    yield f"  dependencies  {report.dependency_quality}"
    if report.imported is not None:
        yield from _step_lines(report.imported)
    if report.refused:
        yield f"  import        refused: {report.refused}"
    yield from finding_lines(report.findings)


def imported_lines(imported: Imported) -> Iterator[str]:
    """Yield the lines about an imported trace."""
    source = imported.source
    kernels = sum(kernel.kind == "kernel" for op in imported.trace.ops for kernel in op.kernels)
    gpu = imported.trace.provenance.gpu.name
    yield f"{', '.join(source.files)}: {counted(kernels, 'kernel')} on {counted(source.streams, 'stream')} of {gpu}"
    yield f"  dependencies  {source.dependency_quality}"
    yield from _step_lines(imported)
    yield from finding_lines(imported.findings)


def imported_document(imported: Imported) -> dict[str, Any]:
    """Return the document of `gpusim import --json`."""
    source = imported.source
    return {
        "gpu": imported.trace.provenance.gpu.name,
        "kernels": sum(kernel.kind == "kernel" for op in imported.trace.ops for kernel in op.kernels),
        "streams": source.streams,
        "step": source.step,
        "steps": imported.steps,
        "dependency_quality": source.dependency_quality,
        "observed_ns": source.observed_ns,
        "busy_ns": source.busy_ns,
        "concurrent_ns": source.concurrent_ns,
        "resimulated_ns": source.resimulated_ns,
        "error": imported.error,
        "findings": [{"code": f.code, "text": f.text, "action": f.action} for f in imported.findings],
    }


def _step_lines(imported: Imported) -> Iterator[str]:
    source = imported.source
    of = f", one of {imported.steps}" if imported.steps > 1 else ""
    yield f"  step          {source.step}{of}"
    if imported.error is not None:
        origin = "as predicted" if source.simulated else "as observed"
        yield (
            f"  {origin:<13} {format_ns(source.observed_ns)}; re-simulated with its edges and launches "
            f"{format_ns(source.resimulated_ns)} ({imported.error:+.2%})"
        )


def finding_lines(findings: tuple[Finding, ...] | list[Finding]) -> Iterator[str]:
    """Yield numbered findings, each with code, reason and advice."""
    if not findings:
        yield "No findings."
    for number, finding in enumerate(findings, 1):
        yield f"{number}. {finding.code}: {finding.text}"
        if finding.action:
            yield f"   -> {finding.action}"
