"""IOS with stage latencies measured on the GPU, in place of simulated ones.

A recipe with the policy `MEASURED_IOS` measures, in its stage 'capture', every stage that IOS could choose in the step
on captured kernels, and merged, where the trace has a variant that merges its convolutions. Its predictions then use
these latencies, as IOS itself does.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from gpusim.errors import RecipeError
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.recipe import Recipe
from gpusim.formats.trace import Trace
from gpusim.gpu.isolate import alone
from gpusim.io.files import Count, Document, Nanoseconds, make_folder, read_document, write_document
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.plan.tasks import Task
from gpusim.policies.ios import ios, ios_stages
from gpusim.policies.shared.ios_blocks import MAX_GROUPS, units_of
from gpusim.text import shortened
from gpusim.trace.merging import CONVOLUTION, merge_in
from gpusim.trace.store import read_trace, trace_sha256
from gpusim.units import counted
from gpusim.version import code_version

SCHEMA: Final = "gpusim-stages/1"
SUFFIX: Final = ".stages.json.gz"

Stage = tuple[tuple[int, ...], ...]
"""Groups of a stage, each with its ops in order."""


class StageTime(Document, frozen=True, kw_only=True):
    """A stage and its latency, with its barriers; `merged_ns` is that with its convolutions merged."""

    groups: tuple[tuple[Count, ...], ...]
    time_ns: Nanoseconds
    merged_ns: Nanoseconds | None = None

    @property
    def is_faster_merged(self) -> bool:
        """Whether the stage was measured to be faster merged."""
        return self.merged_ns is not None and self.merged_ns < self.time_ns


class StageTimes(Document, frozen=True, kw_only=True):
    """Latencies of all stages of a step."""

    schema: Literal["gpusim-stages/1"]
    trace: str
    trace_sha256: str
    gpu: str
    date: str
    command: str
    gpusim: str
    stages: tuple[StageTime, ...]


def stage_times_path(trace: Path, recipe: Recipe) -> Path:
    """Return the path of a trace's stage latencies, in the folder of the recipe's traces."""
    folder = trace.parent if recipe.traces is None else Path(recipe.traces)
    return folder / f"{trace.name.removesuffix('.gz').removesuffix('.json')}{SUFFIX}"


def with_merged(trace: Trace, seed: int) -> Trace:
    """Return the trace with merges as variants, measured on this GPU. Raises `GpuError` without a GPU."""
    from gpusim.gpu.capture.variants import with_merges

    return with_merges(trace, seed)


def stages_to_measure(graph: OpGraph, counts: Sequence[int]) -> list[Stage]:
    """Return every stage that IOS compares on these numbers of streams."""
    stages: dict[Stage, None] = {}

    def note(groups: Sequence[Sequence[Task]], _: HardwareModel) -> float:
        stages[_ops_of(groups)] = None
        return 0.0

    for count in counts:
        ios_stages(graph, units_of(graph), min(MAX_GROUPS, count), note)
    return list(stages)


def measure_stages_of(path: Path, graph: OpGraph, recipe: Recipe, counts: Sequence[int], command: str) -> Path:
    """Measure the stages of a trace on this GPU, and write their latencies. Raises `GpuError` without a GPU."""
    from gpusim.gpu.calibrate.stage_times import measure_stage_times

    stages = stages_to_measure(graph, counts)
    merges = {number: merge for number, each in enumerate(stages) if (merge := merge_of(graph.trace, each)) is not None}
    gpu, times_ns, merged_ns = alone(measure_stage_times, path, stages, merges)
    target = stage_times_path(path, recipe)
    make_folder(target.parent, "stage latencies")
    document = StageTimes(
        schema=SCHEMA,
        trace=graph.trace.name,
        trace_sha256=trace_sha256(path),
        gpu=gpu,
        date=datetime.date.today().isoformat(),
        command=command,
        gpusim=code_version(),
        stages=tuple(
            StageTime(groups=stage, time_ns=ns, merged_ns=merged_ns.get(number))
            for number, (stage, ns) in enumerate(zip(stages, times_ns, strict=True))
        ),
    )
    write_document(target, document)
    return target


def merge_of(trace: Trace, stage: Stage) -> tuple[int, int] | None:
    """Return the op and the number of its variant that merges a stage's convolutions, or None.

    Each group of a merged stage begins with one of the convolutions and has no other. Other variants of the same
    convolutions do not exist (`gpusim.trace.merging`).
    """
    if len(stage) < 2 or any([trace.ops[op].target for op in group].count(CONVOLUTION) != 1 for group in stage):
        return None
    return merge_in(trace, [group[0] for group in stage])


def read_stage_times(path: Path, recipe: Recipe) -> StageTimes:
    """Read the stage latencies of the trace in a file. Raises `RecipeError`, also for those of another trace."""
    file = stage_times_path(path, recipe)
    times = read_document(file, StageTimes, SCHEMA, RecipeError)
    if times.trace_sha256 != trace_sha256(path):
        raise RecipeError(str(file), f"stages of another capture of '{read_trace(path).name}'", place="$.trace_sha256")
    return times


def measured_ios(graph: OpGraph, streams: int, times: StageTimes, file: str, *, merging: bool = False) -> Schedule:
    """Return the schedule of IOS by measured latencies, with `merging` of the faster of both ways to run a stage.

    `file` has the latencies. Raises `RecipeError` for a stage that it lacks.
    """
    merges: dict[Stage, tuple[int, int]] = {}
    times_ns = {each.groups: each.time_ns for each in times.stages}
    for each in times.stages:
        merge = merge_of(graph.trace, each.groups) if merging and each.is_faster_merged else None
        if merge is not None and each.merged_ns is not None:
            merges[each.groups], times_ns[each.groups] = merge, each.merged_ns

    def cost(groups: Sequence[Sequence[Task]], _: HardwareModel) -> float:
        stage = _ops_of(groups)
        if stage not in times_ns:
            problem = f"{counted(len(stage), 'group')} of {graph.trace.name} have no latency: {stage}"
            raise RecipeError(file, shortened(problem), place="$.stages")
        return float(times_ns[stage])

    return ios(graph, streams, cost, merges)


def _ops_of(groups: Sequence[Sequence[Task]]) -> Stage:
    return tuple(tuple(dict.fromkeys(task.op for task in group)) for group in groups)
