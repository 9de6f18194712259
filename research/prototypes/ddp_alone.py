"""What DistributedDataParallel costs where there is nothing to sum.

    PYTHONPATH=validate/layerwise python research/prototypes/ddp_alone.py [-o FILE]

Forward and backward passes of the networks of `ddp.py` on one GPU, plain and under DistributedDataParallel with one
rank over NCCL: hooks, copies into buckets and launches are there, communication is not. Rounds in turns; medians of ten
steps in a row, of single steps that begin on a quiet GPU, and of what the host takes to issue one.
"""

from __future__ import annotations

import argparse
import datetime
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

from gpusim.gpu.device import gpu_facts
from gpusim.version import code_version

ROUNDS, CALLS = 15, 10


def step_of(model: nn.Module, batch: int, side: int) -> Callable[[], None]:
    """A forward and backward pass."""
    images = torch.randn(batch, 3, side, side, device="cuda")
    targets = torch.randint(1000, (batch,), device="cuda")

    def step() -> None:
        model.zero_grad()
        outputs = model(images)
        parts = outputs if isinstance(outputs, tuple) else (outputs,)
        sum(nn.functional.cross_entropy(part, targets) for part in parts).backward()

    return step


def round_ns(step: Callable[[], None]) -> float:
    """One step of several in a row, from a quiet GPU to a quiet GPU."""
    torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    for _ in range(CALLS):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter_ns() - begin) / CALLS


def single_ns(step: Callable[[], None]) -> tuple[float, float]:
    """One step from a quiet GPU to a quiet GPU, and what the host takes to issue it."""
    torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    step()
    issued = time.perf_counter_ns() - begin
    torch.cuda.synchronize()
    return time.perf_counter_ns() - begin, issued


def case(name: str, batch: int) -> dict[str, Any]:
    """One network, both ways."""
    side = 299 if name == "inception_v3" else 224
    # Two models: hooks of the wrapped one stay with its parameters.
    plain_model, wrapped_model = (getattr(torchvision.models, name)().cuda().train() for _ in range(2))
    plain = step_of(plain_model, batch, side)
    wrapped = step_of(nn.parallel.DistributedDataParallel(wrapped_model), batch, side)
    for _ in range(5):
        plain()
        wrapped()
    kinds = ("alone", "ddp", "alone_single", "ddp_single", "alone_host", "ddp_host")
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(ROUNDS):
        for key, step in (("alone", plain), ("ddp", wrapped)):
            times[key].append(round_ns(step))
            whole, issued = single_ns(step)
            times[f"{key}_single"].append(whole)
            times[f"{key}_host"].append(issued)
    medians = {f"{key}_ns": round(statistics.median(values)) for key, values in times.items()}
    return {"network": name, "mode": "train", "batch": batch, "dtype": "tf32", **medians}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    distributed.init_process_group("nccl", rank=0, world_size=1)
    rows = []
    for name, batch in MEASURED_US:
        rows.append(case(name, batch))
        print(rows[-1], flush=True)
    facts = gpu_facts(lambda: torch.rand(4096, 4096, device="cuda") @ torch.rand(4096, 4096, device="cuda"))
    if options.output is not None:
        document = {
            "gpu": facts.name,
            "date": datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d"),
            "command": "python research/prototypes/ddp_alone.py",
            "versions": {"torch": facts.torch, "cuda": facts.cuda, "driver": facts.driver, "cudnn": facts.cudnn},
            "sm_clock_mhz": facts.sm_clock_mhz,
            "gpusim": code_version(),
            "cases": rows,
        }
        options.output.write_text(json.dumps(document, indent=1) + "\n")
    distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
