"""What DistributedDataParallel costs on one GPU.

    PYTHONPATH=validate/layerwise python research/prototypes/ddp_alone.py [-o FILE] [--networks NAMES] [--quick]

Forward and backward passes of the networks of `ddp.py` on one GPU, plain and under DistributedDataParallel with one
rank over NCCL: hooks, copies into buckets and launches are there, communication is not. `ddp2` and `ddp4` have a
stand-in for it: for each bucket a kernel that holds the SMs of a collective for the time of its curve for 2 or 4 GPUs.
Rounds in turns; medians of ten steps in a row, of single steps that begin on a quiet GPU (`_single`), and of the host's
time to issue one of these (`_host`).

`small_ns` has the same with a batch of 2, where the GPU waits for the host: the host's pace. `pace_ns` is a plain step
of GoogLeNet at 8 images, which waits for the host as well.

`--quick` runs one small case on a CPU with gloo, without the kernel: a test of this script.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torchvision
from ddp import MEASURED_US
from torch import distributed, nn

from gpusim.formats.topology import load_topology
from gpusim.gpu.device import provenance
from gpusim.layerwise.communication import members, time_ns

ROUNDS, CALLS, SMALL_BATCH = 9, 10, 2
#: GoogLeNet at 8 images, forward and backward: its host is slower than its kernels.
PACE_OF, PACE_BATCH = "googlenet", 8
#: Holds an SM with all of its registers for some ns.
SOURCE = r"""
extern "C" __global__ void __launch_bounds__(1024, 1) hold(float* out, int ns) {
    float kept[56];
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    #pragma unroll
    for (int i = 0; i < 56; ++i) kept[i] = out[i];
    do {
        #pragma unroll
        for (int i = 0; i < 56; ++i) kept[i] = kept[i] * 1.0001f + kept[(i + 7) % 56];
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - begin < (unsigned long long) ns);
    float sum = 0.0f;
    #pragma unroll
    for (int i = 0; i < 56; ++i) sum += kept[i];
    if (sum == 12345.678f) out[threadIdx.x] = sum;
}
"""


class StandIn:
    """A communication hook that holds SMs for the time of an all-reduce among some GPUs."""

    def __init__(self, gpus: int, device: torch.device) -> None:
        self.gpus, self.device, self.topology = gpus, device, load_topology("h200")
        if device.type == "cuda":
            self.stream = torch.cuda.Stream()
            self.out = torch.zeros(1024, device=device)
            self.kernel = torch.cuda._compile_kernel(SOURCE, "hold")

    def __call__(self, bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Launch the kernel behind the bucket's copies; the gradients stay as they are."""
        buffer = bucket.buffer()
        if self.device.type != "cuda":
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(buffer)
            return future
        future = torch.futures.Future(devices=[torch.device("cuda", torch.cuda.current_device())])
        size = buffer.numel() * buffer.element_size()
        dur_ns = time_ns(self.topology, "all_reduce", size, members(range(self.gpus), self.topology.gpus_per_node))
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            sms = self.topology.collective_sms
            self.kernel((sms, 1, 1), (1024, 1, 1), [self.out, round(dur_ns)], stream=self.stream)
            future.set_result(buffer)
        return future


def step_of(model: nn.Module, name: str, batch: int, device: torch.device) -> Callable[[], None]:
    """A forward and backward pass."""
    side = 299 if name == "inception_v3" else 224
    images = torch.randn(batch, 3, side, side, device=device)
    targets = torch.randint(1000, (batch,), device=device)

    def step() -> None:
        model.zero_grad()
        outputs = model(images)
        parts = outputs if isinstance(outputs, tuple) else (outputs,)
        sum(nn.functional.cross_entropy(part, targets) for part in parts).backward()

    return step


def quiet(device: torch.device) -> None:
    """Wait for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def round_ns(step: Callable[[], None], device: torch.device, calls: int = CALLS) -> float:
    """One step of several in a row, from a quiet GPU to a quiet GPU."""
    quiet(device)
    begin = time.perf_counter_ns()
    for _ in range(calls):
        step()
    quiet(device)
    return (time.perf_counter_ns() - begin) / calls


def single_ns(step: Callable[[], None], device: torch.device) -> tuple[float, float]:
    """One step from a quiet GPU to a quiet GPU, and the host's time to issue it."""
    quiet(device)
    begin = time.perf_counter_ns()
    step()
    issued = time.perf_counter_ns() - begin
    quiet(device)
    return time.perf_counter_ns() - begin, issued


def case(name: str, batch: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """One network, all ways."""

    def model() -> nn.Module:
        made: nn.Module = getattr(torchvision.models, name)().to(device).train()
        return made

    # A model for each: hooks of a wrapped one stay with its parameters.
    models = {"alone": model()}
    models |= {way: nn.parallel.DistributedDataParallel(model()) for way in ("ddp", "ddp2", "ddp4")}
    for gpus in (2, 4):
        wrapped = models[f"ddp{gpus}"]
        assert isinstance(wrapped, nn.parallel.DistributedDataParallel)
        stand_in = StandIn(gpus, device)
        # torch wants annotations that are classes or none: a lambda has none.
        wrapped.register_comm_hook(None, lambda _, bucket, stand_in=stand_in: stand_in(bucket))
    steps = {way: step_of(each, name, batch, device) for way, each in models.items()}
    small = {way: step_of(models[way], name, SMALL_BATCH, device) for way in ("alone", "ddp")}
    pace_model = getattr(torchvision.models, PACE_OF)(init_weights=False).to(device).train()
    pace = step_of(pace_model, PACE_OF, PACE_BATCH, device)
    times: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        found: dict[str, float] = {}
        for way, step in steps.items():
            found[f"{way}_ns"] = round_ns(step, device)
            found[f"{way}_single_ns"], found[f"{way}_host_ns"] = single_ns(step, device)
        for way, step in small.items():
            found[f"{way}_small_ns"] = round_ns(step, device)
        found["pace_ns"] = round_ns(pace, device, 2)
        for key, value in found.items() if number else ():  # the first round warms up
            times.setdefault(key, []).append(value)
    medians = {key: round(statistics.median(values)) for key, values in times.items()}
    return {"network": name, "mode": "train", "batch": batch, "dtype": "tf32", **medians}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--networks", default="alexnet,vgg16,inception_v3", help="[default: %(default)s]")
    parser.add_argument("--quick", action="store_true", help="a test of this script, on a CPU")
    options = parser.parse_args(arguments)
    device = torch.device("cpu" if options.quick else "cuda")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    distributed.init_process_group("gloo" if options.quick else "nccl", rank=0, world_size=1)
    rows: list[dict[str, Any]] = []
    asked = options.networks.split(",")
    cases = [("alexnet", 2)] if options.quick else [each for each in MEASURED_US if each[0] in asked]
    for name, batch in cases:
        rows.append(case(name, batch, 1 if options.quick else ROUNDS, device))
        print(rows[-1], flush=True)
        if options.output is not None and not options.quick:
            write(options.output, rows)
    distributed.destroy_process_group()
    return 0


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write the rows so far."""
    matrix = torch.rand(4096, 4096, device="cuda")
    document = provenance("python research/prototypes/ddp_alone.py", lambda: matrix @ matrix) | {"cases": rows}
    file.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
