"""Examination of a file: format, writer, contents, and numbered findings with remedies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gpusim.errors import GpusimError, OptionError
from gpusim.formats.trace import Quality, Trace
from gpusim.importers.build import Imported, import_contents
from gpusim.importers.model import FORMAT_NAMES, WITHOUT_KERNELS, Finding, GpuFacts, ImportFileError, Profile, busy
from gpusim.importers.read import Contents, read_files
from gpusim.importers.stream_json import Progress
from gpusim.importers.to_trace import estimated_kernels, slowed_kernels
from gpusim.trace.store import bundled_traces, load_trace, read_trace
from gpusim.units import NS_PER_US

#: Kernels shorter than this many clock ticks have over 10 % timing error.
TICKS: Final = 10
#: Clock tick of GPU timestamps, about 32 ns.
GPU_TICK_NS: Final = 32
#: Findings on a single file that do not apply together with a profile with times.
_OF_ONE_ALONE: Final = ("no-kernels", "no-times", "no-gpu-properties", "clocks")
#: Share of a trace's GPU time without an op above which a finding warns.
MAX_UNATTRIBUTED: Final = 0.01


@dataclass(frozen=True, slots=True)
class Report:
    """Report of `gpusim doctor` on a file, or on several files of one run."""

    format: str
    writer: str
    gpus: tuple[str, ...]
    kernels: int
    """Number of kernel records, without copies and memsets."""
    streams: int
    """Number of streams with kernels, over all devices."""
    steps: int
    busy_ns: int
    """Time with at least one kernel running, in ns, summed over devices."""
    concurrent_frac: float
    """Share of the busy time with at least two kernels running on one device."""
    dependency_quality: Quality
    findings: tuple[Finding, ...]
    what: str = ""
    """Format in words."""
    imported: Imported | None = field(default=None, compare=False)
    refused: str = ""
    """Reason why `gpusim import` would refuse the file; empty where it would not."""

    def document(self) -> dict[str, Any]:
        """Return the report in the form that `--json` prints."""
        return {
            "format": self.format,
            "writer": self.writer,
            "gpus": list(self.gpus),
            "kernels": self.kernels,
            "streams": self.streams,
            "steps": self.steps,
            "busy_ns": self.busy_ns,
            "concurrent_frac": self.concurrent_frac,
            "dependency_quality": self.dependency_quality,
            "findings": [{"code": f.code, "text": f.text, "action": f.action} for f in self.findings],
        }


def examine(files: Sequence[str], report: Progress | None = None) -> Report:
    """Return the report on one file, or on several files of one run. Raises `TraceError` for an unreadable file."""
    if len(files) == 1 and files[0] in bundled_traces() and not Path(files[0]).exists():
        return _own(files[0], load_trace(files[0]))
    contents = read_files(list(files), report)
    if contents.traces:
        if len(files) > 1:
            raise ImportFileError(contents.traces[0], "is a gpusim trace, complete without other files: give it alone")
        return _own(contents.traces[0], read_trace(Path(contents.traces[0])))
    parts = contents.all()
    profiles = [part for part in parts if part.activities]
    kernels = [kernel for profile in profiles for kernel in profile.kernels()]
    spans = [busy(profile.kernels()) for profile in profiles if profile.has_times]
    if not spans:
        spans = [(sum(kernel.dur_ns for kernel in kernels), 0)]
    busy_ns, concurrent_ns = sum(one for one, _ in spans), sum(two for _, two in spans)
    timed = any(profile.has_times for profile in profiles)
    findings = [
        finding
        for part in parts
        for finding in part.findings
        if not (timed and finding.code in _OF_ONE_ALONE and not (part.has_times and part.activities))
    ]
    findings += [finding for profile in profiles for finding in _clock_findings(profile)]
    imported, refused = _try(contents, files)
    quality: Quality = parts[0].quality
    if imported is not None:
        quality = imported.source.dependency_quality
        findings += [finding for finding in imported.findings if finding not in findings]
        if quality not in ("data", "graph"):
            findings.append(_no_data(quality))
    elif not kernels and not any(finding.code in WITHOUT_KERNELS for finding in findings):
        text = "no kernel of a GPU is in the file" + (
            f": its {parts[0].nodes} operators ran on the CPU" if parts[0].nodes else ""
        )
        findings.insert(0, Finding("no-kernels", text, "profile with activities=[CPU, CUDA] on a machine with a GPU"))
    elif kernels:
        findings.append(
            Finding("not-importable", refused, "give it with the other files of its run, or choose a part of it")
        )
    main = max(parts, key=lambda part: len(part.activities))
    return Report(
        format=main.format,
        writer=main.writer,
        gpus=tuple(_gpu_names(profiles)),
        kernels=len(kernels),
        streams=sum(len({kernel.lane for kernel in profile.kernels()}) for profile in profiles),
        steps=imported.steps if imported is not None else 0,
        busy_ns=busy_ns,
        concurrent_frac=concurrent_ns / busy_ns if busy_ns else 0.0,
        dependency_quality=quality,
        findings=tuple(_merged(findings)),
        what=FORMAT_NAMES[main.format],
        imported=imported,
        refused=refused,
    )


def _try(contents: Contents, files: Sequence[str]) -> tuple[Imported | None, str]:
    """Import the contents; returns the reason where the import fails."""
    try:
        return import_contents(contents, files), ""
    except OptionError as cause:  # several profiles: each can be imported, by its rank
        return None, str(cause)
    except GpusimError as cause:
        if len(files) > 1:
            raise
        return None, str(cause)


def _no_data(quality: Quality) -> Finding:
    known = {
        "event": "it has streams and recorded waits",
        "stream": "it has one stream and its order",
        "assumed": "it has streams, with waits assumed from the times",
    }.get(quality, "it has kernels without an order")
    text = f"no data dependencies: {known}, so other orders and more streams cannot be judged"
    return Finding(
        "no-data-edges", text, "add the run's execution trace (ExecutionTraceObserver) or a dump of its CUDA graph"
    )


def _clock_findings(profile: Profile) -> list[Finding]:
    findings = []
    kernels = profile.kernels()
    tick_ns = max(profile.resolution_ns, GPU_TICK_NS)
    short = sum(kernel.dur_ns < TICKS * tick_ns for kernel in kernels)
    if short:
        limit = f"{TICKS * tick_ns / NS_PER_US:g} µs"
        text = f"{short} of {len(kernels)} kernels take less than {limit}, {TICKS} ticks of the clock: a tenth of error"
        findings.append(Finding("short-kernels", text, "look at sums of many of them"))
    if kernels and profile.has_times:
        most = max((gpu.max_clock_mhz for gpu in profile.gpus.values()), default=0)
        text = "the file does not have the GPU's clock rate" + (f", only its maximum, {most} MHz" if most else "")
        findings.append(Finding("clocks", text, "compare only with runs at the same clock (nvidia-smi -q -d CLOCK)"))
    overlaps = _overlaps(profile)
    if overlaps:
        text = f"{overlaps} records begin before their predecessor on the stream has ended"
        findings.append(
            Finding("overlap-on-stream", text, "caused by programmatic dependent launches, or by rounded times")
        )
    return findings


def _overlaps(profile: Profile) -> int:
    ends: dict[tuple[int, int, int], int] = {}
    overlaps = 0
    for activity in profile.activities:
        overlaps += activity.start_ns + profile.resolution_ns < ends.get(activity.lane, 0)
        ends[activity.lane] = max(activity.end_ns, ends.get(activity.lane, 0))
    return overlaps


def _gpu_names(profiles: Sequence[Profile]) -> list[str]:
    names = []
    for profile in profiles:
        names += [
            profile.gpus.get(device, GpuFacts()).name or f"device {device}, not named" for device in profile.devices()
        ]
    return names


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """Drop repeated codes; of several profiles, the first finding with a code stands for all."""
    kept: dict[str, Finding] = {}
    for finding in findings:
        kept.setdefault(finding.code, finding)
    return list(kept.values())


def _own(file: str, trace: Trace) -> Report:
    """Return the report on a gpusim trace, captured or imported."""
    provenance, source = trace.provenance, trace.provenance.imported_from
    kernels = [kernel for op in trace.ops for kernel in op.kernels if kernel.kind == "kernel"]
    findings = estimated_kernels(trace)
    quality: Quality = "data"
    streams, busy_ns, concurrent = 1, sum(kernel.dur_ns for kernel in kernels), 0.0
    if source is not None:
        quality = source.dependency_quality
        streams = source.streams
        if source.observed_ns:
            busy_ns, concurrent = source.busy_ns, source.concurrent_ns / max(1, source.busy_ns)
            findings += slowed_kernels(trace)
        if quality not in ("data", "graph"):
            findings.append(_no_data(quality))
    else:
        truth = trace.ground_truth
        if truth is None and not provenance.estimated:
            findings.append(
                Finding("no-ground-truth", "the step was not timed without a profiler", "capture it again on its GPU")
            )
        elif truth is not None and truth.attributed_frac < 1 - MAX_UNATTRIBUTED:
            text = f"{1 - truth.attributed_frac:.1%} of the GPU time belongs to no op"
            findings.append(Finding("unattributed-time", text, "see $.ground_truth.unattributed"))
    if not provenance.gpu.sm_clock_mhz:
        findings.append(
            Finding("clocks", "the file does not have the GPU's clock rate", "compare only with runs at the same clock")
        )
    if kernels and not any(kernel.regs_per_thread for kernel in kernels):
        findings.append(Finding("no-registers", "no kernel has its registers: occupancy is unknown"))
    return Report(
        format="gpusim-trace",
        writer=f"gpusim {provenance.gpusim}",
        gpus=(provenance.gpu.name,),
        kernels=len(kernels),
        streams=streams,
        steps=1,
        busy_ns=busy_ns,
        concurrent_frac=concurrent,
        dependency_quality=quality,
        findings=tuple(findings),
        what=FORMAT_NAMES["gpusim-trace"] + (f", imported from {', '.join(source.files)}" if source else ""),
    )
