"""IOS with stage latencies measured on the GPU, in place of simulated ones.

A recipe with the policy `MEASURED_IOS` measures, in its stage 'capture', every stage that IOS could choose in the step
on captured kernels. Its predictions then use these latencies, as IOS itself does. Merge stages are measured, too, but
no schedule has them: no trace has the kernel of a larger convolution. `saved_by_merging_ns` says what is left out.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

from gpusim.errors import RecipeError
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.recipe import Recipe
from gpusim.formats.trace import Trace
from gpusim.gpu.isolate import alone
from gpusim.io.files import Count, Document, Nanoseconds, make_folder, read_document, write_document
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.plan.tasks import Task
from gpusim.policies.ios import MAX_GROUPS, ios, ios_stages
from gpusim.policies.shared.ios_blocks import units_of
from gpusim.trace.store import read_trace, trace_sha256
from gpusim.version import code_version

SCHEMA: Final = "gpusim-stages/1"
SUFFIX: Final = ".stages.json.gz"
#: Most convolutions of one input that are merged; those of GoogLeNet have three.
MOST_MERGED: Final = 4

Stage = tuple[tuple[int, ...], ...]
"""Groups of a stage, each with its ops in order."""


class StageTime(Document, frozen=True, kw_only=True):
    """A stage and its latency, with its barriers."""

    groups: tuple[tuple[Count, ...], ...]
    time_ns: Nanoseconds


class MergeTime(Document, frozen=True, kw_only=True):
    """Convolutions of one input, as one larger convolution, next to each other, and one after the other."""

    ops: tuple[Count, ...]
    merged_ns: Nanoseconds
    together_ns: Nanoseconds
    in_turn_ns: Nanoseconds


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
    merges: tuple[MergeTime, ...]


def stage_times_path(trace: Path, recipe: Recipe) -> Path:
    """Return the path of a trace's stage latencies, in the folder of the recipe's traces."""
    folder = trace.parent if recipe.traces is None else Path(recipe.traces)
    return folder / f"{trace.name.removesuffix('.gz').removesuffix('.json')}{SUFFIX}"


def stages_to_measure(graph: OpGraph, counts: Sequence[int]) -> list[Stage]:
    """Return every stage that IOS compares on these numbers of streams."""
    found: dict[Stage, None] = {}

    def note(groups: Sequence[Sequence[Task]], _: HardwareModel) -> float:
        found[_ops_of(groups)] = None
        return 0.0

    for count in counts:
        ios_stages(graph, units_of(graph), min(MAX_GROUPS, count), note)
    return list(found)


def measure_stages_of(path: Path, graph: OpGraph, recipe: Recipe, counts: Sequence[int], command: str) -> Path:
    """Measure the stages of a trace on this GPU, and write their latencies. Raises `GpuError` without a GPU."""
    from gpusim.gpu.calibrate.stage_times import measure_stage_times

    stages, merges = stages_to_measure(graph, counts), mergeable(graph.trace)
    gpu, times_ns, of_merges = alone(measure_stage_times, path, stages, merges)
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
        stages=tuple(StageTime(groups=stage, time_ns=ns) for stage, ns in zip(stages, times_ns, strict=True)),
        merges=tuple(
            MergeTime(ops=ops, merged_ns=merged, together_ns=together, in_turn_ns=in_turn)
            for ops, (merged, together, in_turn) in zip(merges, of_merges, strict=True)
        ),
    )
    write_document(target, document)
    return target


def mergeable(trace: Trace) -> list[tuple[int, ...]]:
    """Return the sets of convolutions that IOS could merge: those of one input, alike but for filters and their size.

    Filters of other sizes are padded to the largest, so paddings must match then. Every set of two or more counts.
    """
    alike: dict[Any, list[int]] = {}
    for index, op in enumerate(trace.ops):
        if op.target == "aten.convolution.default" and op.args[8] == 1 and not op.args[6]:
            weight = trace.tensors[op.args[1]["tensor"]].shape
            centres = tuple(2 * pad - side for pad, side in zip(op.args[4], weight[2:], strict=True))
            key = (op.args[0]["tensor"], tuple(op.args[3]), tuple(op.args[5]), centres)
            alike.setdefault(key, []).append(index)
    sets: list[tuple[int, ...]] = []
    for ops in alike.values():
        for size in range(2, min(len(ops), MOST_MERGED) + 1):
            sets += itertools.combinations(ops, size)
    return sets


def saved_by_merging_ns(times: StageTimes) -> int:
    """Return the sum that merges save over the faster of both ways without them: the best ones, each op in one."""
    saved: list[tuple[int, tuple[int, ...]]] = sorted(
        ((min(each.together_ns, each.in_turn_ns) - each.merged_ns, each.ops) for each in times.merges), reverse=True
    )
    merged: set[int] = set()
    total_ns = 0
    for saved_ns, ops in saved:
        if saved_ns > 0 and not merged.intersection(ops):
            merged.update(ops)
            total_ns += saved_ns
    return total_ns


def read_stage_times(path: Path, recipe: Recipe) -> StageTimes:
    """Read the stage latencies of the trace in a file. Raises `RecipeError`, also for those of another trace."""
    file = stage_times_path(path, recipe)
    times = read_document(file, StageTimes, SCHEMA, RecipeError)
    if times.trace_sha256 != trace_sha256(path):
        raise RecipeError(str(file), f"stages of another capture of '{read_trace(path).name}'", place="$.trace_sha256")
    return times


def measured_ios(graph: OpGraph, streams: int, times: StageTimes) -> Schedule:
    """Return the schedule of IOS by measured latencies. Raises `RecipeError` for a stage that was not measured."""
    times_ns = {each.groups: each.time_ns for each in times.stages}

    def cost(groups: Sequence[Sequence[Task]], _: HardwareModel) -> float:
        stage = _ops_of(groups)
        if stage not in times_ns:
            raise RecipeError(graph.trace.name, f"a stage of {len(stage)} groups was not measured")
        return float(times_ns[stage])

    return ios(graph, streams, cost)


def _ops_of(groups: Sequence[Sequence[Task]]) -> Stage:
    return tuple(tuple(dict.fromkeys(task.op for task in group)) for group in groups)
