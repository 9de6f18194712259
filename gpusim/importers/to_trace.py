"""Conversion of one step of a profile to a trace, with a check of how well its edges explain the timeline."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpusim.formats.trace import (
    SCHEMA,
    After,
    Gpu,
    ImportedFrom,
    Kernel,
    Model,
    Observed,
    Op,
    Provenance,
    Trace,
)
from gpusim.importers.join import Joined
from gpusim.importers.model import Activity, Finding, GpuFacts, ImportFileError, Profile, busy
from gpusim.importers.observed import Resimulation, makespan_ns, resimulated
from gpusim.importers.ops import grouped
from gpusim.importers.steps import Step
from gpusim.io import file_limits
from gpusim.text import shortened
from gpusim.trace.kernel_doubts import slowed_frac
from gpusim.trace.op_names import UNKNOWN_OP
from gpusim.units import clause
from gpusim.version import code_version

#: Longest kernel name that is kept.
MAX_NAME: Final = 1024
#: Error of the re-simulated step above which a finding warns.
MAX_ERROR: Final = 0.02
_MORE_EDGES: Final = (
    "use no schedule from it; profile the CPU, too, with waits (_ExperimentalConfig(enable_cuda_sync_events=True), "
    "`nsys profile --cuda-event-trace=true`), or add the execution trace"
)


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a step: its files, its part of the profile, and the user's choices."""

    files: tuple[str, ...]
    step: Step
    device: int
    gpu: str
    """Name of the GPU; empty: as in the file."""
    command: str


def make_trace(
    profile: Profile, activities: Sequence[Activity], joined: Joined, origin: Origin
) -> tuple[Trace, list[Finding]]:
    """Return the trace of a step and the findings. `activities` are in order of start. Raises `ImportFileError`."""
    odd: list[int] = []
    groups, after = grouped(activities, joined.edges, joined.calls)
    origin_ns = min(activity.start_ns for activity in activities)
    ops = []
    for number, (group, edges) in enumerate(zip(groups, after, strict=True)):
        first = activities[group[0]]
        ops.append(
            Op(
                name=f"{_plain(first.op or first.name)}.{number}",
                target=shortened(first.op.replace("::", "."), MAX_NAME) or UNKNOWN_OP + first.kind,
                phase=first.phase,
                layer=shortened(first.module, MAX_NAME),
                kernels=tuple(_kernel(activities[index], odd, index) for index in group),
                moved_bytes=joined.moved_bytes.get(joined.calls.get(group[0], -1), 0),
                after=tuple(After(op=before, kind=kind) for before, kind in sorted(edges.items())),
                observed=Observed(
                    stream=first.stream,
                    start_ns=first.start_ns - origin_ns,
                    launch_ns=None if first.launch_ns is None else first.launch_ns - origin_ns,
                ),
            )
        )
    source, again = _shown(profile, activities, joined, origin)
    facts = profile.gpus.get(origin.device, GpuFacts())
    name = Path(origin.files[0]).name
    trace = Trace(
        schema=SCHEMA,
        provenance=Provenance(
            gpu=Gpu(
                name=origin.gpu or shortened(facts.name, MAX_NAME) or "unknown GPU",
                driver="",
                cuda=profile.cuda,
                torch=profile.torch,
                cudnn="",
                sm_clock_mhz=0,
                mem_clock_mhz=0,
            ),
            date="",
            command=origin.command,
            gpusim=code_version(),
            counters="Nsight Compute" if any(record.counters is not None for record in activities) else "",
            estimated=profile.estimated,
            imported_from=source,
        ),
        model=Model(
            spec=f"imported:{name}",
            network=_plain(name.partition(".")[0]),
            mode="train" if any(activity.phase != "forward" for activity in activities) else "infer",
            batch=1,
            dtype="fp32",
            memory_format="contiguous",
            frontend="aten",
        ),
        storages=(),
        tensors=(),
        ops=tuple(ops),
        ground_truth=profile.ground_truth,
    )
    return trace, [*_notes(source, again, odd), *slowed_kernels(trace), *estimated_kernels(trace)]


def _shown(
    profile: Profile, activities: Sequence[Activity], joined: Joined, origin: Origin
) -> tuple[ImportedFrom, Resimulation | None]:
    """Return the profile's facts on the step, and its re-simulation; None for a file without times."""
    observed_ns = busy_ns = concurrent_ns = again_ns = 0
    again = None
    if profile.has_times:
        observed_ns = makespan_ns(activities)
        limit_ns = file_limits.MAX_STEP_NS
        if observed_ns > limit_ns:
            raise ImportFileError(profile.file, f"its step takes {observed_ns} ns; the limit is {limit_ns}")
        again = resimulated(activities, joined.edges)
        again_ns = min(makespan_ns(activities, again.starts), limit_ns)
        busy_ns, concurrent_ns = busy(activities)
    source = ImportedFrom(
        format=profile.format,
        writer=profile.writer,
        files=tuple(Path(file).name for file in origin.files),
        step=shortened(origin.step.name, MAX_NAME),
        device=origin.device,
        dependency_quality=joined.quality,
        observed_ns=observed_ns,
        busy_ns=busy_ns,
        concurrent_ns=concurrent_ns,
        slowed_frac=profile.slowed_frac,
        times_alone=all(activity.alone_ns is not None for activity in activities),
        simulated=profile.simulated,
        resimulated_ns=again_ns,
        streams=len({activity.lane for activity in activities}),
    )
    return source, again


def _notes(source: ImportedFrom, again: Resimulation | None, odd: Sequence[int]) -> list[Finding]:
    notes = []
    if odd:
        kernels = clause(len(odd), "kernel", "has", "have")
        text = f"{kernels} an impossible launch size, such as record {odd[0]} of the step: the sizes are left out"
        notes.append(Finding("odd-launches", text))
    error = source.resimulated_ns / source.observed_ns - 1 if again is not None and source.observed_ns else 0.0
    if again is not None and abs(error) > MAX_ERROR:
        text = f"re-simulated from edges and launches, the step differs by {error:+.1%} from the observed one"
        reason = again.reason() or "its gaps vary too much"
        notes.append(Finding("resimulated", f"{text}: {reason}", _MORE_EDGES))
    return notes


def estimated_kernels(trace: Trace) -> list[Finding]:
    """Return the finding on a trace whose kernels no GPU has run; empty for another."""
    basis = trace.provenance.estimated
    if not basis:
        return []
    text = f"no GPU has run this step: its kernels are estimated from {basis}"
    return [Finding("estimated", text, "capture it on its GPU for a reliable verdict")]


def slowed_kernels(trace: Trace) -> list[Finding]:
    """Return the finding on an imported trace whose kernels took longer than alone; empty without one."""
    source, doubt = trace.provenance.imported_from, slowed_frac(trace)
    if source is None or not doubt:
        return []
    text = f"up to {doubt:.0%} of the kernels' time is in doubt, by the profile that was simulated"
    if doubt > source.slowed_frac:
        share = source.concurrent_ns / source.busy_ns
        text = (
            f"two or more kernels ran concurrently in {share:.0%} of the busy time, where they take longer than alone"
        )
    return [
        Finding("slowed-kernels", text, "predicted times of schedules are too long; profile the step on one stream")
    ]


def _kernel(activity: Activity, odd: list[int], index: int) -> Kernel:
    grid, block, cluster = activity.grid or (1, 1, 1), activity.block or (1, 1, 1), activity.cluster
    blocks = grid[0] * grid[1] * grid[2]
    if max(grid[1:]) > file_limits.MAX_GRID_YZ:
        grid = (blocks, 1, 1)  # AMD allows more in y and z; only the number of blocks matters
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
    dur_ns = activity.dur_ns if activity.alone_ns is None else activity.alone_ns
    return Kernel(
        name=shortened(activity.name, MAX_NAME),
        dur_ns=dur_ns,
        kind=activity.kind,
        grid=grid,
        block=block,
        cluster=cluster,
        regs_per_thread=registers,
        smem_bytes=smem,
        smem_static_bytes=static,
        smem_dynamic_bytes=None if static is None else activity.smem_dynamic_bytes,
        lo_ns=dur_ns,
        hi_ns=dur_ns,
        samples=1,
        bytes=min(activity.bytes, file_limits.MAX_STORAGE_BYTES),
        counters=activity.counters,
    )


def _plain(text: str) -> str:
    """Shorten a name to letters, digits and a few marks, for ops and networks."""
    base = text.partition("(")[0].partition("<")[0].rpartition(" ")[2].replace("::", ".")
    return re.sub(r"[^A-Za-z0-9_.\-]+", "_", base)[:60].strip("._") or "kernel"
