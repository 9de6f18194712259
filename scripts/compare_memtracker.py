#!/usr/bin/env python3
"""Compare the peaks of estimated steps with PyTorch's MemTracker on the same steps; needs torchvision and no GPU.

    python scripts/compare_memtracker.py [-o research/data/memtracker_YYYYMMDD.json]

Writes the results, and prints them as tables. The steps are those of `validate/memory.toml`, and the
bundled ones of the same networks with a measured peak: training with SGD and momentum, 32-bit floating-point numbers.

- gpusim: the step as `gpusim capture --estimate` records it, keeping all, in the simulated allocator. `captured` is the
  same for a captured trace, where the repository has one. Newer captured traces include workspaces.
- MemTracker (`torch.distributed._tools.mem_tracker`): the second iteration of model, loss, `backward` and
  `torch.optim.SGD.step` on fake tensors, with gradients freed before it. Without a GPU, fake tensors of the device
  `cuda` have no backward pass, so they are on the CPU. Two parts are as on a GPU: sizes are rounded up to 512 bytes,
  and attention and dropout are its fused operators (`gpusim.gpu.capture.estimate.as_on_a_gpu`).
- `lifetimes`: MemTracker on the calls of the step that gpusim records, in its order, with each tensor freed after its
  last use. The difference to MemTracker is memory that Python and autograd hold; the difference to gpusim is the part
  of blocks that the caching allocator does not split.
- measured: `torch.cuda.max_memory_allocated` of the step as one CUDA graph, in `validate/results`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._tools import mem_tracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils import _pytree as pytree

from gpusim.formats.hardware import load_hardware
from gpusim.formats.results import read_all_results
from gpusim.formats.trace import Trace
from gpusim.gpu.capture.calls import JointGraph, Value
from gpusim.gpu.capture.capture import CaptureOptions, build_step
from gpusim.gpu.capture.estimate import META, as_on_a_gpu, capture_estimated
from gpusim.gpu.capture.joint_graph import LEARNING_RATE, MOMENTUM, joint_graph
from gpusim.gpu.capture.models import ModelStep
from gpusim.gpu.capture.record import live_calls
from gpusim.io.files import write_bytes
from gpusim.io.packed import is_file
from gpusim.memplan.memory import MemoryUse, memory_of
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.program import program_of
from gpusim.memplan.storages import Storages
from gpusim.plan.allocator import rounded
from gpusim.trace.store import bundled_traces, read_trace
from gpusim.units import MIB
from gpusim.version import code_version

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "validate" / "memory.toml"
RESULTS = ROOT / "validate" / "results"
DATA = ROOT / "research" / "data"
SCHEMA = "gpusim-memtracker/1"
#: Steps in addition to the recipe's: bundled traces with a measured peak.
MORE = (("torchvision:resnet50", 8), ("torchvision:googlenet", 8), ("torchvision:densenet121", 8))
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Tracked:
    """Peak of MemTracker, in total and by kind, in bytes."""

    peak_bytes: int
    kinds: dict[str, int]


@dataclass(frozen=True)
class Row:
    """Peaks of one step by source, in bytes; None where unknown."""

    trace: str
    memtracker_bytes: int
    memtracker_kinds: dict[str, int]
    lifetimes_bytes: int
    gpusim_bytes: int
    gpusim_categories: dict[str, int]
    gpusim_at: str
    captured_bytes: int | None
    captured_workspace_bytes: int | None
    """Workspace of the op at the captured trace's peak, in bytes; None where that trace has no workspaces."""
    measured_bytes: int | None
    measured_in: str


@contextmanager
def rounding() -> Iterator[None]:
    """Round sizes on the CPU as MemTracker does on the device `cuda`."""
    info = mem_tracker._WeakRefInfo
    own = info._calculate_mem_consumed
    try:
        info._calculate_mem_consumed = lambda self: rounded(self.size * self.element_size)  # type: ignore[method-assign]
        yield
    finally:
        info._calculate_mem_consumed = own  # type: ignore[method-assign]


def tracked(tracker: MemTracker) -> Tracked:
    """Return the peak of a tracker that was run."""
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    kinds = {kind.value: size for kind, size in snapshot.items() if isinstance(kind, mem_tracker._RefType) and size}
    return Tracked(snapshot["Total"], kinds)


def by_iteration(step: ModelStep) -> Tracked:
    """Run MemTracker on the second iteration of a training loop. Takes a step on the device `meta`, which it
    changes.
    """
    assert step.loss is not None
    mode = FakeTensorMode()

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return FakeTensor(mode, tensor, CPU)

    for module in step.module.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, torch.nn.Parameter(fake(parameter.detach()), parameter.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, fake(buffer))
    inputs = pytree.tree_map_only(torch.Tensor, fake, step.inputs)
    target = None if step.target is None else fake(step.target)
    with mode, as_on_a_gpu(), rounding():
        optimizer = torch.optim.SGD(step.module.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, foreach=True)

        def iterate() -> None:
            step.loss(step.module(*inputs), target).backward()
            optimizer.step()

        iterate()
        optimizer.zero_grad()
        tracker = MemTracker()
        tracker.track_external(step.module, optimizer, *pytree.tree_leaves((inputs, target)))
        with tracker:
            iterate()
    return tracked(tracker)


def by_calls(graph: JointGraph) -> Tracked:
    """Run MemTracker on recorded calls, with each tensor freed after its last use."""
    calls = live_calls(graph)
    last: dict[Value, int] = {}
    for place, call in enumerate(calls):
        for value in pytree.tree_leaves((call.args, call.kwargs)):
            if isinstance(value, Value):
                last[value] = place
    results = {*graph.outputs, *graph.gradients}
    wanted = last.keys() | results
    behind: dict[int, list[Value]] = {}
    for value in last.keys() - results - {Value(name) for name in graph.inputs}:
        behind.setdefault(last[value], []).append(value)
    mode = FakeTensorMode()
    env: dict[Value, Any] = {Value(name): FakeTensor(mode, state.tensor, CPU) for name, state in graph.inputs.items()}
    with mode, rounding(), torch.no_grad():
        tracker = MemTracker()
        tracker.track_external(*env.values())
        with tracker:
            for place, call in enumerate(calls):
                args, kwargs = pytree.tree_map_only(Value, env.__getitem__, (call.args, call.kwargs))
                result = call.function(*args, **kwargs)
                parts = list(enumerate(result)) if isinstance(result, list | tuple) else [(None, result)]
                env |= {value: part for index, part in parts if (value := Value(call.name, index)) in wanted}
                del args, kwargs, result, parts
                for value in behind.get(place, ()):
                    del env[value]
    return tracked(tracker)


def memory_use(trace: Trace) -> MemoryUse:
    """Return the memory of the step that keeps all."""
    storages = Storages.of(trace)
    return memory_of(storages, program_of(storages, MemoryPlan()))


def captured_trace(name: str) -> Trace | None:
    """Return the captured trace of a step, where the repository has one."""
    bundled = bundled_traces()
    if name in bundled:
        return read_trace(bundled[name])
    path = ROOT / "validate" / "traces" / "memory" / f"{name}.json.gz"
    return read_trace(path) if is_file(path) else None


def measured_peaks() -> dict[str, tuple[int, str]]:
    """Return step -> measured peak as one CUDA graph on one stream, and the newest results file that has it."""
    found: dict[str, tuple[int, str]] = {}
    for name, results in sorted(read_all_results(RESULTS).items(), key=lambda item: (item[1].date, item[0])):
        for case in results.cases:
            if case.sequential_peak_bytes and case.frontend == "aten":
                found[case.trace] = (case.sequential_peak_bytes, name)
    return found


def compared(spec: str, batch: int, measured: dict[str, tuple[int, str]]) -> Row:
    """Compare one step in all ways."""
    options = CaptureOptions(spec=spec, mode="train", batch=batch)
    trace = capture_estimated(options, load_hardware("h200"), lambda _: None)
    use = memory_use(trace)
    with as_on_a_gpu():
        step = build_step(options, META)
        lifetimes = by_calls(joint_graph(step))
        iteration = by_iteration(step)
    captured = captured_trace(trace.name)
    known = None if captured is None else memory_use(captured)
    peak_bytes, source = measured.get(trace.name, (None, ""))
    op = trace.ops[use.peak.op]
    return Row(
        trace=trace.name,
        memtracker_bytes=iteration.peak_bytes,
        memtracker_kinds=iteration.kinds,
        lifetimes_bytes=lifetimes.peak_bytes,
        gpusim_bytes=use.peak.allocated_bytes,
        gpusim_categories=dict(use.peak.by_category),
        gpusim_at=f"{op.name}, {op.phase}",
        captured_bytes=None if known is None else known.peak.allocated_bytes,
        captured_workspace_bytes=(
            known.peak.by_category.get("workspace", 0)
            if known is not None and captured is not None and any(each.workspace_bytes for each in captured.ops)
            else None
        ),
        measured_bytes=peak_bytes,
        measured_in=source,
    )


def table(rows: Sequence[Row]) -> str:
    """Return all rows in MiB; the last three columns are errors against the measured peak."""
    lines = [
        "| step | MemTracker | lifetimes | gpusim | MemTracker off gpusim | captured, its workspace | measured "
        "| gpusim off | captured off | MemTracker off |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        captured = "" if row.captured_bytes is None else f"{row.captured_bytes / MIB:,.1f}"
        if row.captured_workspace_bytes is not None:
            captured += f", {row.captured_workspace_bytes / MIB:.1f}"
        peaks = (row.gpusim_bytes, row.captured_bytes, row.memtracker_bytes)
        lines.append(
            f"| {row.trace} | {row.memtracker_bytes / MIB:,.1f} | {row.lifetimes_bytes / MIB:,.1f} "
            f"| {row.gpusim_bytes / MIB:,.1f} | {row.memtracker_bytes / row.gpusim_bytes - 1:+.2%} | {captured} "
            f"| {'' if row.measured_bytes is None else f'{row.measured_bytes / MIB:,.1f}'} | "
            + " | ".join(
                "" if row.measured_bytes is None or peak is None else f"{peak / row.measured_bytes - 1:+.2%}"
                for peak in peaks
            )
            + " |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    today = datetime.date.today().isoformat()
    parser.add_argument("-o", dest="output", type=Path, default=DATA / f"memtracker_{today.replace('-', '')}.json")
    parser.add_argument("--case", type=int, action="append", help="only this step, from 1; repeatable")
    options = parser.parse_args(arguments)
    recipe = tomllib.loads(RECIPE.read_text(encoding="utf-8"))
    cases = [*((case["spec"], case["batch"]) for case in recipe["case"]), *MORE]
    measured = measured_peaks()
    rows = []
    for number, (spec, batch) in enumerate(cases, start=1):
        if options.case is None or number in options.case:
            rows.append(compared(spec, batch, measured))
            print(f"{number} of {len(cases)}: {rows[-1].trace}", file=sys.stderr)
    document = {
        "schema": SCHEMA,
        "gpu": None,
        "date": today,
        "command": "python scripts/compare_memtracker.py",
        "versions": {"torch": str(torch.__version__), "python": platform.python_version()},
        "gpusim": code_version(),
        "rows": [asdict(row) for row in rows],
    }
    write_bytes(options.output, (json.dumps(document, indent=1) + "\n").encode())
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
