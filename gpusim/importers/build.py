"""Build of a gpusim trace from files: choice of profile, GPU and step, and edges from the best available source."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gpusim.errors import OptionError
from gpusim.formats.trace import (
    ImportedFrom,
    Trace,
)
from gpusim.importers.edges import observed_edges, restricted
from gpusim.importers.join import Joined, join_counters, join_graph, join_operators
from gpusim.importers.model import FORMAT_NAMES, WITHOUT_KERNELS, Activity, Finding, ImportFileError, Profile
from gpusim.importers.read import Contents, read_files
from gpusim.importers.steps import Step, choose_step
from gpusim.importers.stream_json import Progress
from gpusim.importers.to_trace import Origin, make_trace
from gpusim.io import file_limits
from gpusim.trace.check import check_trace

#: Most edges of a step: eight times the most records.
MAX_EDGES: Final = 8 * file_limits.MAX_PARTS
#: Most execution traces tried for one profile.
MAX_TRIED: Final = 64
#: What to do with a profile without kernels.
_PROFILE_AGAIN: Final = "profile with activities=[CPU, CUDA] on a machine with a GPU"
_NSYS_AGAIN: Final = "profile with `nsys profile --trace=cuda` on a machine with a GPU"
_NUMBERS: Final = re.compile(r"\d{1,9}", re.ASCII)


@dataclass(slots=True)
class Imported:
    """A trace with the findings of its import."""

    trace: Trace
    step: Step
    steps: int
    findings: list[Finding] = field(default_factory=list)

    @property
    def source(self) -> ImportedFrom:
        """Origin recorded in the trace."""
        origin = self.trace.provenance.imported_from
        assert origin is not None
        return origin

    @property
    def error(self) -> float | None:
        """Relative error of the re-simulated step against the observed one; None without times."""
        source = self.source
        return source.resimulated_ns / source.observed_ns - 1 if source.resimulated_ns and source.observed_ns else None


def import_files(
    files: Sequence[str],
    *,
    step: str | None = None,
    device: int | None = None,
    gpu: str | None = None,
    rank: int | None = None,
    command: str = "",
    report: Progress | None = None,
) -> Imported:
    """Import one step of the run in `files` as a trace. Raises `GpusimError`.

    `step` is a step's name or number, or `all`; `device` is the GPU's number in the file; `gpu` is its name, where the
    file has none; `rank` selects one of several profiles.
    """
    return import_contents(
        read_files(list(files), report), files, step=step, device=device, gpu=gpu, rank=rank, command=command
    )


def import_contents(
    contents: Contents,
    files: Sequence[str],
    *,
    step: str | None = None,
    device: int | None = None,
    gpu: str | None = None,
    rank: int | None = None,
    command: str = "",
) -> Imported:
    """Import files that are already read, as `import_files`. Changes the records in `contents`: use them once."""
    if contents.traces:
        raise ImportFileError(contents.traces[0], "is already a gpusim trace: give it to `gpusim explore`")
    profile, notes = _profile(contents, rank)
    findings = [*profile.findings, *notes]
    lane, note = _device(profile, device)
    findings += note
    mine = [index for index, record in enumerate(profile.activities) if (record.process, record.device) == lane]
    chosen, steps = choose_step(profile, mine, step)
    activities = [profile.activities[index] for index in chosen.indices]
    if not any(activity.kind == "kernel" and activity.dur_ns for activity in activities):
        raise ImportFileError(profile.file, f"has no kernel of non-zero duration in {chosen.name}")
    if chosen.is_whole and step is None and profile.has_times:
        findings.append(
            Finding(
                "no-steps",
                "no steps are marked and no sequence of kernels repeats: the whole file is taken as one step",
                "mark steps with profiler.step() or NVTX ranges, or name a range with --step",
            )
        )
    joined = _edges(contents, profile, activities, chosen)
    findings += joined.findings
    for table in contents.tables:
        if table is not profile:
            findings += join_counters(activities, table)
    if len(joined.edges) > MAX_EDGES:
        raise ImportFileError(profile.file, f"its step has {len(joined.edges)} edges; the limit is {MAX_EDGES}")
    origin = Origin(tuple(files), chosen, lane[1], gpu or "", command)
    trace, notes = make_trace(profile, activities, joined, origin)
    check_trace(trace, profile.file)
    return Imported(trace, chosen, len(steps), [*findings, *notes])


def _profile(contents: Contents, rank: int | None) -> tuple[Profile, list[Finding]]:
    """Return the single profile to import. Raises `ImportFileError` or `OptionError`."""
    with_kernels = [profile for profile in contents.profiles if any(a.kind == "kernel" for a in profile.activities)]
    if not with_kernels and contents.tables:
        return contents.tables[0], []
    if not with_kernels:
        first = contents.all()[0]
        format_name = FORMAT_NAMES[first.format]
        for finding in first.findings:
            if finding.code in WITHOUT_KERNELS:
                raise ImportFileError(first.file, f"is {format_name}: {finding.text}; {finding.action}")
        operators = f" ({first.nodes} operators ran on the CPU)" if first.nodes else ""
        fix = _NSYS_AGAIN if first.format == "nsys-sqlite" else _PROFILE_AGAIN
        raise ImportFileError(first.file, f"is {format_name} without a GPU kernel{operators}; {fix}")
    if rank is not None:
        ranked = {
            candidate.rank if candidate.rank is not None else place: candidate
            for place, candidate in enumerate(with_kernels)
        }
        if rank not in ranked:
            known = ", ".join(map(str, sorted(ranked)))
            raise OptionError(f"{with_kernels[0].file}: the ranks are {known}", argument="rank", value=rank)
        return ranked[rank], []
    if len(with_kernels) == 1:
        return with_kernels[0], []
    if len({profile.file.partition(":")[0] for profile in with_kernels}) > 1:
        names = ", ".join(Path(profile.file).name for profile in with_kernels[:4])
        raise OptionError(f"{len(with_kernels)} separate profiles ({names}): import one of them, or select its rank")
    text = f"the archive has {len(with_kernels)} profiles; {with_kernels[0].file.rpartition('/')[2]} is imported"
    return with_kernels[0], [Finding("several-profiles", text, "pick another one with --rank")]


def _device(profile: Profile, wanted: int | None) -> tuple[tuple[int, int], list[Finding]]:
    """Return process and number of the device to import."""
    times: dict[tuple[int, int], int] = {}
    for activity in profile.activities:
        if activity.kind == "kernel":
            key = (activity.process, activity.device)
            times[key] = times.get(key, 0) + activity.dur_ns
    if wanted is not None:
        fitting = [key for key in times if key[1] == wanted]
        if not fitting:
            known = ", ".join(str(number) for number in sorted({key[1] for key in times}))
            raise OptionError(f"{profile.file} has kernels on device {known}", argument="device", value=wanted)
        return max(fitting, key=lambda key: times[key]), []
    best = max(times, key=lambda key: (times[key], -key[1]))
    if len(times) == 1:
        return best, []
    text = f"{len(times)} GPUs or processes ran kernels; device {best[1]}, the busiest, is imported"
    return best, [Finding("several-devices", text, "pick another one with --device")]


def _join_operators(activities: Sequence[Activity], profile: Profile, contents: Contents) -> Joined:
    """Join with the execution trace of the profile's rank.

    Of several traces, first the one with the rank in its name is tried, then the one at the same position among the
    files, then the others.
    """
    place = next(number for number, other in enumerate(contents.profiles) if other is profile)
    order = sorted(
        enumerate(contents.operators),
        key=lambda item: (_last_number(item[1].file) != profile.rank, item[0] != place),
    )
    refused: list[ImportFileError] = []
    for _, trace in order[:MAX_TRIED]:
        try:
            joined = join_operators(activities, profile, trace)
        except ImportFileError as cause:
            refused.append(cause)
            continue
        if refused:
            text = f"it is joined with {trace.file}: the execution trace of its own rank does not fit"
            joined.findings.append(Finding("joined-operators", text, "give the execution trace of the same rank"))
        return joined
    raise refused[0]


def _last_number(file: str) -> int | None:
    """Return the last number in a file's name, which usually is the rank."""
    numbers = _NUMBERS.findall(file.rpartition("/")[2])
    return int(numbers[-1]) if numbers else None


def _edges(contents: Contents, profile: Profile, activities: Sequence[Activity], chosen: Step) -> Joined:
    """Return the edges of the step, from the best available source."""
    if contents.graphs:
        return join_graph(activities, profile, contents.graphs[0])
    if contents.operators:
        return _join_operators(activities, profile, contents)
    if profile.edges is not None:
        return Joined(restricted(profile.edges, chosen.indices), profile.quality, [])
    edges, quality, contradicted = observed_edges(
        activities, profile.waits, profile.has_waits, profile.resolution_ns, profile.file
    )
    findings = []
    if not profile.has_times:
        quality = "none"
    unknown = sum(wait.recorded < 0 for wait in profile.waits)
    if unknown:
        text = f"{unknown} recorded waits do not name their event: all work ended on other streams counts as required"
        findings.append(Finding("unknown-waits", text, "add the execution trace, or profile with another torch"))
    elif quality == "assumed":
        text = "several streams without recorded waits: the observed order across streams counts as required"
        findings.append(
            Finding(
                "no-sync-events",
                text,
                "profile with experimental_config=_ExperimentalConfig("
                "enable_cuda_sync_events=True), or add the execution trace",
            )
        )
    if contradicted:
        text = f"{contradicted} recorded waits contradict the kernels' times and are left out"
        findings.append(Finding("contradicted-waits", text))
    return Joined(edges, quality, findings)
