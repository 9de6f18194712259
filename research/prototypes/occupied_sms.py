"""A training step on a GPU with some of its SMs taken.

    PYTHONPATH=validate/layerwise python research/prototypes/occupied_sms.py [-o FILE] [--quick]

A test of `gpusim.layerwise.made_up` on one GPU. While a collective runs, it occupies SMs. Here a kernel that only
counts takes them: a block on each of 0 to 48 SMs, with all of an SM's registers, and no memory traffic. Forward and
backward passes run as one CUDA graph beside it. From the time without such a kernel, the others are predicted.

`--quick` only predicts, from assumed times, and needs no GPU: a test of this script.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import networks

from gpusim.engine.base import engine_by_name
from gpusim.formats.hardware import load_hardware
from gpusim.formats.topology import load_topology
from gpusim.layerwise.compute import Roofline
from gpusim.layerwise.costs import Problem
from gpusim.layerwise.ddp import lower_ddp
from gpusim.layerwise.lowering import SYNC
from gpusim.layerwise.made_up import collective_kernel
from gpusim.plan.tasks import Plan

STEPS = (("alexnet", 32), ("alexnet", 128), ("vgg16", 32), ("resnet50", 32), ("inception_v3", 32))
SMS = (12, 24, 48)
ROUNDS, CALLS = 9, 4
#: Counts on 1,024 threads with 64 registers each, all of an SM's, until the host's flag or `most` cycles.
SOURCE = r"""
extern "C" __global__ void __launch_bounds__(1024, 1) hold(volatile int* stop, float* out, int most_kilocycles) {
    float kept[56];
    long long begin = clock64();
    #pragma unroll
    for (int i = 0; i < 56; ++i) kept[i] = out[i];
    while (*stop == 0 && (clock64() - begin) / 1024 < most_kilocycles) {
        for (int turn = 0; turn < 16; ++turn) {
            #pragma unroll
            for (int i = 0; i < 56; ++i) kept[i] = kept[i] * 1.0001f + kept[(i + 7) % 56];
        }
    }
    float sum = 0.0f;
    #pragma unroll
    for (int i = 0; i < 56; ++i) sum += kept[i];
    if (sum == 12345.678f) out[threadIdx.x] = sum;
}
"""


def problem_of(name: str, batch: int, alone_ns: float) -> Problem:
    """The step on one GPU; its layers share the measured time by a roofline."""
    hardware = load_hardware("h200")
    graph = networks.inception_v3(batch, auxiliary=True) if name == "inception_v3" else networks.NETWORKS[name](batch)
    return Problem(graph, 1, load_topology("h200"), Roofline(hardware).scaled_to(graph, alone_ns), hardware)


def predicted_ns(problem: Problem, sms: int) -> float:
    """The simulated step beside a kernel that holds `sms` SMs from before its start."""
    tasks = list(lower_ddp(problem).plan.tasks)
    if sms:
        longest_ns = 100 * sum(task.dur_ns for task in tasks)
        holding = collective_kernel(longest_ns, 0.0, sms, problem.hardware, "hold")
        tasks.insert(0, msgspec.structs.replace(holding, queue=SYNC))
    timeline = engine_by_name("fast").run(Plan(tuple(tasks)), problem.hardware)
    first = 1 if sms else 0
    return float(timeline.end_ns[-1] - timeline.start_ns[first])


def step_graph(name: str, batch: int) -> Callable[[], None]:
    """Forward and backward pass as one CUDA graph."""
    import torch
    import torchvision
    from torch import nn

    side = 299 if name == "inception_v3" else 224
    model = getattr(torchvision.models, name)().cuda().train()
    images = torch.randn(batch, 3, side, side, device="cuda")
    targets = torch.randint(1000, (batch,), device="cuda")

    def step() -> None:
        model.zero_grad()
        outputs = model(images)
        parts = outputs if isinstance(outputs, tuple) else (outputs,)
        sum(nn.functional.cross_entropy(part, targets) for part in parts).backward()

    side_stream = torch.cuda.Stream()
    with torch.cuda.stream(side_stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


class Holder:
    """A kernel that holds SMs until it is stopped."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.stream, self.stopping = torch.cuda.Stream(), torch.cuda.Stream()
        self.stop = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.one = torch.ones(1, dtype=torch.int32, device="cuda")
        self.out = torch.zeros(1024, device="cuda")
        self.kernel = torch.cuda._compile_kernel(SOURCE, "hold")

    @contextmanager
    def __call__(self, sms: int) -> Iterator[None]:
        self.stop.zero_()
        self.torch.cuda.synchronize()
        if sms:
            self.kernel((sms, 1, 1), (1024, 1, 1), [self.stop, self.out, 4_000_000], stream=self.stream)
        try:
            yield
        finally:
            with self.torch.cuda.stream(self.stopping):
                self.stop.copy_(self.one)
            self.torch.cuda.synchronize()


def measured_ns(replay: Callable[[], None], hold: Holder, sms: int) -> float:
    """The step's time beside the kernel, in ns: of some replays in a row."""
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with hold(sms):
        replay()
        begin.record()
        for _ in range(CALLS):
            replay()
        end.record()
        end.synchronize()
    return begin.elapsed_time(end) * 1e6 / CALLS


def measured(name: str, batch: int) -> dict[int, float]:
    """Number of SMs taken -> median time of the step, in ns; rounds take turns."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    replay, hold = step_graph(name, batch), Holder()
    times: dict[int, list[float]] = {sms: [] for sms in (0, *SMS)}
    for _ in range(ROUNDS):
        for sms, found in times.items():
            found.append(measured_ns(replay, hold, sms))
    return {sms: statistics.median(found) for sms, found in times.items()}


def rows_of(name: str, batch: int, times: dict[int, float]) -> list[dict[str, Any]]:
    """A row for each number of SMs, from the time with none taken."""
    problem = problem_of(name, batch, times[0])
    rows = []
    for sms in SMS:
        row: dict[str, Any] = {"network": name, "mode": "train", "batch": batch, "dtype": "tf32", "sms": sms}
        row |= {"alone_ns": round(times[0]), "measured_ns": round(times[sms])}
        slower = predicted_ns(problem, sms) / predicted_ns(problem, 0)
        row["predicted_ns"] = round(times[0] * slower)
        rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all, print a table, and write the rows where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    print("| network | batch | SMs taken | alone, us | measured | predicted |")
    print("|---|--:|--:|--:|--:|--:|")
    for name, batch in STEPS[:1] if options.quick else STEPS:
        times = dict.fromkeys((0, *SMS), 2e6) if options.quick else measured(name, batch)
        for row in rows_of(name, batch, times):
            rows.append(row)
            cells = [f"{row['alone_ns'] / 1e3:,.0f}"]
            cells += [f"{row[key] / row['alone_ns'] - 1:+.1%}" for key in ("measured_ns", "predicted_ns")]
            print(f"| {' | '.join([name, str(batch), str(row['sms']), *cells])} |", flush=True)
    errors = [abs(row["predicted_ns"] / row["measured_ns"] - 1) for row in rows]
    print(f"median error {statistics.median(errors):.1%}, largest {max(errors):.1%}")
    if options.output is not None and not options.quick:
        import torch

        from gpusim.gpu.device import provenance

        matrix = torch.rand(4096, 4096, device="cuda")
        document = provenance("python research/prototypes/occupied_sms.py", lambda: matrix @ matrix) | {"cases": rows}
        options.output.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
