"""From files to a gpusim trace: one step of one device, one op for each record of GPU work."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gpusim import file_limits
from gpusim.errors import OptionError
from gpusim.importers.edges import observed_edges, restricted
from gpusim.importers.join import join_counters, join_graph, join_operators
from gpusim.importers.model import FORMAT_NAMES, Activity, Edge, Finding, GpuFacts, ImportFileError, Profile, busy
from gpusim.importers.observed import makespan_ns, resimulated
from gpusim.importers.read import Contents, read_files
from gpusim.importers.steps import Step, choose_step
from gpusim.importers.stream_json import Progress
from gpusim.text import shortened
from gpusim.trace.check import check_trace
from gpusim.trace.schema import (
    SCHEMA,
    After,
    Gpu,
    ImportedFrom,
    Kernel,
    Model,
    Observed,
    Op,
    Provenance,
    Quality,
    Trace,
)
from gpusim.version import code_version

#: Longest name of a kernel that is kept.
MAX_NAME: Final = 1024
#: Step that more than one record may wait for: beyond, edges would outnumber records a hundred times.
MAX_EDGES: Final = 8 * file_limits.MAX_PARTS


@dataclass(slots=True)
class Imported:
    """A trace, and what importing found out."""

    trace: Trace
    step: Step
    steps: int
    findings: list[Finding] = field(default_factory=list)

    @property
    def source(self) -> ImportedFrom:
        """What the trace says of its origin."""
        found = self.trace.provenance.imported_from
        assert found is not None
        return found

    @property
    def error(self) -> float | None:
        """How far the re-simulated step is from the observed one, as a share; None without times."""
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
    """One step of the run in `files` as a trace. Raises `GpusimError`.

    `step` is a step's name or number, or `all`; `device` the GPU's number in the file; `gpu` its name, where the file
    has none; `rank` picks a profile out of several.
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
    """As `import_files`, of files that are read. Changes the records in `contents`: use them once."""
    if contents.traces:
        raise ImportFileError(contents.traces[0], "is a trace of gpusim's already: give it to `gpusim explore`")
    profile, notes = _profile(contents, rank)
    findings = [*profile.findings, *notes]
    lane, note = _device(profile, device)
    findings += note
    mine = [index for index, found in enumerate(profile.activities) if (found.process, found.device) == lane]
    chosen, steps = choose_step(profile, mine, step)
    activities = [profile.activities[index] for index in chosen.indices]
    if not any(activity.kind == "kernel" and activity.dur_ns for activity in activities):
        raise ImportFileError(profile.file, f"has no kernel that takes any time in {chosen.name}")
    if chosen.is_whole and step is None and profile.has_times:
        findings.append(
            Finding(
                "no-steps",
                "no steps are marked and no sequence of kernels repeats: the whole file is taken as one step",
                "mark steps with profiler.step() or NVTX ranges, or name a range with --step",
            )
        )
    edges, quality, joined = _edges(contents, profile, activities, chosen)
    findings += joined
    for table in contents.tables:
        if table is not profile:
            findings += join_counters(activities, table)
    if len(edges) > MAX_EDGES:
        raise ImportFileError(profile.file, f"its step has {len(edges)} edges; the limit is {MAX_EDGES}")
    trace, notes = _trace(profile, activities, edges, quality, chosen, lane[1], gpu, files, command, contents)
    check_trace(trace, profile.file)
    return Imported(trace, chosen, len(steps), [*findings, *notes])


def _profile(contents: Contents, rank: int | None) -> tuple[Profile, list[Finding]]:
    """The one profile to import. Raises `ImportFileError` or `OptionError`."""
    with_kernels = [profile for profile in contents.profiles if any(a.kind == "kernel" for a in profile.activities)]
    if not with_kernels and contents.tables:
        return contents.tables[0], []
    if not with_kernels:
        first = contents.all()[0]
        what = FORMAT_NAMES[first.format]
        if first.findings and first.findings[0].code in ("no-kernels", "no-times"):
            raise ImportFileError(first.file, f"is {what}: {first.findings[0].text}; {first.findings[0].action}")
        operators = f" ({first.nodes} operators ran on the CPU)" if first.nodes else ""
        fix = "profile with activities=[CPU, CUDA] on a machine with a GPU"
        raise ImportFileError(first.file, f"is {what} without a GPU kernel{operators}; {fix}")
    if rank is not None:
        ranked = {found.rank if found.rank is not None else place: found for place, found in enumerate(with_kernels)}
        if rank not in ranked:
            raise OptionError(
                f"the files have the ranks {', '.join(map(str, sorted(ranked)))}", argument="rank", value=rank
            )
        return ranked[rank], []
    if len(with_kernels) == 1:
        return with_kernels[0], []
    if len({profile.file.partition(":")[0] for profile in with_kernels}) > 1:
        names = ", ".join(Path(profile.file).name for profile in with_kernels[:4])
        raise OptionError(f"{len(with_kernels)} profiles of their own ({names}): import one, or pick it by its rank")
    text = f"the archive has {len(with_kernels)} profiles; {with_kernels[0].file.rpartition('/')[2]} is imported"
    return with_kernels[0], [Finding("several-profiles", text, "pick another one with --rank")]


def _device(profile: Profile, wanted: int | None) -> tuple[tuple[int, int], list[Finding]]:
    """Process and number of the device to import."""
    times: dict[tuple[int, int], int] = {}
    for activity in profile.activities:
        if activity.kind == "kernel":
            key = (activity.process, activity.device)
            times[key] = times.get(key, 0) + activity.dur_ns
    if wanted is not None:
        fitting = [key for key in times if key[1] == wanted]
        if not fitting:
            known = ", ".join(str(number) for number in sorted({key[1] for key in times}))
            raise OptionError(f"the file has kernels on device {known}", argument="device", value=wanted)
        return max(fitting, key=lambda key: times[key]), []
    best = max(times, key=lambda key: (times[key], -key[1]))
    if len(times) == 1:
        return best, []
    text = f"{len(times)} GPUs or processes ran kernels; device {best[1]}, the busiest, is imported"
    return best, [Finding("several-devices", text, "pick another one with --device")]


def _edges(
    contents: Contents, profile: Profile, activities: Sequence[Activity], chosen: Step
) -> tuple[list[Edge], Quality, list[Finding]]:
    if contents.graphs:
        joined = join_graph(activities, profile, contents.graphs[0])
        return joined.edges, joined.quality, joined.findings
    if contents.operators:
        joined = join_operators(activities, profile, contents.operators[0])
        return joined.edges, joined.quality, joined.findings
    if profile.edges is not None:
        return restricted(profile.edges, chosen.indices), profile.quality, []
    edges, quality, contradicted = observed_edges(activities, profile.waits, profile.has_waits, profile.resolution_ns)
    findings = []
    if not profile.has_times:
        quality = "none"
    if quality == "assumed":
        text = (
            "several streams and no record of what they wait for: the observed order across streams counts as required"
        )
        findings.append(
            Finding(
                "no-sync-events",
                text,
                "profile with experimental_config=_ExperimentalConfig("
                "enable_cuda_sync_events=True), or add the execution trace",
            )
        )
    if contradicted:
        text = f"{contradicted} recorded waits do not agree with the times of the kernels and are left out"
        findings.append(Finding("contradicted-waits", text))
    return edges, quality, findings


def _trace(
    profile: Profile,
    activities: Sequence[Activity],
    edges: Sequence[Edge],
    quality: Quality,
    step: Step,
    device: int,
    gpu: str | None,
    files: Sequence[str],
    command: str,
    contents: Contents,
) -> tuple[Trace, list[Finding]]:
    origin_ns = min(activity.start_ns for activity in activities)
    odd: list[int] = []
    lanes = {lane: number for number, lane in enumerate(sorted({activity.lane for activity in activities}))}
    after: list[list[After]] = [[] for _ in activities]
    for edge in edges:
        after[edge.after].append(After(op=edge.before, kind=edge.kind))
    ops = tuple(
        Op(
            name=f"{_plain(activity.op or activity.name)}.{index}",
            target=shortened(activity.op, MAX_NAME) or f"imported.{activity.kind}",
            phase=activity.phase,
            layer=shortened(activity.module, MAX_NAME),
            kernels=(_kernel(activity, odd, index),),
            after=tuple(after[index]),
            observed=Observed(
                stream=activity.stream,
                start_ns=activity.start_ns - origin_ns,
                launch_ns=activity.launch_ns - origin_ns if activity.launch_ns >= 0 else None,
            ),
        )
        for index, activity in enumerate(activities)
    )
    observed_ns = makespan_ns(activities) if profile.has_times else 0
    if observed_ns > file_limits.MAX_STEP_NS:
        raise ImportFileError(profile.file, f"its step takes {observed_ns} ns; the limit is {file_limits.MAX_STEP_NS}")
    again_ns = makespan_ns(activities, resimulated(activities, edges)) if profile.has_times else 0
    busy_ns, concurrent_ns = busy(activities) if profile.has_times else (0, 0)
    facts = profile.gpus.get(device, GpuFacts())
    counted = any(activity.counters is not None for activity in activities)
    source = ImportedFrom(
        format=profile.format,
        writer=profile.writer,
        files=tuple(Path(file).name for file in files),
        step=shortened(step.name, MAX_NAME),
        device=device,
        dependency_quality=quality,
        observed_ns=observed_ns,
        busy_ns=busy_ns,
        concurrent_ns=concurrent_ns,
        resimulated_ns=min(again_ns, file_limits.MAX_STEP_NS),
        streams=len(lanes),
    )
    trace = Trace(
        schema=SCHEMA,
        provenance=Provenance(
            gpu=Gpu(
                name=gpu or shortened(facts.name, MAX_NAME) or "unknown GPU",
                driver="",
                cuda=profile.cuda,
                torch=profile.torch,
                cudnn="",
                sm_clock_mhz=facts.sm_clock_mhz,
                mem_clock_mhz=0,
            ),
            date="",
            command=command,
            gpusim=code_version(),
            counters="Nsight Compute" if counted else "",
            imported_from=source,
        ),
        model=Model(
            spec=f"imported:{Path(files[0]).name}",
            network=_plain(Path(files[0]).name.partition(".")[0]),
            mode="train" if any(activity.phase != "forward" for activity in activities) else "infer",
            batch=1,
            dtype="fp32",
            memory_format="contiguous",
            frontend="aten",
        ),
        storages=(),
        tensors=(),
        ops=ops,
    )
    notes = []
    if odd:
        text = f"{len(odd)} kernels have a launch size that no GPU has, such as record {odd[0]} of the step: left out"
        notes.append(Finding("odd-launches", text))
    return trace, notes


def _kernel(activity: Activity, odd: list[int], index: int) -> Kernel:
    grid, block, cluster = activity.grid or (1, 1, 1), activity.block or (1, 1, 1), activity.cluster
    blocks = grid[0] * grid[1] * grid[2]
    if max(grid[1:]) > file_limits.MAX_GRID_YZ:
        grid = (blocks, 1, 1)  # AMD allows more in y and z; how many there are is what counts
    threads = block[0] * block[1] * block[2]
    smem = activity.smem_static_bytes + activity.smem_dynamic_bytes
    registers = activity.regs_per_thread or 0
    if (
        blocks > file_limits.MAX_GRID_BLOCKS
        or threads > file_limits.MAX_BLOCK_THREADS
        or smem > file_limits.MAX_SMEM_BYTES
        or not 0 <= registers <= file_limits.MAX_THREAD_REGS
    ):
        odd.append(index)
        grid, block, smem, registers, cluster = (1, 1, 1), (1, 1, 1), 0, 0, None
    if cluster is not None and (max(cluster) > file_limits.MAX_CLUSTER or cluster == (1, 1, 1)):
        cluster = None
    static = activity.smem_static_bytes if activity.smem_static_bytes and smem else None
    return Kernel(
        name=shortened(activity.name, MAX_NAME),
        dur_ns=activity.dur_ns,
        kind=activity.kind,
        grid=grid,
        block=block,
        cluster=cluster,
        regs_per_thread=registers,
        smem_bytes=smem,
        smem_static_bytes=static,
        smem_dynamic_bytes=None if static is None else activity.smem_dynamic_bytes,
        lo_ns=activity.dur_ns,
        hi_ns=activity.dur_ns,
        samples=1,
        bytes=min(activity.bytes, file_limits.MAX_STORAGE_BYTES),
        counters=activity.counters,
    )


def _plain(text: str) -> str:
    """A short name of letters, digits and a few marks, for ops and networks."""
    base = text.partition("(")[0].partition("<")[0].rpartition(" ")[2].replace("::", ".")
    return re.sub(r"[^A-Za-z0-9_.\-]+", "_", base)[:60].strip("._") or "kernel"
